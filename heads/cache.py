"""A key/value cache that is allocated once and addressed by position.

transformers models write to it through `update`. A row has no length of its own: a forward writes positions
start .. start + T - 1 and attends to positions up to its own, so undoing rejected tokens is passing a smaller start.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

# Live lengths are rounded up to this many positions: fewer matrix shapes for the CPU library to prepare.
LENGTH_STEP = 32


class PositionCache(Cache):
    """Keys and values [num_rows, kv_heads, max_length + 1, head_dim] per layer; the last position takes overflow."""

    def __init__(self, num_layers: int, num_rows: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.num_rows = num_rows
        self.max_length = max_length
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self._row_B1: Tensor | None = None
        self._position_BT = torch.zeros(0, 0, dtype=torch.int64)
        self._rows: Tensor | None = None
        self._live = 0

    def plan(self, position_BT: Tensor, rows: Tensor | None, live: int) -> None:
        """Say where the next forward writes: row b at position_BT[b], attending to the first `live` positions."""
        self._position_BT = position_BT
        self._rows = rows
        self._live = live
        index = torch.arange(position_BT.shape[0], device=position_BT.device) if rows is None else rows
        self._row_B1 = index[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, kv_heads, T, head_dim] and return the live keys and values [B, kv_heads, live, head_dim]."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if keys is None or values is None:
            heads, width, value_width = key_states.shape[1], key_states.shape[3], value_states.shape[3]
            keys = key_states.new_zeros(self.num_rows, heads, self.max_length + 1, width)
            values = value_states.new_zeros(self.num_rows, heads, self.max_length + 1, value_width)
            self.keys[layer_idx], self.values[layer_idx] = keys, values
        keys[self._row_B1, :, self._position_BT] = key_states.transpose(1, 2)
        values[self._row_B1, :, self._position_BT] = value_states.transpose(1, 2)
        if self._rows is None:
            size = key_states.shape[0]
            return keys[:size, :, : self._live], values[:size, :, : self._live]
        return keys[self._rows, :, : self._live], values[self._rows, :, : self._live]

    def move_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                if tensor is not None:
                    tensor[destination, :, :length] = tensor[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._position_BT[0, 0]) if self._position_BT.numel() else 0
