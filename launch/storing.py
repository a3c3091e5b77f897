"""Whether a run stores the states of its training replies: `features.mode`, and what `auto` makes of it."""

from collections.abc import Callable, Iterable

from headstart.heads.store import Stage
from headstart.heads.target import TargetLoader
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.trainer.features import (
    expected_bytes,
    features_inputs,
    find_features,
    free_bytes,
    gigabytes,
    stored_splits,
)

MODE = "mode"  # in run.json, where the recipe leaves it open
Rows = Callable[[], Iterable[tuple[str, int]]]  # gives split and prompt tokens of each row of traffic


def kept_mode(recipe: Recipe, run: RunFolder) -> str | None:
    """`cache` or `stream`, as the recipe says or as the run began; None where neither does."""
    mode = recipe.features.mode
    return mode if mode != "auto" else run.inputs.get(MODE)


def claim_mode(recipe: Recipe, run: RunFolder, targets: TargetLoader, traffic: Stage, rows: Rows) -> str:
    """The mode of a run, kept with it; the arguments are those of `choose_mode`."""
    mode = kept_mode(recipe, run)
    if mode is None:
        mode, reason = choose_mode(recipe, run, targets, traffic, rows)
        run.claim({MODE: mode})
        print(f"features.mode: {mode} ({reason})")
    return mode


def choose_mode(recipe: Recipe, run: RunFolder, targets: TargetLoader, traffic: Stage, rows: Rows) -> tuple[str, str]:
    """The mode of a run and its reason: `auto` goes on with what is there, else stores where the disk has room.

    Args:
        traffic: as it stands, begun or not.
    """
    if mode := kept_mode(recipe, run):
        return mode, "as this run began" if recipe.features.mode == "auto" else "as the recipe says"
    for mode, found in (("cache", "all states"), ("stream", "states of validation and held-out replies")):
        if find_features(run.root, features_inputs(targets, traffic, stored_splits(mode))):
            return mode, f"{found} are there"
    size, tokens = expected_bytes(traffic, rows(), recipe.traffic, targets)
    free, _ = free_bytes(run.root)
    most = "" if tokens is None else "at most "
    reason = f"all states take {most}{gigabytes(size)}, and {gigabytes(free)} are free"
    return "cache" if size <= free else "stream", reason
