"""DeepSpeed's ZeRO as strategies (Rajbhandari et al., arXiv 1910.02054): the extra dependency `deepspeed`.

    zero2    each rank holds all weights, and a part of the gradients, of the moments and of the copy that is stepped
    zero3    a part of the weights too; the head is whole while it computes

DeepSpeed averages over ranks, so shares of the loss are multiplied by their number. Its engine clips and steps at once, and
steps nothing where the norm of the gradient is not finite.
"""

import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from headstart.heads.contract import Head
from headstart.heads.errors import WrongInput
from headstart.trainer.optim import make_optimizer, set_learning_rate
from headstart.trainer.sharding import megabytes
from headstart.trainer.strategy import Strategy

MOMENTS = ("exp_avg", "exp_avg_sq")
NUM_STEPS = "step"


class Zero2(Strategy):
    """Moments, gradients and stepped weights are sharded."""

    name = "zero2"
    stage: ClassVar[int] = 2

    def spread(self, share: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        deepspeed = import_deepspeed(self.head.device)
        for parameter in self.head.trained_tensors().values():
            dist.broadcast(parameter.data, 0)
        share.at_once = True  # type: ignore[assignment]
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=self.layer(share),
            optimizer=make_optimizer(self.head, self.settings),
            config=self.config(self.num_trained),
            dist_init_required=False,
        )
        self.make_moments()
        return self.engine, self.zero.optimizer

    def layer(self, share: nn.Module) -> nn.Module:
        """The share as the module whose layers DeepSpeed is to see."""
        return share

    def config(self, num_parameters: int) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.settings.accumulate,
            "gradient_clipping": self.settings.clip_norm,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": False,
                "reduce_bucket_size": num_parameters,
                "contiguous_gradients": self.stage == 2,  # in a buffer of that size, which zero3 does without
                "stage3_param_persistence_threshold": 0,  # small tensors are sharded too
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
        self.link_moments()

    def link_moments(self) -> None:
        """Let DeepSpeed know where the moments of each parameter are."""
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
        if self.engine.zero_optimization_stage() != self.stage or max(held) > total / self.ranks.world + slack:
            raise WrongInput(
                f"asked for {self.name}, but of {total} numbers the processes step {held}; use train.strategy=ddp."
            )

    def describe(self) -> str:
        found = self.ranks.collect(self.held_bytes())
        parts = [" and ".join(megabytes(held[kind]) for held in found) + f" of {kind}" for kind in found[0]]
        return f"{self.ranks.world} processes, {self.name}: they hold {', '.join(parts)}"


class Zero3(Zero2):
    """Weights are sharded as well."""

    name = "zero3"
    stage = 3

    def layer(self, share: nn.Module) -> nn.Module:
        return OneLayer(share, [parameter for parameter in self.head.parameters() if parameter.requires_grad])

    @property
    def stepped(self) -> list[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def link_moments(self) -> None:
        """DeepSpeed finds them by place."""

    @contextmanager
    def gathered(self) -> Iterator[Head]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(self.head.trained_tensors().values()):
            yield self.head

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.head.trained_tensors().items():
            kept(parameter).copy_(self.own_part(parameter, tensors[name]))
            self.put(parameter, tensors[name], None)

    def put(self, parameter: Tensor, value: Tensor, moment: str | None) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        part = self.own_part(parameter, value)
        if moment is None:
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_local_optimizer_state(parameter, part, moment)

    def own_part(self, parameter: Tensor, value: Tensor) -> Tensor:
        """Of a whole tensor what lies on this rank: numbers in their order, as many on each, zeros after the last one."""
        size = kept(parameter).numel()
        padded = value.new_zeros(size * self.ranks.world)
        padded[: value.numel()] = value.flatten()
        return padded[self.ranks.rank * size :][:size].to(self.head.device)

    def parts(self) -> list[Tensor]:
        return [kept(parameter) for parameter in self.head.trained_tensors().values()]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.head.named_parameters()}

    def check(self) -> None:
        super().check()
        if whole := [name for name, parameter in self.head.trained_tensors().items() if parameter.numel()]:
            raise WrongInput(
                f"asked for {self.name}, but {whole[0]} is whole on every process; use train.strategy=fsdp2."
            )


def kept(parameter: Tensor) -> Tensor:
    """What zero3 keeps of a parameter on this rank, flat."""
    return parameter.ds_tensor  # type: ignore[attr-defined]


class OneLayer(nn.Module):
    """A share of which DeepSpeed sees a single layer: it gathers all trained weights before a pass, and lets them go after.

    Layer by layer, what a rank gathers follows from the layers it passes through, which its own pairs decide; the others
    would wait without end for what it leaves out.
    """

    def __init__(self, share: nn.Module, trained: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.share = (share,)  # out of sight: modules that DeepSpeed finds are layers to it
        for number, parameter in enumerate(trained):
            self.register_parameter(str(number), parameter)

    def forward(self, *inputs: Any) -> Any:
        return self.share[0](*inputs)


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
            "train.strategy: zero2 and zero3 need DeepSpeed: pip install 'headstart[deepspeed]', or use fsdp2."
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Names under which it calls torch, and whose new ones it does not know yet.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    # Its own sums in shared memory would be compiled first, which takes a compiler and half a minute; gloo is there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def held(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Meanwhile its steps change nothing."""
    optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del optimizer.step
