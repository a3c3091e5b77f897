"""What training a recipe would do: derived values with reasons, stages that run or are reused, disk."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headstart.eval.tables import columns
from headstart.heads.facts import told_taps
from headstart.heads.object_store import ObjectStore, num_bytes, object_store, unlike
from headstart.heads.precision import choose_precision
from headstart.heads.start import Start
from headstart.heads.store import Stage
from headstart.heads.target import choose_device
from headstart.launch.check import Checked
from headstart.launch.commands import run_folder, shared_settings, training_settings
from headstart.launch.needs import Needs, Row, measure_needs, memory_rows
from headstart.launch.planning.estimate import CACHE_PAYS, epochs, measure_machine, time_rows, work_of
from headstart.launch.planning.prediction import (
    BEFORE_TRAINING,
    Predicted,
    comparison,
    keep,
    predict_states,
    predict_training,
    remaining_rows,
    took,
)
from headstart.launch.planning.remaining import Remaining, prompts_and_traffic, remaining, steps_done
from headstart.launch.planning.sample import Sample, take_sample
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.launch.storing import choose_mode
from headstart.launch.variants import Loaded
from headstart.trainer.features import (
    expected_bytes,
    free_bytes,
    gigabytes,
    most_bytes,
    stored_splits,
)
from headstart.trainer.served import backend_name


@dataclass(frozen=True)
class Asked:
    """What a plan is made for beside the recipe: machines, as their rates say, and a size."""

    processes: int = 1
    tokens: int = 0
    """Of prompts and replies together; 0 counts those of the recipe's prompts."""
    rates: dict[str, float] = field(default_factory=dict)
    """By the names of `estimate.Machine`; what is not given is measured here."""

    @property
    def elsewhere(self) -> bool:
        """Whether anything differs from this process on this machine, of which a sample can be taken."""
        return self.processes > 1 or self.tokens > 0 or bool(self.rates)


def print_plan(loaded: Loaded, path: Path, checked: Checked, threads: str, asked: Asked | None = None) -> None:
    """Print the plan of a checked recipe; with `asked` also how long its stages take there."""
    recipe, run = loaded.shared, run_folder(loaded.shared)
    number, _, reason = threads.partition(" ")
    prompts, traffic = prompts_and_traffic(recipe, path, checked.target, run)
    mode, why = choose_mode(recipe, run, checked.target, traffic, checked.planned.rows)
    left = remaining(recipe, checked, run, prompts, traffic, mode)
    rows = [("threads", number, reason.strip("()")), *derived(loaded, checked), ("features.mode", mode, why)]
    for name, own in loaded.recipes.items():
        rows += of_variant(name, derived_of_head(own, checked, checked.starts.get(name)))
    table("derived", rows)
    kept = checked.planned.conversations
    told = [*checked.prompts.describe(kept).splitlines(), *checked.planned.describe(table=False)]
    table("prompts", [(line, "", "") for line in told])
    rows = stages(left, checked.target.has_weights, object_store(recipe.run.store))
    for name, own in loaded.recipes.items():
        rows += of_variant(name, head_stages(own, run_folder(own)))
    table("stages", rows)
    needs = replace(measure_needs(loaded, checked.target), streams=mode == "stream")
    if asked is not None:
        needs = replace(needs, num_processes=asked.processes)
    table("memory", memory_rows(needs))
    table("disk", disk(recipe, traffic, mode, checked, run))
    if asked is None:
        return
    here = not asked.elsewhere and checked.target.has_weights and needs.fits and not recipe.target.sharded
    if here and not recipe.prompts.num_synthesized:  # prompts that are not written yet cannot be counted
        table("time", sampled_times(loaded, checked, left, mode))
    else:
        table("time", times(recipe, checked, needs, run, asked))


def sampled_times(loaded: Loaded, checked: Checked, left: Remaining, mode: str) -> list[Row]:
    """What finished stages took beside what was predicted of them, and what the others are going to take, by a sample."""
    recipe, heads = loaded.shared, loaded.recipes
    runs = {name: run_folder(own) for name, own in heads.items()}
    done = {name: steps_done(runs[name]) for name in runs}
    to_train = {name: own for name, own in heads.items() if done[name] < own.train.num_steps}
    sample = take_sample(recipe, to_train, left, run_folder(recipe), mode) if left.shares or to_train else None
    predicted = predict_states(recipe, left, sample.answers, checked.seconds) if sample else {}
    begun = [name for name in BEFORE_TRAINING if getattr(left, name).begun]
    settings = shared_settings(recipe) if loaded.variants else training_settings(recipe)
    rows = time_rows_of(run_folder(recipe), settings, predicted, begun, BEFORE_TRAINING)
    for name, own in heads.items():
        predicted = {}
        if sample is not None and name in to_train:
            predicted = predict_training(own, left, sample.answers, sample.heads[name], done[name])
        begun = ["train"] if done[name] else []
        shown, steps = ("train", "eval"), own.train.num_steps
        own_rows = time_rows_of(runs[name], training_settings(own), predicted, begun, shown, steps)
        rows += of_variant(name, own_rows)
    return rows + ([cache_row(sample)] if sample and sample.heads and sample.answers.read_token else [])


