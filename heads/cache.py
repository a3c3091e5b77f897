"""A key/value cache that is addressed by position.

A row has no length of its own: a forward writes positions start .. start + T - 1 and attends to positions up to its
own, so undoing rejected tokens is passing a smaller start. transformers models write to it through `update`.
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
    last position is never attended to; padding is written there.
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
        self._position_BT = torch.zeros(0, 0, dtype=torch.int64)
        self._rows: Tensor | None = None

    def plan(self, position_BT: Tensor, rows: Tensor | None, end: int, fresh: bool) -> Tensor:
        """Say where the next forward writes: row b (the first B, or `rows`) at position_BT[b], all below `end`.

        Where every row starts at position 0 (`fresh`), what is written is all there is to attend to. Returns the
        positions, those of padding beyond `end` moved to the last one of the capacity.
        """
        needed = capacity_for(end)
        if needed > self.capacity:
            self._resize(needed)
        self.fresh = fresh
        self._rows = rows
        self._position_BT = position_BT.clamp(max=self.capacity - 1)
        index = torch.arange(position_BT.shape[0], device=position_BT.device) if rows is None else rows
        self._row_B1 = index[:, None]
        return self._position_BT

    def bias(self, dtype: torch.dtype) -> Tensor:
        """What to add to the scores [B, T, capacity] of the planned forward: -inf at positions behind a token's own."""
        position_L = torch.arange(self.capacity, device=self._position_BT.device)
        hidden_BTL = position_L > self._position_BT[:, :, None]
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
        keys[self._row_B1, :, self._position_BT] = key_states.transpose(1, 2)
        values[self._row_B1, :, self._position_BT] = value_states.transpose(1, 2)
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
    def shrink(self, length: int) -> None:
        """Give up capacity when every row still in use is at most `length` long."""
        if capacity_for(length) < self.capacity:
            self._resize(capacity_for(length))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._position_BT[0, 0]) if self._position_BT.numel() else 0

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
