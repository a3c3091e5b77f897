"""What a recipe has left to do, counted: chunks and requests, optimiser steps, validations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.store import Stage, stage_there
from headstart.heads.target import TargetLoader
from headstart.launch.check import Checked
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.trainer.checkpoint import pointed
from headstart.trainer.conversations import Conversation
from headstart.trainer.features import features_inputs, find_features, has, needs_features, stored_splits
from headstart.trainer.prompts import prompt_inputs
from headstart.trainer.settings import TrafficSettings, TrainSettings
from headstart.trainer.traffic import Chunk, Share, plan_chunks, shares, traffic_inputs


@dataclass(frozen=True)
class Remaining:
    """Stages before training as they stand, and what is left of them."""

    prompts: Stage
    traffic: Stage
    features: Stage
    taps: list[int]
    talks: Mapping[str, Conversation]
    chunks: list[Chunk]
    """All of the recipe."""
    shares: list[Share]
    """Of them, those that have to be answered or read."""

    @property
    def states_are_there(self) -> bool:
        return self.traffic.complete and self.features.complete

    def most_at_once(self, train: bool) -> int:
        """Chunks of the largest share that has training prompts, or others: its workers answer side by side."""
        shares = [share for share in self.shares if any((chunk.split == "train") == train for chunk in share.chunks)]
        return max((len(share.chunks) for share in shares), default=1)

    def token_ids(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """Every request of some chunks; of later turns, with the source's history."""
        return [
            request.token_ids
            for chunk in chunks
            for prompt in chunk.prompts
            for request in self.talks[prompt.prompt_id].requests
        ]

    def reply_lengths(self, chunks: Sequence[Chunk]) -> list[int]:
        """Of replies that the sources bring."""
        return [
            len(marked.reply_ids)
            for chunk in chunks
            for prompt in chunk.prompts
            for marked in self.talks[prompt.prompt_id].marked
        ]

    def sampled_splits(self, dtype: str, settings: TrafficSettings) -> list[bool]:
        """Training prompts (True), for a head needs states of some in any case, and others where these take another time."""
        alike = dtype == settings.eval_dtype and settings.backend == "local" and settings.replies != "recorded"
        others = any(chunk.split != "train" for share in self.shares for chunk in share.chunks)
        return [True, False] if others and not alike else [True]


def prompts_and_traffic(recipe: Recipe, path: Path, target: TargetLoader, run: RunFolder) -> tuple[Stage, Stage]:
    """Both stages as they stand; no folder is made."""
    seed = recipe.run.seed
    prompts = stage_there(run.root, "prompts", prompt_inputs(recipe.prompts, path.parent, seed, target))
    return prompts, stage_there(run.root, "traffic", traffic_inputs(target, prompts, recipe.traffic, seed))


def remaining(recipe: Recipe, checked: Checked, run: RunFolder, prompts: Stage, traffic: Stage, mode: str) -> Remaining:
    """What is left before training, of a run that stores states as `mode` says; no folder is made."""
    target, settings = checked.target, recipe.traffic
    talks, stored = checked.planned.conversations, stored_splits(mode)
    inputs = features_inputs(target, traffic, stored)
    more = find_features(run.root, inputs) if traffic.complete else None
    features = more or stage_there(run.root, "features", inputs)
    chunks = plan_chunks([prompt for prompt in checked.prompts.prompts if prompt.prompt_id in talks], settings, stored)
    todo = [chunk for chunk in chunks if not has(traffic, chunk.part) or needs_features(features, chunk)]
    return Remaining(
        prompts, traffic, features, target.taps, talks, chunks, shares(todo, traffic, target.dtype, settings)
    )


def steps_done(run: RunFolder) -> int:
    last = pointed(run.checkpoints, "last")
    return int(last.name.removeprefix("step-")) if last else 0


def num_validations(settings: TrainSettings, done: int) -> int:
    """Measurements of acceptance from a step on: one before the first step, then as the settings say, and at the end."""
    later = [step for step in range(done + 1, settings.num_steps + 1) if step % settings.eval_every == 0]
    return (done == 0) + len({*later, *([settings.num_steps] if done < settings.num_steps else [])})
