"""EAGLE-3's layouts: the classic one of vLLM, SGLang and llama.cpp, and that of speculators, which wraps the same head.

Every flag is written out, because the layouts and engines differ in their defaults.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.eagle3 import Eagle3
from headstart.heads.export.layer import layer_config
from headstart.heads.export.readers.eagle3 import ServedEagle3, read_eagle3

# What speculators keeps beside the layer's own config.
OUTER = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DEFAULT_DRAFT_LENGTH = 3  # of the speculators config; the card's command names the length


def config(head: Eagle3, engine: str, dtype: str) -> dict[str, Any]:
    """The whole config.json."""
    facts, settings, taps = head.facts, head.settings, list(head.taps)
    classic = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_config(head, dtype),
        "target_hidden_size": facts.hidden_size,
        "draft_vocab_size": len(head.draft_ids_V),
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        # Boundary ids for vLLM and llama.cpp. SGLang reads only eagle_config, and adds one.
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps] if engine == "sglang" else taps,
        },
    }
    return speculators_config(classic, facts.name) if engine == "speculators" else classic


def speculators_config(classic: dict[str, Any], target: str) -> dict[str, Any]:
    """The same head in the speculators layout, whose own default for `norm_before_residual` is true."""
    inner = {k: v for k, v in classic.items() if k not in (*OUTER, "architectures", "eagle_config")}
    taps = inner.pop("eagle_aux_hidden_state_layer_ids")
    proposal = {"proposal_type": "greedy", "speculative_tokens": DEFAULT_DRAFT_LENGTH}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        **{name: classic[name] for name in OUTER},
        "eagle_aux_hidden_state_layer_ids": taps,
        "dtype": classic["dtype"],
        "torch_dtype": classic["dtype"],
        "transformer_layer_config": inner,
    }


def tensors(head: Eagle3, engine: str) -> dict[str, Tensor]:
    """Trained tensors and, for a reduced vocabulary, the map both ways."""
    found = dict(head.trained_tensors())
    ids_V, vocab = head.draft_ids_V.cpu(), head.facts.vocab_size
    if len(ids_V) != vocab:
        found["d2t"] = ids_V - torch.arange(len(ids_V))  # offsets, not ids
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids_V, True)
    if engine == "speculators":
        found = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in found.items()}
    return found


def read(folder: Path, engine: str, head: Eagle3) -> ServedEagle3:
    return read_eagle3(folder, engine, head.rotary.facts, head.embedding_VH)
