"""The law that recorded tokens were drawn by: what acceptance of sampled drafts is measured against.

A path is a fair sample of what the target says at one sampling setting, and at no other.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads.batch import Batch
from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling, filtered_logprobs
from headstart.heads.target import Target

TARGET_CHUNK = 128  # positions projected to the target's vocabulary at a time
UNFILTERED = Sampling(1.0)  # the setting whose law the recorded log-probabilities are of


def check_sampling(recorded: Iterable[dict[str, Any]], sampling: Sampling) -> None:
    """Refuse paths of another sampling setting: acceptance is exact only along what the target really says.

    Raises:
        WrongInput: naming both settings.
    """
    for values in recorded:
        if {**asdict(Sampling()), **values} != asdict(sampling):
            raise WrongInput(
                f"found paths recorded at sampling setting {values}, expected {sampling.to_dict()}: acceptance is exact "
                "only on paths of the setting it is reported for.\nRecord paths at this setting (traffic.temperature, "
                "..), or measure at theirs."
            )


@dataclass(frozen=True)
class TargetLaw:
    """What recorded tokens were drawn by: the target's logits under one sampling setting, filters applied."""

    target: Target
    sampling: Sampling

    def check(self, recorded: Iterable[dict[str, Any]]) -> None:
        """Raises WrongInput: paths of another setting."""
        check_sampling(recorded, self.sampling)

    @torch.no_grad()
    def logprobs(self, final_SH: Tensor, token_S: Tensor) -> Tensor:
        """log p(x) [S] in float64 of the tokens that follow final states, a few positions at a time.

        A recorded token was kept by the filters; where rounding puts it just outside, its unfiltered probability counts.
        """
        if self.sampling.temperature == 0:
            return torch.zeros(len(token_S), dtype=torch.float64, device=token_S.device)
        parts = [torch.zeros(0, dtype=torch.float64, device=token_S.device)]
        for begin in range(0, len(token_S), TARGET_CHUNK):
            chunk = slice(begin, begin + TARGET_CHUNK)
            logits_CV, token_C1 = self.target.logits(final_SH[chunk].to(self.target.dtype)), token_S[chunk, None]
            logp_C1 = filtered_logprobs(logits_CV, self.sampling).gather(1, token_C1).double()
            if not bool(logp_C1.isfinite().all()):
                unfiltered_CV = filtered_logprobs(logits_CV, Sampling(self.sampling.temperature))
                logp_C1 = torch.where(logp_C1.isfinite(), logp_C1, unfiltered_CV.gather(1, token_C1).double())
            parts.append(logp_C1.squeeze(1))
        return torch.cat(parts)

    def of_batch(self, batch: Batch) -> Tensor:
        """log p(x_{s+1}) of every slot s [T] whose next token was generated; nan elsewhere. Raises as `check`."""
        self.check(batch.samplings)
        slot_G = batch.next_generated_T.nonzero().squeeze(1)
        logp_T = torch.full(batch.next_token_T.shape, torch.nan, dtype=torch.float64, device=slot_G.device)
        logp_T[slot_G] = self.logprobs(batch.final_TH[slot_G], batch.next_token_T[slot_G])
        return logp_T


def emitted_logprobs(batch: Batch, law: TargetLaw | None) -> Tensor:
    """log p of the emitted tokens [T] under the law they were drawn by; without one, the recorded raw ones are it.

    Raises:
        WrongInput: paths of another setting than the law's, or filtered or tempered ones without a law.
    """
    if law is not None:
        return law.of_batch(batch)
    check_sampling(batch.samplings, UNFILTERED)
    return batch.next_logprob_T.double()
