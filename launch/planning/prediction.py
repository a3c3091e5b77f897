"""Seconds of each stage, predicted from a sample of it, kept for the run, and held against what the stage took.

`plan.json` in the run folder has what was predicted of every stage before it began, and for which work:

    {"schema":"headstart.plan/1","key":"sha256 of the training's settings","threads":2,
     "stages":{"prompts":{"seconds":17.3},"traffic":{"seconds":301.0,"num_requests":1496,"num_prompt_tokens":135018,"num_chunks":5},
               "train":{"seconds":512.0,"num_steps":700,"num_validations":8}}}

A plan that is made again writes anew what has not begun; what has begun keeps the prediction that it began with. Of a recipe
with variants the stages that these share are in the bake-off's folder, and each training in its run's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headstart.eval.bakeoff import seconds_of, stage_seconds, train_seconds
from headstart.eval.tables import columns
from headstart.heads.paths import read_part
from headstart.heads.store import hash_json, read_json, write_json
from headstart.launch.needs import Row
from headstart.launch.planning.remaining import Remaining, num_validations
from headstart.launch.planning.sample import Answers, HeadTimes
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.trainer.features import has
from headstart.trainer.metrics import METRICS
from headstart.trainer.progress import duration
from headstart.trainer.rehearsal import makespan, seconds_of_chunk
from headstart.trainer.traffic import Chunk, keeps_replies

PLAN, SCHEMA = "plan.json", "headstart.plan/1"
BEFORE_TRAINING = ("prompts", "traffic", "features")
Predicted = dict[str, dict[str, Any]]
"""By stage: `seconds`, and the work that they are for."""


def predict_states(recipe: Recipe, left: Remaining, answers: Answers, checks: Mapping[str, float]) -> Predicted:
    """What is left of the stages before training; where servers answer, their pace is unknown, and with it that of traffic.

    Args:
        checks: seconds of what the checks have done already, and a run does again, by stage.
    """
    found: Predicted = {}
    if not left.prompts.complete:
        found["prompts"] = {"seconds": checks["prompts"]}
    if left.shares and not any(share.served for share in left.shares):
        seconds = checks["traffic"] + sum(answers.load[dtype] for dtype in {share.dtype for share in left.shares})
        for share in left.shares:
            jobs = [chunk_seconds(chunk, recipe, left, answers) for chunk in share.chunks]
            seconds += makespan(jobs, answers.side_by_side(share.chunks[0].split, len(jobs)))
        chunks = [chunk for share in left.shares for chunk in share.chunks]
        requests = left.token_ids(chunks)
        found["features" if left.traffic.complete else "traffic"] = {
            "seconds": seconds,
            "num_requests": len(requests),
            "num_prompt_tokens": sum(map(len, requests)),
            "num_chunks": len(chunks),
        }
    return found


def chunk_seconds(chunk: Chunk, recipe: Recipe, left: Remaining, answers: Answers) -> float:
    """What a worker takes for a chunk: to read replies that are recorded already, to answer, or to keep those of sources."""
    if has(left.traffic, chunk.part):
        return answers.read_token * recorded_tokens(left, [chunk])
    times = answers.times(chunk.split)
    kept = left.reply_lengths([chunk]) if keeps_replies(chunk, recipe.traffic) else ()
    return seconds_of_chunk(times, [len(ids) for ids in left.token_ids([chunk])], recipe.traffic.slots, kept)


def predict_training(recipe: Recipe, left: Remaining, answers: Answers, times: HeadTimes, done: int) -> Predicted:
    """Steps and validations from step `done` on."""
    settings = recipe.train
    steps, validations = settings.num_steps - done, num_validations(settings, done)
    each = times.validation_token * validation_tokens(left, answers)
    return {
        "train": {
            "seconds": steps * times.step + validations * each,
            "num_steps": steps,
            "num_validations": validations,
        }
    }


def validation_tokens(left: Remaining, answers: Answers) -> float:
    """Slots of the validation replies: as they are recorded, or as long as the sample's."""
    chunks = [chunk for chunk in left.chunks if chunk.split == "validation"]
    if left.traffic.complete:
        return recorded_tokens(left, chunks)
    requests, lengths = left.token_ids(chunks), answers.times("validation").lengths
    return sum(map(len, requests)) + len(requests) * (sum(lengths) / len(lengths) - 1)


def recorded_tokens(left: Remaining, chunks: Sequence[Chunk]) -> int:
    """Tokens with states, of chunks that are recorded."""
    return sum(path.num_slots for chunk in chunks for path in read_part(left.traffic.folder / chunk.part))


def keep(run: RunFolder, settings: Mapping[str, Any], predicted: Predicted) -> Predicted:
    """Keep for the run what is predicted of stages that have not begun; returns all that is kept for it.

    Args:
        settings: what the run's name is bound to; a plan of other settings is replaced.
    """
    kept = {**read_kept(run, settings), **predicted}
    if predicted:
        run.folder.mkdir(parents=True, exist_ok=True)
        named = {"schema": SCHEMA, "key": hash_json(settings), "threads": torch.get_num_threads()}
        write_json(run.folder / PLAN, {**named, "stages": kept})
    return kept


def read_kept(run: RunFolder, settings: Mapping[str, Any]) -> Predicted:
    """What was predicted for a run of these settings."""
    file = run.folder / PLAN
    content: dict[str, Any] = read_json(file, SCHEMA) if file.exists() else {"key": None}
    return content["stages"] if content["key"] == hash_json(settings) else {}


def took(run: RunFolder, num_steps: int = 0) -> dict[str, float]:
    """Seconds of a run's stages that are finished; training's are those of its steps and validations.

    Args:
        num_steps: of the whole training.
    """
    shared = stage_seconds(run.folder, [])
    found = {name: shared[name] for name in BEFORE_TRAINING}
    found |= {"train": train_seconds(run.folder / METRICS, num_steps), "eval": seconds_of(run.eval)}
    return {name: seconds for name, seconds in found.items() if seconds}


def comparison(kept: Predicted, seconds: Mapping[str, float]) -> list[Row]:
    """Rows of the finished stages: what they took, and beside it what was predicted."""
    rows = []
    for name, each in seconds.items():
        told = "not predicted"
        if name in kept:
            predicted = kept[name]["seconds"]
            told = f"predicted {duration(predicted)}; it took {each / predicted:.2f} times as long"
        rows.append((name, f"took {duration(each)}", told))
    return rows


def remaining_rows(predicted: Predicted) -> list[Row]:
    """Rows of what is to come."""
    rows = []
    for name, found in predicted.items():
        work = [
            f"{value:,} {key.removeprefix('num_').replace('_', ' ')}"
            for key, value in found.items()
            if key != "seconds"
        ]
        rows.append((name, duration(found["seconds"]), ", ".join(work)))
    return rows


def print_comparison(run: RunFolder, recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """At the end of a run that was planned: what it took beside what was predicted."""
    if kept := read_kept(run, settings):
        print("time", *(f"  {line}" for line in columns(comparison(kept, took(run, recipe.train.num_steps)))), sep="\n")
