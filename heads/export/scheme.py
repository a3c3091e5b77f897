"""Write a trained head as the folder a serving engine loads, and prove it before the folder gets its name.

The config is built from a layout's own fields and nothing else. After writing, a reader (`heads/export/readers/`) loads the
folder by the engine's own rules and must reproduce the head's logits over several drafted blocks; only then does it get
its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.heads.checkpoint import write_tensors
from headstart.heads.contract import Head
from headstart.heads.errors import WrongInput
from headstart.heads.export import eagle1, eagle3, medusa
from headstart.heads.export.comparison import TOLERANCE, Served, difference, golden, rounded
from headstart.heads.export.folder import check_folder_name, fresh_folder
from headstart.heads.export.limits import refuse_unservable
from headstart.heads.export.readers.files import DTYPES
from headstart.heads.store import write_json


@dataclass(frozen=True)
class Layout:
    """How heads of a kind are laid out in a folder of their own, for each of its engines."""

    config: Callable[[Any, str, str], dict[str, Any]]
    """The whole config.json of a head, for an engine, in a precision."""
    tensors: Callable[[Any, str], dict[str, Tensor]]
    """Its tensors by published names, as the head holds them."""
    read: Callable[[Path, str, Any], Served]
    """The folder as the engine reads it, beside the target of a head."""


# Kinds that are exported alone; draft models and MTP layers are whole models (`draft.py`, `mtp.py`, `mimo.py`).
LAYOUTS: dict[str, Layout] = {
    "eagle3": Layout(eagle3.config, eagle3.tensors, eagle3.read),
    "eagle1": Layout(eagle1.config, eagle1.tensors, eagle1.read),
    "medusa": Layout(medusa.config, medusa.tensors, medusa.read),
}


def write_head(
    head: Any, out: Path, engine: str, dtype: str = "float32", describe: Callable[[Path], None] | None = None
) -> Path:
    """Write `out` for `engine`, checked.

    Args:
        dtype: of the written tensors, by name.
        describe: may add the card before the folder gets its name.

    Raises:
        WrongInput: the engine could not serve this head as trained, `out` cannot be used, or the reader does not
            reproduce the head's logits. Nothing is left under `out` then.
    """
    refuse_unservable(head, engine)
    check_folder_name(out, head.kind)
    layout = LAYOUTS[head.kind]
    with fresh_folder(out) as folder:
        write_json(folder / "config.json", layout.config(head, engine, dtype))
        tensors = {
            name: tensor.detach().to("cpu", DTYPES[dtype] if tensor.is_floating_point() else None).contiguous()
            for name, tensor in layout.tensors(head, engine).items()
        }
        write_tensors(folder / "model.safetensors", tensors)
        prove(head, layout.read(folder, engine, head), DTYPES[dtype], out)
        if describe is not None:
            describe(folder)
    return out


def prove(head: Head, served: Served, dtype: Any, out: Path) -> None:
    """Raise WrongInput where a written folder is not served as the head, rounded to `dtype`, drafts."""
    if served.taps != head.taps:
        raise WrongInput(f"{out}: the engine would capture the taps {served.taps}, the head reads {head.taps}.")
    with rounded(head, dtype):
        apart = difference(golden(head), served)
    if not apart <= TOLERANCE:
        raise WrongInput(
            f"{out}: the written folder does not draft what the head drafts: largest difference {apart:.2e} "
            f"of the largest logit, allowed {TOLERANCE:.0e}.\n"
            "This is a fault of the export, not of the head: please report it."
        )


def read_served(folder: Path, engine: str, head: Head) -> Served:
    """A written folder as `engine` reads it, beside the target of `head`.

    Raises:
        WrongInput: everything found wrong with the folder, in one message.
    """
    return LAYOUTS[head.kind].read(folder, engine, head)
