"""An exported Medusa folder as vLLM 0.27 to 0.32 reads it (`medusa.py` of its models and of its configs).

vLLM drops tensors whose names it does not know and, unless `medusa_fc_bias` is set, all biases; this reader refuses that.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.export.readers.files import (
    DTYPES,
    ascending,
    dtype_problems,
    key_problems,
    read_files,
    refuse_any,
    tensor_problems,
    value_problems,
)
from headstart.heads.facts import TargetFacts

COUNTS = ("num_heads", "num_hidden_layers", "truncated_vocab_size")
KEYS = {
    *("architectures", "model_type", "hidden_size", "vocab_size", "medusa_fc_bias", "original_lm_head"),
    *("dtype", "torch_dtype", *COUNTS),
}


class ServedMedusa:
    """The loaded heads: each reads the target's final state of the last slot, and no token."""

    taps: list[int] = []

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config, self.ids_V = config, tensors.get("token_map", torch.arange(config["vocab_size"]))
        self.weights = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}

    def chain(self, features_TF: Tensor, token_U: Tensor, drafted: list[int], depth: int) -> Tensor:
        """Draft logits [depth, V], -inf where nothing can be drafted: head j predicts the token j + 2 behind slot T - 1."""
        rows = []
        for head in range(depth):
            x_H = features_TF[-1].float()
            for layer in range(self.config["num_hidden_layers"]):
                name = f"blocks.{head}.layers.{layer}"
                x_H = x_H + functional.silu(
                    functional.linear(x_H, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
                )
            output = "lm_head.weight" if self.config["original_lm_head"] else f"lm_heads.{head}.weight"
            row_V = torch.full((self.config["vocab_size"],), float("-inf"))
            row_V[self.ids_V] = functional.linear(x_H, self.weights[output])
            rows.append(row_V)
        return torch.stack(rows)


def read_medusa(folder: Path, facts: TargetFacts) -> ServedMedusa:
    """Load an exported folder for a target with these facts.

    Raises:
        WrongInput: everything found wrong with the folder, in one message.
    """
    config, tensors = read_files(folder)
    refuse_any(folder, key_problems(config, KEYS, set()))
    refuse_any(folder, config_problems(config, facts))
    refuse_any(folder, config_tensor_problems(tensors, config))
    return ServedMedusa(config, tensors)


def config_problems(config: dict[str, Any], facts: TargetFacts) -> list[str]:
    expected = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "medusa_fc_bias": True,
    }
    problems = value_problems(config, expected) + dtype_problems(config)
    problems += [
        f"{k} is {config[k]!r}, expected 1 or more" for k in COUNTS if type(config[k]) is not int or config[k] < 1
    ]
    if not isinstance(config["original_lm_head"], bool):
        problems.append(f"original_lm_head is {config['original_lm_head']!r}, expected true or false")
    if not problems and config["truncated_vocab_size"] > facts.vocab_size:
        problems.append(f"truncated_vocab_size {config['truncated_vocab_size']} is not within 1..{facts.vocab_size}")
    return problems


def config_tensor_problems(tensors: dict[str, Tensor], config: dict[str, Any]) -> list[str]:
    """Against what the config says."""
    h, vocab, num_draft = config["hidden_size"], config["vocab_size"], config["truncated_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(config["num_heads"]):
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            shapes |= {f"{name}.weight": (h, h), f"{name}.bias": (h,)}
        shapes["lm_head.weight" if config["original_lm_head"] else f"lm_heads.{head}.weight"] = (num_draft, h)
    dtypes = dict.fromkeys(shapes, DTYPES[config["dtype"]])
    if num_draft != vocab:
        shapes["token_map"], dtypes["token_map"] = (num_draft,), torch.int64
    problems = tensor_problems(tensors, shapes, dtypes)
    if num_draft != vocab and not problems and not ascending(tensors["token_map"], vocab):
        problems.append(f"token_map is not strictly ascending within 0..{vocab - 1}: it must hold the ids themselves")
    return problems
