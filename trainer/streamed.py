"""Training states that are stored nowhere (`features.mode: stream`): the target reads a micro-batch's rows inside the step.

They are rounded to what a cache holds, so both train alike; which passes are made depends on the rows alone, so a resume
makes them again. A target that is spread over processes reads the rows of all of them together (`Target.together`).
"""

from collections.abc import Sequence

from torch import Tensor

from headstart.heads.paths import Path
from headstart.heads.target import Target
from headstart.trainer.features import TRAINING_DTYPE


class StreamedStates:
    """States of paths as the target has them now; every process asks once a micro-batch, with rows of it or filler."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def of(self, paths: Sequence[Path]) -> list[tuple[Tensor, Tensor]]:
        """taps [S, F] and final [S, H] of each, on the target's device."""
        with self.target.together():
            read = self.target.read([path.token_N for path in paths])
        return [(states.taps.to(TRAINING_DTYPE), states.final.to(TRAINING_DTYPE)) for states in read]
