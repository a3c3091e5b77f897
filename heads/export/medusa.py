"""Medusa's layout of vLLM 0.27 to 0.32: residual blocks with biases, one output layer for all heads or one for each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.heads.export.layout import Layout, alone, reduced
from headstart.heads.export.readers.medusa import ServedMedusa, read_medusa
from headstart.heads.facts import TargetFacts
from headstart.heads.medusa import Medusa
from headstart.heads.settings import MedusaSettings
from headstart.heads.target import Target


def limits(settings: MedusaSettings, facts: TargetFacts, taps: list[int], engine: str) -> Iterator[str]:
    if settings.own_output:
        yield from reduced(settings, facts, "it loads one output layer for a reduced vocabulary, not one for each head")


def config(head: Medusa, engine: str, dtype: str) -> dict[str, Any]:
    """The whole config.json. No other key may speak of a number of heads or layers: vLLM would take it for these two."""
    settings, facts = head.settings, head.facts
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "truncated_vocab_size": len(head.draft_ids_V),
        "num_heads": settings.num_heads,
        "num_hidden_layers": settings.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not settings.own_output,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def tensors(head: Medusa, engine: str) -> dict[str, Tensor]:
    """Trained tensors and, for a reduced vocabulary, the target ids of its tokens."""
    found = dict(head.trained_tensors())
    if not head.settings.own_output:
        found["lm_head.weight"] = found.pop("lm_heads.0.weight")
    if len(head.draft_ids_V) != head.facts.vocab_size:
        found["token_map"] = head.draft_ids_V
    return found


def read(folder: Path, engine: str, head: Medusa, target: Target | None) -> ServedMedusa:
    return read_medusa(folder, head.facts)


LAYOUT = Layout("medusa", {"vllm": "0.27 to 0.32"}, limits, alone(config, tensors), read)
