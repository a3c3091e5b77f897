"""The one contract of every head: `rollout` and `draft` answer the same question in two ways.

Given the target's features up to t and the tokens up to x_{t+1+j}: what is q(x_{t+2+j})?

* `rollout` answers for all recorded starts at once, teacher-forced; training and offline acceptance read it.
* `draft` answers one block at a time with a key/value cache, as an engine does; the live loop reads it.

A test holds the two equal for every head, so that what trains well also serves well.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from headstart.heads.batch import Batch
from headstart.heads.facts import TargetFacts
from headstart.heads.layers import Projection

# Chooses the next draft token of every row from draft logits [B, Vd]: draft-vocabulary indices [B], or None to end here.
Sampler = Callable[[Tensor], Tensor | None]


def greedy(logits_BV: Tensor) -> Tensor:
    """The sampler that takes the largest logit."""
    return logits_BV.argmax(-1)


@dataclass
class Rollout:
    """States of all supervised pairs; loss and eval project them to logits in chunks (`Head.logits`)."""

    state_SDH: Tensor  # input of the head's output layer at (start, depth)
    start_S: Tensor  # int64 slot index t of each start in the batch
    valid_SD: Tensor  # bool: the pair can be met in serving


@dataclass
class Draft:
    """One drafted chain a row: target token ids, and the draft logits they were chosen from."""

    tokens_BK: Tensor  # int64, target vocabulary ids
    logits_BKV: Tensor  # draft-vocabulary logits of each step


@dataclass
class Level:
    """Nodes of a tree of drafts at one depth, those that more drafts follow, fed together."""

    parent_BW: Tensor  # int64, index of each node's parent among the nodes of the level before
    index_BW: Tensor  # int64, the token of each node as a draft-vocabulary index


# Grows a tree: from draft logits [B, W, Vd] of the nodes fed last (at first the one root) to the next level, or None.
Grow = Callable[[Tensor], Level | None]


class Head(nn.Module, ABC):
    """What is trained: a draft of any kind for one frozen target."""

    kind: ClassVar[str]
    reads: ClassVar[Literal["taps", "final", "text"]]  # its feature, of the target's states; of text there is none
    exports_frozen: ClassVar[bool] = False  # an exported folder is whole: it holds frozen tensors too
    settings: Any  # the dataclass of this kind in heads/settings.py
    facts: TargetFacts
    taps: list[int]  # residual streams read from the target, ascending; none where `final` is read
    draft_ids_V: Tensor  # int64 [Vd], ascending target ids of the draft vocabulary
    base: TargetFacts | None = None  # of the model that frozen tensors belong to, where that is not the target
    max_position: int | None = None  # slots it can draft at; None: as many as the target has
    first_values: dict[str, str]  # where trained tensors were copied from, by name; others are random

    def __init__(self, settings: Any, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__()
        self.settings, self.facts, self.first_values = settings, facts, {}
        self.register_buffer("draft_ids_V", draft_ids_V.to(torch.int64), persistent=False)

    @classmethod
    def check(cls, settings: Any, target: Any) -> None:
        """Refuse settings that no head for this target can be built from; `target` has facts and tokenizer, no weights.

        Raises:
            WrongInput: beginning with the key of the setting.
        """

    @classmethod
    def form(cls, settings: Any) -> type["Head"]:
        """The class that keeps these settings; most kinds are one class."""
        return cls

    @abstractmethod
    def rollout(self, batch: Batch, depth: int) -> Rollout:
        """Teacher-forced states for all starts t and depths j < depth, own states recycled as in serving."""

    @abstractmethod
    def outputs(self) -> Sequence[Projection]:
        """The output layer of each depth, or the one that all depths share: states [.., H] to logits [.., Vd]."""

    @abstractmethod
    def start(
        self,
        features_BTF: Tensor,
        next_tokens_BT: Tensor,
        lengths_B: Tensor,
        max_length: int,
        first_token_B: Tensor | None = None,
    ) -> Any:
        """Read the prompt: features of x_0..x_t and tokens x_1..x_{t+1}, right-padded; rows are `lengths_B` long.

        Features are what this kind reads from the target (`features`). Returns the draft state, with room for
        `max_length` slots a row; its `select(rows)` gives the state of some rows only, in that order.

        Args:
            first_token_B: x_0 of each row; only kinds that read the text itself have to know.
        """

    @abstractmethod
    def draft(self, state: Any, depth: int, sampler: Sampler = greedy) -> Draft:
        """Draft `depth` tokens a row after x_{t+1}, fewer where the sampler ends the block (none, even).

        After a block's first step one token a row is fed.
        """

    @abstractmethod
    def draft_tree(self, state: Any, grow: Grow) -> None:
        """Draft a tree, level by level: `grow` chooses every row's nodes and keeps what it wants to know of them.

        It is given the logits behind all nodes fed last, first behind x_{t+1}, and returns the nodes that are to be drafted
        from. Logits behind a node are those that `rollout` has along its path: a node sees slots 0..t, its ancestors and
        itself. The state needs room for one slot a node.
        """

    @abstractmethod
    def accept(self, state: Any, features_BTF: Tensor, next_tokens_BT: Tensor, num_accepted_B: Tensor) -> None:
        """Take the verification's result: T = depth + 1 slots were scored and row b keeps num_accepted_b + 1 of them.

        `features_BTF[:, i]` is the target's feature at t+1+i and `next_tokens_BT[:, i]` is x_{t+2+i} (accepted
        drafts, then the corrected or bonus token). Slots of own states are rewritten from target features. A row with
        num_accepted = -1 is left untouched (it has finished).
        """

    @abstractmethod
    def load_target(self, target: Any, initialise: bool) -> None:
        """Attach the target's frozen tensors (embedding) and, for a new head, initialise weights from the target's."""

    def features(self, taps: Tensor, final: Tensor) -> Tensor:
        """Of the target's states, those that this kind reads; one that reads the text gets some, and ignores them."""
        return taps if self.reads == "taps" else final

    def logits(self, state: Tensor, depth: int | Tensor | None = None) -> Tensor:
        """Project states [.., H] to draft-vocabulary logits [.., Vd].

        Args:
            depth: of all states, or one of each [..]; only kinds with an output layer for each depth have to know.
        """
        outputs = self.outputs()
        if len(outputs) == 1:
            return outputs[0](state)
        if isinstance(depth, int):
            return outputs[depth](state)
        if depth is None:
            raise ValueError(f"{self.kind} has {len(outputs)} output layers: depth needed")
        logits = state.new_empty(*state.shape[:-1], len(self.draft_ids_V))
        for j in depth.unique().tolist():
            logits[depth == j] = outputs[j](state[depth == j])
        return logits

    def pack(self) -> Self:
        """Make ready to draft: weights are laid out for products of few rows, and must not change afterwards."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.pack()
        return self

    def refuse_own_target(self, target: Any) -> None:
        """Raise WrongInput where the head is its own target and its settings do not ask for that."""

    def origins(self) -> dict[str, str]:
        """Where each tensor's first value came from, for the table at the start of training; others are random."""
        return {"embedding_VH": "target's embedding", "draft_ids_V": "traffic", **self.first_values}

    def trained_tensors(self) -> dict[str, Tensor]:
        """Exactly what a checkpoint holds: trained parameters, never the frozen target's weights."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype
