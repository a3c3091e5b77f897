"""DeepSpeed's ZeRO-2 as a strategy (Rajbhandari et al., arXiv 1910.02054): the extra dependency `deepspeed`.

Each rank holds all weights, and a part of the gradients, of the moments and of the copy of the weights that is stepped.

DeepSpeed averages over ranks, so shares of the loss are multiplied by their number. Its engine clips and steps at once, and
steps nothing where the norm of the gradient is not finite.
"""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from headstart.heads.errors import WrongInput
from headstart.trainer.optim import make_optimizer, set_learning_rate
from headstart.trainer.sharding import megabytes
from headstart.trainer.strategy import Strategy

MOMENTS = ("exp_avg", "exp_avg_sq")
NUM_STEPS = "step"


class Zero2(Strategy):
    """Moments, gradients and stepped weights are sharded."""

    name = "zero2"

    def spread(self, share: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        deepspeed = import_deepspeed(self.head.device)
        for parameter in self.head.trained_tensors().values():
            dist.broadcast(parameter.data, 0)
        share.at_once = True  # type: ignore[assignment]
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=share,
            optimizer=make_optimizer(self.head, self.settings),
            config=self.config(self.num_trained),
            dist_init_required=False,
        )
        self.make_moments()
        return self.engine, self.zero.optimizer

    def config(self, num_parameters: int) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.settings.accumulate,
            "gradient_clipping": self.settings.clip_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            "zero_optimization": {
                "stage": 2,
                "overlap_comm": False,
                "reduce_bucket_size": num_parameters,  # of which a buffer is made
            },
        }

    @property
    def stepped(self) -> list[Tensor]:
        """What the optimiser steps: this rank's part of the weights, flat, in float32."""
        return list(self.zero.single_partition_of_fp32_groups)

    def make_moments(self) -> None:
        """Moments as they are before the first step; DeepSpeed makes them in it, but a resume needs them before."""
        for flat in self.stepped:
            self.zero.optimizer.state[flat] = {
                NUM_STEPS: torch.zeros((), dtype=torch.float32, device=flat.device),
                **{name: torch.zeros_like(flat) for name in MOMENTS},
            }
        self.zero._lazy_init_hp_params_optimizer_state()

    @contextmanager
    def adding_up(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self.ranks.world, scale_wrt_gas=False)

    def step(self, rate: float, allowed: bool) -> float:
        set_learning_rate(self.optimizer, rate)
        with nullcontext() if allowed else held(self.optimizer):
            self.engine.step()
        return math.inf if self.zero.overflow else float(self.engine.get_global_grad_norm())

    def warm(self) -> None:
        """Moments are there from the start."""

    def reset(self) -> None:
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def state(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = next(iter(self.optimizer.state.values()))[NUM_STEPS]
        found = {}
        for name, parameter in self.head.trained_tensors().items():
            for moment in MOMENTS:
                full = safe_get_full_optimizer_state(parameter, moment)
                found[f"{name}.{moment}"] = full.detach().to("cpu", copy=True).contiguous()
            found[f"{name}.{NUM_STEPS}"] = steps.detach().to("cpu", copy=True)
        return found

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        trained = self.head.trained_tensors()
        for state in self.optimizer.state.values():
            state[NUM_STEPS].copy_(tensors[f"{next(iter(trained))}.{NUM_STEPS}"])
        for name, parameter in trained.items():
            for moment in MOMENTS:
                self.put(parameter, tensors[f"{name}.{moment}"].to(self.head.device), moment)

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.head.trained_tensors().items():
            value = tensors[name].to(self.head.device)
            parameter.data.copy_(value)
            self.put(parameter, value, None)

    def put(self, parameter: Tensor, value: Tensor, moment: str | None) -> None:
        """Write this rank's part of a moment, or of the stepped weight."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if moment is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, moment)

    def held_bytes(self) -> dict[str, int]:
        moments = [state[name] for state in self.optimizer.state.values() for name in MOMENTS]
        return {"weights": sum(part.nbytes for part in self.parts()), "moments": sum(m.nbytes for m in moments)}

    def check(self) -> None:
        total = self.num_trained
        held = self.ranks.collect(sum(flat.numel() for flat in self.stepped))
        slack = 64 * len(self.shapes())  # parts are aligned
        if self.engine.zero_optimization_stage() != 2 or max(held) > total / self.ranks.world + slack:
            raise WrongInput(
                f"asked for {self.name}, but of {total} numbers the processes step {held}; use train.strategy=ddp."
            )

    def describe(self) -> str:
        parts = " and ".join(megabytes(held["moments"]) for held in self.ranks.collect(self.held_bytes()))
        return f"{self.ranks.world} processes, {self.name}: of the optimiser's moments they hold {parts}"


def import_deepspeed(device: torch.device) -> Any:
    """The library, told which device it runs on and to keep quiet.

    Raises:
        WrongInput: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        import deepspeed
    except ImportError:
        raise WrongInput(
            "train.strategy: zero2 needs DeepSpeed: pip install 'headstart[deepspeed]', or use fsdp2."
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its own sums in shared memory would be compiled first, which takes a compiler and half a minute; gloo is there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def held(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Meanwhile its steps change nothing."""

    @contextmanager
    def holding() -> Iterator[None]:
        optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del optimizer.step

    return holding()
