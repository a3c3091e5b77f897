"""The feature loss of EAGLE-1: a head's states should be the target's own final states one token on.

Li et al., arXiv 2401.15077, section 3.2: smooth L1 beside the loss over tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.batch import Batch
from headstart.heads.contract import Rollout
from headstart.trainer.losses import sum_dtype
from headstart.trainer.settings import LossSettings


def feature_loss(rollout: Rollout, batch: Batch, loss: LossSettings, normaliser: float) -> tuple[Tensor, Tensor]:
    """Charge every pair (t, j) feature_weight * smooth L1 (mean over the width) of its state and final_{t+1+j}.

    Returns:
        The batch's share of the step's loss, normalised as `pair_loss` does it, and the sums of each depth [D] without the
        depth weight.
    """
    depth_D = torch.arange(rollout.valid_SD.shape[1], device=rollout.start_S.device)
    slot_SD = (rollout.start_S[:, None] + 1 + depth_D).clamp(max=len(batch.final_TH) - 1)
    state_SDH = rollout.state_SDH.to(torch.promote_types(torch.float32, rollout.state_SDH.dtype))
    apart_SDH = functional.smooth_l1_loss(state_SDH, batch.final_TH[slot_SD].to(state_SDH.dtype), reduction="none")
    sums_D = loss.feature_weight * (apart_SDH.mean(-1) * rollout.valid_SD).sum(0, dtype=sum_dtype(slot_SD.device))
    share = (sums_D @ loss.depth_decay ** depth_D.to(sums_D.dtype) / normaliser).to(state_SDH.dtype)
    return share, sums_D.detach()
