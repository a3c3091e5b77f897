"""What a saved head says of itself in head.json; no torch, no tensor is read."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.settings import HEADS
from headstart.heads.store import hash_file, read_json

HEAD_SCHEMA = "headstart.head/1"
WEIGHTS, DESCRIPTION = "head.safetensors", "head.json"
DAMAGED = "The checkpoint is damaged: use another one of the run (checkpoints/last and best name them), or train again."


def read_description(folder: Path) -> dict[str, Any]:
    """head.json of a saved head.

    Raises:
        WrongInput: no head there, a damaged description, or one of an unknown kind or setting.
    """
    if not (folder / DESCRIPTION).exists() or not (folder / WEIGHTS).exists():
        raise WrongInput(f"{folder}: found no head ({DESCRIPTION} and {WEIGHTS}). Give a run or a checkpoint folder.")
    file = folder / DESCRIPTION
    description: dict[str, Any] = read_json(file, HEAD_SCHEMA)
    lacking = [name for name in ("kind", "settings", "target", "taps", "draft_ids_sha256") if name not in description]
    if lacking:
        raise WrongInput(f"{file}: found no {', '.join(lacking)}; it is damaged. Use another checkpoint of the run.")
    if description["kind"] not in HEADS:
        raise WrongInput(
            f"{folder}: found a head of kind {description['kind']!r}, expected one of {', '.join(HEADS)}.\n"
            "Load it with the version of headstart that trained it, or train again."
        )
    known = {field.name for field in fields(HEADS[description["kind"]])}
    if unknown := sorted(description["settings"].keys() - known):
        raise WrongInput(
            f"{file}: found the settings {', '.join(unknown)}, which {description['kind']} of this version has not: "
            "it was edited, or trained by another version.\nLoad it with that version, or train again."
        )
    return description


def check_weights(folder: Path, description: dict[str, Any]) -> str:
    """The sha256 of a saved head's weights file, which has to be the one that was written.

    Raises:
        WrongInput: it is another one. Of a description that names none, any is right.
    """
    found = hash_file(folder / WEIGHTS)
    if (expected := description.get("weights_sha256", found)) != found:
        raise WrongInput(
            f"{folder / WEIGHTS}: found sha256 {found[:12]}, expected {expected[:12]}, as {DESCRIPTION} says.\n{DAMAGED}"
        )
    return found
