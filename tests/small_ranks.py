"""What two processes do for tests/test_ranks.py: `python -m tests.small_ranks PART FOLDER`, started once for each rank.

PART is `laws`, or a strategy: one training by it, to be killed and started again. One start serves many laws, because it
takes longer than most of them. Every training goes into a folder of its own, and what cannot be read from there into
facts-RANK.json.
"""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import distributed as dist

from headstart.heads.errors import TrainingFailed
from headstart.launch.processes import Processes, muted
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.loop import Job, optimizer_step, train
from headstart.trainer.ranks import joined
from tests.kinds import FORMS
from tests.small_training import SETTINGS, RandomFeatures, SmallTarget, make_head, make_lengths, make_paths

STRATEGIES = ("ddp", "fsdp2", *(("zero2", "zero3") if find_spec("deepspeed") else ()))
CURVE = replace(SETTINGS, num_steps=50, log_every=1, eval_every=25, save_every=20)
SHORT = replace(SETTINGS, num_steps=9, log_every=1, eval_every=6, save_every=4)
STOP_STEP, MIDWAY = 5, "step-000040"
DAMAGED = "train-9"


def damaged_by(which):
    """Features of the training paths, some of which overflowed when they were recorded."""
    # A path longer than a step's tokens is a step of its own: one rank has no row of it.
    paths, features = make_paths([*make_lengths(14), (5, 200)])
    broken = RandomFeatures()
    for path in paths:
        taps, final = features.get(path.prompt_id)
        broken.states[path.prompt_id] = (taps * torch.inf if which(path.prompt_id) else taps), final
    return paths, broken


def rows_of(settings, kind=TrainingRows, damaged=lambda prompt_id: False):
    return kind(*damaged_by(damaged), settings.batch_tokens, 0)


class Signalled(TrainingRows):
    """Rows during whose step `STOP_STEP` the last rank, and no other, gets a polite kill."""

    def batch(self, step, micro, accumulate, rank, world):
        if step == STOP_STEP and rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(step, micro, accumulate, rank, world)


def validation_rows():
    paths, features = make_paths(make_lengths(9, seed=9), split="validation", seed=3)
    return EvaluationRows(paths, features, 60)  # several batches, of which ranks take turns


def train_in(folder, settings, rows=None, head=None, **options):
    folder.mkdir(parents=True, exist_ok=True)
    job = Job.open(head or make_head(), SmallTarget().output, rows or rows_of(settings), settings, **options)
    return train(job, validation_rows(), folder)


def weights_after_steps(kind, **options):
    """Trained tensors after three steps of two micro-batches, of which one has a single row."""
    head = make_head(kind=kind)
    settings = replace(SETTINGS, accumulate=2)
    job = Job.open(head, SmallTarget().output, rows_of(settings), settings, **options)
    for step in (1, 2, 4):
        assert not optimizer_step(job, step).skipped
    with job.strategy.gathered() as whole:
        return {name: tensor.detach().clone() for name, tensor in whole.trained_tensors().items()}


def differences(tensors, others):
    """The largest relative Frobenius norm of a difference."""
    return max(float((tensors[k] - others[k]).norm() / others[k].norm().clamp(min=1e-3)) for k in others)


def frozen_after_resume(folder, **options):
    """How far the frozen output rows of a resumed head are from the target's."""
    settings = replace(SHORT, num_steps=4, save_every=2)
    for seed in (0, 5):
        head = make_head(seed, "eagle1")
        if seed:  # go on from the checkpoint in the middle
            (folder / "checkpoints" / "last").write_text("step-000002\n")
        train_in(folder, settings, head=head, **options)
    return float((head.lm_head.weight - SmallTarget().output[head.draft_ids_V]).abs().max())


def laws(folder, ranks):
    """Every training whose outcome the tests compare, by every strategy."""
    facts = {"world": dist.get_world_size(), "kinds": {}}
    for strategy in STRATEGIES:
        shared = {"strategy": strategy, "ranks": ranks}
        train_in(folder / strategy, CURVE, **shared)

        job = Job.open(make_head(), SmallTarget().output, rows_of(SHORT), SHORT, **shared)
        optimizer_step(job, 1)
        facts[strategy] = {
            "held": job.strategy.held_bytes(),
            "described": job.strategy.describe(),
            "shapes": job.strategy.shapes(),
            "frozen": frozen_after_resume(folder / f"{strategy}-frozen", **shared),
        }

        train_in(folder / f"{strategy}-unbroken", SHORT, **shared)
        try:
            train_in(folder / f"{strategy}-broken", SHORT, rows_of(SHORT, Signalled), **shared)
        except KeyboardInterrupt:
            facts[strategy]["stopped"] = (folder / f"{strategy}-broken" / "checkpoints" / "last").read_text().strip()
        train_in(folder / f"{strategy}-broken", SHORT, head=make_head(seed=5), **shared)

        # What one process began, and the other strategy: from its midway checkpoint to the end.
        continued = folder / f"{strategy}-continued"
        if ranks.first:
            shutil.copytree(folder / "single", continued)
            (continued / "checkpoints" / "last").write_text(MIDWAY + "\n")
        ranks.wait()
        train_in(continued, CURVE, head=make_head(seed=5), **shared)

        progress = train_in(
            folder / f"{strategy}-damaged",
            SHORT,
            rows_of(SHORT, damaged=lambda prompt_id: prompt_id == DAMAGED),
            **shared,
        )
        facts[strategy]["skipped"] = progress.num_skipped
        try:
            train_in(folder / f"{strategy}-hopeless", SHORT, rows_of(SHORT, damaged=lambda prompt_id: True), **shared)
        except TrainingFailed as error:
            facts[strategy]["failed"] = str(error)
    for kind in FORMS:
        one = weights_after_steps(kind)
        facts["kinds"][kind] = {
            strategy: differences(weights_after_steps(kind, strategy=strategy, ranks=ranks), one)
            for strategy in STRATEGIES
        }
    (folder / f"facts-{ranks.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    part, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    with muted(Processes(rank=rank)), joined(rank, int(os.environ["WORLD_SIZE"]), rank, "cpu") as ranks:
        if part == "laws":
            laws(folder, ranks)
        else:
            train_in(folder, CURVE, strategy=part, ranks=ranks)
