"""An exported EAGLE folder as vLLM (`EagleLlamaForCausalLM`) and SGLang (`LlamaForCausalLMEagle`) read it.

Both run a Llama layer whose input norm is left out, on a projection of embedding and state, and project what comes out
through the target's own output layer, without a norm. vLLM's projection has no bias, SGLang's has one.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.export.readers.files import (
    DTYPES,
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
    LlamaLayer,
    layer_problems,
    layer_shapes,
)
from headstart.heads.facts import TargetFacts

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
KEYS = {"architectures", *LAYER_KEYS}


class ServedEagle1:
    """The loaded head beside its target's embedding and output layer."""

    taps: list[int] = []

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], embedding_VH: Tensor, output_VH: Tensor
    ) -> None:
        self.config, self.embedding_VH, self.output_VH = config, embedding_VH, output_VH.float()
        self.layer = LlamaLayer(config, tensors, "layers.0")

    def chain(self, features_TF: Tensor, token_U: Tensor, drafted: list[int], depth: int) -> Tensor:
        """Draft logits [depth, V], -inf for rows of the table that no token of the target has; as `ServedEagle3.chain`."""
        cache, rows, next_token_T = self.layer.empty_cache(), [], token_U[1:]
        state_H = self.step(features_TF.float(), next_token_T, torch.arange(len(next_token_T)), cache)[-1]
        for j in range(depth):
            row_V = torch.full((self.config["vocab_size"],), float("-inf"))
            row_V[: len(self.output_VH)] = functional.linear(state_H, self.output_VH)
            rows.append(row_V)
            if j + 1 < depth:
                token_T, place_T = torch.tensor([drafted[j]]), torch.tensor([len(next_token_T) + j])
                state_H = self.step(state_H[None], token_T, place_T, cache)[-1]
        return torch.stack(rows)

    def step(self, hidden_TH: Tensor, token_T: Tensor, position_T: Tensor, cache: Cache) -> Tensor:
        weights = self.layer.weights
        x_TI = torch.cat((self.embedding_VH[token_T].float(), hidden_TH), dim=-1)
        x_TH = functional.linear(x_TI, weights["fc.weight"], weights.get("fc.bias"))
        return self.layer(x_TH, x_TH, position_T, cache)


def read_eagle1(folder: Path, engine: str, facts: TargetFacts, embedding_VH: Tensor, output_VH: Tensor) -> ServedEagle1:
    """Load an exported folder by the rules of `engine`, for a target with these facts, this embedding and output layer.

    Raises:
        WrongInput: everything found wrong with the folder, in one message.
    """
    config, tensors = read_files(folder)
    refuse_any(folder, key_problems(config, KEYS, LAYER_OPTIONAL_KEYS))
    architecture = value_problems(config, {"architectures": [ARCHITECTURES[engine]]})
    refuse_any(folder, [*architecture, *layer_problems(config, facts)])
    h = config["hidden_size"]
    shapes = {"fc.weight": (h, 2 * h), **layer_shapes(config, "layers.0", h)}
    if engine == "sglang":
        shapes["fc.bias"] = (h,)
    refuse_any(folder, tensor_problems(tensors, shapes, dict.fromkeys(shapes, DTYPES[config["dtype"]])))
    return ServedEagle1(config, tensors, embedding_VH.cpu(), output_VH.cpu())
