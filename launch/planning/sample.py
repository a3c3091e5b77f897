"""A small sample of each stage, made here with the code that the stage runs: what a plan's seconds are told by.

Real prompts of the recipe are answered in its slots by as many workers, and its head is trained for some steps on the states
that come of it. The recipe's own stages are not touched: all of it lies in a temporary folder of `run.root`.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO

import numpy as np

from headstart.heads.paths import read_paths
from headstart.heads.store import remove_leftovers
from headstart.heads.target import TargetLoader
from headstart.launch.planning.remaining import Remaining
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.launch.stages import open_job, stored_features, target_loader
from headstart.trainer.data import EvaluationRows
from headstart.trainer.features import stored_dtype
from headstart.trainer.progress import duration
from headstart.trainer.rehearsal import (
    ReplyTimes,
    rehearse_replies,
    seconds_of_validation,
    seconds_per_step,
    seconds_to_load_batches,
    seconds_to_read,
)
from headstart.trainer.traffic import Chunk, num_requests
from headstart.trainer.workers import num_workers

REPLY_SECONDS = 30.0  # of replies, as far as a first pass can tell; a slow target answers fewer prompts for it
STEP_SECONDS = 12.0  # of optimiser steps, of all heads together
MOST_STEPS = 20
MOST_TOKENS = 256  # of a sampled reply; longer ones are extrapolated
READ_PROMPTS = 16  # that tell what a pass takes


@dataclass(frozen=True)
class HeadTimes:
    """Seconds of a head's training."""

    step: float
    validation_token: float
    stored_token: float  # to read a token's states and pack them


@dataclass(frozen=True)
class Answers:
    """Seconds of the target's part; of replies and passes those of one worker. Nothing of what no stage needs."""

    load: Mapping[str, float] = field(default_factory=dict)  # the target, by precision
    replies: Mapping[bool, ReplyTimes] = field(default_factory=dict)  # by whether prompts are trained on
    workers: Mapping[bool, int] = field(default_factory=dict)  # that answered side by side, likewise
    read_token: float = 0.0  # the target's states of a token, by a worker beside those of training replies

    def times(self, split: str) -> ReplyTimes:
        """Those of training replies where others were not sampled."""
        return self.replies[self._sampled(split)]

    def side_by_side(self, split: str, num_chunks: int) -> int:
        """Workers that answer so many chunks."""
        return min(self.workers[self._sampled(split)], num_chunks)

    def _sampled(self, split: str) -> bool:
        return split == "train" or False not in self.replies


@dataclass(frozen=True)
class Sample:
    """Seconds of everything that stages are made of."""

    answers: Answers
    heads: Mapping[str, HeadTimes]  # by variant


def take_sample(recipe: Recipe, heads: Mapping[str, Recipe], left: Remaining, run: RunFolder, mode: str) -> Sample:
    """Time what is left to do.

    Args:
        heads: the recipes of the variants that are not trained yet.
        mode: cache or stream; steps of the latter let the target read their rows.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run.root, locked=False)
    with temporary_run(run) as trial:
        if left.states_are_there:
            trial.link("traffic", left.traffic.folder)
            trial.link("features", left.features.folder)
            answers = Answers()
        else:
            answers = sample_answers(recipe, left, trial)
        times = {}
        for name, own in heads.items():
            own = replace(own, train=replace(own.train, cut_replies=True))  # the sample may have cut all of its replies
            times[name] = time_head(own, trial, mode, STEP_SECONDS / len(heads))
    return Sample(answers, times)


def sample_answers(recipe: Recipe, left: Remaining, trial: RunFolder) -> Answers:
    """Let the target answer prompts that are trained on, and others where these take another time; their states stay."""
    targets = TargetLoader(recipe.target, left.taps)
    load: dict[str, float] = {}
    replies: dict[bool, ReplyTimes] = {}
    workers: dict[bool, int] = {}
    read: list[float] = []
    splits = left.sampled_splits(targets.dtype, recipe.traffic)
    for train in splits:
        dtype = targets.dtype if train else recipe.traffic.eval_dtype
        began = time.perf_counter()
        target = targets(dtype)
        load.setdefault(dtype, time.perf_counter() - began)
        chunks = [chunk for chunk in left.chunks if (chunk.split == "train") == train]
        workers[train] = num_workers(target, left.most_at_once(train))
        asked = [np.array(ids) for ids in left.token_ids(chunks)[:READ_PROMPTS]]
        with silent():
            read.append(seconds_to_read(target, asked, workers[train]))
            few = sampled_chunks(chunks, left, recipe, workers[train], read[-1] * len(splits) / REPLY_SECONDS)
            replies[train], traffic, features = rehearse_replies(
                targets, few, left.talks, recipe.traffic, MOST_TOKENS, trial.folder / str(train), recipe.run.seed
            )
        tell(f"{num_requests(few, left.talks)} replies in {dtype}", began)
        if train:
            trial.link("traffic", traffic.folder)
            trial.link("features", features.folder)
    return Answers(load, replies, workers, read[0])


def sampled_chunks(chunks: list[Chunk], left: Remaining, recipe: Recipe, workers: int, share: float) -> list[Chunk]:
    """A chunk for every worker, of prompts from all of `chunks`: as many as it has slots, or as there is time for.

    Args:
        share: of the time there is, that a worker takes to read a token.
    """
    prompts = [prompt for chunk in chunks for prompt in chunk.prompts]
    requests = num_requests(chunks, left.talks) / len(prompts)
    longest = min(recipe.traffic.max_new_tokens, MOST_TOKENS)
    tokens = sum(map(len, left.token_ids(chunks))) / len(prompts) + requests * longest
    number = min(recipe.traffic.slots / requests, 1 / (share * tokens))
    number = min(max(round(number), 1) * workers, len(prompts))
    chosen = [prompts[i] for i in np.linspace(0, len(prompts) - 1, number).round().astype(int)]
    dtype = stored_dtype(chunks[0].split, recipe.traffic)
    return [Chunk(worker, chunks[0].split, chosen[worker::workers], dtype) for worker in range(min(workers, number))]


def time_head(recipe: Recipe, trial: RunFolder, mode: str, budget: float) -> HeadTimes:
    """Steps and a validation of a head on the trial's states.

    Args:
        budget: seconds for the steps.
    """
    with silent():
        targets = target_loader(recipe)
        stored = stored_features(trial, targets)
        job = open_job(recipe, trial, targets(), mode, stored)
    validation = list(read_paths(trial.folder / "traffic", "validation"))
    paths = validation or job.rows.paths[: recipe.prompts.num_validation]
    rows = EvaluationRows(paths, stored, recipe.train.batch_tokens)
    began = time.perf_counter()
    step = seconds_per_step(job, MOST_STEPS, budget)
    num_tokens = sum(path.num_slots for path in paths)
    times = HeadTimes(step, seconds_of_validation(job, rows) / num_tokens, seconds_to_load_batches(rows))
    tell(f"optimiser steps of the {recipe.head.kind} head and a validation", began)
    return times


@contextmanager
def temporary_run(run: RunFolder) -> Iterator[RunFolder]:
    """A run folder beside the one that is planned, which is gone afterwards."""
    folder = run.root / f".{run.name}.{os.getpid()}.tmp"
    folder.mkdir()
    try:
        yield RunFolder(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def silent() -> redirect_stdout:
    """What stages print of a sample would be taken for the recipe's."""
    return redirect_stdout(StringIO())


def tell(what: str, began: float) -> None:
    print(f"sampled: {what}, {duration(time.perf_counter() - began)}", flush=True)
