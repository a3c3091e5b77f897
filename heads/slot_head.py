"""What heads without attention share: a block depends on the one slot it starts from, and on the tokens drafted since.

    begin     h of a block from the target's final state at slot t
    step      depth j reads h and x_{t+1+j}; it gives the state that depth j is projected from, and the h of depth j + 1

`rollout` and `draft` run the same two methods, over all recorded starts or over the rows of a batch.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.batch import Batch, supervised_pairs
from headstart.heads.contract import Draft, Grow, Head, Rollout, Sampler, greedy
from headstart.heads.facts import TargetFacts
from headstart.heads.growth import Chain
from headstart.heads.layers import Projection
from headstart.heads.settings import SlotSettings


@dataclass
class SlotState:
    """The last slot of B requests: all that the next block depends on."""

    feature_BH: Tensor
    token_B: Tensor  # int64, the token that was emitted last

    def select(self, rows: Tensor) -> "SlotState":
        """The same state for fewer (or reordered) rows."""
        return replace(self, **{k: v[rows] for k, v in vars(self).items()})


class SlotHead(Head):
    """A head of `settings.num_heads` depths that reads `final` and keeps nothing but the last slot between blocks."""

    reads = "final"

    def __init__(self, settings: SlotSettings, facts: TargetFacts, draft_ids_V: Tensor, width: int) -> None:
        """`width` is that of the states that are projected to logits."""
        super().__init__(settings, facts, draft_ids_V)
        self.taps: list[int] = []
        num_outputs = settings.num_heads if settings.own_output else 1
        self.lm_heads = nn.ModuleList(Projection(width, len(draft_ids_V)) for _ in range(num_outputs))

    @abstractmethod
    def begin(self, final: Tensor) -> Tensor:
        """h of depth 0 from the target's final states [.., H], in the head's dtype."""

    @abstractmethod
    def step(self, depth: int, hidden: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """State of a depth, and the h of the next one, from h and tokens [..]; how wide h is, is the kind's own affair."""

    def outputs(self) -> Sequence[Projection]:
        return list(self.lm_heads)  # type: ignore[arg-type]

    @torch.no_grad()
    def start_outputs_from(self, target: Any) -> None:
        """Copy the target's output rows of the draft vocabulary; states of another width start at random."""
        rows_VH = target.output_weight()[self.draft_ids_V.to(target.device)]
        for i, output in enumerate(self.outputs()):
            if output.weight.shape == rows_VH.shape:
                output.weight.copy_(rows_VH)
                self.first_values[f"lm_heads.{i}.weight"] = "target's output rows"

    # Training and offline acceptance: all starts at once

    def rollout(self, batch: Batch, depth: int) -> Rollout:
        self._check(depth)
        start_S, valid_SD = supervised_pairs(batch, depth)
        last_slot = batch.next_token_T.shape[0] - 1
        hidden = self.begin(batch.final_TH[start_S])
        states = []
        for j in range(depth):
            # Past a reply's end there is no token to read; such pairs are not valid and read any slot.
            state_SH, hidden = self.step(j, hidden, batch.next_token_T[(start_S + j).clamp(max=last_slot)])
            states.append(state_SH)
        return Rollout(torch.stack(states, dim=1), start_S, valid_SD)

    # Serving: one block at a time

    def start(
        self,
        features_BTF: Tensor,
        next_tokens_BT: Tensor,
        lengths_B: Tensor,
        max_length: int,
        first_token_B: Tensor | None = None,
    ) -> SlotState:
        row_B, last_B = torch.arange(len(lengths_B), device=self.device), lengths_B.to(self.device) - 1
        return SlotState(features_BTF[row_B, last_B], next_tokens_BT[row_B, last_B])

    def accept(self, state: SlotState, features_BTF: Tensor, next_tokens_BT: Tensor, num_accepted_B: Tensor) -> None:
        row_B, last_B = torch.arange(len(num_accepted_B), device=self.device), num_accepted_B.to(self.device)
        kept_B, last_B = last_B >= 0, last_B.clamp(min=0)
        state.feature_BH = torch.where(kept_B[:, None], features_BTF[row_B, last_B], state.feature_BH)
        state.token_B = torch.where(kept_B, next_tokens_BT[row_B, last_B], state.token_B)

    def draft(self, state: SlotState, depth: int, sampler: Sampler = greedy) -> Draft:
        self._check(depth)
        hidden, token_B = self.begin(state.feature_BH), state.token_B
        chain = Chain(self.draft_ids_V, hidden)
        for j in range(depth):
            state_BH, hidden = self.step(j, hidden, token_B)
            if not chain.extend(self.logits(state_BH, j), sampler):
                break
            token_B = chain.token_B
        return chain.draft()

    def draft_tree(self, state: SlotState, grow: Grow) -> None:
        hidden, token_BW = self.begin(state.feature_BH)[:, None], state.token_B[:, None]
        row_B1 = torch.arange(len(token_BW), device=self.device)[:, None]
        for depth in range(self.settings.num_heads):
            state_BWH, hidden = self.step(depth, hidden, token_BW)
            level = grow(self.logits(state_BWH, depth))
            if level is None:
                return
            hidden, token_BW = hidden[row_B1, level.parent_BW], self.draft_ids_V[level.index_BW]
        self._check(self.settings.num_heads + 1)

    def _check(self, depth: int) -> None:
        if depth > self.settings.num_heads:
            raise ValueError(f"depth {depth}: this {self.kind} head has weights for {self.settings.num_heads} tokens")


class ResidualBlocks(nn.Module):
    """x + silu(W x + b), several times. Weights start at 0, so that the output starts as the input."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Projection(width, width, bias=True) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x
