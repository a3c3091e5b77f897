"""The commands that compute: each readies the process and the run folder, then hands over to the stages."""

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.heads.errors import WrongInput
from headstart.heads.store import remove_leftovers
from headstart.launch.processes import (
    Processes,
    choose_strategy,
    end_with_launcher,
    expect_one,
    expect_several,
    find_processes,
    muted,
)
from headstart.launch.recipe import dump_recipe, find_recipe, load_recipe
from headstart.launch.rehearsal import with_rehearsed_steps
from headstart.launch.run import RunFolder, exported_checkpoint, find_run, locked
from headstart.launch.settings import Recipe
from headstart.launch.threads import apply_threads, choose_threads
from headstart.launch.variants import OWN, Loaded, dump, load
from headstart.trainer.settings import PACING

if TYPE_CHECKING:
    from headstart.eval.prompt_sums import PromptSums
    from headstart.heads.start import Start
    from headstart.launch.planning.plan import Asked


def check(recipe_text: str, overrides: list[str], dry_run: bool, asked: "Asked | None" = None) -> None:
    """Check a recipe against its target and prompts; with `dry_run` also print what training it would do.

    Args:
        asked: machines that the plan is to tell hours for.
    """
    path = find_recipe(recipe_text)
    loaded = load_with_steps(path, overrides)
    processes = find_processes()
    threads = ready_process(loaded.shared, processes)
    if not processes.first:
        return
    tell_check(path)
    from headstart.launch.check import check_loaded, skip_lines
    from headstart.trainer.verdicts import check_broken

    if dry_run:
        compare_claims(loaded)
    checked = check_loaded(loaded, path, overrides, need_weights=False, here=not dry_run)
    if dry_run:
        compare_claims(loaded, checked.starts)
        from headstart.launch.planning.plan import print_plan

        print(dump(loaded, f"resolved from {path.name}"), flush=True)
        print_plan(loaded, path, checked, threads, asked)
    else:
        print("".join(f"{line}\n" for line in skip_lines(checked.prompts)), end="")
        print("".join(f"{line}\n" for line in checked.planned.describe()), end="")
        for name, start in checked.starts.items():
            head = name or "the head"
            print(f"{head} starts from the {start.layout} {start.folder} ({start.kind}, sha256 {start.sha256[:12]})")
        if not checked.target.has_weights:
            print(f"no weights in {checked.target.folder} yet: training needs them")
    check_broken(checked.prompts.records, loaded.shared.prompts.max_broken)
    if not dry_run:
        print(f"{path} is fine; next: headstart train {shlex.quote(recipe_text)}")


def train(recipe_text: str, overrides: list[str], fresh: bool) -> None:
    """Run every stage of a recipe in its run folder; of a bake-off, what its variants share and then each of them."""
    path = find_recipe(recipe_text)
    loaded = load(path, overrides) if fresh else load_with_steps(path, overrides)
    processes = find_processes()
    end_with_launcher()
    for recipe in loaded.recipes.values():
        choose_strategy(recipe.train, processes)
    if loaded.variants:
        expect_one(processes, "a recipe with variants")
    if loaded.shared.target.sharded:
        expect_several(processes, "target.sharded")
    threads = ready_process(loaded.shared, processes)
    with muted(processes):
        if processes.first:
            train_checked(loaded, path, overrides, fresh, threads, processes)
        else:
            follow(loaded.shared, path, processes)


def train_checked(
    loaded: Loaded, path: Path, overrides: list[str], fresh: bool, threads: str, processes: Processes
) -> None:
    """What the first process does with a recipe that could be read."""
    tell_check(path)
    from headstart.launch.check import check_loaded
    from headstart.trainer.verdicts import check_broken

    if not fresh:
        compare_claims(loaded)
    # The traffic stage measures the prompts it renders.
    checked = check_loaded(loaded, path, overrides, render=False, processes=processes)
    starts = checked.starts
    if not fresh:
        compare_claims(loaded, starts)
    for recipe in (loaded.shared, *loaded.variants.values()) if fresh else ():
        if (run := run_folder(recipe)).folder.exists():
            with locked(run.folder):
                print(f"the old run is now {run.set_aside()}")
    comment = f"resolved from {path.name}"
    comment += f" with {' '.join(overrides)}" if overrides else ""
    if loaded.variants:
        from headstart.launch.bakeoff import train_variants

        train_variants(loaded, path, starts, comment, threads)
    else:
        train_head(loaded.shared, path, starts.get(""), comment, threads, processes)
    check_broken(checked.prompts.records, loaded.shared.prompts.max_broken)


def follow(recipe: Recipe, path: Path, processes: Processes) -> None:
    """What the others do: they wait for what the first one makes, and train the head with it."""
    from headstart.launch.stages import run_train

    run_train(recipe, path, run_folder(recipe), processes)


