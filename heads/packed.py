"""Frozen matrix products, laid out once for the CPU's matrix library.

oneDNN rearranges a plain weight in every call; a weight rearranged once halves the time of a product with few rows.
It also adds up in the same order whatever the number of rows (from `min_rows` on), so that a token's result does not
depend on how many tokens are read beside it.
"""

import torch
from torch import Tensor
from torch.nn import functional


def min_rows(device: torch.device) -> int:
    """Rows that callers pad a product up to.

    With AVX-512 fewer than four take longer than four, and add up in another order. With AVX2 alone neither is so, and four
    take half as long again as one.
    """
    return 1 if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "AVX2" else 4


class FrozenLinear:
    """x @ weight.T + bias for frozen weights, with an optional fused activation, sum or product."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self._packed: Tensor | None = None
        if can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 64)

    def __call__(self, x_NK: Tensor) -> Tensor:
        if self._packed is None:
            return functional.linear(x_NK, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_NK, self._packed, self.bias, "none", [], "")
        return out

    def silu(self, x_NK: Tensor) -> Tensor:
        """silu(x @ weight.T + bias)."""
        if self._packed is None:
            return functional.silu(functional.linear(x_NK, self.weight, self.bias))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_NK, self._packed, self.bias, "swish", [], "")
        return out

    def plus(self, x_NK: Tensor, other_NM: Tensor) -> Tensor:
        """x @ weight.T + bias + other."""
        if self._packed is None:
            return functional.linear(x_NK, self.weight, self.bias) + other_NM
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_NK, other_NM, self._packed, self.bias, "add")
        return out

    def times(self, x_NK: Tensor, other_NM: Tensor) -> Tensor:
        """(x @ weight.T + bias) * other."""
        if self._packed is None:
            return functional.linear(x_NK, self.weight, self.bias) * other_NM
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_NK, other_NM, self._packed, self.bias, "mul")
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch and this CPU have oneDNN's packed products for the weight's type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not (hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
