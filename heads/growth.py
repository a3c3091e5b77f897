"""How drafts of every kind grow: a chain token by token, a tree level by level, its nodes side by side in a cache."""

import torch
from torch import Tensor

from headstart.heads.contract import Draft, Level, Sampler


class Chain:
    """One drafted chain a row: draft logits in, target token ids out."""

    def __init__(self, draft_ids_V: Tensor, state_BH: Tensor) -> None:
        """Chains of no token yet; `state_BH` has the rows and the precision of the logits to come."""
        num_rows = len(state_BH)
        self._draft_ids_V = draft_ids_V
        self._tokens = [draft_ids_V.new_zeros(num_rows, 0)]
        self._logits = [state_BH.new_zeros(num_rows, 0, len(draft_ids_V))]

    @property
    def token_B(self) -> Tensor:
        """The token drafted last in every row."""
        return self._tokens[-1].squeeze(1)

    def extend(self, logits_BV: Tensor, sampler: Sampler) -> bool:
        """Append what the sampler chooses; false where it ends the chains."""
        chosen_B = sampler(logits_BV)
        if chosen_B is None:
            return False
        self._logits.append(logits_BV[:, None])
        self._tokens.append(self._draft_ids_V[chosen_B][:, None])
        return True

    def draft(self) -> Draft:
        return Draft(torch.cat(self._tokens, dim=1), torch.cat(self._logits, dim=1))


class TreeSlots:
    """Places of a tree's nodes in a cache: side by side from each row's first free slot on, level after level."""

    def __init__(self, length_B: Tensor, num_slots: int) -> None:
        """The first `length_b` of `num_slots` slots are a row's text, which every node sees."""
        self.row_B1 = torch.arange(len(length_B), device=length_B.device)[:, None]
        slot_L = torch.arange(num_slots, device=length_B.device)
        self._visible_BWL = (slot_L < length_B[:, None])[:, None]
        self._first_B1, self._num_used = length_B[:, None], int(length_B.max())

    def place(self, level: Level) -> tuple[Tensor, Tensor]:
        """Slots [B, W] of a level's nodes, and which of the L slots used so far each of them sees, bool [B, W, L]."""
        width = level.index_BW.shape[1]
        slot_BW = self._first_B1 + torch.arange(width, device=self._first_B1.device)
        inherited_BWL = self._visible_BWL[self.row_B1, level.parent_BW]
        self._visible_BWL = inherited_BWL.scatter(2, slot_BW[:, :, None], True)
        self._first_B1, self._num_used = self._first_B1 + width, self._num_used + width
        return slot_BW, self._visible_BWL[:, :, : self._num_used]
