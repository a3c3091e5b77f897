"""The training loop: the target is frozen, one head is trained, and acceptance chooses the checkpoint that is kept."""

import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.eval.acceptance import count_replies, reply_acceptance
from headstart.eval.acceptance_rows import acceptance_row
from headstart.heads.contract import Head
from headstart.heads.errors import TrainingFailed, WrongInput
from headstart.heads.paths import conversations
from headstart.heads.precision import Precision, choose_precision
from headstart.heads.vocabulary import hash_ids
from headstart.trainer.checkpoint import (
    TrainingProgress,
    load_checkpoint,
    point,
    pointed,
    prune,
    save_checkpoint,
    sweep,
    try_saving,
)
from headstart.trainer.console import Pace, print_start, progress_line
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.faults import FAULTS, save_batches
from headstart.trainer.interruption import interruption
from headstart.trainer.losses import PairSums, Teacher
from headstart.trainer.metrics import METRICS, MetricsFile, Window
from headstart.trainer.optim import learning_rate
from headstart.trainer.ranks import Ranks, naming_the_lost, refuse_differences
from headstart.trainer.settings import PACING, TrackingSettings, TrainSettings
from headstart.trainer.share import LossShare
from headstart.trainer.strategies import STRATEGIES
from headstart.trainer.strategy import Strategy
from headstart.trainer.tracking import start_tracker

MAX_SKIPPED_IN_A_ROW = 5


@dataclass
class Job:
    """What every optimiser step needs."""

    head: Head
    teacher: Teacher
    strategy: Strategy
    rows: TrainingRows
    settings: TrainSettings
    precision: Precision
    identity: dict[str, Any]
    draft_length: int = 4  # acceptance at this length chooses `best`
    ranks: Ranks = field(default_factory=Ranks)

    @classmethod
    @naming_the_lost()
    def open(
        cls,
        head: Head,
        output_weight_VH: Tensor,
        rows: TrainingRows,
        settings: TrainSettings,
        draft_length: int = 4,
        strategy: str = Strategy.name,
        ranks: Ranks | None = None,
    ) -> "Job":
        """
        Args:
            output_weight_VH: the target's output head.
            draft_length: at which acceptance is measured to choose `best`.
            strategy: by which `ranks` share the training, one of `STRATEGIES`; all of them call this alike.

        Raises:
            WrongInput: the processes do not train the same, or the head did not come to lie on them as asked.
        """
        ranks = (ranks or Ranks()).in_step()
        precision = choose_precision(settings.dtype, head.device)
        identity = training_identity(head, rows, settings, precision, draft_length, ranks.world)
        refuse_differences(ranks, identity)
        dtype = torch.bfloat16 if precision.dtype == torch.bfloat16 else head.outputs()[0].weight.dtype
        teacher = Teacher(output_weight_VH.to(head.device), head.draft_ids_V, dtype)
        share = LossShare(head, teacher, settings, precision, rows.seed)
        spread = STRATEGIES[strategy](share, head, settings, ranks)
        spread.check()
        return cls(head, teacher, spread, rows, settings, precision, identity, draft_length, ranks)


def training_identity(
    head: Head, rows: TrainingRows, settings: TrainSettings, precision: Precision, draft_length: int, world: int
) -> dict[str, Any]:
    """What must be equal for a resume to be exact, flat."""
    values = {f"train.{k}": v for k, v in asdict(settings).items() if k not in (*PACING, "loss", "dtype")}
    loss = {f"train.loss.{k}": v for k, v in asdict(settings.loss).items()}
    of_head = {f"head.{k}": v for k, v in asdict(head.settings).items()}
    target = {f"target.{k}": v for k, v in head.facts.fingerprint.items()}
    if head.base:
        target |= {f"head.model.{k}": v for k, v in head.base.fingerprint.items()}
    return {
        **values, **loss, **of_head, **target, "head.kind": head.kind, "train.dtype": str(precision.dtype),
        "eval.draft_length": draft_length, "draft_ids": hash_ids(head.draft_ids_V.cpu().numpy()),
        "paths": rows.identity(), "seed": rows.seed, "world": world, "device": head.device.type,
    }  # fmt: skip


@dataclass
class StepResult:
    """Sums of one optimiser step. `skipped` names what was not finite; such a step changed no weight."""

    sums: PairSums
    grad_norm: float
    skipped: str = ""


