"""The stages of a recipe, in order: prompts -> traffic and features -> head -> eval -> export -> report.

Each stage reads one folder and writes one. What its key says is complete is reused, what was interrupted continues.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstart.eval.gate import read_evals
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.report import write_report
from headstart.eval.speed import hardware
from headstart.eval.summary import summary
from headstart.heads.checkpoint import KINDS, build_head, checkpoint_identity
from headstart.heads.contract import Head
from headstart.heads.errors import GateFailed, WrongInput
from headstart.heads.facts import TargetFacts, told_taps
from headstart.heads.features import FeatureReader
from headstart.heads.memory import keep_freed_memory
from headstart.heads.object_store import object_store
from headstart.heads.paths import Path as ReplyPath
from headstart.heads.paths import read_paths
from headstart.heads.settings import HeadSettings
from headstart.heads.sharded_target import load_sharded
from headstart.heads.start import Start
from headstart.heads.store import (
    MANIFEST,
    MANIFEST_SCHEMA,
    Stage,
    finished_stage,
    hash_json,
    holds,
    new_stage,
    read_json,
    stage_folder,
    stage_inputs,
    stage_there,
)
from headstart.heads.target import Target, TargetLoader, choose_device
from headstart.heads.target_ends import load_ends
from headstart.heads.vocabulary import choose_draft_vocabulary, count_tokens, coverage
from headstart.heads.warm_start import take_over
from headstart.launch.export_gate import export_head
from headstart.launch.previous import previous_folder
from headstart.launch.processes import Processes, choose_strategy
from headstart.launch.run import RunFolder, locked
from headstart.launch.settings import Recipe
from headstart.launch.start import find_start
from headstart.launch.storing import claim_mode
from headstart.launch.variants import Loaded, stored_taps
from headstart.trainer.checkpoint import checkpoint_folder
from headstart.trainer.data import EvaluationRows, Features, TrainingRows
from headstart.trainer.features import features_inputs, stored_splits
from headstart.trainer.heldout_traffic import at_temperature, heldout_inputs, make_heldout_traffic
from headstart.trainer.loop import Job, train
from headstart.trainer.on_policy import OnPolicyRows
from headstart.trainer.prompts import make_prompts, prompt_inputs, read_prompts
from headstart.trainer.ranks import Ranks, joined
from headstart.trainer.recorded import plan_traffic
from headstart.trainer.strategy import Strategy
from headstart.trainer.streamed import StreamedStates
from headstart.trainer.supervision import check_supervision, training_paths
from headstart.trainer.traffic import make_traffic, traffic_inputs

EVAL_VERSION = 1
READ = {"taps": "the taps", "final": "the state after the final norm, as lm_head does", "text": "the text alone"}
OF_STATES = ("offline",)  # parts of an evaluation that need no pass of the target


def run_train(recipe: Recipe, recipe_path: Path, run: RunFolder, processes: Processes | None = None) -> None:
    """Everything from a recipe to an exported head. Each call below is a stage that can be run again on its own.

    Of several processes all answer prompts and train the head; the first one does the rest, and the others wait or are done.
    """
    processes = processes or Processes()
    targets = target_loader(recipe)
    with meeting(processes, recipe.target.device) as ranks:
        mode = run_traffic(recipe, recipe_path, run, targets, ranks)
        if recipe.target.sharded and mode == "cache":
            targets.load_by(load_ends)
        run_head(recipe, run, targets, mode, choose_strategy(recipe.train, processes), ranks)
    if not processes.first:
        return
    if recipe.target.sharded:
        targets.load_by(load_ends)
    run_measurements(recipe, run, targets)
    write_report(run.folder)
    for engine in recipe.export.engines:
        export_head(run.folder, engine, targets(), recipe.eval, recipe.export)
    if not recipe.export.engines:
        print("export.engines is empty: nothing was written for an engine")
    print(f"report: {run.folder / 'report.md'}")


def meeting(processes: Processes, device: str) -> AbstractContextManager[Ranks]:
    """The processes of this training, together while they share it."""
    if not processes.launched:
        return nullcontext(Ranks())
    return joined(processes.rank, processes.world_size, processes.local_rank, device)


def followed_stage(run: RunFolder, name: str) -> Stage:
    """A stage that the first process has made. Raises WrongInput: this one does not see it."""
    if not (run.folder / name).exists():
        raise WrongInput(
            f"{run.folder}: found nothing of what the first process has made there.\n"
            "Set run.root to a folder on storage that all machines share, under the same path."
        )
    return finished_stage(run.folder / name)


def run_shared(loaded: Loaded, recipe_path: Path, run: RunFolder) -> str:
    """`run_traffic` of all variants: one target pass, whose states hold the taps that any of them reads."""
    targets = TargetLoader(loaded.shared.target)
    targets.taps = stored_taps(loaded.recipes.values(), targets.taps)
    return run_traffic(loaded.shared, recipe_path, run, targets)


def target_loader(recipe: Recipe) -> TargetLoader:
    """The recipe's target; of one that no device holds its ends alone, which is all that one process can read."""
    targets = TargetLoader(recipe.target, recipe.head.asked_taps)
    if recipe.target.sharded:
        targets.load_by(load_ends)
    return targets


