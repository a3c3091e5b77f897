"""Checkpoints: a folder that appears whole or not at all, describes itself, and holds no pickle.

checkpoints/step-000500/head.safetensors, head.json         the head alone (heads.checkpoint)
checkpoints/step-000500/trainer/state.json                  position, counters, and the identity of the run
checkpoints/step-000500/trainer/optimizer.safetensors       moments by parameter name, and every rank's random state
checkpoints/last, checkpoints/best                          text files with a folder name

Tensors are whole, however many processes held them: any number of processes, by any strategy, goes on from any checkpoint.
"""

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.checkpoint import DESCRIPTION, WEIGHTS, read_tensors, save_head, write_tensors
from headstart.heads.contract import Head
from headstart.heads.description import check_weights, read_description
from headstart.heads.errors import WrongInput
from headstart.heads.store import atomic_path, read_json, write_json
from headstart.trainer.strategy import Strategy

STATE_SCHEMA = "headstart.trainer/1"
RANDOM_STATE = "random_state"  # a row for each rank
ROUNDING = ("world",)  # fields of the identity that change the order of sums and nothing else


@dataclass
class TrainingProgress:
    """Where training stands: everything besides tensors that a resume needs."""

    step: int = 0
    tokens: int = 0  # real slots of all steps so far
    num_skipped: int = 0  # steps with a non-finite loss or gradient
    num_skipped_in_a_row: int = 0
    best_step: int = 0  # 0: none measured yet
    best_accept_len: float = 0.0
    window: dict[str, list[float]] = field(default_factory=dict)  # sums since the last line of metrics.jsonl

    def advance(self, num_tokens: int, skipped: bool) -> None:
        self.step += 1
        self.tokens += num_tokens
        self.num_skipped += skipped
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0

    def note_best(self, accept_len: float | None) -> bool:
        """Take note of a measured accept_len (None: not measurable); returns whether it is the best so far."""
        if accept_len is None or not accept_len > self.best_accept_len:
            return False
        self.best_step, self.best_accept_len = self.step, accept_len
        return True


CHECKPOINT_NAME = re.compile(r"step-\d+")


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def save_checkpoint(folder: Path, strategy: Strategy, progress: TrainingProgress, identity: dict[str, Any]) -> Path:
    """Write `folder`/step-N: the first rank does, while all give their parts; none goes on before it is there.

    Args:
        folder: the run's `checkpoints` folder.
        identity: what must be equal for a resume to be exact; flat, JSON values.

    Returns:
        The checkpoint's folder. `last` is not moved: see `point`.
    """
    ranks = strategy.ranks
    tensors = strategy.state()
    tensors[RANDOM_STATE] = torch.stack(ranks.collect(torch.get_rng_state()))
    state = {"schema": STATE_SCHEMA, **vars(progress), "strategy": strategy.name, "identity": identity}
    with strategy.gathered() as head:
        if ranks.first:
            write_checkpoint(folder, head, tensors, state)
    ranks.wait()
    return folder / checkpoint_name(progress.step)


