"""Noise on the states that a head reads while it trains, so that it bears its own states' errors when it drafts.

Li et al., arXiv 2401.15077, section 3.2, for EAGLE-1: uniform noise. As published trainings scale it, on a path of S slots
it is drawn from U(-a, a) * 512 / S. The teacher and the states that the loss compares with stay as the target has them.
"""

import hashlib
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from headstart.heads.batch import Batch

FULL_LENGTH = 512


def noisy(batch: Batch, reads: Literal["taps", "final", "text"], amplitude: float, seed: int, step: int) -> Batch:
    """The batch as a head of such features is to read it in an optimiser step.

    A path's noise depends on the seed, the step and the prompt alone: not on the other rows, nor on who reads them.
    """
    if not amplitude or reads == "text":
        return batch
    name = "taps_TF" if reads == "taps" else "final_TH"
    clean = getattr(batch, name)
    noise = torch.zeros(clean.shape)
    for prompt_id, (begin, end) in zip(batch.prompt_ids, pairwise(batch.offsets), strict=True):
        digest = hashlib.sha256(f"{seed}/{step}/{prompt_id}".encode()).digest()
        drawn = np.random.default_rng(list(digest)).uniform(-1, 1, (end - begin, clean.shape[1]))
        noise[begin:end] = torch.from_numpy(drawn) * (amplitude * FULL_LENGTH / (end - begin))
    return replace(batch, **{name: (clean + noise.to(clean.device)).to(clean.dtype)})
