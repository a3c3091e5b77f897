"""AdamW and its state, the learning rate as a function of the optimiser step, and clipping."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headstart.heads.contract import Head
from headstart.trainer.settings import TrainSettings
from headstart.trainer.sharding import laid_out, whole

BETAS = (0.9, 0.95)


def make_optimizer(head: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Fused AdamW over the trained parameters; only matrices decay, never norms."""
    trained = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
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


def clip_gradients(parameters: Iterable[Tensor], clip_norm: float) -> Tensor:
    """Scale gradients to a total norm of at most `clip_norm` (0: leave them); returns the norm before."""
    limit = clip_norm if clip_norm > 0 else math.inf
    return nn.utils.clip_grad_norm_(list(parameters), limit)


def optimizer_tensors(head: Head, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state under `<parameter name>.<state name>`, whole; of sharded tensors all ranks have to ask."""
    return {
        f"{name}.{key}": whole(value.detach()).cpu().contiguous()
        for name, parameter in head.trained_tensors().items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(head: Head, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`; the learning rate is a function of the step and not part of the state."""
    optimizer.state.clear()
    for name, parameter in head.trained_tensors().items():
        own = {key.removeprefix(f"{name}."): key for key in tensors if key.rpartition(".")[0] == name}
        if own:
            # A fused optimiser keeps its step count beside the moments, on the parameter's device.
            optimizer.state[parameter] = {key: laid_out(tensors[full], parameter) for key, full in own.items()}
