"""What one micro-batch adds to an optimiser step, as one forward pass: strategies wrap it and see nothing else."""

from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.batch import Batch
from headstart.heads.contract import Head
from headstart.heads.precision import Precision
from headstart.trainer.feature_loss import feature_loss
from headstart.trainer.feature_noise import noisy
from headstart.trainer.losses import PairSums, Teacher, pair_loss
from headstart.trainer.settings import TrainSettings


class LossShare(nn.Module):
    """A micro-batch's share of loss = sum of w_j l / sum of w_j over every supervised pair (t, j) of the whole step."""

    def __init__(self, head: Head, teacher: Teacher, settings: TrainSettings, precision: Precision, seed: int) -> None:
        super().__init__()
        self.head, self.teacher, self.settings, self.precision, self.seed = head, teacher, settings, precision, seed
        self.fills_gradients = False  # whether a parameter that gets nothing gets zeros

    def forward(self, batch: Batch, step: int, normaliser: float) -> tuple[Tensor, PairSums]:
        """
        Args:
            step: the optimiser step, to which random numbers belong.
            normaliser: sum of w_j over the pairs of the whole step, every micro-batch and rank.

        Returns:
            The share, which every trained parameter is a part of; and the sums per depth.
        """
        settings, head = self.settings, self.head
        with self.precision.autocast(head.device):
            read = noisy(batch, head.reads, settings.feature_noise, self.seed, step)
            rollout = head.rollout(read, settings.depth)
        weights = [output.weight for output in head.outputs()]
        loss, sums = pair_loss(rollout, weights, batch, self.teacher, settings.loss, normaliser)
        if settings.loss.feature_weight:
            share, share_D = feature_loss(rollout, batch, settings.loss, normaliser)
            loss = loss + share
            sums.loss_D += share_D
        return _Touching.apply(loss, self.fills_gradients, *head.trained_tensors().values()), sums


class _Touching(torch.autograd.Function):
    """The loss, with parameters tied to it that get nothing from it.

    A rank without a pair leaves most parameters out of its graph, and one whose tokens reach no token of an expert leaves
    that one out; the other ranks would wait for their gradients without end.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, fills: bool, *parameters: Tensor) -> Tensor:
        ctx.fills, ctx.shapes = fills, [parameter.shape for parameter in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        zeros = (gradients[0].new_zeros(shape) if ctx.fills else None for shape in ctx.shapes)
        return gradients[0], None, *zeros
