"""The features stage: taps and final states of every path, in packed bf16 shards, one for each chunk of traffic."""

import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headstart.heads.checkpoint import write_tensors
from headstart.heads.errors import WrongInput
from headstart.heads.features import to_stored, write_metadata
from headstart.heads.store import Stage, atomic_path, stage_inputs
from headstart.heads.target import States, TargetLoader
from headstart.trainer.generation import Request

if TYPE_CHECKING:
    from headstart.trainer.traffic import Chunk

STAGE_VERSION = 1
BYTES_PER_VALUE = 2  # bf16


def features_inputs(load_target: TargetLoader, traffic: Stage, splits: Sequence[str]) -> dict[str, Any]:
    """Everything that changes the features."""
    settings = {"taps": load_target.taps, "splits": list(splits)}
    return stage_inputs(STAGE_VERSION, settings, {"traffic": traffic.key}, load_target.facts.fingerprint)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def needs_features(features: Stage, chunk: "Chunk") -> bool:
    """Whether a chunk's shard is wanted and not there, whole."""
    if chunk.split not in features.manifest["inputs"]["settings"]["splits"]:
        return False
    return not has(features, shard_name(chunk.number))


def has(stage: Stage, name: str) -> bool:
    """Whether a file is recorded and still there, whole."""
    path = stage.folder / name
    return name in stage.outputs and path.is_file() and path.stat().st_size == stage.outputs[name]["bytes"]


def token_bytes(load_target: TargetLoader) -> int:
    """Bytes of one token's taps and final state."""
    return (len(load_target.taps) + 1) * load_target.facts.hidden_size * BYTES_PER_VALUE


def check_disk(
    features: Stage,
    missing: list["Chunk"],
    requests: Mapping[str, Request],
    max_new_tokens: int,
    load_target: TargetLoader,
) -> None:
    """Say how large the missing features can become, and refuse what cannot fit.

    Raises:
        WrongInput: more bytes than the disk has free.
    """
    prompts = [prompt for chunk in missing for prompt in chunk.prompts]
    if not prompts:
        return
    tokens = sum(len(requests[prompt.prompt_id].token_ids) + max_new_tokens - 1 for prompt in prompts)
    size = tokens * token_bytes(load_target)
    free = shutil.disk_usage(features.folder).free
    print(
        f"features: at most {gigabytes(size)} for {tokens:,} tokens of {len(prompts):,} paths, {gigabytes(free)} free"
    )
    if size > free:
        raise WrongInput(
            f"features: found {gigabytes(free)} free in {features.folder}, expected at least {gigabytes(size)} "
            f"({token_bytes(load_target):,} bytes for each of at most {tokens:,} tokens).\n"
            "Lower prompts.num_train or traffic.max_new_tokens, use fewer head.taps, or set run.root to a larger disk."
        )


def write_shard(features: Stage, chunk: "Chunk", states: list[States], taps: list[int]) -> None:
    """Commit a chunk's features."""
    prompt_ids = [prompt.prompt_id for prompt in chunk.prompts]
    name = shard_name(chunk.number)
    with atomic_path(features.folder / name) as temporary:
        write_tensors(temporary, shard_tensors(states), write_metadata(prompt_ids, taps, features.key))
    features.record(name, len(prompt_ids))


def shard_tensors(states: list[States]) -> dict[str, torch.Tensor]:
    """Paths laid end to end: `taps` [T, F], `final` [T, H] and the row boundaries `offsets`."""
    lengths = torch.tensor([0, *(len(state.final) for state in states)])
    return {
        "taps": torch.cat([to_stored(state.taps) for state in states]).cpu(),
        "final": torch.cat([to_stored(state.final) for state in states]).cpu(),
        "offsets": lengths.cumsum(0),
    }


def finish(stage: Stage) -> None:
    """Mark a stage complete, once."""
    if not stage.complete:
        stage.finish()


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
