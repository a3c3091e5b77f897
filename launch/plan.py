"""What training a recipe would do: derived values with reasons, stages that run or are reused, disk."""

import shutil
from pathlib import Path

from headstart.eval.tables import columns
from headstart.heads.precision import choose_precision
from headstart.heads.start import Start
from headstart.heads.store import MANIFEST, MANIFEST_SCHEMA, Stage, hash_json, read_json, stage_folder
from headstart.heads.target import choose_device
from headstart.launch.check import Checked
from headstart.launch.commands import run_folder
from headstart.launch.needs import measure_needs, memory_rows
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.launch.variants import Loaded
from headstart.trainer.checkpoint import pointed
from headstart.trainer.features import features_inputs, find_features, gigabytes, most_bytes
from headstart.trainer.prompts import prompt_inputs
from headstart.trainer.served import backend_name
from headstart.trainer.traffic import traffic_inputs

Row = tuple[str, str, str]


def print_plan(loaded: Loaded, path: Path, checked: Checked, threads: str) -> None:
    """Print the plan of a checked recipe."""
    recipe, run = loaded.shared, run_folder(loaded.shared)
    number, _, reason = threads.partition(" ")
    rows = [("threads", number, reason.strip("()")), *derived(loaded, checked)]
    for name, own in loaded.recipes.items():
        rows += of_variant(name, derived_of_head(own, checked, checked.starts.get(name)))
    table("derived", rows)
    told = [*checked.prompts.describe().splitlines(), *checked.planned.describe()]
    table("prompts", [(line, "", "") for line in told])
    rows = stages(recipe, path, checked, run)
    for name, own in loaded.recipes.items():
        rows += of_variant(name, head_stages(own, run_folder(own)))
    table("stages", rows)
    table("memory", memory_rows(measure_needs(loaded, checked.target)))
    table("disk", disk(recipe, checked, run))


def of_variant(name: str, rows: list[Row]) -> list[Row]:
    """Rows under a variant's name; of a recipe for one head as they are."""
    return [(f"{name}: {row[0]}" if name else row[0], *row[1:]) for row in rows]


def table(title: str, rows: list[Row]) -> None:
    print(title, *(f"  {line}" for line in columns(rows)), "", sep="\n")


def derived(loaded: Loaded, checked: Checked) -> list[Row]:
    """Values of the target that the recipe leaves open, as this machine fills them in."""
    recipe, target, facts = loaded.shared, checked.target, checked.target.facts
    device = choose_device(recipe.target.device)
    asked = any(own.head.asked_taps for own in loaded.recipes.values())
    recipe_says = "as the recipe says"
    device_reason = "no accelerator here" if device.type == "cpu" else "the first accelerator"
    target_precision = choose_precision(recipe.target.dtype, device)
    servers = recipe.traffic.server.urls
    answering = [("training replies", backend_name(recipe.traffic), ", ".join(servers))] if servers else []
    return [
        *answering,
        ("target", recipe.target.model, f"{facts.num_layers} layers, width {facts.hidden_size}, {target.folder}"),
        ("device", str(device), device_reason if recipe.target.device == "auto" else recipe_says),
        ("target.dtype", target_precision.name, target_precision.reason),
        ("taps", str(target.taps), recipe_says if asked else "2, N // 2, N - 3: what engines read"),
    ]


def derived_of_head(recipe: Recipe, checked: Checked, start: Start | None) -> list[Row]:
    """Values of the head and its training that the recipe leaves open."""
    facts = checked.target.facts
    precision = choose_precision(recipe.train.dtype, choose_device(recipe.target.device))
    vocabulary = recipe.head.draft_vocab_size or facts.num_tokens
    begins = [] if start is None else [("starts from", start.layout, f"{start.folder}, sha256 {start.sha256[:12]}")]
    return [
        ("draft vocabulary", f"{vocabulary:,}", f"{vocabulary / facts.num_tokens:.0%} of {facts.num_tokens:,} tokens"),
        *begins,
        ("train.dtype", precision.name, precision.reason),
        (
            "training tokens",
            f"{recipe.train.num_steps * recipe.train.batch_tokens:,}",
            f"{recipe.train.num_steps:,} steps of {recipe.train.batch_tokens:,}",
        ),
    ]


def stages(recipe: Recipe, path: Path, checked: Checked, run: RunFolder) -> list[Row]:
    """Each stage before training with its key, and whether it is reused, continued or run."""
    prompts = unopened(prompt_inputs(recipe.prompts, path.parent, recipe.run.seed, checked.target))
    traffic = unopened(traffic_inputs(checked.target, prompts, recipe.traffic, recipe.run.seed))
    features = features_inputs(checked.target, traffic)
    folders = [stage_folder(run.root, name, stage.key) for name, stage in (("prompts", prompts), ("traffic", traffic))]
    folders.append(find_features(run.root, features) or stage_folder(run.root, "features", hash_json(features)))
    if not checked.target.has_weights:
        return [(folder.name.partition("-")[0], "", "runs, once the target's weights are there") for folder in folders]
    return [stage_row(folder) for folder in folders]


def head_stages(recipe: Recipe, run: RunFolder) -> list[Row]:
    """The stages of one head."""
    last = pointed(run.checkpoints, "last")
    step = int(last.name.removeprefix("step-")) if last else 0
    state = "runs" if not step else f"continues from step {step:,}" if step < recipe.train.num_steps else "done"
    return [
        ("train", "", f"{state} ({recipe.train.num_steps:,} steps)"),
        ("eval", "", "runs, or is reused for the same checkpoint"),
        ("export", "", f"runs for {', '.join(recipe.export.engines) or 'no engine'}"),
    ]


def unopened(inputs: dict) -> Stage:
    """A stage by its inputs alone; no folder is made."""
    return Stage(Path(), {"key": hash_json(inputs)})


def stage_row(folder: Path) -> Row:
    name, _, key = folder.name.partition("-")
    if not (folder / MANIFEST).exists():
        return name, key, "runs"
    found = read_json(folder / MANIFEST, MANIFEST_SCHEMA)
    state = "reused" if found["state"] == "complete" else f"continues, {len(found['outputs'])} files are there"
    return name, key, state


def disk(recipe: Recipe, checked: Checked, run: RunFolder) -> list[Row]:
    """The most that features can take, and what is free."""
    talks = checked.planned.conversations.values()
    prompts = [(talk.prompt.split, tokens) for talk in talks for tokens in talk.kept_tokens]
    tokens, size = most_bytes(prompts, recipe.traffic, checked.target)
    folder = run.root
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return [
        (
            "features",
            f"at most {gigabytes(size)}",
            f"about {size // max(tokens, 1):,} bytes for each of {tokens:,} tokens, if every reply runs to its limit",
        ),
        (
            "free",
            gigabytes(free),
            f"at {folder}" + ("" if size <= free else ": not enough, set run.root to a larger disk"),
        ),
    ]
