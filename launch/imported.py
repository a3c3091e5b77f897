"""A head that others trained as a run of ours: a checkpoint, and held-out replies to measure it on."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from headstart.heads.checkpoint import save_head
from headstart.heads.errors import WrongInput
from headstart.heads.settings import HEADS
from headstart.heads.start import Start
from headstart.heads.warm_start import start_problems
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.launch.stages import first_head, heldout_replies, shared_prompts, target_loader
from headstart.trainer.checkpoint import checkpoint_name, point
from headstart.trainer.settings import TrainSettings


def imported_recipe(recipe: Recipe, start: Start, run: Path) -> Recipe:
    """The target, prompts and measurements of a recipe, with the head of a start and no training.

    Draft lengths beyond what the head has weights for are left out, and so are smaller vocabularies, which are chosen on
    training replies: there are none.
    """
    settings = {"draft_vocab_size": 0, **start.settings, "init_from": str(start.folder)}
    head = HEADS[start.kind](**settings)
    most = head.max_depth or max(recipe.eval.draft_lengths + recipe.eval.speed_draft_lengths)
    lengths, timed = (
        [n for n in numbers if n <= most] or [most]
        for numbers in (recipe.eval.draft_lengths, recipe.eval.speed_draft_lengths)
    )
    shown = recipe.eval.draft_length if recipe.eval.draft_length in lengths else lengths[-1]
    trees = [tree for tree in recipe.eval.trees if len(tree) <= most]
    return replace(
        recipe,
        run=replace(recipe.run, root=str(run.parent), name=run.name),
        head=head,
        train=TrainSettings(depth=head.max_depth or recipe.train.depth),
        eval=replace(
            recipe.eval,
            draft_lengths=lengths,
            speed_draft_lengths=timed,
            draft_length=shown,
            trees=trees,
            vocab_sizes=[],
        ),
        export=replace(recipe.export, engines=[]),
    )


def run_import(recipe: Recipe, recipe_path: Path, run: RunFolder, start: Start) -> None:
    """Write the head as the run's checkpoint, and let the target answer the held-out prompts.

    Raises:
        WrongInput: everything by which the head is not one for the recipe's target.
    """
    targets = target_loader(recipe)
    if problems := list(start_problems(start, recipe.head, targets.facts, targets.folder)):
        told = "\n".join(f"  - {key}: {text}" for key, text in problems)
        raise WrongInput(f"{start.folder} is no head for {recipe.target.model}:\n{told}")
    checkpoint = run.checkpoints / checkpoint_name(0)
    checkpoint.mkdir(parents=True, exist_ok=True)
    ids_V = np.arange(targets.facts.num_tokens) if start.draft_ids_V is None else start.draft_ids_V
    save_head(checkpoint, first_head(recipe.head, targets(), ids_V, start), step=0)
    for name in ("best", "last"):
        point(run.checkpoints, name, checkpoint)
    print(f"{start.layout} {start.folder}: {start.kind} head, checkpoint {checkpoint}", flush=True)
    prompts = shared_prompts(recipe, recipe_path, run, targets)
    run.link("prompts", prompts.folder)
    temperature = recipe.traffic.temperature
    replies = heldout_replies(recipe, run, targets, temperature)
    run.link("traffic", (run.folder / f"traffic-t{temperature:g}").resolve())
    print(f"{len(replies)} held-out replies; next: headstart eval {run.folder}")
