"""Weights in files of bounded size: one, or several with an index, as all engines and transformers read them."""

import json
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from headstart.heads.checkpoint import write_tensors
from headstart.heads.shipped import INDEX
from headstart.heads.store import write_json

SHARD_BYTES = 5_000_000_000


def write_model(folder: Path, tensors: dict[str, Tensor], most_bytes: int = SHARD_BYTES) -> None:
    """Write tensors as model.safetensors or, where that would take more than `most_bytes`, as several files and an index."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    write_shards(folder, sizes, lambda names: {name: tensors[name] for name in names}, most_bytes)


def write_shards(
    folder: Path, sizes: dict[str, int], load: Callable[[list[str]], dict[str, Tensor]], most_bytes: int
) -> None:
    """The same for tensors that are loaded file by file: `sizes` are their bytes by name, in the order they are written."""
    shards: list[list[str]] = [[]]
    room = most_bytes
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        write_tensors(folder / "model.safetensors", load(shards[0]))
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        write_tensors(folder / file, load(names))
    places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})


def stored(file: Path) -> dict[str, tuple[list[int], int]]:
    """Shape and bytes of every tensor in a safetensors file, told by its header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {
        name: (entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0]) for name, entry in entries.items()
    }
