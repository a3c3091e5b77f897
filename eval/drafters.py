"""What proposes tokens to the reference decoder: a head, n-gram lookup, or nothing.

A drafter opens a session for a batch of requests. In every step the decoder asks the session for a proposal, verifies
it, and tells it the emitted block: the accepted drafts and the token the target added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headstart.eval.acceptance import ReplyAcceptance
from headstart.heads.contract import Head
from headstart.heads.paths import Path
from headstart.heads.target import States


@dataclass
class Proposal:
    """Drafted chains, target vocabulary ids; row b proposes its first `length_B[b]` tokens, the rest is padding."""

    tokens_BK: Tensor  # int64
    length_B: list[int]


class Session(Protocol):
    """The drafting state of one batch; rows stay in the decoder's order."""

    def propose(self, length_B: list[int]) -> Proposal:
        """At most `length_B[b]` tokens after the last emitted token of row b; the largest entry is at least 1."""

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        """Row b emitted `blocks[b]`: accepted drafts and one more; `states` [B, T, ..] are of the tokens verified."""

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in ascending order; the others have finished."""


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
    """A trained head, drafting greedily by its serving path (`start`, `draft`, `accept`)."""

    def __init__(self, head: Head, max_position: int | None = None) -> None:
        self.head = head
        self.name: str = head.kind
        self.max_position = max_position

    def start(
        self, prompts: list[list[int]], first_tokens: list[int], states: States, max_length: int
    ) -> "HeadSession":
        next_tokens = [prompt[1:] + [first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        tokens_BT = padded(next_tokens, self.head.device)
        features_BTF = states.taps[:, : tokens_BT.shape[1]]
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=self.head.device)
        return HeadSession(self.head, self.head.start(features_BTF, tokens_BT, lengths_B, max_length))


class HeadSession:
    """Session of a head; the draft state is the head's own."""

    def __init__(self, head: Head, state: Any) -> None:
        self.head, self.state = head, state

    def propose(self, length_B: list[int]) -> Proposal:
        return Proposal(self.head.draft(self.state, max(length_B)).tokens_BK, length_B)

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        num_slots = states.taps.shape[1]
        tokens_BT = torch.tensor([block + [0] * (num_slots - len(block)) for block in blocks], device=self.head.device)
        num_accepted_B = torch.tensor([len(block) - 1 for block in blocks], device=self.head.device)
        self.head.accept(self.state, states.taps, tokens_BT, num_accepted_B)

    def select(self, rows: list[int]) -> None:
        self.state = self.state.select(torch.tensor(rows, device=self.head.device))


class NgramIndex:
    """Last occurrence of every n-gram of a growing token list, the list's own end excluded."""

    def __init__(self, tokens: Sequence[int], longest: int) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it last
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for n in range(1, min(self.longest, end) + 1):
                self._next[tuple(self.tokens[end - n :])] = end
            self.tokens.append(token)

    def propose(self, length: int) -> list[int]:
        """What followed the last earlier occurrence of the longest suffix that has one; nothing where none has."""
        for n in range(min(self.longest, len(self.tokens)), 0, -1):
            begin = self._next.get(tuple(self.tokens[-n:]))
            if begin is not None:
                return self.tokens[begin : begin + length]
        return []


class NgramDrafter:
    """n-gram (prompt) lookup: drafts cost nothing, so it is the baseline a head has to beat."""

    name = "ngram"
    max_position: int | None = None

    def __init__(self, longest: int = 3) -> None:
        self.longest = longest

    def start(
        self, prompts: list[list[int]], first_tokens: list[int], states: States, max_length: int
    ) -> "NgramSession":
        contexts = [[*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        return NgramSession([NgramIndex(context, self.longest) for context in contexts], states.final.device)


class NgramSession:
    """Session of n-gram lookup."""

    def __init__(self, indexes: list[NgramIndex], device: torch.device) -> None:
        self.indexes, self.device = indexes, device

    def propose(self, length_B: list[int]) -> Proposal:
        drafts = [index.propose(length) for index, length in zip(self.indexes, length_B, strict=True)]
        return Proposal(padded(drafts, self.device), [len(draft) for draft in drafts])

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        for index, block in zip(self.indexes, blocks, strict=True):
            index.extend(block)

    def select(self, rows: list[int]) -> None:
        self.indexes = [self.indexes[row] for row in rows]


def ngram_acceptance(paths: Sequence[Path], draft_length: int, longest: int = 3) -> list[ReplyAcceptance]:
    """Exact offline acceptance of n-gram lookup: its drafts depend on nothing but the recorded tokens."""
    replies = []
    for path in paths:
        tokens = path.token_N.tolist()
        num_starts = max(path.num_reply_tokens - 1, 0)
        accept_TK = np.zeros((num_starts, draft_length))
        judged_TK = np.zeros((num_starts, draft_length), dtype=bool)
        index = NgramIndex(tokens[: path.num_prompt_tokens], longest)
        for start in range(num_starts):
            index.extend([tokens[path.num_prompt_tokens + start]])
            begin = path.num_prompt_tokens + start + 1
            for j, (draft, token) in enumerate(zip(index.propose(draft_length), tokens[begin:], strict=False)):
                judged_TK[start, j] = True
                accept_TK[start, j] = draft == token
        replies.append(ReplyAcceptance(path.prompt_id, path.route, accept_TK, judged_TK, num_out_of_vocab=0))
    return replies
