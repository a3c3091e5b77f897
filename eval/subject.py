"""What an evaluation measures, and how its replies are read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.eval.acceptance import PromptCounts, acceptance_row
from headstart.eval.settings import EvalSettings
from headstart.heads.batch import Batch, pack
from headstart.heads.contract import Head
from headstart.heads.paths import Path
from headstart.heads.sampling import Sampling
from headstart.heads.target import Target

READ_PATHS = 16  # held-out paths whose features are in memory at once


@dataclass
class Subject:
    """What is measured: one head on one target (in float32), on recorded replies of one sampling setting."""

    target: Target
    head: Head
    paths: list[Path]
    routes: list[str]  # also those without a reply here
    settings: EvalSettings
    seed: int
    tell: Callable[[str], None]

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.paths[0].sampling)

    def row(self, counts: Sequence[PromptCounts], **names: Any) -> dict[str, Any]:
        sampling = self.sampling
        return acceptance_row(
            counts,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            replicates=self.settings.replicates,
            seed=self.seed,
            **names,
        )


def read_batches(target: Target, head: Head, paths: Sequence[Path]) -> Iterator[Batch]:
    """Held-out paths with teacher-forced features, a few at a time."""
    for begin in range(0, len(paths), READ_PATHS):
        chunk = paths[begin : begin + READ_PATHS]
        states = target.read([path.token_N for path in chunk])
        batch = pack([(path, s.taps, s.final) for path, s in zip(chunk, states, strict=True)])
        yield batch.to(head.device)