def write_checkpoint(folder: Path, head: Head, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint under a temporary name, flush it to the disk, and rename it."""
    final = folder / checkpoint_name(state["step"])
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        (temporary / "trainer").mkdir(parents=True)
        save_head(temporary, head, step=state["step"])
        write_tensors(temporary / "trainer" / "optimizer.safetensors", tensors)
        write_json(temporary / "trainer" / "state.json", state)
        for path in sorted(temporary.rglob("*")):
            _flush(path)
    except BaseException:  # of a full disk, every byte counts
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if final.exists():  # left by a process that was killed before it moved `last`
        stale = folder / f".{final.name}.stale.{os.getpid()}.tmp"
        final.rename(stale)
        shutil.rmtree(stale, ignore_errors=True)
    temporary.rename(final)
    _flush(folder)


def load_checkpoint(checkpoint: Path, strategy: Strategy, identity: dict[str, Any]) -> TrainingProgress:
    """Put a checkpoint into a head and an optimiser of the same run, on as many processes as there are now.

    Raises:
        WrongInput: the checkpoint's identity differs (the fields are named), or its tensors are not the head's, or not
            those that were saved.
    """
    if not (checkpoint / "trainer" / "state.json").is_file():
        raise WrongInput(
            f"{checkpoint}: found no trainer/state.json, without which training cannot continue.\n"
            f"Write the name of another checkpoint into {checkpoint.parent / 'last'}, or train anew with --fresh."
        )
    state = read_json(checkpoint / "trainer" / "state.json", STATE_SCHEMA)
    differing = differing_fields(state["identity"], identity)
    if refused := [field for field in differing if field[0] not in ROUNDING]:
        listed = "\n".join(f"  {name}: {old!r} in the checkpoint, {new!r} now" for name, old, new in refused)
        raise WrongInput(
            f"{checkpoint}: this checkpoint cannot be continued exactly:\n{listed}\n"
            "Set the old values, or start another run with run.name=NEW."
        )
    was, now = state.get("strategy", strategy.name), strategy.name
    if differing or was != now:
        old, new = (f"{found['world']} x {name}" for found, name in ((state["identity"], was), (identity, now)))
        print(f"{old} in the checkpoint, {new} now: the same steps on the same paths, equal but for rounding")
    saved = read_tensors(checkpoint / WEIGHTS)
    check_weights(checkpoint, read_description(checkpoint))
    draft_ids_V = saved.pop("draft_ids", torch.empty(0, dtype=torch.int64))
    head = strategy.head
    if saved.keys() != head.trained_tensors().keys() or not torch.equal(draft_ids_V, head.draft_ids_V.cpu()):
        raise WrongInput(
            f"{checkpoint}: {WEIGHTS} holds other tensors or another draft vocabulary than this head.\n"
            "Train it anew with --fresh, or under another name: run.name=NEW."
        )
    strategy.load_weights(saved)
    tensors = read_tensors(checkpoint / "trainer" / "optimizer.safetensors")
    states_RB = torch.atleast_2d(tensors.pop(RANDOM_STATE))
    if strategy.ranks.rank < len(states_RB):
        torch.set_rng_state(states_RB[strategy.ranks.rank].clone())
    strategy.load_state(tensors)
    return TrainingProgress(**{name: state[name] for name in vars(TrainingProgress())})


def try_saving(folder: Path, strategy: Strategy, identity: dict[str, Any]) -> int:
    """Save and reload everything before the first step, so that no run learns hours later that it cannot be kept.

    Returns:
        Size of a checkpoint in bytes.

    Raises:
        AssertionError: what was loaded is not what was saved.
    """
    ranks, before = strategy.ranks, [part.clone() for part in strategy.parts()]
    strategy.warm()
    moments = strategy.state()
    trial = folder / ".step-trial.tmp"
    checkpoint = save_checkpoint(trial, strategy, TrainingProgress(), identity)
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    load_checkpoint(checkpoint, strategy, identity)
    ranks.wait()
    if ranks.first:
        shutil.rmtree(trial)
    again = strategy.state()
    if not all(torch.equal(was, now) for was, now in zip(before, strategy.parts(), strict=True)) or not all(
        torch.equal(moments[name], again[name]) for name in moments
    ):
        raise AssertionError("a checkpoint that was saved and loaded again is not the same head and optimiser")
    strategy.reset()
    return size


def differing_fields(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, old.get(name), new.get(name)) for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def point(folder: Path, name: str, checkpoint: Path) -> None:
    """Let `last` or `best` name a checkpoint."""
    with atomic_path(folder / name) as temporary:
        temporary.write_text(checkpoint.name + "\n", encoding="utf-8")


def pointed(folder: Path, name: str) -> Path | None:
    """The checkpoint that `last` or `best` names."""
    path = folder / name
    named = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    checkpoint = folder / named
    return checkpoint if CHECKPOINT_NAME.fullmatch(named) and checkpoint.is_dir() else None


def checkpoint_folder(run: Path, name: str) -> Path:
    """Folder of a run's checkpoint; `best` and `last` are text files that hold a folder's name.

    Raises:
        WrongInput: there is none of that name.
    """
    pointer = run / "checkpoints" / name
    folder = pointed(pointer.parent, name) if pointer.is_file() else pointer
    if folder is None or not (folder / DESCRIPTION).exists():
        found = sorted(path.name for path in pointer.parent.glob("step-*")) if pointer.parent.is_dir() else []
        if pointer.is_file() and found:
            named = pointer.read_text(encoding="utf-8", errors="replace").strip()
            raise WrongInput(
                f"{pointer} names {named!r}, which is no checkpoint. Write one into it: {', '.join(found)}."
            )
        raise WrongInput(f"{run}: found no checkpoint {name!r} (there: {found}). Train first: headstart train RECIPE")
    return folder


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and what `last` and `best` name."""
    kept = {pointed(folder, "last"), pointed(folder, "best")}
    checkpoints = sorted(path for path in folder.glob("step-*") if path.is_dir())
    for path in checkpoints[: max(0, len(checkpoints) - keep)]:
        if path not in kept:
            shutil.rmtree(path)


def sweep(folder: Path) -> None:
    """Remove what a killed process left half written. The run's lock has kept every other writer out."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
