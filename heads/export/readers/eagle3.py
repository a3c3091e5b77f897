"""An exported EAGLE-3 folder as a serving engine reads it: its loading rules and its forward, written a second time.

Nothing here uses the head's own code, so a folder that reproduces the head's logits through this reader is one whose
names, shapes, order and flags mean to an engine what they mean to us. Engines are lenient (missing tensors stay
uninitialised, wrong tap ids only lower acceptance); this reader refuses all of that.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.errors import WrongInput
from headstart.heads.export.readers.files import (
    DTYPES,
    ascending,
    key_problems,
    read_files,
    refuse_any,
    tensor_problems,
    value_problems,
)
from headstart.heads.export.readers.llama_layer import (
    LAYER_KEYS,
    LAYER_OPTIONAL_KEYS,
    Cache,
    LlamaDrafter,
    layer_problems,
    layer_shapes,
)
from headstart.heads.export.readers.speculators import as_classic
from headstart.heads.facts import TargetFacts

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
KEYS = {
    *LAYER_KEYS,
    *("architectures", "target_hidden_size", "draft_vocab_size"),
    *("num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids", "eagle_config", *FLAGS),
}
OPTIONAL_KEYS = LAYER_OPTIONAL_KEYS
# Engines that know taps as the layers whose outputs are taken: SGLang reads eagle_config so, and adds one; of TensorRT-LLM
# the launch options say it, which the card takes from there.
OUTPUT_IDS = ("sglang", "trtllm")
# Flags that an engine takes no notice of.
IGNORED = {"sglang": ("norm_before_residual",), "trtllm": ("norm_before_residual",), "llamacpp": ("norm_output",)}


def taps_as_read(config: dict[str, Any], engine: str) -> list[int]:
    """Boundary ids (tap L = residual stream after L layers) that `engine` captures for this config.

    vLLM and llama.cpp read the top-level list as boundaries. SGLang's llama and qwen targets always add one to the ids in
    `eagle_config`, DeepSeek ones only when the first id is 1, so the two rules agree exactly on lists that start with 1.
    """
    if engine not in OUTPUT_IDS:
        ids = list(config["eagle_aux_hidden_state_layer_ids"])
        return ids if engine == "llamacpp" else sorted(set(ids))
    ids = list(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    if engine == "sglang" and ids[:1] != [1]:
        raise WrongInput(
            f"eagle_config lists the tap ids {ids}; SGLang's targets agree on what they mean only if the first is 1."
        )
    return [i + 1 for i in ids]


class ServedEagle3(LlamaDrafter):
    """The loaded head: fuse taps, take one step, map draft ids to target ids."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], taps: list[int], embedding_VH: Tensor
    ) -> None:
        super().__init__(config, tensors, "midlayer", embedding_VH)
        self.taps = taps
        num_draft = config["draft_vocab_size"]
        offset_V = tensors["d2t"] if "d2t" in tensors else torch.zeros(num_draft, dtype=torch.int64)
        self.target_ids_V = torch.arange(num_draft) + offset_V

    def fuse(self, features_TF: Tensor) -> Tensor:
        """The concatenated taps, in ascending order, projected."""
        if self.config["fc_norm"]:
            chunks = features_TF.chunk(self.config["num_aux_hidden_states"], dim=-1)
            features_TF = torch.cat([self.layer.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return functional.linear(features_TF, self.layer.weights["fc.weight"])

    def step(self, hidden_TH: Tensor, token_T: Tensor, position_T: Tensor, cache: Cache) -> Tensor:
        """States come before the final norm."""
        normed_TH = self.layer.norm(hidden_TH, "midlayer.hidden_norm")
        embedded_TH = self.layer.norm(self.embedding_VH[token_T].float(), "midlayer.input_layernorm")
        residual_TH = normed_TH if self.config["norm_before_residual"] else hidden_TH
        return self.layer(torch.cat((embedded_TH, normed_TH), dim=-1), residual_TH, position_T, cache)

    def project(self, state_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed_H = self.layer.norm(state_H, "norm")
        logits_V = functional.linear(normed_H, self.layer.weights["lm_head.weight"])
        return logits_V, self.target_ids_V, normed_H if self.config["norm_output"] else state_H


def read_eagle3(folder: Path, engine: str, facts: TargetFacts, embedding_VH: Tensor) -> ServedEagle3:
    """Load an exported folder by the rules of `engine`, for a target with these facts and this embedding.

    Raises:
        WrongInput: everything found wrong with the folder, in one message.
    """
    config, tensors = read_files(folder)
    if engine == "speculators" or (engine == "vllm" and "speculators_model_type" in config):
        config, tensors = as_classic(folder, config, tensors, facts)
    refuse_any(folder, config_problems(config, facts))
    taps = taps_as_read(config, engine)
    problems = [f"{flag} is true, which {engine} ignores" for flag in IGNORED.get(engine, ()) if config[flag]]
    problems += config_tensor_problems(tensors, config)
    if taps != config["eagle_aux_hidden_state_layer_ids"]:
        problems.append(f"{engine} would capture the taps {taps}, not {config['eagle_aux_hidden_state_layer_ids']}")
    refuse_any(folder, problems)
    return ServedEagle3(config, tensors, taps, embedding_VH.cpu())


def config_problems(config: dict[str, Any], facts: TargetFacts) -> list[str]:
    if problems := key_problems(config, KEYS, OPTIONAL_KEYS):
        return problems
    wanted = {"draft_vocab_size": int, "num_aux_hidden_states": int, "eagle_aux_hidden_state_layer_ids": list}
    wanted |= {"vocab_size": int, "eagle_config": dict}
    if wrong := [f"{k} is {config[k]!r}, expected {t.__name__}" for k, t in wanted.items() if type(config[k]) is not t]:
        return wrong
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "norm_before_fc": False,
        "target_hidden_size": facts.hidden_size,
    }
    problems = layer_problems(config, facts) + value_problems(config, expected)
    problems += [f"{k} is {config[k]!r}, expected true or false" for k in FLAGS if not isinstance(config[k], bool)]
    if not 0 < config["draft_vocab_size"] <= config["vocab_size"]:
        problems.append(f"draft_vocab_size {config['draft_vocab_size']} is not within 1..{config['vocab_size']}")
    ids, inner = config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    if not ids or any(type(i) is not int for i in ids):
        return [*problems, f"tap ids {ids} are no list of layers"]
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > facts.num_layers:
        problems.append(f"tap ids {ids} are not ascending, distinct and within 0..{facts.num_layers}")
    known = {"use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids"}
    if set(inner) != known or inner["use_aux_hidden_state"] is not True:
        problems.append(f"eagle_config is {inner}, expected use_aux_hidden_state = true and the tap ids")
    elif inner["eagle_aux_hidden_state_layer_ids"] not in (ids, [i - 1 for i in ids]):
        problems.append(f"eagle_config lists taps {inner['eagle_aux_hidden_state_layer_ids']}, the top level {ids}")
    if config["num_aux_hidden_states"] != len(ids):
        problems.append(f"num_aux_hidden_states is {config['num_aux_hidden_states']}, but {len(ids)} taps are listed")
    return problems


def config_tensor_problems(tensors: dict[str, Tensor], config: dict[str, Any]) -> list[str]:
    """Against what the config says."""
    h, num_taps = config["hidden_size"], config["num_aux_hidden_states"]
    vocab, num_draft = config["vocab_size"], config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, num_taps * h),
        **layer_shapes(config, "midlayer", 2 * h),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (num_draft, h),
    }
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(num_taps)}
    dtypes = dict.fromkeys(shapes, DTYPES[config["dtype"]])
    if num_draft != vocab:
        shapes |= {"d2t": (num_draft,), "t2d": (vocab,)}
        dtypes |= {"d2t": torch.int64, "t2d": torch.bool}
    problems = tensor_problems(tensors, shapes, dtypes)
    if num_draft != vocab and not problems:
        ids_V = torch.arange(num_draft) + tensors["d2t"]
        if not ascending(ids_V, vocab):
            problems.append(f"arange + d2t is not strictly ascending within 0..{vocab - 1}: d2t must hold offsets")
        elif not torch.equal(tensors["t2d"].nonzero().squeeze(1), ids_V):
            problems.append("t2d does not mark the tokens that d2t maps to")
    return problems
