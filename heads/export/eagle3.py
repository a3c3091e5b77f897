"""EAGLE-3's layouts: the classic one, which most engines read, and that of speculators, which wraps the same head.

Every flag is written out, because the layouts and engines differ in their defaults.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.eagle3 import Eagle3
from headstart.heads.export.layer import layer_config
from headstart.heads.export.layout import Layout, alone, partial_rotary, unknown_target
from headstart.heads.export.readers.eagle3 import IGNORED, OUTPUT_IDS, ServedEagle3, read_eagle3
from headstart.heads.facts import TargetFacts
from headstart.heads.settings import Eagle3Settings
from headstart.heads.target import Target

# What speculators keeps beside the layer's own config.
OUTER = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DEFAULT_DRAFT_LENGTH = 3  # of the speculators config; the card's command names the length


def limits(settings: Eagle3Settings, facts: TargetFacts, taps: list[int], engine: str) -> Iterator[str]:
    yield from partial_rotary(settings, facts)
    yield from unknown_target(facts, engine)
    yield from (f"{flag} = true is ignored" for flag in IGNORED.get(engine, ()) if getattr(settings, flag))
    rope = settings.rope_parameters(facts.rope_parameters).get("rope_type", "default")
    if engine == "sglang" and taps[0] != 2:
        yield f"taps {taps}: its targets read the same layers from one list only if the first tap is 2"
    if engine == "sglang" and taps[-1] == facts.num_layers:
        yield f"tap {taps[-1]} (after the last layer) is never captured"
    if engine == "trtllm":
        if taps[0] == 0:
            yield "tap 0 (the embedding) is never captured: layers are named by their output"
        if len(taps) == 1:
            yield f"taps {taps}: a single one is read past the fusing projection"
        if rope not in ("default", "linear", "llama3"):
            yield f"{rope} rotary positions are untried"
    if engine == "llamacpp":
        if len(taps) != 3:
            yield f"{len(taps)} taps, exactly 3 are read"
        if settings.fc_norm:
            yield "fc_norm is not supported"
        if taps[-1] == facts.num_layers:
            yield f"tap {taps[-1]} (after the last layer) exists only for targets with next-token layers"
        if rope == "yarn":
            yield "yarn rotary positions are untried"


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
        # Boundary ids for vLLM and llama.cpp. In eagle_config others look for the layers whose outputs are taken.
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps] if engine in OUTPUT_IDS else taps,
        },
    }
    return speculators_config(classic, facts) if engine == "speculators" else classic


def speculators_config(classic: dict[str, Any], facts: TargetFacts) -> dict[str, Any]:
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
            "verifier": {"name_or_path": facts.shown_name, "architectures": facts.architectures},
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


def read(folder: Path, engine: str, head: Eagle3, target: Target | None) -> ServedEagle3:
    return read_eagle3(folder, engine, head.rotary.facts, head.embedding_VH)


LAYOUT = Layout(
    "eagle3",
    {
        "vllm": "0.32.0",
        "speculators": "vLLM 0.33.0",
        "sglang": "0.5.23",
        "trtllm": "1.3, commit 00679c6",
        "llamacpp": "11434",
    },
    limits,
    alone(config, tensors),
    read,
)
