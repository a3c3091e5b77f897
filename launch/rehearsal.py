"""Equal training time (`bakeoff.rule: equal_time`): a rehearsal says how many steps each head gets, and the counts stay.

Budgets are counts, so that runs repeat. The first variant's steps are the budget. What one of them takes is timed for every
variant, and the others get as many as fit into the time of the first. `rehearsal.json` in the bake-off's folder keeps the
counts, and so does each variant's resolved recipe: started again, on whatever machine, a bake-off trains the same steps.

    {"schema":"headstart.rehearsal/1","num_steps":4800,"variants":{"medusa":{"seconds_per_step":0.41,"num_steps":6205}}}
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from headstart.heads.store import read_json, write_json
from headstart.launch.run import RunFolder
from headstart.launch.variants import Loaded

SCHEMA = "headstart.rehearsal/1"
REHEARSAL = "rehearsal.json"


def read_rehearsal(loaded: Loaded, run: RunFolder) -> dict[str, Any]:
    """What was rehearsed for this budget; of another one, nothing."""
    budget = {"schema": SCHEMA, "num_steps": loaded.shared.train.num_steps}
    file = run.folder / REHEARSAL
    found: dict[str, Any] = read_json(file, SCHEMA) if file.exists() else {}
    return found if budget.items() <= found.items() else {**budget, "variants": {}}


def with_rehearsed_steps(loaded: Loaded, run: RunFolder) -> Loaded:
    """The recipes with the step counts that were rehearsed; as they are where another rule holds or nothing was."""
    if loaded.bakeoff.rule != "equal_time" or not loaded.variants:
        return loaded
    return with_steps(loaded, read_rehearsal(loaded, run)["variants"])


def with_steps(loaded: Loaded, rehearsed: Mapping[str, dict[str, Any]]) -> Loaded:
    variants = {}
    for name, recipe in loaded.variants.items():
        steps = rehearsed[name]["num_steps"] if name in rehearsed else recipe.train.num_steps
        variants[name] = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, num_steps=steps))
    return dataclasses.replace(loaded, variants=variants)


def rehearse(loaded: Loaded, run: RunFolder, mode: str) -> Loaded:
    """Time a step of every variant that was not rehearsed yet, and give each the steps that fit into the first one's time.

    Traffic and features of the bake-off are finished, and hold what `mode` stores.
    """
    from headstart.launch.stages import open_job, stored_features, target_loader
    from headstart.trainer.rehearsal import seconds_per_step

    found = read_rehearsal(loaded, run)
    rehearsed, budget = found["variants"], found["num_steps"]
    first = next(iter(loaded.variants))
    for name, recipe in loaded.variants.items():
        if name in rehearsed:
            continue
        print(f"rehearsal of {name}: {loaded.bakeoff.rehearsal_steps} steps", flush=True)
        targets = target_loader(recipe)
        job = open_job(recipe, run, targets(), mode, stored_features(run, targets))
        seconds = seconds_per_step(job, loaded.bakeoff.rehearsal_steps)
        share = rehearsed[first]["seconds_per_step"] / seconds if rehearsed else 1.0
        rehearsed[name] = {"seconds_per_step": seconds, "num_steps": max(1, round(budget * share))}
        print(f"  {seconds:.3f} s a step: {rehearsed[name]['num_steps']:,} steps", flush=True)
        write_json(run.folder / REHEARSAL, found)
    return with_steps(loaded, rehearsed)
