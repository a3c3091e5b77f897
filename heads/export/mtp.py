"""Write a fine-tuned MTP layer back into its target: the target's own folder, with the layer's tensors replaced.

Every file is copied, and those that hold tensors of the layer are written anew, in their names, shapes and precisions; an
index stays as it is. Before the folder gets its name it is read back and every tensor of it is accounted for.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.checkpoint import write_tensors
from headstart.heads.errors import WrongInput
from headstart.heads.export.card import CARD
from headstart.heads.export.folder import check_folder_name, fresh_folder
from headstart.heads.export.limits import refuse_unservable
from headstart.heads.mtp_shipped import MTPShipped
from headstart.heads.shipped import pieces, tensor_files

TARGET_CARD = f"TARGET_{CARD}"  # the target's own README.md, which ours stands in the place of


def write_merged(
    head: MTPShipped, source: Path, out: Path, engine: str, describe: Callable[[Path], None] | None = None
) -> Path:
    """Write `out`, checked, from the target's folder; `describe` may add the card before the folder gets its name.

    Raises:
        WrongInput: the engine could not serve this head as trained, `out` cannot be used, or what was written is not the
            target with this layer. Nothing is left under `out` then.
    """
    refuse_unservable(head, engine)
    check_folder_name(out, head.kind)
    layer, places = published_tensors(head), tensor_files(source)
    changed = {places[path] for path in layer}
    with fresh_folder(out) as folder:
        for file in sorted(source.iterdir()):
            copied = folder / (TARGET_CARD if file.name == CARD else file.name)
            if file in changed:
                with safe_open(file, framework="pt") as old:
                    metadata = old.metadata()
                tensors = load_file(file)
                tensors |= {path: layer[path].to(tensors[path].dtype) for path in layer.keys() & tensors.keys()}
                write_tensors(copied, tensors, metadata)
            elif file.is_dir():
                shutil.copytree(file, copied)
            else:
                shutil.copyfile(file, copied)
        check_merged(folder, source, layer)
        if describe is not None:
            describe(folder)
    return out


def published_tensors(head: MTPShipped) -> dict[str, Tensor]:
    """The head's trained tensors as the target's files have them, by name."""
    return {
        path: part.detach().to("cpu").contiguous()
        for name, tensor in head.trained_tensors().items()
        for path, part in pieces(head.layout, head.facts.num_layers, name, tensor)
    }


def check_merged(folder: Path, source: Path, layer: dict[str, Tensor]) -> None:
    """Account for every tensor of a merged folder: the layer's are the head's, rounded; all others the target's, bit by bit.

    Raises:
        WrongInput: naming what is not as it should be.
    """
    old, new = ({path: file.name for path, file in tensor_files(folder).items()} for folder in (source, folder))
    problems = [f"{path} is in {new.get(path)}" for path in sorted(old) if new.get(path) != old[path]]
    problems += [f"{path} is new" for path in sorted(new.keys() - old.keys())]
    problems += [f"{path} is nowhere" for path in sorted(layer.keys() - old.keys())]
    for name in sorted(set(old.values())):
        with safe_open(source / name, framework="pt") as before, safe_open(folder / name, framework="pt") as after:
            if set(before.keys()) != set(after.keys()) or before.metadata() != after.metadata():
                problems.append(f"{name} holds other tensors than the target's")
                continue
            for path in before.keys():  # noqa: SIM118 (not a dict)
                expected, found = before.get_tensor(path), after.get_tensor(path)
                expected = layer[path].to(expected.dtype) if path in layer else expected
                if found.dtype != expected.dtype or not torch.equal(found, expected):
                    problems.append(f"{path} is not the {'head' if path in layer else 'target'}'s")
    if problems:
        raise WrongInput(
            f"{folder}: what was written is not the target with this layer:\n  "
            + "\n  ".join(problems[:8])
            + "\nThis is a fault of the export, not of the head: please report it."
        )
