"""The features stage: taps and final states of paths in packed shards, one for each chunk of traffic.

Those of every split, or of validation and held-out replies alone (`features.mode: stream`): training then lets the target
read its rows in every step (`trainer/streamed.py`).
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headstart.heads.checkpoint import write_tensors
from headstart.heads.errors import WrongInput
from headstart.heads.features import write_metadata
from headstart.heads.paths import SPLITS, read_part
from headstart.heads.precision import DTYPES
from headstart.heads.store import (
    MANIFEST,
    MANIFEST_SCHEMA,
    STAGES,
    Stage,
    atomic_path,
    hash_json,
    open_stage,
    read_json,
    stage_inputs,
    stage_there,
)
from headstart.heads.target import States, TargetLoader
from headstart.trainer.settings import TrafficSettings

if TYPE_CHECKING:
    from headstart.trainer.traffic import Chunk

STAGE_VERSION = 2
TRAINING_DTYPE = torch.bfloat16  # of the states that training reads, stored or not


def stored_splits(mode: str) -> tuple[str, ...]:
    """Splits whose states a mode stores."""
    return {"cache": SPLITS, "stream": tuple(split for split in SPLITS if split != "train")}[mode]


def features_inputs(load_target: TargetLoader, traffic: Stage, stored: Sequence[str] = SPLITS) -> dict[str, Any]:
    """Everything that changes the features; `stored` are the splits whose states they hold."""
    settings: dict[str, Any] = {"taps": load_target.taps}
    if set(stored) != set(SPLITS):
        settings["splits"] = list(stored)
    return stage_inputs(STAGE_VERSION, settings, {"traffic": traffic.key}, load_target.facts.fingerprint)


def find_features(root: Path, inputs: dict[str, Any]) -> Stage | None:
    """The features of these inputs: their own, begun or finished, else finished ones that hold more."""
    own = stage_there(root, "features", inputs)
    if own.begun:
        return own
    for manifest in sorted((root / STAGES).glob(f"features-*/{MANIFEST}")):
        stage = Stage(manifest.parent, read_json(manifest, MANIFEST_SCHEMA))
        held = stage.manifest["inputs"]
        alike = held == {**inputs, "settings": held["settings"]}
        if alike and holds_more(held["settings"], inputs["settings"]) and stage.complete and not stage.damaged():
            return stage
    return None


def holds_more(held: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether features of the settings `held` have all taps and splits of those that are `asked` for."""
    taps = {*asked["taps"]} <= {*held["taps"]}
    return taps and {*asked.get("splits", SPLITS)} <= {*held.get("splits", SPLITS)}


def open_features(root: Path, inputs: dict[str, Any], seed: int) -> Stage:
    """Open the stage of these inputs, or the finished one that serves them (`find_features`)."""
    return find_features(root, inputs) or open_stage(root, "features", inputs, seed)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def needs_features(features: Stage, chunk: "Chunk") -> bool:
    """Whether a chunk's states are to be stored, and its shard is not there, whole."""
    return chunk.states_dtype is not None and not has(features, shard_name(chunk.number))


def has(stage: Stage, name: str) -> bool:
    """Whether a file is recorded and still there, whole."""
    path = stage.folder / name
    return name in stage.outputs and path.is_file() and path.stat().st_size == stage.outputs[name]["bytes"]


def stored_dtype(split: str, settings: TrafficSettings) -> torch.dtype:
    """Training reads bfloat16; held-out states stay as exact as the replies they belong to."""
    return DTYPES[settings.eval_dtype] if split == "heldout" else TRAINING_DTYPE


def token_bytes(load_target: TargetLoader, dtype: torch.dtype) -> int:
    """Bytes of one token's taps and final state."""
    return (len(load_target.taps) + 1) * load_target.facts.hidden_size * dtype.itemsize


def most_bytes(
    rows: Iterable[tuple[str, int]], settings: TrafficSettings, load_target: TargetLoader
) -> tuple[int, int]:
    """The most that features can take, if every reply runs to its limit.

    Args:
        rows: split and prompt tokens of each.

    Returns:
        Number of tokens, and of bytes.
    """
    tokens = dict.fromkeys(SPLITS, 0)
    for split, num_prompt_tokens in rows:
        tokens[split] += num_prompt_tokens + settings.max_new_tokens - 1
    size = sum(number * token_bytes(load_target, stored_dtype(split, settings)) for split, number in tokens.items())
    return sum(tokens.values()), size


