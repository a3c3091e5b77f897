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
    LlamaDrafter,
    layer_problems,
    layer_shapes,
)
from headstart.heads.facts import TargetFacts

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
KEYS = {"architectures", *LAYER_KEYS}


class ServedEagle1(LlamaDrafter):
    """The loaded head beside its target's embedding and output layer, whose rows may be fewer than the vocabulary's."""

    taps: list[int] = []

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], embedding_VH: Tensor, output_VH: Tensor
    ) -> None:
        super().__init__(config, tensors, "layers.0", embedding_VH)
        self.output_VH = output_VH.float()

    def step(self, hidden_TH: Tensor, token_T: Tensor, position_T: Tensor, cache: Cache) -> Tensor:
        weights = self.layer.weights
        x_TI = torch.cat((self.embedding_VH[token_T].float(), hidden_TH), dim=-1)
        x_TH = functional.linear(x_TI, weights["fc.weight"], weights.get("fc.bias"))
        return self.layer(x_TH, x_TH, position_T, cache)

    def project(self, state_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return functional.linear(state_H, self.output_VH), torch.arange(len(self.output_VH)), state_H


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
