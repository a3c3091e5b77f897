"""What is kept of a step that training could not go on from: its batches, to be looked at."""

import json
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from headstart.heads.batch import Batch
from headstart.heads.checkpoint import write_tensors
from headstart.heads.store import atomic_path
from headstart.trainer.data import TrainingRows
from headstart.trainer.ranks import Ranks

FAULTS = "faults"


def save_batches(folder: Path, rows: TrainingRows, step: int, accumulate: int, ranks: Ranks) -> list[str]:
    """Write the micro-batches of a step, each rank its own, to faults/step-000012.rank-0.micro-0.safetensors.

    Returns:
        The ids of all ranks' prompts whose states or log-probabilities are not finite: none where it is the weights' doing.
    """
    (folder / FAULTS).mkdir(exist_ok=True)
    damaged = []
    for micro in range(accumulate):
        batch = rows.batch(step, micro, accumulate, ranks.rank, ranks.world).to("cpu")
        name = f"step-{step:06d}.rank-{ranks.rank}.micro-{micro}.safetensors"
        with atomic_path(folder / FAULTS / name) as temporary:
            tensors = {key: value.contiguous() for key, value in vars(batch).items() if isinstance(value, Tensor)}
            write_tensors(
                temporary,
                tensors,
                metadata={"prompt_ids": json.dumps(batch.prompt_ids), "offsets": json.dumps(batch.offsets)},
            )
        damaged += not_finite(batch)
    return [prompt_id for part in ranks.collect(damaged) for prompt_id in part]


def not_finite(batch: Batch) -> list[str]:
    """Prompts of a batch whose states or log-probabilities are not all finite."""
    good_T = batch.taps_TF.isfinite().all(1) & batch.final_TH.isfinite().all(1)
    good_T &= batch.next_logprob_T.isfinite() | ~batch.next_generated_T
    bounds = zip(batch.prompt_ids, pairwise(batch.offsets), strict=True)
    return [prompt_id for prompt_id, (begin, end) in bounds if not good_T[begin:end].all()]
