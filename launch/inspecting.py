"""`headstart inspect`: a few training rows of a run, or of a recipe that has not run yet, as training will see them."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.heads.errors import WrongInput
from headstart.heads.paths import UNKNOWN, read_paths
from headstart.heads.paths import Path as ReplyPath
from headstart.heads.target import TargetLoader
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.launch.stages import target_loader
from headstart.trainer.conversations import Answered, answer_turns, longest_request
from headstart.trainer.generation import Generator
from headstart.trainer.inspection import inspection_text
from headstart.trainer.prompts import gather
from headstart.trainer.recorded import plan_traffic, read_recorded
from headstart.trainer.supervision import NUM_CHECKED, check_supervision
from headstart.trainer.traffic import sampling_of

SPARE = 4  # times the prompts that are shown, for some may be left out


def inspect_run(recipe: Recipe, run: RunFolder, rows: int) -> None:
    """Print training rows of a run's traffic, and check them.

    Raises:
        WrongInput: there is no traffic, or it breaks a rule of supervision.
    """
    targets = TargetLoader(recipe.target, need_weights=False)
    paths = list(read_paths(run.folder / "traffic", "train"))
    if not paths:
        raise WrongInput(f"{run.folder}: found no training replies.\nTrain it first: headstart train {run.recipe}")
    show(paths[:rows], paths, targets, recipe.train.depth)


def inspect_recipe(recipe: Recipe, base: Path, rows: int) -> None:
    """Answer a few training prompts of a recipe, or read the replies they bring, and print what training would be given.

    Nothing is written. The target answers in this process, whoever answers in the run.
    """
    targets = target_loader(recipe)
    prompts = gather(recipe.prompts, base).of("train")
    if recipe.traffic.replies != "recorded":
        prompts = prompts[: SPARE * rows]
    planned = plan_traffic(targets, prompts, replace(recipe.traffic, max_left_out=1.0))
    talks = planned.conversations
    chosen = list(talks.values())[:rows]
    target = targets()
    print("".join(f"{line}\n" for line in planned.describe()))
    if planned.recorded is not None:
        answered = read_recorded(target, chosen, None, lambda tokens, replies: None)
        sampling = UNKNOWN
    else:
        longest = longest_request(talks) + recipe.traffic.max_new_tokens
        setting = sampling_of(recipe.traffic)
        generator = Generator(target, setting, recipe.traffic.max_new_tokens, rows, longest, recipe.run.seed)
        answered, _ = answer_turns(target, chosen, recipe.traffic, generator.generate)
        sampling = setting.to_dict()
    paths = [path_of(row, sampling) for row in answered]
    show(paths[:rows], paths, targets, recipe.train.depth)


def show(paths: list[ReplyPath], checked: list[ReplyPath], targets: TargetLoader, depth: int) -> None:
    """Print some paths, then what the check of `checked` found."""
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(inspection_text(paths, targets.tokenizer, depth, colour), flush=True)
    counts = check_supervision(checked, targets.facts.stop_ids, depth)
    print(
        f"\nchecked {min(len(checked), NUM_CHECKED)} rows: every label is a token of a reply, the first block of each reply "
        f"is there, nothing follows an end of turn; pairs by depth: {' '.join(map(str, counts))}"
    )


def path_of(row: Answered, sampling: dict[str, Any]) -> ReplyPath:
    """A row as it would be read back from traffic."""
    prompt_ids, reply = row.request.token_ids, row.reply
    token_N = np.array(prompt_ids + reply.token_ids, dtype=np.int32)
    generated_N = np.arange(len(token_N)) >= len(prompt_ids)
    logprob_N = np.full(len(token_N), np.nan, dtype=np.float32)
    logprob_N[generated_N] = reply.logprobs
    return ReplyPath(
        row.request.prompt_id,
        row.prompt.route,
        row.prompt.split,
        token_N,
        generated_N,
        logprob_N,
        reply.finish_reason,
        sampling,
    )