def run_eval(
    recipe: Recipe,
    run: RunFolder,
    checkpoint: str = "best",
    parts: Sequence[str] = (),
    temperatures: Sequence[float] = (),
) -> None:
    """Measure a checkpoint of a finished run again; `parts` of offline, live, lossless, prove, speed limit what is measured.

    Args:
        temperatures: at which acceptance is measured beside the recipe's own.

    Raises:
        GateFailed: the losslessness battery missed a seeded fault, or raised an alarm at a sound decoder.
    """
    targets = target_loader(recipe)
    others = [heldout_replies(recipe, run, targets, t) for t in temperatures if t != recipe.traffic.temperature]
    results = measure_head(recipe, run, targets, checkpoint, parts, others)
    write_report(run.folder)
    if problems := (results["lossless"] or {}).get("battery_problems"):
        raise GateFailed("the losslessness battery is not to be trusted:\n  - " + "\n  - ".join(problems))


def run_export(
    recipe: Recipe, run: RunFolder, checkpoint: str = "best", out: Path | None = None, untested: bool = False
) -> None:
    """Write a checkpoint for the recipe's engines."""
    target = target_loader(recipe)()
    for engine in recipe.export.engines:
        export_head(run.folder, engine, target, recipe.eval, recipe.export, checkpoint, out, untested)


def run_traffic(
    recipe: Recipe, recipe_path: Path, run: RunFolder, targets: TargetLoader, ranks: Ranks | None = None
) -> str:
    """Prompts, the target's replies to them, and the states it had while replying, as far as they are stored.

    Returns:
        Whether the states of training replies are: `cache`, else `stream`.
    """
    ranks, seed = ranks or Ranks(), recipe.run.seed
    print(f"taps {targets.taps}: {told_taps(targets.taps, targets.facts.num_layers)}")
    with ranks.first_before_others():
        prompts = first_prompts(recipe, recipe_path, run, targets) if ranks.first else followed_stage(run, "prompts")
    traffic = stage_there(run.root, "traffic", traffic_inputs(targets, prompts, recipe.traffic, seed))
    with ranks.first_before_others():
        mode = claim_mode(recipe, run, targets, traffic, partial(rows_to_come, recipe, targets, prompts))
    stored, answered = stored_splits(mode), traffic.complete
    if recipe.target.sharded:
        targets.load_by(partial(load_sharded, vote=ranks.any))
    with locked(traffic.folder, wait_for="it is answering the same prompts") if ranks.first else nullcontext():
        traffic, features = make_traffic(
            targets, prompts, recipe.traffic, run.root, seed, ranks, stored, object_store(recipe.run.store)
        )
    with ranks.first_before_others():
        if ranks.first:
            # The features a head asks for, whichever stage serves them: one that holds more trains the same head.
            asked = hash_json(features_inputs(targets, traffic, stored))
            run.claim({"traffic": traffic.key, "features": asked})
            run.link("traffic", traffic.folder)
            run.link("features", features.folder)
            if answered:
                print(f"traffic: reused, {traffic.folder.name}")
            if mode == "stream":
                print("features.mode: stream, so the target reads the training rows of every step")
        else:
            followed_stage(run, "features")
    return mode


def rows_to_come(recipe: Recipe, targets: TargetLoader, prompts: Stage) -> list[tuple[str, int]]:
    """Split, and the most prompt tokens, of every row of traffic."""
    return plan_traffic(targets, read_prompts(prompts.folder), recipe.traffic).rows()


