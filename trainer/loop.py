"""The training loop: the target is frozen, one head is trained, and acceptance chooses the checkpoint that is kept."""

import math
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.eval.acceptance import acceptance_row, offline_acceptance
from headstart.heads.contract import Head
from headstart.heads.errors import TrainingFailed, WrongInput
from headstart.heads.precision import Precision, choose_precision
from headstart.heads.vocabulary import hash_ids
from headstart.trainer.checkpoint import (
    Progress,
    load_checkpoint,
    point,
    pointed,
    prune,
    rehearse,
    save_checkpoint,
    sweep,
)
from headstart.trainer.console import Pace, print_start, progress_line
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.feature_loss import feature_loss
from headstart.trainer.feature_noise import noisy
from headstart.trainer.interruption import interruption
from headstart.trainer.losses import PairSums, Teacher, pair_loss
from headstart.trainer.memory import keep_freed_memory
from headstart.trainer.metrics import METRICS, MetricsFile, Window
from headstart.trainer.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate
from headstart.trainer.settings import TrackingSettings, TrainSettings
from headstart.trainer.tracking import start_tracker

MAX_SKIPPED_IN_A_ROW = 5
FREE_SETTINGS = ("eval_every", "save_every", "keep", "log_every")  # a resume may change them: no weight depends on them


@dataclass
class Job:
    """What every optimiser step needs."""

    head: Head
    teacher: Teacher
    optimizer: torch.optim.AdamW
    rows: TrainingRows
    settings: TrainSettings
    precision: Precision
    draft_length: int = 4  # acceptance at this length chooses `best`
    rank: int = 0
    world: int = 1

    @classmethod
    def open(
        cls,
        head: Head,
        output_weight_VH: Tensor,
        rows: TrainingRows,
        settings: TrainSettings,
        draft_length: int = 4,
    ) -> "Job":
        precision = choose_precision(settings.dtype, head.device)
        dtype = torch.bfloat16 if precision.dtype == torch.bfloat16 else head.outputs()[0].weight.dtype
        teacher = Teacher(output_weight_VH.to(head.device), head.draft_ids_V, dtype)
        return cls(head, teacher, make_optimizer(head, settings), rows, settings, precision, draft_length)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be equal for a resume to be exact, flat."""
        settings = {
            f"train.{k}": v for k, v in asdict(self.settings).items() if k not in (*FREE_SETTINGS, "loss", "dtype")
        }
        loss = {f"train.loss.{k}": v for k, v in asdict(self.settings.loss).items()}
        head = {f"head.{k}": v for k, v in asdict(self.head.settings).items()}
        target = {f"target.{k}": v for k, v in self.head.facts.fingerprint.items()}
        if self.head.base:
            target |= {f"head.model.{k}": v for k, v in self.head.base.fingerprint.items()}
        return {
            **settings, **loss, **head, **target, "head.kind": self.head.kind, "train.dtype": str(self.precision.dtype),
            "eval.draft_length": self.draft_length, "draft_ids": hash_ids(self.head.draft_ids_V.cpu().numpy()),
            "paths": self.rows.identity(), "seed": self.rows.seed, "world": self.world, "device": self.head.device.type,
        }  # fmt: skip


@dataclass
class StepResult:
    """Sums of one optimiser step. `skipped` names what was not finite; such a step changed no weight."""

    sums: PairSums
    grad_norm: float
    skipped: str = ""


def train(
    head: Head,
    output_weight_VH: Tensor,
    rows: TrainingRows,
    validation: EvaluationRows,
    settings: TrainSettings,
    folder: Path,
    *,
    draft_length: int = 4,
    tracking: TrackingSettings | None = None,
    name: str = "headstart",
    config: dict[str, Any] | None = None,
) -> Progress:
    """Train `head`, or continue from `folder`/checkpoints/last as if never stopped: bit for bit on a CPU.

    Args:
        output_weight_VH: the target's output head.
        folder: the run's folder; metrics.jsonl, checkpoints/ and wandb/ are written into it.
        draft_length: at which acceptance is measured on the validation paths to choose `best`.
        name, config: what the tracker calls the run, and shows as its configuration.

    Raises:
        WrongInput: the last checkpoint belongs to another training; the differing fields are named.
        TrainingFailed: several steps in a row were not finite.
        KeyboardInterrupt: asked to stop; a checkpoint of the last whole step is written.
    """
    keep_freed_memory()
    job = Job.open(head, output_weight_VH, rows, settings, draft_length)
    metrics, checkpoints = MetricsFile(folder / METRICS), folder / "checkpoints"
    progress = resume(job, checkpoints)
    if progress and progress.step == settings.num_steps:
        return progress
    print_start(head, rows, settings, job.precision)
    earlier = metrics.cut(progress.step if progress else -1)
    window = Window(settings.depth, progress.window if progress else {})
    with start_tracker(tracking, folder, name, config, earlier) as tracker, interruption() as stop:
        if progress is None:
            progress = Progress()
            size = rehearse(checkpoints, head, job.optimizer, job.identity)
            print(f"a checkpoint takes {size / 1e6:,.1f} MB; saving and loading one works")
            first = measure(head, validation, job.draft_length)
            tracker.log(metrics.write(0, 0, first))
            if head.settings.init_from and progress.note_best(first["accept_len"]):
                keep(job, checkpoints, progress, improved=True)  # a trained head is the one to beat
        pace = Pace(progress.step, settings.num_steps)
        while progress.step < settings.num_steps:
            step, began = progress.step + 1, time.perf_counter()
            result = optimizer_step(job, step)
            progress.advance(rows.step_tokens(step), bool(result.skipped))
            window.add(result.sums, rows.step_tokens(step), time.perf_counter() - began)
            if result.skipped:
                warn_skipped(job, progress, result)

            last = step == settings.num_steps
            evaluate = last or step % settings.eval_every == 0
            line: dict[str, Any] = {}
            if evaluate or step % settings.log_every == 0:
                line = describe(job, progress, result, window)
            if evaluate:
                line |= measure(head, validation, job.draft_length)
            if line:
                tracker.log(metrics.write(step, progress.tokens, line))
                print(progress_line(step, line, pace), flush=True)
            improved = evaluate and progress.note_best(line["accept_len"])
            if improved or last or stop.requested or step % settings.save_every == 0:
                progress.window = window.state()
                keep(job, checkpoints, progress, improved)
            if stop.requested:
                raise KeyboardInterrupt
    return progress


def optimizer_step(job: Job, step: int) -> StepResult:
    """Gradients of the whole step, clipping, and one update at the step's learning rate; nothing where not finite."""
    sums = accumulate_gradients(job, step)
    grad_norm = float(clip_gradients(job.head.parameters(), job.settings.clip_norm))
    finite = {"loss": bool(sums.loss_D.isfinite().all()), "gradient": math.isfinite(grad_norm)}
    skipped = " and ".join(name for name, good in finite.items() if not good)
    if skipped:
        sums = PairSums.zeros(job.settings.depth, job.head.device)
    else:
        set_learning_rate(job.optimizer, learning_rate(step, job.settings))
        job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    return StepResult(sums, grad_norm, skipped)


