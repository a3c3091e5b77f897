"""The head that a recipe's head starts from (`head.init_from`): where it is, and the settings that it brings along."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.heads.description import DESCRIPTION
from headstart.heads.errors import WrongInput
from headstart.heads.rules import RecipePath
from headstart.heads.settings import HEADS
from headstart.launch.run import RunFolder, find_run
from headstart.launch.schema import Found, Problem

if TYPE_CHECKING:
    from headstart.heads.start import Start


def find_start(text: str, root: Path) -> "Start | None":
    """The head in a folder, or the best (or named) checkpoint of a run under `root`; None where none is named.

    Raises:
        WrongInput: no such head, or one that cannot be gone on with.
    """
    if not text:
        return None
    from headstart.heads.published import read_start  # reads tensors' headers, for which `--help` does not wait
    from headstart.heads.start import holds_weights
    from headstart.trainer.checkpoint import checkpoint_folder

    folder = Path(text).expanduser()
    if not (folder / DESCRIPTION).is_file() and not holds_weights(folder):
        run, named = named_run(text, root)
        folder = checkpoint_folder(run.folder, named or "best")
    return read_start(folder.resolve())


def named_run(text: str, root: Path) -> tuple[RunFolder, str | None]:
    """As `find_run`; its message also says what else may be named."""
    try:
        return find_run(text, root)
    except WrongInput as error:
        text = "A published head is named by its folder, with its weights as *.safetensors; download hub ids first."
        raise WrongInput(f"{error}\n{text}") from None


def with_start(recipe: Found, base: Path, problems: list[Problem]) -> Found:
    """The recipe with the settings of the head it starts from laid under what it says about the head itself.

    Nothing is read where every setting is said, as in a resolved recipe.
    """
    head = recipe.value.get("head") if isinstance(recipe.value, dict) else None
    if head is None or not isinstance(head.value, dict):
        return recipe
    named, kind = head.value.get("init_from"), head.value.get("kind")
    if named is None or not isinstance(named.value, str) or not named.value:
        return recipe
    cls = HEADS.get(kind.value) if kind is not None else None
    if cls is not None and {field.name for field in dataclasses.fields(cls)} <= head.value.keys():
        return recipe
    run = recipe.value.get("run")
    root = run.value.get("root") if run is not None and isinstance(run.value, dict) else None
    text = RecipePath().resolve(named.value, named.base or base)
    try:
        start = find_start(text, Path(root.value if root is not None else "runs").expanduser())
    except WrongInput as error:
        problems.append(Problem(named.where, "head.init_from", str(error)))
        return recipe
    assert start is not None
    if kind is not None and kind.value != start.kind:
        text = f"found {kind.value!r}, expected {start.kind}: the {start.layout} {start.folder} is of that kind"
        problems.append(Problem(kind.where, "head.kind", text))
        return recipe
    brought = {
        name: Found([Found(item, named.where) for item in value] if isinstance(value, list) else value, named.where)
        for name, value in {"kind": start.kind, **start.settings}.items()
    }
    entries = {**recipe.value, "head": Found({**brought, **head.value}, head.where)}
    return Found(entries, recipe.where, recipe.base)