def first_prompts(recipe: Recipe, recipe_path: Path, run: RunFolder, targets: TargetLoader) -> Stage:
    """The prompts, gathered where they are not there yet."""
    prompts = shared_prompts(recipe, recipe_path, run, targets)
    run.claim({"prompts": prompts.key})
    run.link("prompts", prompts.folder)
    return prompts


def shared_prompts(recipe: Recipe, recipe_path: Path, run: RunFolder, targets: TargetLoader) -> Stage:
    """The prompts stage, gathered by one run at a time."""
    source = (recipe_path.parent, recipe.run.seed, targets)
    shared = stage_folder(run.root, "prompts", hash_json(prompt_inputs(recipe.prompts, *source)))
    with locked(shared, wait_for="it is gathering the same prompts"):
        return make_prompts(recipe.prompts, run.root, *source, store=object_store(recipe.run.store))


def heldout_replies(recipe: Recipe, run: RunFolder, targets: TargetLoader, temperature: float) -> list[ReplyPath]:
    """The target's replies to the held-out prompts at another temperature, answered where they are not there yet."""
    prompts, seed = finished_stage(run.folder / "prompts"), recipe.run.seed
    settings = at_temperature(recipe.traffic, temperature)
    shared = stage_folder(run.root, "traffic", hash_json(heldout_inputs(targets, prompts, settings, seed)))
    with locked(shared, wait_for="it is answering the same prompts"):
        stage = make_heldout_traffic(targets, prompts, settings, run.root, seed, object_store(recipe.run.store))
    run.link(f"traffic-t{temperature:g}", stage.folder)
    return list(read_paths(stage.folder, "heldout"))


def run_head(recipe: Recipe, run: RunFolder, targets: TargetLoader, mode: str, strategy: str, ranks: Ranks) -> None:
    """Train the head on what the target said, or finish a training that was interrupted."""
    target = targets()
    if not (target.sharded and mode == "stream"):  # whose layers come and go, as `load_sharded` has set it
        keep_freed_memory()
    reader = stored_features(run, targets)
    job = open_job(recipe, run, target, mode, reader, strategy, ranks)
    paths = list(read_paths(run.folder / "traffic", "validation"))
    validation = EvaluationRows(paths, reader, recipe.train.batch_tokens)
    train(job, validation, run.folder, tracking=recipe.tracking, name=run.name, config=asdict(recipe))


def open_job(
    recipe: Recipe,
    run: RunFolder,
    target: Target,
    mode: str,
    stored: FeatureReader,
    strategy: str = Strategy.name,
    ranks: Ranks | None = None,
) -> Job:
    """The training of a recipe from its first step, on the traffic and features that a run has; nothing is written.

    Args:
        mode: `cache` reads training states from `stored`, `stream` lets the target read them in the step.
        strategy: by which `ranks` share it.
    """
    paths = training_paths(run.folder / "traffic", recipe.train.cut_replies)
    check_supervision(paths, target.facts.stop_ids, recipe.train.depth)
    head = new_head(recipe, target, paths, find_start(recipe.head.init_from, run.root))
    states: Features = StreamedStates(target) if mode == "stream" else stored
    source = (paths, states, recipe.train.batch_tokens, recipe.run.seed)
    share = recipe.train.on_policy
    rows = OnPolicyRows(*source, head=head, target=target, share=share) if share else TrainingRows(*source)
    return Job.open(head, target.output_weight(), rows, recipe.train, recipe.eval.draft_length, strategy, ranks)


def new_head(recipe: Recipe, target: Target, paths: Sequence[ReplyPath], start: Start | None = None) -> Head:
    """A head whose vocabulary and first weights come from the training replies and the target, or from another head."""
    counts_V = count_tokens(paths, target.facts)
    if start is not None and start.draft_ids_V is not None:
        draft_ids_V, chosen = start.draft_ids_V, f", as in {start.folder},"
    else:
        draft_ids_V, chosen = choose_draft_vocabulary(counts_V, recipe.head.draft_vocab_size, target.facts), ""
    print(
        f"draft vocabulary: {len(draft_ids_V):,} of {target.facts.num_tokens:,} tokens{chosen} hold "
        f"{coverage(counts_V, draft_ids_V):.2%} of {counts_V.sum():,} generated training tokens"
    )
    print(f"{recipe.head.kind} reads {READ[KINDS[recipe.head.kind].reads]}")
    torch.manual_seed(recipe.run.seed)
    return first_head(recipe.head, target, draft_ids_V, start)