def load_with_steps(path: Path, overrides: list[str]) -> Loaded:
    """A recipe with the steps that its bake-off has rehearsed, if it has."""
    loaded = load(path, overrides)
    return with_rehearsed_steps(loaded, run_folder(loaded.shared))


def train_head(
    recipe: Recipe,
    path: Path,
    start: "Start | None",
    comment: str,
    threads: str,
    processes: Processes | None = None,
) -> None:
    """Run every stage of a recipe for one head in its run folder."""
    run = run_folder(recipe)
    with opened(run):
        run.claim({"settings": training_settings(recipe), "start": start_identity(start)})
        run.write_recipe(dump_recipe(recipe, comment))
        print(f"run {run.folder}\nthreads: {threads}")
        from headstart.launch.planning.prediction import print_comparison
        from headstart.launch.stages import run_train

        run_train(recipe, path, run, processes)
        print_comparison(run, recipe, training_settings(recipe))


def compare_claims(loaded: Loaded, starts: "Mapping[str, Start] | None" = None) -> None:
    """Refuse run names that belong to other trainings; `starts` are the heads that variants go on from, once known."""
    for name, recipe in loaded.recipes.items():
        start = {} if starts is None else {"start": start_identity(starts.get(name))}
        run_folder(recipe).compare({"settings": training_settings(recipe), **start})
    if loaded.variants:
        run_folder(loaded.shared).compare({"settings": shared_settings(loaded.shared)})


def evaluate(run_text: str, checkpoint: str, overrides: list[str], parts: list[str], temperatures: list[float]) -> None:
    """Measure a checkpoint of a run; `parts` of offline, live, lossless, prove, speed limit what is measured."""
    run, named = find_run(run_text)
    recipe = run_recipe(run, overrides)
    threads = ready_process(recipe)
    with opened(run):
        print(f"run {run.folder}\nthreads: {threads}")
        from headstart.launch.stages import run_eval

        run_eval(recipe, run, checkpoint=named or checkpoint, parts=parts, temperatures=temperatures)


def export(run_text: str, checkpoint: str, engine: str, out: Path | None, untested: bool, overrides: list[str]) -> None:
    """Write a checkpoint of a run for one engine."""
    run, named = find_run(run_text)
    recipe = run_recipe(run, [*overrides, f"export.engines=[{engine}]"])
    ready_process(recipe)
    with opened(run):
        from headstart.launch.stages import run_export

        run_export(recipe, run, checkpoint=named or checkpoint, out=out, untested=untested)


def import_head(folder: str, out: Path, recipe_text: str, overrides: list[str]) -> None:
    """Make a run of a head that is there already: a published folder, a checkpoint, or another run's best."""
    path = find_recipe(recipe_text)
    recipe = load(path, overrides).shared
    threads = ready_process(recipe)
    from headstart.launch.imported import imported_recipe, run_import
    from headstart.launch.start import find_start

    start = find_start(folder, Path(recipe.run.root).expanduser())
    if start is None:
        raise WrongInput("found no folder, expected a published head: headstart import FOLDER --out RUN")
    under = out if out.parent != Path() else Path(recipe.run.root).expanduser() / out
    recipe = imported_recipe(recipe, start, under)
    run = run_folder(recipe)
    with opened(run):
        run.claim({"settings": training_settings(recipe), "start": start_identity(start)})
        run.write_recipe(
            dump_recipe(recipe, f"target, prompts and measurements of {path.name}; head of {start.folder}")
        )
        print(f"run {run.folder}\nthreads: {threads}")
        run_import(recipe, path, run, start)


def inspect(text: str, overrides: list[str], rows: int) -> None:
    """Show a few training rows: those of a run, else what a recipe's first prompts would give."""
    try:
        run = None if Path(text).is_file() else find_run(text)[0]
    except WrongInput:
        run = None
    path = find_recipe(text) if run is None else run.recipe
    recipe = load(path, overrides).shared if run is None else run_recipe(run, overrides)
    ready_process(recipe)
    from headstart.launch.inspecting import inspect_recipe, inspect_run

    if run is None:
        inspect_recipe(recipe, path.parent, rows)
    else:
        inspect_run(recipe, run, rows)


def compare(run_texts: list[str], draft_length: int | None, draft: str) -> None:
    """Print the paired comparison of measured heads with the first of them; reads files only."""
    if len(run_texts) < 2:
        raise WrongInput(
            f"found one run ({run_texts[0]}), expected two or more to compare.\n`headstart ls runs` lists them."
        )
    from headstart.eval.compare import compare as compare_heads
    from headstart.eval.compare import comparison_text

    heads = [measured_head(text, draft_length, draft) for text in run_texts]
    if len({head.label for head in heads}) < len(heads):  # runs of one name in several folders, say
        for head, text in zip(heads, run_texts, strict=True):
            head.label = text
    print(comparison_text(heads, compare_heads(heads)))


