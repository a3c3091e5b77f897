"""What a head drafts, kept to hold an engine's reading of its folder against.

States of the target are random, and others at every tap and slot, so that each tensor, flag, tap id and position matters.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headstart.heads.contract import Head
from headstart.heads.facts import TargetFacts

TOLERANCE = 1e-4  # of the largest logit; both sides compute in float32


class Served(Protocol):
    """A folder as an engine reads it."""

    taps: list[int]  # boundary ids of the residual streams it captures; none where it reads final states

    def chain(self, features_TF: Tensor, token_U: Tensor, drafted: list[int], depth: int) -> Tensor:
        """Draft logits over the target's vocabulary, [depth, V], -inf where nothing can be drafted.

        The text has one token more than there are slots: slot t holds target features of x_t, and x_{t+1}. Step j > 0
        follows `drafted[j - 1]` (a target id).
        """


@dataclass(frozen=True)
class Block:
    """One drafted block: behind the first `num_slots` slots of a request."""

    row: int
    num_slots: int
    drafted: list[int]
    logits_KV: Tensor  # of the draft vocabulary


@dataclass(frozen=True)
class Golden:
    """What a head drafts: two blocks of every request, the second after some drafts were accepted."""

    facts: TargetFacts
    draft_ids_V: Tensor
    token_BU: Tensor  # x_0 of every request, and the tokens of its slots
    blocks: list[Block]
    seed: int

    def features(self, taps: Sequence[int]) -> Tensor:
        """Features [B, T, F] of concatenated taps; final states where there are none."""
        shape = (len(self.token_BU), self.token_BU.shape[1] - 1)
        return random_states(self.facts.hidden_size, taps, shape, self.seed)


def random_states(width: int, taps: Sequence[int], shape: Sequence[int], seed: int) -> Tensor:
    """The same states for the same tap, whichever others are read."""
    parts = []
    for tap in taps or [-1]:
        generator = torch.Generator().manual_seed(1009 * (seed + 1) + tap)
        parts.append(torch.randn(*shape, width, generator=generator))
    return torch.cat(parts, dim=-1)


@torch.no_grad()
def golden(head: Head, lengths: Sequence[int] = (9, 6), depth: int = 4, seed: int = 0) -> Golden:
    """Draft behind ragged requests of `lengths` slots, and again where 2, 0, 1, 2, .. drafts of each were accepted."""
    depth = min(depth, head.settings.max_depth or depth)
    accepted = [(2, 0, 1)[row % 3] % (depth + 1) for row in range(len(lengths))]
    longest = max(lengths)
    num_slots = longest + depth + 1
    generator = torch.Generator().manual_seed(seed)
    token_BU = torch.randint(head.facts.num_tokens, (len(lengths), num_slots + 1), generator=generator)
    token_BT = token_BU[:, 1:]
    kept = Golden(head.facts, head.draft_ids_V.cpu(), token_BU, [], seed)
    features_BTF, device = kept.features(head.taps), head.device

    def block(ends: list[int]) -> None:
        draft = head.draft(state, depth)
        for row, end in enumerate(ends):
            kept.blocks.append(Block(row, end, draft.tokens_BK[row].tolist(), draft.logits_BKV[row].float().cpu()))

    length_B = torch.tensor(lengths, device=device)
    prompt = (features_BTF[:, :longest].to(device), token_BT[:, :longest].to(device))
    state = head.start(*prompt, length_B, num_slots + depth + 1, token_BU[:, 0].to(device))
    block(list(lengths))
    for row, (end, count) in enumerate(zip(lengths, accepted, strict=True)):  # what is accepted was drafted
        token_BU[row, end + 1 : end + 1 + count] = torch.tensor(kept.blocks[row].drafted[:count])
    slot_BK = torch.tensor(lengths)[:, None] + torch.arange(depth + 1)
    row_B1 = torch.arange(len(lengths))[:, None]
    verified = (features_BTF[row_B1, slot_BK].to(device), token_BT[row_B1, slot_BK].to(device))
    head.accept(state, *verified, torch.tensor(accepted, device=device))
    block([n + k + 1 for n, k in zip(lengths, accepted, strict=True)])
    return kept


@torch.no_grad()
def difference(kept: Golden, served: Served, limit: float = float("inf")) -> float:
    """Largest difference of draft logits, relative to the largest logit; the first one above `limit` ends the comparison.

    Infinite where other tokens can be drafted, or where the greedy drafts differ beyond a tie.
    """
    features_BTF, worst = kept.features(served.taps), 0.0
    for block in kept.blocks:
        features_TF = features_BTF[block.row, : block.num_slots]
        token_U = kept.token_BU[block.row, : block.num_slots + 1]
        expected_KV = served.chain(features_TF, token_U, block.drafted, len(block.drafted))
        ours_KV = torch.full_like(expected_KV, float("-inf"))
        ours_KV[:, kept.draft_ids_V] = block.logits_KV
        finite_KV = expected_KV.isfinite()
        if not torch.equal(finite_KV, ours_KV.isfinite()):
            return float("inf")
        drafted_K1 = torch.tensor(block.drafted)[:, None]
        gap_K = expected_KV.max(-1).values - expected_KV.gather(1, drafted_K1).squeeze(1)
        apart = (expected_KV - ours_KV)[finite_KV].abs().max()
        worst = max(worst, float(torch.maximum(apart, gap_K.max()) / expected_KV[finite_KV].abs().max()))
        if not worst <= limit:
            break
    return worst


@contextmanager
def rounded(head: Head, dtype: torch.dtype | Mapping[str, torch.dtype]) -> Iterator[Head]:
    """Let the head compute with its trained tensors rounded to `dtype`, one for all or each by name, as written ones are."""
    if any(getattr(module, "packed", None) is not None for module in head.modules()):
        raise ValueError("a packed head does not follow its weights: round it first, then pack it")
    kept = {name: tensor.detach().clone() for name, tensor in head.trained_tensors().items()}
    with torch.no_grad():
        for name, tensor in head.trained_tensors().items():
            tensor.copy_(tensor.to(dtype[name] if isinstance(dtype, Mapping) else dtype))
    try:
        yield head
    finally:
        with torch.no_grad():
            for name, tensor in head.trained_tensors().items():
                tensor.copy_(kept[name])