def accumulate_gradients(job: Job, step: int) -> PairSums:
    """Add up the gradient of loss = sum of w_j l / sum of w_j over every supervised pair (t, j) of the whole step.

    The normaliser comes from the recorded paths alone, so it is known before the first micro-batch and on every rank.
    """
    settings, head = job.settings, job.head
    pairs_D = job.rows.step_pairs(step, settings.depth)
    normaliser = float(pairs_D @ settings.loss.depth_decay ** np.arange(settings.depth))
    sums = PairSums.zeros(settings.depth, head.device)
    for micro in range(settings.accumulate):
        batch = job.rows.batch(step, micro, settings.accumulate, job.rank, job.world).to(head.device)
        with job.precision.autocast(head.device):
            read = noisy(batch, head.reads, settings.feature_noise, job.rows.seed, step)
            rollout = head.rollout(read, settings.depth)
        weights = [output.weight for output in head.outputs()]
        loss, found = pair_loss(rollout, weights, batch, job.teacher, settings.loss, normaliser)
        if settings.loss.feature_weight:
            share, share_D = feature_loss(rollout, batch, settings.loss, normaliser)
            loss = loss + share
            found.loss_D += share_D
        loss.backward()
        sums.add(found)
    if job.world == 1 and sums.pairs_D.tolist() != pairs_D.tolist():
        raise AssertionError(f"step {step} charged {sums.pairs_D.tolist()} pairs, its paths hold {pairs_D.tolist()}")
    return sums


def measure(head: Head, validation: EvaluationRows, draft_length: int) -> dict[str, Any]:
    """Greedy acceptance on the validation paths (exact: eval.acceptance), under the keys of metrics.jsonl."""
    began = time.perf_counter()
    counts = offline_acceptance(head, (batch.to(head.device) for batch in validation), draft_length)
    row = acceptance_row(counts, source="offline", drafter=head.kind, draft_length=draft_length)
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


def describe(job: Job, progress: Progress, result: StepResult, window: Window) -> dict[str, Any]:
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


def resume(job: Job, checkpoints: Path) -> Progress | None:
    """Continue from `last` where there is one."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    sweep(checkpoints)
    last = pointed(checkpoints, "last")
    if last is None and (checkpoints / "last").exists():
        named = (checkpoints / "last").read_text(encoding="utf-8", errors="replace").strip()
        raise WrongInput(
            f"{checkpoints / 'last'} names {named!r}, which is not there. "
            "Write the name of a checkpoint that is into it, or train anew with --fresh."
        )
    if last is None:
        return None
    progress = load_checkpoint(last, job.head, job.optimizer, job.identity)
    done = progress.step == job.settings.num_steps
    print(f"trained already: {last}" if done else f"continuing from {last}")
    return progress


def keep(job: Job, checkpoints: Path, progress: Progress, improved: bool) -> None:
    """Save a checkpoint. `best` moves before `last`: killed in between, the rerun comes here again and repeats both.

    Until an accept_len is measured, the newest checkpoint is the best.
    """
    checkpoint = save_checkpoint(checkpoints, job.head, job.optimizer, progress, job.identity)
    if improved or not progress.best_accept_len or pointed(checkpoints, "best") is None:
        point(checkpoints, "best", checkpoint)
    point(checkpoints, "last", checkpoint)
    prune(checkpoints, job.settings.keep)


def warn_skipped(job: Job, progress: Progress, result: StepResult) -> None:
    """Name a step that was not finite; stop where they follow one another."""
    prompts = ", ".join(job.rows.paths[row].prompt_id[:12] for row in job.rows.rows(progress.step))
    print(f"step {progress.step}: {result.skipped} not finite, step skipped (prompts {prompts})", flush=True)
    if progress.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise TrainingFailed(
            f"{progress.num_skipped_in_a_row} steps in a row up to step {progress.step} had a non-finite {result.skipped}. "
            "Lower train.learning_rate or train.clip_norm, or train in float32 (train.dtype=float32); "
            "the checkpoint before them is kept."
        )