def measured_head(text: str, draft_length: int | None = None, draft: str = "greedy") -> "PromptSums":
    """Stored sums of the head that a run, checkpoint or export folder stands for; a run means the one eval/ speaks of."""
    from headstart.eval.prompt_sums import read_sums

    run, named = find_run(text)
    label = f"{run.name}/{named}" if named else run.name
    checkpoint = exported_checkpoint(run, text)
    if named:
        from headstart.heads.checkpoint import checkpoint_identity

        checkpoint = checkpoint_identity(run.checkpoints / named)
    return read_sums(run.folder, checkpoint, label, draft_length, draft)


def vocabulary(run_text: str, sizes: list[int]) -> None:
    """Print what draft vocabularies of several sizes cover of a run's replies; reads its traffic and the tokenizer only."""
    run, _ = find_run(run_text)
    recipe = load(run.recipe).shared
    ready_process(recipe)
    from headstart.eval.coverage import coverage_text, default_sizes
    from headstart.heads.paths import SPLITS, read_paths
    from headstart.heads.target import TargetLoader

    facts = TargetLoader(recipe.target, need_weights=False).facts
    train, *others = (list(read_paths(run.folder / "traffic", split)) for split in SPLITS)
    unseen = [path for paths in others for path in paths]
    print(coverage_text(train, unseen, sizes or default_sizes(facts, recipe.head.draft_vocab_size), facts))


def report(run_text: str) -> None:
    """Write a run's report and plots again, or a bake-off's table."""
    run, _ = find_run(run_text)
    with locked(run.folder):
        if (loaded := load(run.recipe)).variants:
            from headstart.launch.bakeoff import write_table

            write_table(with_rehearsed_steps(loaded, run), run)
            print(run.folder / "report.md")
            return
        from headstart.eval.report import write_report

        print(write_report(run.folder))


def tell_check(path: Path) -> None:
    """Say what takes the next seconds: importing torch, then reading prompts and the target's files."""
    print(f"checking {path} against its target and prompts", file=sys.stderr, flush=True)


def run_folder(recipe: Recipe) -> RunFolder:
    return RunFolder(Path(recipe.run.root).expanduser().resolve() / recipe.run.name)


def ready_process(recipe: Recipe, processes: Processes | None = None) -> str:
    """Set the thread count before torch is imported; for what one process does, check that it is one.

    Returns:
        The count with its reason.
    """
    if processes is None:
        expect_one(processes := find_processes(), "this command")
    threads = choose_threads(recipe.run.threads, processes.local_world_size)
    apply_threads(threads)
    return str(threads)


@contextmanager
def opened(run: RunFolder) -> Iterator[None]:
    """Hold a run folder as its only writer, with the command and the console recorded in it."""
    with locked(run.folder):
        for folder in (run.folder, run.checkpoints, run.eval, run.folder / "export"):
            remove_leftovers(folder, locked=True)
        run.write_command()
        with run.recorded():
            yield


def training_settings(recipe: Recipe) -> dict[str, object]:
    """The settings that decide what is trained: a run name belongs to one set of them.

    Paths are left out (their contents are in the stages' keys), and so is what only paces or places the work.
    """
    values = dataclasses.asdict(recipe)
    for path in (
        "target.model",
        "target.device",
        "target.sharded",
        "prompts.sources",
        "prompts.heldout",
        "prompts.max_broken",
        "traffic.max_left_out",
        "traffic.server.urls",
        "traffic.server.concurrency",
        "traffic.server.timeout",
        "traffic.server.retries",
        "traffic.server.max_failed",
        "head.init_from",
        "train.loss.chunk",
        *(f"train.{name}" for name in PACING),
    ):
        *sections, leaf = path.split(".")
        section = values
        for name in sections:
            section = section[name]
        del section[leaf]
    sections_kept = ("target", "prompts", "traffic", "features", "head", "train")
    return {"run": {"seed": recipe.run.seed}, **{name: values[name] for name in sections_kept}}


def shared_settings(recipe: Recipe) -> dict[str, object]:
    """The training settings that all variants of a bake-off have."""
    return {name: value for name, value in training_settings(recipe).items() if name not in OWN}


def start_identity(start: "Start | None") -> str | None:
    """What a training started from, by content."""
    return None if start is None else start.sha256


def run_recipe(run: RunFolder, overrides: list[str]) -> Recipe:
    """The recipe a run was made with; overrides may change how it is measured and exported, not what was trained."""
    recipe = load_recipe(run.recipe)
    changed = load_recipe(run.recipe, overrides)
    if training_settings(changed) != training_settings(recipe) or changed.target.model != recipe.target.model:
        raise WrongInput(
            f"{run.folder} is trained already; found {' '.join(overrides)}, expected settings of eval, export or run.\n"
            f"To train with other settings: headstart train {run.recipe} run.name=NAME {' '.join(overrides)}"
        )
    return changed
