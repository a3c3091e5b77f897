"""Settings of the target and of every head kind. No torch here: help and `check` answer at once."""

from dataclasses import dataclass, field
from typing import Literal

from headstart.heads.rules import Conflicts, Count, PathText


@dataclass(frozen=True)
class TargetSettings:
    """The frozen model whose output distribution never changes."""

    model: PathText = "smollm2-135m"
    """Built-in name (`smollm2-135m`), a folder, or a hub id of a transformers causal LM."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the target for traffic and features: auto (bfloat16 where the processor has it), float32 or bfloat16."""
    device: str = "auto"
    """auto (the first accelerator, else cpu), or a torch device string."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of the target: auto, sdpa or eager."""


@dataclass(frozen=True)
class Eagle3Settings:
    """EAGLE-3 head (arXiv 2503.01840) and the flags of EAGLE 3.1 (arXiv 2605.09992)."""

    kind: Literal["eagle3"] = "eagle3"
    """Which head is trained."""
    taps: list[Count] = field(default_factory=list)
    """Residual streams read from the target, L = after L layers, ascending. Empty: [2, N // 2, N - 3], as served."""
    draft_vocab_size: Count = 8192
    """Tokens the head can draft; 0 means the target's whole vocabulary."""
    intermediate_size: Count = 0
    """Width of the head's MLP; 0 means the target's."""
    norm_before_residual: bool = False
    """Whether the residual branch carries the normed feature (true) or the raw one (false)."""
    fc_norm: bool = False
    """EAGLE 3.1: norm each tap before the fusing projection."""
    norm_output: bool = False
    """EAGLE 3.1: recycle the normed state between depths instead of the raw one."""
    init_from_target: bool = True
    """Start the head's layer and output rows from the target's last layer and output head."""

    def conflicts(self) -> Conflicts:
        if self.taps != sorted(set(self.taps)):
            yield "taps", f"found {self.taps}, expected ascending tap ids without repeats: {sorted(set(self.taps))}"
