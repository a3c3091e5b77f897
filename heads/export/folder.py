"""The folder of an export: its name, its precision, and that it is there whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

import torch

from headstart.heads.errors import WrongInput
from headstart.heads.export.card import RECORD, RECORD_SCHEMA
from headstart.heads.export.readers.files import DTYPES
from headstart.heads.store import read_json, remove_leftovers

# Where no method is named, vLLM guesses it from these substrings of a path. The card names it, so that a run may be called
# eagle-2; the exported folder's own name, which is what people copy, must not mislead.
METHOD_SUBSTRINGS = {"eagle-": "eagle1", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}


def check_folder_name(out: Path, kind: str) -> None:
    """Refuse a folder name by which vLLM would take the head for another kind."""
    name = out.name.lower()
    wrong = [text for text, meant in METHOD_SUBSTRINGS.items() if text in name and meant != kind]
    if wrong:
        raise WrongInput(
            f"{out}: vLLM guesses the drafting method from a path, and {wrong[0]!r} means "
            f"{METHOD_SUBSTRINGS[wrong[0]]}, not {kind}. Choose another folder name with --out."
        )


def misleading_path(out: Path, kind: str) -> str:
    """What to say where vLLM takes the whole path for another method: it heeds the path unless told that it is EAGLE."""
    if kind in ("eagle1", "eagle3"):
        return ""
    found = [text for text, meant in METHOD_SUBSTRINGS.items() if text in str(out.resolve()).lower() and meant != kind]
    if not found:
        return ""
    return (
        f"vLLM takes a head under a path with {found[0]!r} in it for {METHOD_SUBSTRINGS[found[0]]}, whatever method it is "
        "told: serve a copy that lies elsewhere"
    )


def export_dtype(name: str, of_target: torch.dtype) -> str:
    """`auto` is the precision the target was loaded in: engines cast a draft to the target's dtype anyway."""
    chosen = str(of_target).removeprefix("torch.") if name == "auto" else name
    if chosen not in DTYPES:
        raise WrongInput(f"export.dtype: found {chosen!r}, expected auto or one of {', '.join(DTYPES)}.")
    return chosen


@contextmanager
def fresh_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary sibling that becomes `out` on success; an earlier export there is replaced.

    Raises:
        WrongInput: `out` is no folder that an export can be, or another command exported there at the same time.
    """
    if out.exists() and not (out.is_dir() and (is_export(out) or not any(out.iterdir()))):
        raise WrongInput(f"{out}: found files that are no export of ours. Move them away or choose another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = (out.with_name(f".{out.name}.{end}{os.getpid()}.tmp") for end in ("", "old."))
    for folder in (temporary, replaced):
        shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        try:
            if out.exists():  # moved, not deleted: only between two renames is there no export at all
                out.rename(replaced)
            temporary.rename(out)
        except OSError as error:
            if replaced.exists() and not out.exists():
                replaced.rename(out)
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise WrongInput(f"{out}: another command exported there just now. Run this one again.") from None
        remove_leftovers(out.parent, locked=False, of=escape(out.name))
    finally:
        for folder in (temporary, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def is_export(folder: Path) -> bool:
    """Whether the folder was exported by us; another tool's head is not ours to replace."""
    try:
        read_json(folder / RECORD, RECORD_SCHEMA)
    except (OSError, WrongInput):
        return False
    return True
