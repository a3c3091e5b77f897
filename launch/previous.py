"""The previous head of a recipe (`eval.previous`): where its checkpoint is, and whether it can be measured."""

from pathlib import Path

from headstart.heads.checkpoint import DESCRIPTION, check_target, checkpoint_identity
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.launch.run import exported_checkpoint, find_run
from headstart.trainer.checkpoint import checkpoint_folder


def previous_folder(text: str, root: Path, facts: TargetFacts) -> Path | None:
    """Checkpoint folder of a run (its best), a checkpoint or an export folder; None where none is named.

    Raises:
        WrongInput: no such head, an export whose checkpoint is gone, or a head of another target.
    """
    if not text:
        return None
    try:
        folder = named_folder(text, root)
        check_target(folder, facts)
    except WrongInput as error:
        raise WrongInput(f"eval.previous: {error}") from None
    return folder


def named_folder(text: str, root: Path) -> Path:
    """Where the head lies that a run, a checkpoint or an export folder stands for. Raises as `previous_folder`."""
    run, named = find_run(text, root)
    exported = exported_checkpoint(run, text)
    if exported is None:
        return checkpoint_folder(run.folder, named or "best")
    kept = [path for path in run.checkpoints.glob("step-*") if (path / DESCRIPTION).exists()]
    found = [path for path in kept if checkpoint_identity(path)["sha256"] == exported["sha256"]]
    if not found:
        raise WrongInput(
            f"{text}: found no checkpoint in {run.checkpoints} with the weights it was exported from (step "
            f"{exported['step']}), expected one that is kept.\nName a checkpoint folder of the run instead."
        )
    return found[0]
