"""What proposes tokens to the reference decoder: a head, lookup in the request's own text, or nothing.

A drafter opens a session for a batch of requests. In every step the decoder asks the session for a proposal, verifies
it, and tells it the emitted block: the accepted drafts and the token the target added. Lookup costs nothing to train or
run, so it is the baseline that a head has to beat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from headstart.eval.acceptance import ReplyAcceptance
from headstart.eval.early_stop import EarlyStop
from headstart.eval.verify import invert
from headstart.heads.contract import Head, Level, greedy
from headstart.heads.errors import WrongInput
from headstart.heads.paths import Path
from headstart.heads.target import States
from headstart.heads.tree import Tree


@dataclass
class Proposal:
    """Drafted chains or trees, target vocabulary ids; row b proposes its first `length_B[b]` tokens, the rest is padding."""

    tokens_BK: Tensor  # int64; of a tree, its nodes without the root
    length_B: list[int]
    # float64 over the target's vocabulary: what drafts were drawn from; None: nothing random. For trees [B, K + 1, V]:
    # what the first child of every node was drawn from.
    law_BKV: Tensor | None = None
    trees: list[Tree] | None = None  # of every row; None: chains

    def depth_below(self, row: int, block: Sequence[int]) -> int:
        """How deep drafts go along the kept part of an emitted block and on from there: a chain's length."""
        if self.trees is None:
            return self.length_B[row]
        return len(block) - 1 + self.trees[row].heights[self.path(row, block)[-1]]

    def path(self, row: int, block: Sequence[int]) -> list[int]:
        """Nodes of the row's tree that were kept, the root first."""
        if self.trees is None:
            return list(range(len(block)))
        return self.trees[row].path([-1, *self.tokens_BK[row].tolist()], block[:-1])


class Session(Protocol):
    """The drafting state of one batch; rows stay in the decoder's order."""

    def propose(self, length_B: list[int]) -> Proposal:
        """At most `length_B[b]` tokens after the last emitted token of row b; the largest entry is at least 1."""

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        """Row b emitted `blocks[b]`: accepted drafts and one more; `states` [B, T, ..] are of the tokens verified.

        Of a tree, of its root and the kept path.
        """

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in ascending order; the others have finished."""


class DraftSampler:
    """Draws the j-th draft of every row from softmax(logits / temperature) with the row's j-th random number."""

    def __init__(self, temperature: float, uniform_BK: np.ndarray) -> None:
        self.temperature, self.uniform_BK = temperature, uniform_BK
        self.laws: list[Tensor] = []  # float64 [B, Vd] of every draft so far

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Draft-vocabulary indices [B]."""
        law_BV = (logits_BV.double() / self.temperature).softmax(-1)
        uniform_B = self.uniform_BK[:, len(self.laws)]
        self.laws.append(law_BV)
        drawn = [invert(law_V, float(uniform)) for law_V, uniform in zip(law_BV, uniform_B, strict=True)]
        return torch.tensor(drawn, device=logits_BV.device)

    def law_BKV(self, ids_W: Tensor, vocab_size: int) -> Tensor:
        """The laws of all drafts over the target's vocabulary; draft index i is target id `ids_W[i]`."""
        law_BKW = torch.stack(self.laws, dim=1)
        law_BKV = law_BKW.new_zeros(*law_BKW.shape[:2], vocab_size)
        law_BKV[:, :, ids_W] = law_BKW
        return law_BKV


@runtime_checkable
class SamplingSession(Session, Protocol):
    """A session that can also draw its drafts; one that cannot proposes deterministically at every temperature."""

    def sample(self, length_B: list[int], sampler: DraftSampler) -> Proposal:
        """As `propose`, with drafts drawn by the sampler and the laws they were drawn from."""


class Growth(Protocol):
    """Chooses the nodes of one step's trees (`eval/tree_drafts.py`)."""

    def __call__(self, logits_BWV: Tensor) -> Level | None:
        """The nodes to draft from next, given the logits behind those fed last; `contract.Grow`."""

    def proposal(self, ids_W: Tensor, vocab_size: int) -> Proposal:
        """All drafts, once the last level was chosen; draft index i is target id `ids_W[i]`."""


@runtime_checkable
class TreeSession(Session, Protocol):
    """A session that can also draft trees."""

    def propose_tree(self, growth: Growth) -> Proposal:
        """Trees grown by `growth`."""


