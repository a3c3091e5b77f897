"""Which paths an optimiser step learns from: a function of the step alone, so that a resume needs no iterator state.

A step's rows depend on the seed, the paths and `batch_tokens` only. How they are shared among ranks and micro-batches
is decided afterwards, so neither the number of processes nor accumulation changes what a step learns.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headstart.heads.batch import Batch, pack
from headstart.heads.errors import WrongInput
from headstart.heads.paths import Path

# Packed rows are padded up to few lengths, because every new shape costs oneDNN a new kernel: at most 32 of them between a
# power of two and the next, so that filler is never more than 1 / 32 of a batch of 256 slots or more.
LENGTH_BITS = 6
MIN_MULTIPLE = 8
SAMPLED_STEPS = 50  # steps that the share of filler is told by


class Features(Protocol):
    """States of recorded paths: stored ones (`heads.features.FeatureReader`), or read now (`trainer.streamed`)."""

    def of(self, paths: Sequence[Path]) -> list[tuple[Tensor, Tensor]]:
        """taps [S, F] and final [S, H] of each, S = N - 1."""


def count_pairs(path: Path, depth: int) -> np.ndarray:
    """Supervised pairs of a path at each depth, int64 [D]: a reply of n tokens gives n - 1 - j (docs/design.md)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], path.generated_N, [False])).astype(np.int8)))
    lengths = edges[1::2] - edges[::2]
    # x_{t+1} needs a feature before it, so a reply that begins the path loses its first token as a start.
    if len(path.generated_N) and path.generated_N[0]:
        lengths[0] -= 1
    return np.maximum(lengths[:, None] - 1 - np.arange(depth), 0).sum(0)


def pack_rows(rows: Sequence[Path], features: Features) -> Batch:
    """One packed batch, padded to one of a few lengths."""
    taken = [(path, *states) for path, states in zip(rows, features.of(rows), strict=True)]
    return pack(taken, padded(sum(path.num_slots for path in rows)))


class TrainingRows:
    """An endless, seeded stream of the training paths, cut into optimiser steps of about `batch_tokens` slots.

    Every epoch is a new permutation; steps run across its end, so no trailing rows are dropped or trained twice. A path
    longer than `batch_tokens` is a step of its own. Paths without a supervised pair are left out (`num_skipped`).

    Raises:
        WrongInput: no path has a supervised pair.
    """

    def __init__(self, paths: Sequence[Path], features: Features, batch_tokens: int, seed: int) -> None:
        self.paths = [path for path in paths if count_pairs(path, 1)[0] > 0]
        self.num_skipped = len(paths) - len(self.paths)
        if not self.paths:
            raise WrongInput(
                f"train: found {len(paths)} training paths and none with two reply tokens in a row, so nothing to learn "
                "from. The target ends its replies at once: compare its chat template and its stop tokens with its source."
            )
        self.features, self.batch_tokens, self.seed = features, batch_tokens, seed
        self.slots = [path.num_slots for path in self.paths]
        self._steps: list[list[int]] = []
        self._epoch = 0
        self._pending: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Slots of one epoch."""
        return sum(self.slots)

    def identity(self) -> str:
        """Hash of what is learned from, in order."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(path.prompt_id.encode() + path.token_N.tobytes() + path.generated_N.tobytes())
        return digest.hexdigest()

    def rows(self, step: int) -> list[int]:
        """Paths of optimiser step 1, 2, .. as indices into `paths`."""
        while len(self._steps) < step:
            self._steps.append(self._next_step())
        return self._steps[step - 1]

    def step_tokens(self, step: int) -> int:
        """Real slots of the whole step, all ranks and micro-batches."""
        return sum(self.slots[row] for row in self.rows(step))

    def filler_share(self, num_shares: int = 1) -> float:
        """Filler among the slots of the first steps, each split into `num_shares` micro-batches of all ranks."""
        real = whole = 0
        for step in range(1, SAMPLED_STEPS + 1):
            for share in filter(None, self._shares(step, num_shares)):
                slots = sum(self.slots[row] for row in share)
                real, whole = real + slots, whole + padded(slots)
        return 1 - real / whole

    def step_pairs(self, step: int, depth: int) -> np.ndarray:
        """Supervised pairs of the whole step by depth, known to every rank without a message."""
        return np.sum([count_pairs(self.paths[row], depth) for row in self.rows(step)], axis=0)

    def reads_head(self, step: int) -> bool:
        """Whether the step's rows depend on the weights of the head in training."""
        return False

    def batch(self, step: int, micro: int = 0, accumulate: int = 1, rank: int = 0, world: int = 1) -> Batch:
        """The rows of one micro-batch of one rank; filler only where a step has fewer rows than shares."""
        share = self._shares(step, accumulate * world)[rank * accumulate + micro]
        if share:
            return self.packed(step, share)
        filler = pack_rows([self.paths[min(self.rows(step), key=lambda row: self.slots[row])]], self.features)
        unread = torch.zeros_like(filler.next_generated_T)
        return replace(filler, offsets=[0], prompt_ids=[], routes=[], next_generated_T=unread)

    def packed(self, step: int, rows: Sequence[int]) -> Batch:
        """Some rows of a step, as indices into `paths`."""
        return pack_rows([self.paths[row] for row in rows], self.features)

    def _shares(self, step: int, num_shares: int) -> list[list[int]]:
        """Longest row first to the lightest share; each share keeps the step's order."""
        rows = self.rows(step)
        shares: list[list[int]] = [[] for _ in range(num_shares)]
        load = [0] * num_shares
        for place in sorted(range(len(rows)), key=lambda place: (-self.slots[rows[place]], place)):
            lightest = load.index(min(load))
            shares[lightest].append(place)
            load[lightest] += self.slots[rows[place]]
        return [[rows[place] for place in sorted(share)] for share in shares]

    def _next_step(self) -> list[int]:
        step: list[int] = []
        size = 0
        while True:
            if not self._pending:
                order = np.random.default_rng([self.seed, self._epoch]).permutation(len(self.paths))
                self._pending = order.tolist()[::-1]
                self._epoch += 1
            if step and size + self.slots[self._pending[-1]] > self.batch_tokens:
                return step
            row = self._pending.pop()
            step.append(row)
            size += self.slots[row]


class EvaluationRows:
    """All paths in stored order, in packed batches; iterate as often as needed."""

    def __init__(self, paths: Sequence[Path], features: Features, batch_tokens: int) -> None:
        self.paths, self.features, self.batch_tokens = list(paths), features, batch_tokens

    def __iter__(self) -> Iterator[Batch]:
        group: list[Path] = []
        size = 0
        for path in self.paths:
            slots = path.num_slots
            if group and size + slots > self.batch_tokens:
                yield pack_rows(group, self.features)
                group, size = [], 0
            group.append(path)
            size += slots
        if group:
            yield pack_rows(group, self.features)


def padded(num_slots: int) -> int:
    """Length that so many slots are padded to."""
    multiple = max(1 << max(num_slots.bit_length() - LENGTH_BITS, 0), MIN_MULTIPLE)
    return -(-num_slots // multiple) * multiple
