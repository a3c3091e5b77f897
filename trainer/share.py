"""What one micro-batch adds to an optimiser step, as one forward pass: strategies wrap it and see nothing else."""

from collections.abc import Callable
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
        self.at_once = False  # whether gradients reach parameters all at once, in one order, instead of one by one

    def forward(self, batch: Batch, step: int, normaliser: float) -> tuple[Tensor, PairSums]:
        """
        Args:
            step: the optimiser step, to which random numbers belong.
            normaliser: sum of w_j over the pairs of the whole step, every micro-batch and rank.

        Returns:
            The share, which every trained parameter is a part of; and the sums per depth.
        """
        trained = list(self.head.trained_tensors().values())
        if not self.at_once:
            loss, sums = self.charge(batch, step, normaliser)
            return _Touching.apply(loss, *trained), sums
        found: list[PairSums] = []

        def charge() -> Tensor:
            loss, sums = self.charge(batch, step, normaliser)
            found.append(sums)
            return loss

        return _AtOnce.apply(charge, *trained), found[0]

    def charge(self, batch: Batch, step: int, normaliser: float) -> tuple[Tensor, PairSums]:
        """The share and the sums; only parameters that a pair reaches are a part of the share."""
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
        return loss, sums


class _Touching(torch.autograd.Function):
    """The loss, with parameters tied to it that get nothing from it.

    A rank without a pair leaves most parameters out of its graph, and one whose tokens reach no token of an expert leaves
    that one out; the other ranks would wait for their gradients without end.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.number = len(parameters)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], *[None] * ctx.number


class _AtOnce(torch.autograd.Function):
    """The loss of `charge`, whose gradients are computed with it and handed over together, zeros included.

    A backward pass reaches parameters in an order that depends on the batch: without a pair, most of them first. DeepSpeed
    lays gradients side by side as they come and adds up what lies at the same place, so ranks have to agree on the order.
    """

    @staticmethod
    def forward(ctx: Any, charge: Callable[[], Tensor], *parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = charge()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        ctx.gradients = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(parameters, found, strict=True)
        ]
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.gradients
        del ctx.gradients
        return None, *(gradient.mul_(gradients[0]) for gradient in found)
