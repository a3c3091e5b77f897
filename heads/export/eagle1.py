"""EAGLE-1's layout: a Llama of one layer without input norm, final norm and output layer, which is the target's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.eagle1 import Eagle1
from headstart.heads.export.layer import layer_config
from headstart.heads.export.layout import Layout, alone, partial_rotary, reduced
from headstart.heads.export.readers.eagle1 import ServedEagle1, read_eagle1
from headstart.heads.facts import TargetFacts
from headstart.heads.settings import Eagle1Settings
from headstart.heads.target import Target

# vLLM puts `Eagle` before the name of a plain model; SGLang's own class has it behind.
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}


def limits(settings: Eagle1Settings, facts: TargetFacts, taps: list[int], engine: str) -> Iterator[str]:
    yield from partial_rotary(settings, facts)
    yield from reduced(settings, facts, "the head drafts through the target's whole output head")


def config(head: Eagle1, engine: str, dtype: str) -> dict[str, Any]:
    """The whole config.json."""
    return {"architectures": [ARCHITECTURES[engine]], **layer_config(head, dtype)}


def tensors(head: Eagle1, engine: str) -> dict[str, Tensor]:
    """Trained tensors. SGLang's fusing projection has a bias, which stays as it was initialised where none is there."""
    found = dict(head.trained_tensors())
    return found | ({"fc.bias": torch.zeros(head.facts.hidden_size)} if engine == "sglang" else {})


def read(folder: Path, engine: str, head: Eagle1, target: Target | None) -> ServedEagle1:
    return read_eagle1(folder, engine, head.rotary.facts, head.embedding_VH, head.lm_head.weight.detach())


LAYOUT = Layout("eagle1", {"vllm": "0.33.0", "sglang": "commit 034b3be"}, limits, alone(config, tensors), read)
