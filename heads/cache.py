"""A key/value cache that is addressed by slot.

A row has no length of its own: a forward writes slots start .. start + T - 1 and attends to slots up to its own, so
undoing rejected tokens is passing a smaller start. In a text the slot of a token is its position; the nodes of a tree of
drafts lie side by side, and those that were accepted are moved together afterwards (`move_slots`). transformers models
write to it through `update`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

# Lengths are rounded up to this many positions: fewer matrix shapes for the CPU library to prepare.
LENGTH_STEP = 32


class PositionCache(Cache):
    """Keys and values [num_rows, kv_heads, capacity, head_dim] per layer.

    The capacity follows the longest live row in steps, because batched matrix products copy what is not contiguous. Its
    last slot is never attended to; padding is written there.
    """

    def __init__(self, num_layers: int, num_rows: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.num_rows = num_rows
        self.max_length = max_length
        self.capacity = 0
        self.fresh = False
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._row_B1 = torch.zeros(0, 1, dtype=torch.int64)
        self._slot_BT = torch.zeros(0, 0, dtype=torch.int64)
        self._sees_BTT: Tensor | None = None
        self._rows: Tensor | None = None

    def plan(
        self,
        slot_BT: Tensor,
        rows: Tensor | None,
        end: int,
        fresh: bool,
        sees_BTT: Tensor | None = None,
    ) -> Tensor:
        """Say where the next forward writes: row b (the first B, or `rows`) at slot_BT[b], all below `end`.

        Where every row starts at slot 0 (`fresh`), what is written is all there is to attend to. `sees_BTT` (bool) says
        which of the T tokens of a tree attend to which, beside all slots before the first; by default those before them.
        Returns the slots, those of padding beyond `end` moved to the last one of the capacity.
        """
        needed = capacity_for(end)
        if needed > self.capacity:
            self._resize(needed)
        self.fresh = fresh
        self._rows = rows
        self._slot_BT = slot_BT.clamp(max=self.capacity - 1)
        self._sees_BTT = sees_BTT
        index = torch.arange(slot_BT.shape[0], device=slot_BT.device) if rows is None else rows
        self._row_B1 = index[:, None]
        return self._slot_BT

    def bias(self, dtype: torch.dtype) -> Tensor:
        """What to add to the scores [B, T, capacity] of the planned forward: -inf at slots a token does not attend to."""
        slot_L = torch.arange(self.capacity, device=self._slot_BT.device)
        if self._sees_BTT is None:
            hidden_BTL = slot_L > self._slot_BT[:, :, None]
        else:
            before_B1L = slot_L < self._slot_BT[:, :1, None]
            slot_BTT = self._slot_BT[:, None].expand_as(self._sees_BTT)
            hidden_BTL = (~before_B1L).repeat(1, slot_BTT.shape[1], 1).scatter_(2, slot_BTT, ~self._sees_BTT)
        return torch.zeros(hidden_BTL.shape, dtype=dtype, device=hidden_BTL.device).masked_fill_(hidden_BTL, -torch.inf)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, kv_heads, T, head_dim]; return the keys and values to attend to, [B, kv_heads, L, head_dim]."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            keys = self._allocate(key_states)
            values = self._allocate(value_states)
            self._keys[layer_idx], self._values[layer_idx] = keys, values
        keys[self._row_B1, :, self._slot_BT] = key_states.transpose(1, 2)
        values[self._row_B1, :, self._slot_BT] = value_states.transpose(1, 2)
        if self.fresh:
            return key_states, value_states
        if self._rows is None:
            size = key_states.shape[0]
            return keys[:size], values[:size]
        return keys[self._rows], values[self._rows]

    @torch.inference_mode()
    def move_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for tensor in (*self._keys, *self._values):
            if tensor is not None:
                tensor[destination, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def move_slots(self, source_BK: Tensor, first_B: Tensor) -> None:
        """Copy slots source_BK of the first B rows to first_b, first_b + 1, .. in the same row.

        A row's sources lie at or behind where they go; entries of `source_BK` that only pad a row repeat a slot that
        nothing reads any more.
        """
        row_B1 = torch.arange(len(first_B), device=first_B.device)[:, None]
        slot_BK = first_B[:, None] + torch.arange(source_BK.shape[1], device=first_B.device)
        slot_BK = slot_BK.clamp(max=self.capacity - 1)  # of padding
        for tensor in (*self._keys, *self._values):
            if tensor is not None:
                tensor[row_B1, :, slot_BK] = tensor[row_B1, :, source_BK]

    @torch.inference_mode()
    def shrink(self, length: int) -> None:
        """Give up capacity when every row still in use is at most `length` long."""
        if capacity_for(length) < self.capacity:
            self._resize(capacity_for(length))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._slot_BT[0, 0]) if self._slot_BT.numel() else 0

    def _allocate(self, states: Tensor) -> Tensor:
        # Zeros, since a masked position still takes part in products, where anything but a number would spread.
        return states.new_zeros(self.num_rows, states.shape[1], self.capacity, states.shape[3])

    def _resize(self, capacity: int) -> None:
        kept = min(self.capacity, capacity)
        self.capacity = capacity
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                if old is not None:
                    new = self._allocate(old)
                    new[:, :, :kept] = old[:, :, :kept]
                    tensors[layer] = new


def capacity_for(length: int) -> int:
    """Room for `length` tokens and one position for padding, in steps."""
    return -(-(length + 1) // LENGTH_STEP) * LENGTH_STEP