def first_head(settings: HeadSettings, target: Target, draft_ids_V: np.ndarray, start: Start | None) -> Head:
    """A head with its first weights: random, the target's, and those of the head that it starts from."""
    # What a head started from is told by content: folders move.
    settings = settings if start is None else replace(settings, init_from=start.sha256)
    head = build_head(settings, target.facts, torch.from_numpy(draft_ids_V)).to(target.device)
    head.load_target(target, initialise=True)
    if start is not None:
        take_over(head, start)
    return head


def run_measurements(recipe: Recipe, run: RunFolder, targets: TargetLoader) -> None:
    """The eval stage of a recipe, or what it wrote where nothing that decides its figures has changed since."""
    inputs = eval_inputs(recipe, run, targets)
    if holds(run.eval, inputs):
        print(f"eval: measured already; headstart eval {run.name} measures again")
        print(summary(read_evals(run.eval), recipe.eval.draft_length))
        return
    run.eval.mkdir(exist_ok=True)
    stage = new_stage(run.eval, "eval", inputs, recipe.run.seed)
    measure_head(recipe, run, targets)
    files = sorted(file.name for file in run.eval.glob("*.json") if file.name != MANIFEST)
    for name in files:
        stage.record(name, rows=1)
    stage.finish()


def eval_inputs(recipe: Recipe, run: RunFolder, targets: TargetLoader) -> dict[str, Any]:
    """What decides the figures of `best`: also the machine, its threads and versions, for they are timed."""
    checkpoint = checkpoint_identity(checkpoint_folder(run.folder, "best"))
    previous = previous_folder(recipe.eval.previous, run.root, targets.facts)
    settings = {
        **asdict(recipe.eval),
        "previous": None if previous is None else checkpoint_identity(previous),
        "seed": recipe.run.seed,
        "hardware": hardware(choose_device(recipe.target.device)),
        "threads": torch.get_num_threads(),
    }
    traffic = read_json(run.folder / "traffic" / MANIFEST, MANIFEST_SCHEMA)["key"]
    parents = {"traffic": traffic, "checkpoint": hash_json(checkpoint)}
    return stage_inputs(EVAL_VERSION, settings, parents, targets.facts.fingerprint)


def measure_head(
    recipe: Recipe,
    run: RunFolder,
    targets: TargetLoader,
    checkpoint: str = "best",
    parts: Sequence[str] = (),
    others: Sequence[Sequence[ReplyPath]] = (),
) -> dict[str, Any]:
    """The eval stage on the held-out replies, which nothing before has read.

    Of a target that no device holds, what stored states tell.
    """
    if recipe.target.sharded and not parts:
        parts = OF_STATES
        print("target.sharded: nothing is decoded here; acceptance is measured on the stored states")
    here = (run.folder / "features" / MANIFEST).exists()  # a moved run may be without
    heldout = Heldout(
        list(read_paths(run.folder / "traffic", "heldout")),
        recipe.traffic.eval_dtype,
        recipe.traffic.max_new_tokens,
        features=stored_features(run, targets) if here else None,
        routes=sorted({prompt.route for prompt in read_prompts(run.folder / "prompts")}),
        others=others,
        vocabularies=smaller_vocabularies(recipe, run, targets.facts),
        previous=previous_folder(recipe.eval.previous, run.root, targets.facts),
    )
    folder = checkpoint_folder(run.folder, checkpoint)
    return evaluate(targets, folder, heldout, recipe.eval, run.eval, parts=parts, seed=recipe.run.seed)


def stored_features(run: RunFolder, targets: TargetLoader) -> FeatureReader:
    """The target's states on a run's replies. Raises WrongInput: there are none, or those of other replies."""
    traffic = read_json(run.folder / "traffic" / MANIFEST, MANIFEST_SCHEMA)["key"]
    return FeatureReader(run.folder / "features", targets.taps, traffic)


def smaller_vocabularies(recipe: Recipe, run: RunFolder, facts: TargetFacts) -> list[np.ndarray]:
    """Draft vocabularies of `eval.vocab_sizes`, chosen as the head's own was."""
    if not recipe.eval.vocab_sizes:
        return []
    counts_V = count_tokens(read_paths(run.folder / "traffic", "train"), facts)
    return [choose_draft_vocabulary(counts_V, size, facts, "eval.vocab_sizes") for size in recipe.eval.vocab_sizes]