def recorded_bytes(
    traffic: Stage, load_target: TargetLoader, settings: TrafficSettings, stored: Sequence[str] = SPLITS
) -> int:
    """Bytes of the features of replies that are all recorded: of their files, headers included."""
    key = hash_json(features_inputs(load_target, traffic, stored))
    size = 0
    for name in sorted(traffic.outputs):
        if (paths := list(read_part(traffic.folder / name))) and paths[0].split in stored:
            tokens = sum(path.num_slots for path in paths)
            dtype = stored_dtype(paths[0].split, settings)
            metadata = write_metadata([path.prompt_id for path in paths], load_target.taps, key)
            size += shard_bytes(
                tokens, len(paths), len(load_target.taps), load_target.facts.hidden_size, dtype, metadata
            )
    return size


def expected_bytes(
    traffic: Stage,
    rows: Iterable[tuple[str, int]],
    settings: TrafficSettings,
    load_target: TargetLoader,
    stored: Sequence[str] = SPLITS,
) -> tuple[int, int | None]:
    """Bytes that features take; until all replies are recorded the most they can, and of how many tokens.

    Args:
        traffic: as it stands, begun or not.
        rows: split and prompt tokens of each row to come.
    """
    if traffic.complete:
        return recorded_bytes(traffic, load_target, settings, stored), None
    tokens, size = most_bytes([row for row in rows if row[0] in stored], settings, load_target)
    return size, tokens


def free_bytes(folder: Path) -> tuple[int, Path]:
    """What the disk of a folder has free, or of the nearest one above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free, folder


def shard_bytes(
    num_tokens: int, num_paths: int, num_taps: int, width: int, dtype: torch.dtype, metadata: dict[str, str]
) -> int:
    """Bytes of a shard as safetensors writes it: the length of its header, the header in steps of 8 bytes, the tensors."""
    name = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    shapes = {
        "offsets": ("I64", [num_paths + 1], 8 * (num_paths + 1)),
        "final": (name, [num_tokens, width], num_tokens * width * dtype.itemsize),
        "taps": (name, [num_tokens, num_taps * width], num_tokens * num_taps * width * dtype.itemsize),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for tensor, (kind, shape, size) in shapes.items():
        header[tensor] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return 8 + -(-len(json.dumps(header, separators=(",", ":"))) // 8) * 8 + end


def check_disk(
    features: Stage, rows: Sequence[tuple[str, int]], settings: TrafficSettings, load_target: TargetLoader
) -> None:
    """Say how large the missing features can become, and refuse what cannot fit.

    Args:
        rows: split and prompt tokens of each whose features are missing.

    Raises:
        WrongInput: more bytes than the disk has free.
    """
    if not rows:
        return
    tokens, size = most_bytes(rows, settings, load_target)
    free, _ = free_bytes(features.folder)
    print(f"features: at most {gigabytes(size)} for {tokens:,} tokens of {len(rows):,} paths, {gigabytes(free)} free")
    if size > free:
        raise WrongInput(
            f"features: found {gigabytes(free)} free in {features.folder}, expected at least {gigabytes(size)} "
            f"(about {size // tokens:,} bytes for each of at most {tokens:,} tokens).\n"
            "Store no training states (features.mode=stream), lower prompts.num_train or traffic.max_new_tokens, use fewer "
            "head.taps, or set run.root to a larger disk."
        )


def of_other_replies(features: Stage, traffic: Stage) -> list[str]:
    """Shards whose states are not of the replies that are recorded: a store may have some of each of two machines."""
    parts = {shard_name(int(Path(name).stem.removeprefix("part-"))): name for name in traffic.outputs}
    found = {name: traffic.outputs[parts[name]]["sha256"] for name in features.outputs if name in parts}
    return [name for name, replies in found.items() if features.outputs[name].get("replies", replies) != replies]


def write_shard(
    features: Stage, chunk: "Chunk", states: Mapping[str, States], taps: list[int], replies: str
) -> dict[str, Any]:
    """Write a chunk's features, by prompt id, in the precision it keeps; the file that is to be committed.

    Args:
        replies: sha256 of the part file that they are of.
    """
    prompt_ids = list(states)
    name = shard_name(chunk.number)
    with atomic_path(features.folder / name) as temporary:
        tensors = shard_tensors(list(states.values()), chunk.states_dtype)
        write_tensors(temporary, tensors, write_metadata(prompt_ids, taps, features.key))
    return {name: {**features.describe(name, len(prompt_ids)), "replies": replies}}


def shard_tensors(states: list[States], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Paths laid end to end: `taps` [T, F], `final` [T, H] and the row boundaries `offsets`."""
    lengths = torch.tensor([0, *(len(state.final) for state in states)])
    return {
        "taps": torch.cat([state.taps.to(dtype) for state in states]).cpu(),
        "final": torch.cat([state.final.to(dtype) for state in states]).cpu(),
        "offsets": lengths.cumsum(0),
    }


def finish(stage: Stage) -> None:
    """Mark a stage complete, once."""
    if not stage.complete:
        stage.finish()


def gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