@naming_the_lost()
def train(
    job: Job,
    validation: EvaluationRows,
    folder: Path,
    *,
    tracking: TrackingSettings | None = None,
    name: str = "headstart",
    config: dict[str, Any] | None = None,
) -> TrainingProgress:
    """Train the job's head, or continue from `folder`/checkpoints/last as if never stopped: bit for bit on a CPU.

    Args:
        validation: paths on which acceptance is measured to choose `best`.
        folder: the run's folder; metrics.jsonl, checkpoints/ and wandb/ are written into it, by the first rank.
        name, config: what the tracker calls the run, and shows as its configuration.

    Raises:
        WrongInput: the last checkpoint belongs to another training; the differing fields are named.
        TrainingFailed: several steps in a row were not finite, or another process has ended.
        KeyboardInterrupt: one of the ranks was asked to stop; a checkpoint of the last whole step is written.
    """
    rows, settings, first = job.rows, job.settings, job.ranks.first
    metrics, checkpoints = MetricsFile(folder / METRICS), folder / "checkpoints"
    progress = resume(job, checkpoints)
    if progress and progress.step == settings.num_steps:
        return progress
    print_start(job.strategy, rows, settings, job.precision)
    earlier = metrics.cut(progress.step if progress else -1) if first else []
    window = Window(settings.depth, progress.window if progress else {})
    shown = tracking if first else None
    with start_tracker(shown, folder, name, config, earlier) as tracker, interruption() as stop:
        if progress is None:
            progress = TrainingProgress()
            size = try_saving(checkpoints, job.strategy, job.identity)
            print(f"a checkpoint takes {size / 1e6:,.1f} MB; saving and loading one works")
            untrained = measure(job, validation)
            if first:
                tracker.log(metrics.write(0, 0, untrained))
            if job.head.settings.init_from and progress.note_best(untrained["accept_len"]):
                keep(job, checkpoints, progress, improved=True)  # a trained head is the one to beat
        pace = Pace(progress.step, settings.num_steps)
        while progress.step < settings.num_steps:
            step, began = progress.step + 1, time.perf_counter()
            result = optimizer_step(job, step)
            progress.advance(rows.step_tokens(step), bool(result.skipped))
            window.add(result.sums, rows.step_tokens(step), time.perf_counter() - began)
            if result.skipped:
                warn_skipped(job, progress, result, folder)

            last = step == settings.num_steps
            evaluate = last or step % settings.eval_every == 0
            line: dict[str, Any] = {}
            if evaluate or step % settings.log_every == 0:
                line = describe(job, progress, result, window)
            if evaluate:
                line |= measure(job, validation)
            if line and first:
                tracker.log(metrics.write(step, progress.tokens, line))
                print(progress_line(step, line, pace), flush=True)
            improved = evaluate and progress.note_best(line["accept_len"])
            stopping = job.ranks.any(stop.requested)  # a signal reaches ranks in different steps
            if improved or last or stopping or step % settings.save_every == 0:
                progress.window = window.state()
                keep(job, checkpoints, progress, improved)
            if stopping:
                raise KeyboardInterrupt
    return progress


def optimizer_step(job: Job, step: int) -> StepResult:
    """Gradients of the whole step, clipping, and one update at the step's learning rate; nothing where not finite."""
    sums = all_sums(job, step, accumulate_gradients(job, step))
    charged = bool(sums.loss_D.isfinite().all())
    grad_norm = job.strategy.step(learning_rate(step, job.settings), allowed=charged)
    finite = {"loss": charged, "gradient": math.isfinite(grad_norm)}
    if skipped := " and ".join(name for name, good in finite.items() if not good):
        sums = PairSums.zeros(job.settings.depth, job.head.device)
    return StepResult(sums, grad_norm, skipped)


def accumulate_gradients(job: Job, step: int) -> PairSums:
    """Add up the gradient of loss = sum of w_j l / sum of w_j over every supervised pair (t, j) of the whole step.

    The normaliser comes from the recorded paths alone, so it is known before the first micro-batch and on every rank.

    Returns:
        The sums of this rank's pairs.
    """
    settings, ranks, strategy = job.settings, job.ranks, job.strategy
    normaliser = float(
        job.rows.step_pairs(step, settings.depth) @ settings.loss.depth_decay ** np.arange(settings.depth)
    )
    sums = PairSums.zeros(settings.depth, job.head.device)
    for micro in range(settings.accumulate):
        with strategy.gathered() if job.rows.reads_head(step) else nullcontext():
            batch = job.rows.batch(step, micro, settings.accumulate, ranks.rank, ranks.world).to(job.head.device)
        with strategy.adding_up(last=micro == settings.accumulate - 1):
            loss, found = strategy.share(batch, step, normaliser)
            strategy.backward(loss)
        sums.add(found)
    return sums


def all_sums(job: Job, step: int, own: PairSums) -> PairSums:
    """The sums of all ranks; their pairs have to be those of the step's paths."""
    sums = PairSums(*job.ranks.total(torch.stack([getattr(own, column.name) for column in fields(own)])))
    expected_D = job.rows.step_pairs(step, job.settings.depth)
    if sums.pairs_D.tolist() != expected_D.tolist():
        raise AssertionError(f"step {step} charged {sums.pairs_D.tolist()} pairs, its paths hold {expected_D.tolist()}")
    return sums