class Drafter(Protocol):
    """Opens sessions."""

    name: str
    max_position: int | None  # positions it can draft at; beyond them decoding goes on without drafts

    def start(self, prompts: list[list[int]], first_tokens: list[int], states: States, max_length: int) -> Session:
        """Begin after prefill: prompt states [B, T, ..] right-padded, and the first reply token of each request."""


def padded(rows: Sequence[Sequence[int]], device: torch.device, multiple: int = 1) -> Tensor:
    """Token lists as one int64 tensor, right-padded with 0 to a multiple of `multiple`."""
    width = max((len(row) for row in rows), default=0)
    tokens_BT = torch.zeros(len(rows), -(-width // multiple) * multiple, dtype=torch.int64)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens_BT.to(device)


class HeadDrafter:
    """A trained head, drafting by its serving path (`start`, `draft`, `accept`).

    `stop_below` ends a draft where the product of the head's confidences falls below it (`early_stop.py`); 0 never does.
    """

    def __init__(self, head: Head, max_position: int | None = None, stop_below: float = 0.0) -> None:
        self.head, self.stop_below = head, stop_below
        self.name: str = head.kind
        self.max_position = head.max_position if max_position is None else max_position

    def start(
        self, prompts: list[list[int]], first_tokens: list[int], states: States, max_length: int
    ) -> "HeadSession":
        next_tokens = [prompt[1:] + [first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        tokens_BT = padded(next_tokens, self.head.device)
        features_BTF = self.head.features(states.taps, states.final)[:, : tokens_BT.shape[1]]
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=self.head.device)
        first_B = torch.tensor([prompt[0] for prompt in prompts], device=self.head.device)
        state = self.head.start(features_BTF, tokens_BT, lengths_B, max_length, first_B)
        return HeadSession(self.head, state, self.stop_below)


class HeadSession:
    """Session of a head; the draft state is the head's own."""

    def __init__(self, head: Head, state: Any, stop_below: float = 0.0) -> None:
        self.head, self.state, self.stop_below = head, state, stop_below

    def propose(self, length_B: list[int]) -> Proposal:
        stop = EarlyStop(greedy, length_B, self.stop_below)
        return Proposal(self.head.draft(self.state, max(length_B), stop).tokens_BK, stop.length_B)

    def sample(self, length_B: list[int], sampler: DraftSampler) -> Proposal:
        stop = EarlyStop(sampler, length_B, self.stop_below, sampler.temperature)
        tokens_BK = self.head.draft(self.state, max(length_B), stop).tokens_BK
        law_BKV = sampler.law_BKV(self.head.draft_ids_V, self.head.facts.vocab_size) if tokens_BK.shape[1] else None
        return Proposal(tokens_BK, stop.length_B, law_BKV)

    def propose_tree(self, growth: Growth) -> Proposal:
        if self.stop_below:
            raise WrongInput(
                f"found a tree and stop_below = {self.stop_below:g}, expected one of them: only chains stop early."
            )
        self.head.draft_tree(self.state, growth)
        return growth.proposal(self.head.draft_ids_V, self.head.facts.vocab_size)

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        features_BTF = self.head.features(states.taps, states.final)
        num_slots = features_BTF.shape[1]
        tokens_BT = torch.tensor([block + [0] * (num_slots - len(block)) for block in blocks], device=self.head.device)
        num_accepted_B = torch.tensor([len(block) - 1 for block in blocks], device=self.head.device)
        self.head.accept(self.state, features_BTF, tokens_BT, num_accepted_B)

    def select(self, rows: list[int]) -> None:
        self.state = self.state.select(torch.tensor(rows, device=self.head.device))


class Index(Protocol):
    """A growing text that can be asked how it went on before."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""

    def propose(self, length: int) -> list[int]:
        """At most `length` tokens for what comes next; nothing where the text has no precedent."""


class NgramIndex:
    """Last occurrence of every n-gram of a growing token list, the list's own end excluded."""

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it last

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(self.longest, end) + 1):
                self._next[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def propose(self, length: int) -> list[int]:
        """What followed the last earlier occurrence of the longest suffix that has one, of at most `longest` tokens."""
        for n in range(min(self.longest, len(self.tokens)), 0, -1):
            begin = self._next.get(tuple(self.tokens[-n:]))
            if begin is not None:
                return self.tokens[begin : begin + length]
        return []


class SuffixIndex:
    """The longest suffix that occurred before, however long; the newest occurrence where several are as long.

    A simple form of suffix decoding (Oliaro et al., arXiv 2411.04975): it looks at the request's own text only and follows
    one occurrence, with no tree of other requests and no frequencies.
    """

    def __init__(self) -> None:
        self.token_N = np.zeros(0, dtype=np.int64)
        self._match_N = np.zeros(0, dtype=np.int64)  # entry e: tokens that x_0..x_{e-1} and the whole text end alike in

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # Two ends that agree in m tokens agree in m + 1 if the same token follows both, else in none.
            longer_N = np.where(self.token_N == token, self._match_N + 1, 0)
            self._match_N = np.concatenate(([0], longer_N))
            self.token_N = np.append(self.token_N, token)

    def propose(self, length: int) -> list[int]:
        """What followed that occurrence."""
        if self._match_N.max(initial=0) == 0:
            return []
        begin = len(self._match_N) - 1 - int(self._match_N[::-1].argmax())
        return [int(token) for token in self.token_N[begin : begin + length]]


class LookupDrafter:
    """Drafts from an index of each request's own tokens."""

    max_position: int | None = None

    def __init__(self, name: str, new_index: Callable[[], Index]) -> None:
        self.name = name
        self.new_index = new_index

    def start(
        self, prompts: list[list[int]], first_tokens: list[int], states: States, max_length: int
    ) -> "LookupSession":
        indexes = []
        for prompt, first in zip(prompts, first_tokens, strict=True):
            indexes.append(self.new_index())
            indexes[-1].extend([*prompt, first])
        return LookupSession(indexes, states.final.device)


class NgramDrafter(LookupDrafter):
    """n-gram (prompt) lookup: suffixes of at most `longest` tokens."""

    def __init__(self, longest: int = 3) -> None:
        super().__init__("ngram", lambda: NgramIndex(longest))


class SuffixDrafter(LookupDrafter):
    """Suffix lookup: suffixes of any length."""

    def __init__(self) -> None:
        super().__init__("suffix", SuffixIndex)


class LookupSession:
    """Session of a lookup drafter."""

    def __init__(self, indexes: list[Index], device: torch.device) -> None:
        self.indexes, self.device = indexes, device

    def propose(self, length_B: list[int]) -> Proposal:
        drafts = [index.propose(length) for index, length in zip(self.indexes, length_B, strict=True)]
        return Proposal(padded(drafts, self.device), [len(draft) for draft in drafts])

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        for index, block in zip(self.indexes, blocks, strict=True):
            index.extend(block)

    def select(self, rows: list[int]) -> None:
        self.indexes = [self.indexes[row] for row in rows]


def lookup_acceptance(paths: Sequence[Path], draft_length: int, drafter: LookupDrafter) -> list[ReplyAcceptance]:
    """Exact offline acceptance of lookup: its drafts depend on nothing but the recorded tokens.

    A looked-up draft is a one-hot law, so given that x is emitted it was kept exactly if it is x, at any temperature.
    """
    replies = []
    for path in paths:
        tokens = path.token_N.tolist()
        num_starts = max(path.num_reply_tokens - 1, 0)
        accept_TK = np.zeros((num_starts, draft_length))
        judged_TK = np.zeros((num_starts, draft_length), dtype=bool)
        index = drafter.new_index()
        index.extend(tokens[: path.num_prompt_tokens])
        for start in range(num_starts):
            index.extend([tokens[path.num_prompt_tokens + start]])
            begin = path.num_prompt_tokens + start + 1
            for j, (draft, token) in enumerate(zip(index.propose(draft_length), tokens[begin:], strict=False)):
                judged_TK[start, j] = True
                accept_TK[start, j] = draft == token
        replies.append(ReplyAcceptance(path.prompt_id, path.route, accept_TK, judged_TK, num_out_of_vocab=0))
    return replies


def ngram_acceptance(paths: Sequence[Path], draft_length: int) -> list[ReplyAcceptance]:
    """Exact offline acceptance of n-gram lookup."""
    return lookup_acceptance(paths, draft_length, NgramDrafter())
