"""Held-out prompts answered at another temperature than the recipe's: what acceptance there is measured on.

A stage of its own beside the recipe's traffic, made by the same code: keyed by its setting, continued where it was
interrupted, shared by all runs of the same prompts and target.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from headstart.heads.object_store import ObjectStore
from headstart.heads.store import Stage, open_stage
from headstart.heads.target import TargetLoader
from headstart.trainer.conversations import plan_conversations
from headstart.trainer.features import finish, has
from headstart.trainer.progress import Progress
from headstart.trainer.prompts import read_prompts
from headstart.trainer.settings import TrafficSettings
from headstart.trainer.traffic import answer_chunks, num_requests, plan_chunks, shares, traffic_inputs, write_part

SPLIT = "heldout"


def at_temperature(settings: TrafficSettings, temperature: float) -> TrafficSettings:
    """The recipe's settings at another temperature; greedy replies take no filter."""
    filters: dict[str, Any] = {} if temperature > 0 else {"top_k": 0, "top_p": 1.0}
    return replace(settings, temperature=temperature, **filters)


def heldout_inputs(load_target: TargetLoader, prompts: Stage, settings: TrafficSettings, seed: int) -> dict[str, Any]:
    """Everything that changes a held-out reply."""
    return traffic_inputs(load_target, prompts, settings, seed, splits=(SPLIT,))


def make_heldout_traffic(
    load_target: TargetLoader,
    prompts: Stage,
    settings: TrafficSettings,
    root: FilePath,
    seed: int = 0,
    store: ObjectStore | None = None,
) -> Stage:
    """Answer the held-out prompts of a prompts stage; reuse and continue what is there. No features are kept.

    Raises:
        WrongInput: prompts that are too long, before anything runs.
    """
    stage = open_stage(root, "traffic", heldout_inputs(load_target, prompts, settings, seed), seed)
    stage.keep_in(store)
    stage.mend()
    if stage.complete:
        return stage
    asked = [prompt for prompt in read_prompts(prompts.folder) if prompt.split == SPLIT]
    talks, _ = plan_conversations(load_target, asked, settings)  # what is left out is so at every temperature
    chunks = plan_chunks([prompt for prompt in asked if prompt.prompt_id in talks], settings, stored=())
    todo = [chunk for chunk in chunks if not has(stage, chunk.part)]
    progress = Progress(
        f"traffic at temperature {settings.temperature:g}", num_requests(todo, talks), settings.max_new_tokens
    )
    own = shares(todo, stage, load_target.dtype, settings)
    with closing(answer_chunks(load_target, stage, own, talks, settings, seed, progress)) as answers:
        for found in answers:
            stage.put(write_part(stage, found, settings) if found else {})
            stage.publish()
    progress.finish()
    finish(stage)
    return stage
