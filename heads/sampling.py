"""The sampling rule of the target, as a distribution and as draws from it.

Temperature, then min-p, then top-k, then top-p on what is left: vLLM's order (engines that apply min-p last keep a few
tokens more where both top-p and min-p are set). Sorting a whole vocabulary costs more than a small model's forward pass,
so only candidates are ever sorted.
"""

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Candidates sorted for top-p without top-k; rows whose mass lies deeper are sorted whole.
NUM_CANDIDATES = 256


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # tokens less likely than this share of the likeliest one's probability are removed

    @property
    def filters(self) -> bool:
        """Whether any token can be removed."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def to_dict(self) -> dict[str, Any]:
        """The recorded form; min_p stands in it where it does something."""
        values = asdict(self)
        if self.min_p == 0:
            del values["min_p"]
        return values


def request_generator(prompt_id: str, seed: int) -> np.random.Generator:
    """The random numbers of one request: its own, whatever runs beside it and in which order."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def request_uniforms(prompt_id: str, seed: int, number: int) -> np.ndarray:
    """The first random numbers of one request: number i decides reply token i of plain sampling."""
    return request_generator(prompt_id, seed).random(number)


def filtered_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [.., V] that tokens are drawn by: -inf for what the filters remove.

    Greedy is the distribution that gives the largest logit (the first of equals) all the mass.
    """
    if sampling.temperature == 0:
        logprobs = torch.full_like(logits, -torch.inf)
        return logprobs.scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    logits_BV = logits.reshape(-1, logits.shape[-1])
    ids_BK, logprobs_BK = _candidates(logits_BV, sampling)
    if ids_BK is None:
        return logprobs_BK.view_as(logits)
    logprobs_BV = logprobs_BK.new_full(logits_BV.shape, -torch.inf).scatter_(1, ids_BK, logprobs_BK)
    return logprobs_BV.view_as(logits)


def filtered_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The same law [.., V] in float64, exactly normalised: what verification judges drafts by.

    It keeps the very tokens that `filtered_logprobs` and `sample` keep, so replies of all three have one law.
    """
    if sampling.temperature == 0:
        return filtered_logprobs(logits, sampling).double().exp()
    scaled = logits.double() / sampling.temperature
    if sampling.filters:
        scaled = scaled.masked_fill(filtered_logprobs(logits, sampling) == -torch.inf, -torch.inf)
    return scaled.softmax(-1)


def sample(logits_BV: Tensor, sampling: Sampling, uniforms_B: Tensor | None = None) -> Tensor:
    """Draw one token a row: the one under whose share of the cumulative mass the row's uniform number falls."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    if uniforms_B is None:
        raise ValueError("sampling needs one uniform number a row")
    ids_BK, logprobs_BK = _candidates(logits_BV, sampling)
    if ids_BK is None:
        return _invert(logprobs_BK.exp(), uniforms_B)
    chosen_B = _invert_small(logprobs_BK.exp().double(), uniforms_B)
    return ids_BK.gather(1, chosen_B[:, None]).squeeze(1)


def _candidates(logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor | None, Tensor]:
    """Ids and renormalised log-probabilities of kept tokens, most likely first; ids None means the whole vocabulary."""
    scaled_BV = logits_BV.float() / sampling.temperature
    if sampling.min_p:
        threshold_B1 = scaled_BV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scaled_BV = scaled_BV.masked_fill(scaled_BV < threshold_B1, -torch.inf)
    vocab_size = scaled_BV.shape[1]
    if sampling.top_k == 0 and sampling.top_p >= 1:
        return None, scaled_BV.log_softmax(-1)
    if sampling.top_k:
        top_BK, ids_BK = scaled_BV.topk(min(sampling.top_k, vocab_size), dim=-1)
        logprobs_BK = top_BK.log_softmax(-1)
    else:
        top_BK, ids_BK = scaled_BV.topk(min(NUM_CANDIDATES, vocab_size), dim=-1)
        total_B1 = scaled_BV.logsumexp(-1, keepdim=True)
        logprobs_BK = top_BK - total_B1
        if bool((logprobs_BK.exp().double().sum(-1) < sampling.top_p).any()):
            top_BK, ids_BK = scaled_BV.sort(dim=-1, descending=True, stable=True)
            logprobs_BK = top_BK - total_B1
    if sampling.top_p < 1:
        # A token stays while the mass before it is still short of top_p; the first always stays.
        mass_BK = logprobs_BK.exp().double().cumsum(-1)
        before_BK = mass_BK - logprobs_BK.exp().double()
        logprobs_BK = logprobs_BK.masked_fill(before_BK >= sampling.top_p, -torch.inf)
        logprobs_BK = logprobs_BK.log_softmax(-1)
    return ids_BK, logprobs_BK


def _invert_small(probabilities_BK: Tensor, uniforms_B: Tensor) -> Tensor:
    """Index of the first cumulative sum above u times the total mass."""
    mass_BK = probabilities_BK.cumsum(-1)
    threshold_B1 = uniforms_B[:, None].to(mass_BK) * mass_BK[:, -1:]
    index_B = (mass_BK <= threshold_B1).sum(-1)
    # Rounding may push the threshold to the very end: fall back to the last token with mass.
    last_B = probabilities_BK.shape[1] - 1 - (probabilities_BK.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index_B, last_B)


def _invert(probabilities_BV: Tensor, uniforms_B: Tensor, block: int = 256) -> Tensor:
    """The same for a whole vocabulary in two levels, blocks first: no sum over the vocabulary in double precision."""
    vocab_size = probabilities_BV.shape[1]
    padded_BV = torch.nn.functional.pad(probabilities_BV, (0, -vocab_size % block))
    blocks_BNK = padded_BV.view(len(padded_BV), -1, block)
    sums_BN = blocks_BNK.sum(-1, dtype=torch.float64)
    row_B = _invert_small(sums_BN, uniforms_B)
    rows = torch.arange(len(row_B), device=row_B.device)
    before_B = sums_BN.cumsum(-1)[rows, row_B] - sums_BN[rows, row_B]
    inside_B = (uniforms_B.to(sums_BN) * sums_BN.sum(-1) - before_B) / sums_BN[rows, row_B]
    return row_B * block + _invert_small(blocks_BNK[rows, row_B].double(), inside_B.clamp(0, 1))
