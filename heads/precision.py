"""Which precision matrix products run in, and why: of the frozen target, of training, of timed decoding."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """In training it is about products alone: weights, optimiser, softmax and sums are float32 in any case."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)


def choose_precision(name: str, device: torch.device) -> Precision:
    """A named precision, or with `auto` bfloat16, which halves memory traffic, where the processor multiplies it natively.

    Elsewhere it is emulated: reading a prompt takes hundreds of times as long.
    """
    if name != "auto":
        return Precision(DTYPES[name], "as the recipe says")
    if device.type == "cuda":
        native, where = torch.cuda.is_bf16_supported(including_emulation=False), torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        native, where = cpu_has_bfloat16(), "this CPU"
    else:
        native, where = False, device.type
    if native:
        return Precision(torch.bfloat16, f"half the memory traffic, and {where} multiplies it natively")
    return Precision(torch.float32, f"{where} has no native bfloat16 products")


def cpu_has_bfloat16() -> bool:
    """AVX512-BF16 or AMX; torch's own answer (`mkldnn` support) is true for emulation as well."""
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(probe() for probe in probes if probe is not None)
