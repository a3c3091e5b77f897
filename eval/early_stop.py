"""Stopping a draft early: where the head itself is no longer sure, a draft costs more than it is likely to give.

The confidence of a draft is the largest probability of the law that it is made from: a function of what precedes the
token, never of the token. Drafting goes on while the product of the confidences so far is at least a threshold. The
decision falls before the token is drawn, so it cannot favour one token over another, and the output stays the target's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.heads.contract import Sampler


def confidence(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Largest probability [..] of softmax(logits / temperature) over the last dimension.

    Greedy drafts have no temperature of their own; theirs is 1.
    """
    scaled = logits / temperature
    return (scaled.amax(-1) - scaled.logsumexp(-1)).exp()


class EarlyStop:
    """A sampler for one block: chooses like `choose`, counts how many drafts each row uses, and says when none goes on."""

    def __init__(self, choose: Sampler, length_B: Sequence[int], threshold: float, temperature: float = 1.0) -> None:
        """Row b uses at most `length_B[b]` drafts; threshold 0 stops nothing. `temperature` is that of the draft law."""
        self.choose, self.threshold, self.temperature = choose, threshold, temperature
        self.most_B = list(length_B)
        self.length_B = [0] * len(self.most_B) if threshold > 0 else self.most_B
        self._product_B = torch.ones(len(self.most_B), dtype=torch.float64)

    def __call__(self, logits_BV: Tensor) -> Tensor | None:
        """Draft-vocabulary indices [B], or None where no row uses another draft."""
        if self.threshold > 0:
            self._product_B *= confidence(logits_BV, self.temperature).double().cpu()
            sure_B = (self._product_B >= self.threshold).tolist()
            going_B = [
                sure and used < most for sure, used, most in zip(sure_B, self.length_B, self.most_B, strict=True)
            ]
            if not any(going_B):
                return None
            self.length_B = [used + going for used, going in zip(self.length_B, going_B, strict=True)]
        return self.choose(logits_BV)
