"""What an evaluation measures, and how its replies are read."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.eval.acceptance import PromptCounts
from headstart.eval.acceptance_rows import acceptance_row
from headstart.eval.settings import EvalSettings
from headstart.heads.batch import Batch, pack
from headstart.heads.contract import Head
from headstart.heads.features import FeatureReader
from headstart.heads.paths import Path, conversations
from headstart.heads.sampling import Sampling
from headstart.heads.target import Target

READ_PATHS = 16  # held-out paths whose features are in memory at once


@dataclass
class Subject:
    """What is measured: one head on one target, in the precision of the replies, which are of one sampling setting."""

    target: Target
    head: Head
    paths: list[Path]
    routes: list[str]  # also those without a reply here
    settings: EvalSettings
    seed: int
    tell: Callable[[str], None]
    features: FeatureReader | None = None  # states of these very replies

    @property
    def sampling(self) -> Sampling:
        return Sampling(**self.paths[0].sampling)

    @property
    def draft_temperatures(self) -> dict[str, float]:
        """Kinds of drafts that are measured, and their temperatures: greedy ones, and at a temperature sampled ones."""
        temperature = self.sampling.temperature
        return {"greedy": 0.0} | ({"sampled": temperature} if temperature else {})

    @property
    def conversations(self) -> dict[str, str]:
        """By prompt id: turns of one are drawn together for every interval."""
        return conversations(self.paths)

    def row(self, counts: Sequence[PromptCounts], **names: Any) -> dict[str, Any]:
        sampling = self.sampling
        return acceptance_row(
            counts,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            replicates=self.settings.replicates,
            seed=self.seed,
            conversations=self.conversations,
            **names,
        )

    def batches(self, paths: Sequence[Path]) -> Iterator[Batch]:
        """Some of the paths with their features, a few at a time."""
        return read_batches(self.target, self.head, paths, self.features)


def read_batches(
    target: Target, head: Head, paths: Sequence[Path], features: FeatureReader | None = None
) -> Iterator[Batch]:
    """Paths with the target's states on them, a few at a time.

    States that are stored as the target computed them, in its own precision and at its taps, are taken from there. Others
    are read teacher-forced, which costs a pass of the target over every token.
    """
    stored = features is not None and features.taps == target.taps
    for begin in range(0, len(paths), READ_PATHS):
        chunk = paths[begin : begin + READ_PATHS]
        if features is not None and stored and all(features.dtype(path.prompt_id) == target.dtype for path in chunk):
            states = [features.get(path.prompt_id) for path in chunk]
        else:
            states = [(read.taps, read.final) for read in target.read([path.token_N for path in chunk])]
        batch = pack([(path, taps_SF, final_SH) for path, (taps_SF, final_SH) in zip(chunk, states, strict=True)])
        yield batch.to(head.device)
