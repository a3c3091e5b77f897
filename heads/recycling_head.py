"""How heads that recycle their state draft: a block at a time, over a cache of slots.

The contract of slots, depths and positions is that of `layer_head.py`. A head says how slots are read; what is fed when,
what becomes of accepted tokens, and how a tree grows is the same for all.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.contract import Draft, Grow, Head, Sampler, greedy
from headstart.heads.facts import TargetFacts
from headstart.heads.growth import Chain, TreeSlots
from headstart.heads.layers import Projection


@dataclass
class DraftState:
    """Caches of B requests. Slots 0..length_b - 1 are written; `fresh` slots wait for the next block's first step."""

    key_BGLD: Tensor
    value_BGLD: Tensor
    length_B: Tensor  # int64
    fresh_BTF: Tensor | None  # features of slots length_b .. length_b + num_fresh_b - 1, right-padded
    fresh_token_BT: Tensor | None
    num_fresh_B: Tensor | None
    last_BH: Tensor  # state y of each row's last slot

    def select(self, rows: Tensor) -> "DraftState":
        """The same state for fewer (or reordered) rows."""
        return replace(self, **{k: v[rows] for k, v in vars(self).items() if v is not None})


class EmbeddingHead(Head):
    """A head that reads tokens through the target's embedding."""

    embedding_VH: Tensor

    def __init__(self, settings: Any, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        # Borrowed: frozen, never saved, found again through `load_target`.
        self.register_buffer("embedding_VH", torch.empty(0, facts.hidden_size), persistent=False)

    def embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Embeddings [.., H] of tokens that stand at rotary positions [..]; kinds may treat a position apart."""
        return functional.embedding(tokens, self.embedding_VH).to(self.dtype)

    @torch.no_grad()
    def borrow(self, target: Any, output: Projection) -> None:
        """The target's embedding and, for kinds with a frozen `lm_head`, its rows of the draft vocabulary."""
        self.embedding_VH = target.embedding_weight().detach()
        output.weight.copy_(target.output_weight()[self.draft_ids_V.to(target.device)])
        self.first_values["lm_head.weight"] = "target's output rows"

    @torch.no_grad()
    def copy(self, name: str, found: Tensor | None, origin: str, columns: slice = slice(None)) -> None:
        """First value of a trained tensor; one that the target has under no such name and shape stays random."""
        part = self.get_parameter(name)[..., columns]
        if found is not None and found.shape == part.shape:
            part.copy_(found)
            self.first_values[name] = origin


class RecyclingHead(EmbeddingHead):
    """A head whose state at one depth is what the next depth reads."""

    norm: nn.Module  # from the layer's state to the input of the output layer
    norm_output = False  # whether the normed state is recycled between depths, or the layer's own

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """h of depth 0 [.., H] from the target's features [.., F]."""

    @abstractmethod
    def _read_fresh(self, state: DraftState) -> None:
        """Write the waiting slots (target features) to the caches and compute the state of each row's last one."""

    @abstractmethod
    def _step(self, state: DraftState, hidden_BH: Tensor, token_B: Tensor, position_B: Tensor) -> Tensor:
        """Feed one drafted token a row at `position_B`; its slot is rewritten from target features if it is accepted."""

    @abstractmethod
    def _step_level(
        self,
        state: DraftState,
        hidden_BWH: Tensor,
        token_BW: Tensor,
        position_B1: Tensor,
        slot_BW: Tensor,
        visible_BWL: Tensor,
    ) -> Tensor:
        """The same for all nodes of a level of a tree: slots of their own, one position, and what each of them sees."""

    def accept(self, state: DraftState, features_BTF: Tensor, next_tokens_BT: Tensor, num_accepted_B: Tensor) -> None:
        self._read_fresh(state)  # a block may have been verified without a draft
        state.fresh_BTF, state.fresh_token_BT = features_BTF, next_tokens_BT
        state.num_fresh_B = num_accepted_B.to(self.device) + 1

    def draft(self, state: DraftState, depth: int, sampler: Sampler = greedy) -> Draft:
        self._read_fresh(state)
        hidden_BH, position_B = state.last_BH, state.length_B - 1
        chain = Chain(self.draft_ids_V, hidden_BH)
        for j in range(depth):
            if j > 0:
                hidden_BH = self._step(state, hidden_BH, chain.token_B, position_B + j)
            normed_BH = self.norm(hidden_BH)
            if not chain.extend(self.logits(normed_BH), sampler):
                break
            if self.norm_output:
                hidden_BH = normed_BH
        return chain.draft()

    def draft_tree(self, state: DraftState, grow: Grow) -> None:
        self._read_fresh(state)
        hidden_BWH, depth = state.last_BH[:, None], 0
        slots = TreeSlots(state.length_B, state.key_BGLD.shape[2])
        while (level := grow(self.logits(self.norm(hidden_BWH)))) is not None:
            depth += 1
            if self.norm_output:
                hidden_BWH = self.norm(hidden_BWH)
            hidden_BWH = self._step_level(
                state,
                hidden_BWH[slots.row_B1, level.parent_BW],
                self.draft_ids_V[level.index_BW],
                state.length_B[:, None] - 1 + depth,
                *slots.place(level),
            )
