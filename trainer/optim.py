"""AdamW, the learning rate as a function of the optimiser step, and clipping."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headstart.trainer.settings import TrainSettings

BETAS = (0.9, 0.95)


def make_optimizer(head: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Fused AdamW over the trained parameters; only matrices decay, never norms."""
    trained = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=BETAS, fused=True)


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Rate of optimiser step 1 .. num_steps: linear warm-up, then a cosine down to `final_learning_rate` x peak.

    Counted in optimiser steps, so that accumulation does not change it. The warm-up is cut to half of a short run.
    """
    warmup = min(settings.warmup_steps, settings.num_steps // 2)
    if step <= warmup:
        return settings.learning_rate * step / warmup
    progress = (step - warmup) / max(1, settings.num_steps - warmup)
    floor = settings.final_learning_rate
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[nn.Parameter], clip_norm: float) -> Tensor:
    """Scale gradients to a total norm of at most `clip_norm` (0: leave them); returns the norm before."""
    limit = clip_norm if clip_norm > 0 else math.inf
    return nn.utils.clip_grad_norm_(list(parameters), limit)
