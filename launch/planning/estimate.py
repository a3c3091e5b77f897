"""How long the stages of a recipe take on given machines, and what bounds each of them: for planning at sizes not at hand.

A stage is bound by the slowest of four things: products, the memory of a device, links between devices, and the disk. Each
is a rate that was measured (`measure_machine`, or what the user gives), at sizes of the recipe's target; work that overlaps
takes as long as its slowest part, so the hours are those of a pipeline without gaps.

    P   parameters of the layers, of experts those that a token meets     H, V   width of the target, draft vocabulary
    read        a pass of T tokens a process: 2 P T products, all layers through memory, and, of a sharded target, over links
    reply       a step of B replies a process: the same with T = B
    train       a token: 6 x (trained parameters) x depth products, 2 H V of the teacher's logits, its stored states read;
                with `features.mode: stream` none are, and a pass of each micro-batch comes before it
"""

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.heads.precision import DTYPES
from headstart.heads.sharded_target import ShardedTarget
from headstart.heads.target import Target, TargetLoader
from headstart.launch.needs import Needs, Row
from headstart.launch.settings import Recipe
from headstart.trainer.features import free_bytes, gigabytes, stored_dtype, token_bytes

CACHE_PAYS = "epochs from which on reading states is faster than computing them"
PROBE_S = 0.3  # seconds each rate is measured for
PROBE_ROWS = 512
PROBE_BYTES = 1 << 26


@dataclass(frozen=True)
class Machine:
    """Rates of one device and of what it shares, in the target's precision."""

    processes: int
    tflops: float  # matrix products, 1e12 operations a second
    memory: float  # bytes a device reads of its memory, 1e9 a second
    link: float  # bytes a device receives while all gather from each other, 1e9 a second
    disk: float  # bytes of run.root, of all processes together, 1e9 a second

    def describe(self) -> str:
        tflops, memory, link, disk = (
            f"{float(f'{x:.3g}'):,g}" for x in (self.tflops, self.memory, self.link, self.disk)
        )
        each = f"{tflops} TFLOP/s, {memory} GB/s of memory, {link} GB/s of links"
        return f"{self.processes} x {each}; {disk} GB/s of disk in all"


@dataclass(frozen=True)
class Work:
    """What a recipe asks for, in tokens, operations and bytes."""

    tokens: int  # of prompts and replies
    reply_tokens: int
    trained_tokens: int
    pass_tokens: int  # a process reads at once
    slots: int  # replies a process generates at once
    layer_ops: int  # of a token in the target's layers
    layer_bytes: int  # of the target's layers
    sharded: bool
    head_ops: int  # of a training token
    token_bytes: int  # of its states
    streams: bool  # whether training lets the target read its tokens
    step_tokens: int  # of a micro-batch of a process
    stored_bytes: int  # of all states that are stored


@dataclass(frozen=True)
class Pace:
    """A stage's rate in tokens a second, and what bounds it."""

    rate: float
    bound: str

    def hours(self, tokens: int) -> str:
        hours = tokens / self.rate / 3600
        return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:,.1f} min"


