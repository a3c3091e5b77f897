"""What a layout is: the folders that engines load of one kind of head, and the limits that more than one kind has."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.contract import Head
from headstart.heads.export.comparison import Served, rounded
from headstart.heads.export.shards import SHARD_BYTES, write_model
from headstart.heads.facts import TargetFacts
from headstart.heads.settings import HeadSettings
from headstart.heads.store import write_json
from headstart.heads.target import Target

# Targets with which TensorRT-LLM's PyTorch backend runs a drafter of any kind, by model type.
TRTLLM_TARGETS = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class Request:
    """What a folder is written for."""

    engine: str
    dtype: torch.dtype
    """Of the tensors; layers that are written into their target have those of its files."""
    target: Target | None = None
    """The head's target, where the folder holds a part of it."""
    shard_bytes: int = SHARD_BYTES
    """Weights beyond it go into several files."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def given(target: Target | None) -> Target:
    """A target that a layout holds a part of. Raises ValueError where the caller gave none."""
    if target is None:
        raise ValueError("this layout holds a part of the target: give it to write_head and read_served")
    return target


Write = Callable[[Any, Path, Request], dict[str, Tensor]]


def as_rounded(head: Head, written: dict[str, Tensor]) -> AbstractContextManager[Head]:
    """The head in the precision of the written tensors, all of one."""
    return rounded(head, next(tensor.dtype for tensor in written.values() if tensor.is_floating_point()))


@dataclass(frozen=True)
class Layout:
    """How heads of one kind are written, for which engines, and how these read them."""

    kind: str
    versions: dict[str, str]
    """Engines it is written for, each with the version whose rules it follows."""
    limits: Callable[[Any, TargetFacts, list[int], str], Iterator[str]]
    """What an engine would ignore or misread about a head of these settings, for such a target and taps."""
    write: Write
    """Fill a folder with a head, and return the head's own tensors under published names, as they were written."""
    read: Callable[[Path, str, Any, Target | None], Served]
    """The folder as an engine reads it beside the head's target. Raises WrongInput with everything found wrong."""
    as_written: Callable[[Any, dict[str, Tensor]], AbstractContextManager[Head]] = as_rounded
    """The head as it has to draft from what was written."""
    alike: bool = False
    """Whether every engine that can serve a head reads the same folder."""


def alone(config: Callable[[Any, str, str], dict[str, Any]], tensors: Callable[[Any, str], dict[str, Tensor]]) -> Write:
    """Write a folder that holds a head alone: `config(head, engine, dtype)` and `tensors(head, engine)`."""

    def write(head: Any, folder: Path, request: Request) -> dict[str, Tensor]:
        write_json(folder / "config.json", config(head, request.engine, request.dtype_name))
        found = {
            name: tensor.detach().to("cpu", request.dtype if tensor.is_floating_point() else None).contiguous()
            for name, tensor in tensors(head, request.engine).items()
        }
        write_model(folder, found, request.shard_bytes)
        return found

    return write


def reduced(settings: HeadSettings, facts: TargetFacts, reason: str) -> Iterator[str]:
    """A draft vocabulary that the engine would not keep to."""
    if 0 < (size := settings.draft_vocab_size) < facts.num_tokens:
        yield f"draft_vocab_size = {size}, expected 0: {reason}"


def partial_rotary(settings: HeadSettings, facts: TargetFacts) -> Iterator[str]:
    if settings.rope_parameters(facts.rope_parameters).get("partial_rotary_factor", 1.0) != 1.0:
        yield "rotary positions on a part of the head dimension are not supported"


def unknown_target(facts: TargetFacts, engine: str) -> Iterator[str]:
    """A target beside which the engine runs no drafter."""
    if engine == "trtllm" and facts.model_type not in TRTLLM_TARGETS:
        yield f"targets of type {facts.model_type!r} run no drafter there, only {', '.join(TRTLLM_TARGETS)}"