def measure(job: Job, validation: EvaluationRows) -> dict[str, Any]:
    """Greedy acceptance on the validation paths (exact: eval.acceptance), under the keys of metrics.jsonl.

    Each rank reads its share of the batches; the figures are those of all of them, on every rank.
    """
    began, ranks = time.perf_counter(), job.ranks
    with job.strategy.gathered() as head:
        own = [
            reply_acceptance(head, [batch.to(head.device)], job.draft_length)
            for batch in islice(validation, ranks.rank, None, ranks.world)
        ]
    parts = ranks.collect(own)
    turns = (part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part))  # as they are stored
    counts = count_replies([reply for batch in turns for reply in batch], job.draft_length)
    row = acceptance_row(
        counts,
        source="offline",
        drafter=job.head.kind,
        draft_length=job.draft_length,
        conversations=conversations(validation.paths),
    )
    values = {f"acceptance/position_{k}": found["value"] for k, found in enumerate(row["conditional"])}
    values |= {f"survival/position_{k}": found["value"] for k, found in enumerate(row["survival"])}
    for key, bound in (("accept_len", "value"), ("accept_len_low", "low"), ("accept_len_high", "high")):
        values[key] = row["accept_len"][bound]
    for route in sorted({c.route for c in counts}):
        chosen = [c for c in counts if c.route == route]
        steps = sum(c.num_steps for c in chosen)
        values[f"accept_len/route/{route}"] = sum(c.num_tokens for c in chosen) / steps if steps else None
    values["validation/seconds"] = time.perf_counter() - began
    return values


def describe(job: Job, progress: TrainingProgress, result: StepResult, window: Window) -> dict[str, Any]:
    """The line of metrics.jsonl after a step: facts of that step, and means since the line before."""
    means = window.close(job.settings.loss.depth_decay)
    return {
        "train/loss": means.pop("train/loss"),
        "train/lr": learning_rate(progress.step, job.settings),
        "train/grad_norm": result.grad_norm,
        "train/num_supervised": int(job.rows.step_pairs(progress.step, job.settings.depth).sum()),
        "train/tokens_per_s": means.pop("train/tokens_per_s"),
        **means,
        "train/num_skipped_steps": progress.num_skipped,
    }


def resume(job: Job, checkpoints: Path) -> TrainingProgress | None:
    """Continue from `last` where there is one."""
    if job.ranks.first:
        checkpoints.mkdir(parents=True, exist_ok=True)
        sweep(checkpoints)
    job.ranks.wait()
    last = pointed(checkpoints, "last")
    if last is None and (checkpoints / "last").exists():
        named = (checkpoints / "last").read_text(encoding="utf-8", errors="replace").strip()
        raise WrongInput(
            f"{checkpoints / 'last'} names {named!r}, which is not there. "
            "Write the name of a checkpoint that is into it, or train anew with --fresh."
        )
    if last is None:
        return None
    progress = load_checkpoint(last, job.strategy, job.identity)
    done = progress.step == job.settings.num_steps
    print(f"trained already: {last}" if done else f"continuing from {last}")
    return progress


def keep(job: Job, checkpoints: Path, progress: TrainingProgress, improved: bool) -> None:
    """Save a checkpoint. `best` moves before `last`: killed in between, the rerun comes here again and repeats both.

    Until an accept_len is measured, the newest checkpoint is the best.
    """
    checkpoint = save_checkpoint(checkpoints, job.strategy, progress, job.identity)
    if job.ranks.first:
        if improved or not progress.best_accept_len or pointed(checkpoints, "best") is None:
            point(checkpoints, "best", checkpoint)
        point(checkpoints, "last", checkpoint)
        prune(checkpoints, job.settings.keep)
    job.ranks.wait()


def warn_skipped(job: Job, progress: TrainingProgress, result: StepResult, folder: Path) -> None:
    """Name a step that was not finite; stop where they follow one another, and keep the last one's batches."""
    prompts = ", ".join(job.rows.paths[row].prompt_id[:12] for row in job.rows.rows(progress.step))
    print(f"step {progress.step}: {result.skipped} not finite, step skipped (prompts {prompts})", flush=True)
    if progress.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        with job.strategy.gathered():
            damaged = save_batches(folder, job.rows, progress.step, job.settings.accumulate, job.ranks)
        found = f"states that are not finite in the prompts {', '.join(damaged)}" if damaged else "finite states only"
        raise TrainingFailed(
            f"{progress.num_skipped_in_a_row} steps in a row up to step {progress.step} had a non-finite {result.skipped}. "
            "Lower train.learning_rate or train.clip_norm, or train in float32 (train.dtype=float32); "
            f"the checkpoint before them is kept. The batches of step {progress.step} are in {folder / FAULTS}: {found}."
        )