def work_of(
    recipe: Recipe, target: TargetLoader, needs: Needs, tokens: int, reply_tokens: int, stored_bytes: int = 0
) -> Work:
    """The work of a recipe whose traffic has so many tokens; of its heads, the largest.

    Args:
        stored_bytes: of the states that are stored where training streams its own.
    """
    facts, train = target.facts, recipe.train
    vocabulary = recipe.head.draft_vocab_size or facts.num_tokens
    pass_tokens = (ShardedTarget if recipe.target.sharded else Target).pass_tokens
    each = token_bytes(target, stored_dtype("train", recipe.traffic))
    return Work(
        tokens=tokens,
        reply_tokens=reply_tokens,
        trained_tokens=train.num_steps * train.batch_tokens,
        pass_tokens=pass_tokens,
        slots=recipe.traffic.slots,
        layer_ops=2 * needs.counted.active_layers,
        layer_bytes=round(needs.counted.layers * needs.bytes_each),
        sharded=recipe.target.sharded,
        head_ops=6 * needs.num_trained * train.depth + 2 * facts.hidden_size * vocabulary,
        token_bytes=each,
        streams=needs.streams,
        step_tokens=min(max(train.batch_tokens // (train.accumulate * needs.num_processes), 1), pass_tokens),
        stored_bytes=stored_bytes if needs.streams else tokens * each,
    )


def passing(work: Work, machine: Machine, tokens: int, written: int) -> Pace:
    """Passes of so many tokens a process, which leave `written` bytes a token on disk."""
    gathered = work.layer_bytes * (machine.processes - 1) / machine.processes if work.sharded else 0
    return slowest(
        tokens * machine.processes,
        {
            "products": tokens * work.layer_ops / (machine.tflops * 1e12),
            "memory": work.layer_bytes / (machine.memory * 1e9),
            "links": gathered / (machine.link * 1e9),
            "disk": tokens * machine.processes * written / (machine.disk * 1e9),
        },
    )


def training(work: Work, machine: Machine) -> Pace:
    """Steps on states that are stored, or that the target gives before each micro-batch."""
    tokens, products = machine.processes, work.head_ops / (machine.tflops * 1e12)
    if not work.streams:
        return slowest(tokens, {"products": products, "disk": tokens * work.token_bytes / (machine.disk * 1e9)})
    head, read = slowest(tokens, {"products": products}), streaming(work, machine)
    return Pace(1 / (1 / head.rate + 1 / read.rate), min(head, read, key=lambda pace: pace.rate).bound)


def streaming(work: Work, machine: Machine) -> Pace:
    """The target's passes inside training, a micro-batch each."""
    return passing(work, machine, work.step_tokens, 0)


def slowest(tokens: int, seconds: dict[str, float]) -> Pace:
    bound = max(seconds, key=lambda name: seconds[name])
    return Pace(tokens / seconds[bound], bound)


def time_rows(work: Work, machine: Machine) -> list[Row]:
    """The table of a plan: stage, hours, tokens a second and what bounds them."""
    written = 0 if work.streams else work.token_bytes
    reply = passing(work, machine, work.slots, written)
    read = passing(work, machine, work.pass_tokens, written)
    train = training(work, machine)
    passes = f", passes of {work.step_tokens:,} tokens a process included" if work.streams else ""
    most = "at most, of validation and held-out replies" if work.streams else f"states of {work.tokens:,} tokens"
    return [
        ("on", "", machine.describe()),
        ("replies", reply.hours(work.reply_tokens), f"{told(reply)}, if the target answers here"),
        ("states", read.hours(work.tokens), f"{told(read)}, if servers answer and it only reads"),
        ("train", train.hours(work.trained_tokens), told(train) + passes),
        ("stored", gigabytes(work.stored_bytes), most),
        ("cache pays", break_even(work, machine), CACHE_PAYS),
    ]


def told(pace: Pace) -> str:
    return f"{pace.rate:,.0f} tokens/s, bound by {pace.bound}"


def break_even(work: Work, machine: Machine) -> str:
    """By the passes of training's micro-batches against longer ones."""
    compute, store = 1 / streaming(work, machine).rate, 1 / passing(work, machine, work.pass_tokens, 0).rate
    return epochs(compute, store, work.token_bytes / (machine.disk * 1e9))


def epochs(compute: float, store: float, move: float) -> str:
    """From which on it pays to store states, by the seconds of a token.

    Args:
        compute: in a pass of an epoch, where nothing is stored.
        store: in the pass whose states are stored.
        move: to write it once, and to read it in an epoch.
    """
    if compute <= move:
        return "never"
    return f"{math.ceil((store + move) / (compute - move)):,}"


def measure_machine(target: TargetLoader, needs: Needs, root: Path, given: dict[str, float]) -> Machine:
    """The rates of this machine, where they are not given, by a second of products, copies and writing.

    Args:
        root: the disk that is written to and read from.
        given: rates by the names of `Machine`; links have to be measured between machines, here they are memory.
    """
    measures = {
        "tflops": lambda: product_rate(target.facts.hidden_size, DTYPES[target.dtype], needs.device) / 1e12,
        "memory": lambda: memory_rate(needs.device) / 1e9,
        "disk": lambda: disk_rate(root) / 1e9,
    }
    found = {name: given[name] if name in given else measure() for name, measure in measures.items()}
    return Machine(needs.num_processes, link=given.get("link", found["memory"]), **found)


def product_rate(width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second in products as an MLP of this width makes them."""
    weight = torch.ones(4 * width, width, dtype=dtype, device=device)
    rows = torch.ones(PROBE_ROWS, width, dtype=dtype, device=device)
    return 2 * PROBE_ROWS * weight.numel() * rate(lambda: rows @ weight.T, device)


def memory_rate(device: torch.device) -> float:
    """Bytes a second that are read and written."""
    numbers = torch.ones(PROBE_BYTES // 4, device=device)
    return 2 * PROBE_BYTES * rate(lambda: numbers.clone(), device)


def rate(work: Callable[[], object], device: torch.device) -> float:
    """Times a second."""
    work()
    number, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < PROBE_S:
        work()
        number += 1
        if device.type != "cpu":
            torch.accelerator.synchronize()
    return number / elapsed


def disk_rate(root: Path) -> float:
    """Bytes a second that reach the disk of a folder, or of the nearest one above it that is there."""
    _, folder = free_bytes(root)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        file.write(os.urandom(1 << 20) * (PROBE_BYTES >> 20))
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - began)
