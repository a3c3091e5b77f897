"""MTP layers, which engines load as a part of their target: written back into one that ships them, or into one made a MiMo.

Of a target that ships its layer every file that engines read is copied, and those that hold tensors of the layer are written
anew, in their names, shapes and precisions; an index stays as it is. Layers of our own: `mimo.py`.
"""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.builtin import resolve_model
from headstart.heads.checkpoint import write_tensors
from headstart.heads.contract import Head
from headstart.heads.export.comparison import rounded
from headstart.heads.export.layout import Layout, Request, as_rounded, given, reduced
from headstart.heads.export.mimo import write_mimo
from headstart.heads.export.readers.mtp import BEFORE_NORM, FAMILIES, ZEROED, ServedMTP, read_merged, read_mimo
from headstart.heads.export.target_files import copy_files
from headstart.heads.facts import TargetFacts
from headstart.heads.mtp_shipped import MTPShipped
from headstart.heads.settings import MTPSettings
from headstart.heads.shipped import LAYOUTS, pieces, tensor_files, unlike_mimo
from headstart.heads.target import Target


def limits(settings: MTPSettings, facts: TargetFacts, taps: list[int], engine: str) -> Iterator[str]:
    if not settings.shipped:
        yield from unlike_mimo(settings, facts)
    yield from reduced(settings, facts, "the layer drafts through the target's whole output head")
    family = facts.shipped.get("layout", "") if settings.shipped else "qwen2"
    if family not in FAMILIES[engine]:
        named = "MiMo, which target and layer would be," if family == "qwen2" else f"the family {family!r}"
        yield f"MTP layers of {named} are not known there, only those of {', '.join(FAMILIES[engine])}"
    elif (family in ZEROED[engine]) != LAYOUTS[family].zero_first:
        yield (
            f"the embedding at position 0 is not zeroed there, and a layer of {family} is trained with a zero: its first "
            "slot, which all others attend to, would be another one"
        )
    elif (family in BEFORE_NORM[engine]) != LAYOUTS[family].before_norm:
        yield (
            f"a layer of {family} is handed the target's state behind the final norm there, and is trained on the one in "
            "front of it"
        )


def write(head: Any, folder: Path, request: Request) -> dict[str, Tensor]:
    source = resolve_model(given(request.target).facts.name)
    return write_merged(head, source, folder) if head.settings.shipped else write_mimo(head, source, folder, request)


def read(folder: Path, engine: str, head: Any, target: Target | None) -> ServedMTP:
    source = resolve_model(given(target).facts.name)
    return (read_merged if head.settings.shipped else read_mimo)(folder, engine, head, source)


def as_written(head: Any, written: dict[str, Tensor]) -> AbstractContextManager[Head]:
    if not head.settings.shipped:
        return as_rounded(head, written)
    named = {name: [path for path, _ in published(head, name, t)] for name, t in head.trained_tensors().items()}
    return rounded(head, {name: written[paths[0]].dtype for name, paths in named.items()})


def published(head: MTPShipped, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    return pieces(head.layout, head.facts.num_layers, name, tensor)


def write_merged(head: MTPShipped, source: Path, folder: Path) -> dict[str, Tensor]:
    """The target with the head's tensors in place of its layer's, in a folder that is there."""
    layer = {
        path: part.detach().to("cpu").contiguous()
        for name, tensor in head.trained_tensors().items()
        for path, part in published(head, name, tensor)
    }
    places = tensor_files(source)
    written: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if file not in {places[path] for path in layer}:
            shutil.copyfile(file, folder / file.name)
            continue
        with safe_open(file, framework="pt") as old:
            metadata = old.metadata()
        tensors = load_file(file)
        new = {path: layer[path].to(tensors[path].dtype) for path in layer.keys() & tensors.keys()}
        write_tensors(folder / file.name, tensors | new, metadata)
        written |= new
    copy_files(source, folder)
    return written


LAYOUT = Layout(
    "mtp",
    {"vllm": "0.33.0", "sglang": "commit 0564b52", "trtllm": "1.3, commit 00679c6"},
    limits,
    write,
    read,
    as_written,
    alike=True,
)