def time_rows_of(
    run: RunFolder,
    settings: dict[str, object],
    predicted: Predicted,
    begun: Sequence[str],
    shown: Sequence[str],
    num_steps: int = 0,
) -> list[Row]:
    """Rows of some stages of a run, and what is predicted of those that have not begun is kept for it."""
    kept = keep(run, settings, {name: found for name, found in predicted.items() if name not in begun})
    finished = {name: seconds for name, seconds in took(run, num_steps).items() if name in shown}
    return comparison(kept, finished) + remaining_rows(predicted)


def cache_row(sample: Sample) -> Row:
    """From which epoch on stored states are worth their disk; all heads read the same."""
    stored = max(times.stored_token for times in sample.heads.values())
    computed = sample.answers.read_token / sample.answers.workers[True]
    told = f"{CACHE_PAYS}: {1000 * stored:.3f} ms a token against {1000 * computed:.3f} ms"
    return "cache pays", epochs(computed, computed, stored), told


def times(recipe: Recipe, checked: Checked, needs: Needs, run: RunFolder, asked: Asked) -> list[Row]:
    """Hours of the stages; replies of unknown length run to their limit."""
    longest, limit = recipe.traffic.max_new_tokens, recipe.traffic.max_prompt_tokens
    tokens, reply_tokens = asked.tokens, asked.tokens * longest // (limit + longest)
    if not tokens:
        prompts = [kept for _, kept in checked.planned.rows()]
        tokens, reply_tokens = sum(prompts) + len(prompts) * longest, len(prompts) * longest
    kept = [row for row in checked.planned.rows() if row[0] in stored_splits("stream")]
    _, stored = most_bytes([(split, limit if asked.tokens else n) for split, n in kept], recipe.traffic, checked.target)
    work = work_of(recipe, checked.target, needs, tokens, reply_tokens, stored)
    return time_rows(work, measure_machine(checked.target, needs, run.root, asked.rates))


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
    engines = "2, N // 2, N - 3, as engines read"
    if target.taps != sorted({2, facts.num_layers // 2, facts.num_layers - 3}):
        engines += f", made to differ in {facts.num_layers} layers"
    device_reason = "no accelerator here" if device.type == "cpu" else "the first accelerator"
    target_precision = choose_precision(recipe.target.dtype, device)
    servers = recipe.traffic.server.urls
    answering = [("training replies", backend_name(recipe.traffic), ", ".join(servers))] if servers else []
    return [
        *answering,
        ("target", recipe.target.model, f"{facts.num_layers} layers, width {facts.hidden_size}, {target.folder}"),
        ("device", str(device), device_reason if recipe.target.device == "auto" else recipe_says),
        ("target.dtype", target_precision.name, target_precision.reason),
        ("taps", str(target.taps), recipe_says if asked else engines),
        ("", "", told_taps(target.taps, facts.num_layers)),
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


def stages(left: Remaining, has_weights: bool, store: ObjectStore | None) -> list[Row]:
    """Each stage before training with its key, and whether it is reused, continued or run."""
    if not has_weights:
        return [(name, "", "runs, once the target's weights are there") for name in BEFORE_TRAINING]
    rows = [stage_row(getattr(left, name)) for name in BEFORE_TRAINING]
    return rows if store is None else rows + [store_row(getattr(left, name), store) for name in BEFORE_TRAINING]


def head_stages(recipe: Recipe, run: RunFolder) -> list[Row]:
    """The stages of one head."""
    step = steps_done(run)
    state = "runs" if not step else f"continues from step {step:,}" if step < recipe.train.num_steps else "done"
    return [
        ("train", "", f"{state} ({recipe.train.num_steps:,} steps)"),
        ("eval", "", "runs, or is reused for the same checkpoint"),
        ("export", "", f"runs for {', '.join(recipe.export.engines) or 'no engine'}"),
    ]


def stage_row(stage: Stage) -> Row:
    name, _, key = stage.folder.name.partition("-")
    if stage.begun and not stage.complete:
        return name, key, f"continues, {len(stage.outputs)} files are there"
    return name, key, "reused" if stage.complete else "runs"


def store_row(stage: Stage, store: ObjectStore) -> Row:
    """What a run takes of a stage from a store before it makes any, and what it puts there of what is here."""
    copy = store.copy_of(stage.folder.name)
    there = copy.manifest(stage.key)
    comes = {} if stage.complete else unlike(copy.outputs, stage.outputs)
    goes = unlike(stage.outputs, copy.outputs)
    told = "complete there" if there is not None and there["state"] == "complete" else "not complete there"
    told += f"; {len(comes)} files come, {gigabytes(num_bytes(comes))}"
    told += f"; {len(goes)} files of here go there, {gigabytes(num_bytes(goes))}" if goes else ""
    return f"store: {stage.folder.name.partition('-')[0]}", copy.url, told


def disk(recipe: Recipe, traffic: Stage, mode: str, checked: Checked, run: RunFolder) -> list[Row]:
    """What features take, or the most they can while replies are not recorded; and what is free."""
    stored, rows = stored_splits(mode), checked.planned.rows()
    size, tokens = expected_bytes(traffic, rows, recipe.traffic, checked.target, stored)
    if tokens is None:
        taken, told = gigabytes(size), f"{size:,} bytes, as the replies that are recorded have it"
    else:
        each = size // max(tokens, 1)
        taken = f"at most {gigabytes(size)}"
        told = f"about {each:,} bytes for each of {tokens:,} tokens, if every reply runs to its limit"
    free, folder = free_bytes(run.root)
    enough = "" if size <= free else ": not enough, set run.root to a larger disk"
    return [("features", taken, told), ("free", gigabytes(free), f"at {folder}{enough}")]
