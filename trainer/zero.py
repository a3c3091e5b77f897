"""DeepSpeed's ZeRO as strategies (Rajbhandari et al., arXiv 1910.02054): the extra dependency `deepspeed`.

    zero2    each rank holds all weights, and a part of the gradients, of the moments and of the copy that is stepped
    zero3    a part of the weights too; the head is gathered for a pass

DeepSpeed averages over ranks, so shares of the loss are multiplied by their number. Its engine clips and steps at once, and
steps nothing where the norm of the gradient is not finite.
"""

import copy
import logging
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
            model=share,
            optimizer=make_optimizer(self.head, self.settings),
            config=self.config(self.num_trained),
            dist_init_required=False,
        )
        self.make_moments()
        return self.engine, self.zero.optimizer

    def config(self, num_parameters: int) -> dict[str, Any]:
        stage3 = {
            "stage3_param_persistence_threshold": 0,  # small tensors too
            # All of the head is fetched at once (`register_external_parameter`) and let go at once. What a rank would fetch
            # earlier or keep longer is learned from its own passes, and those of a rank without a row are others.
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
        }
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
                "reduce_bucket_size": num_parameters,  # of which a buffer is made
                **(stage3 if self.stage == 3 else {}),
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
        self.link()

    def link(self) -> None:
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
        parts = " and ".join(megabytes(held["moments"]) for held in self.ranks.collect(self.held_bytes()))
        return f"{self.ranks.world} processes, {self.name}: of the optimiser's moments they hold {parts}"


class Zero3(Zero2):
    """Weights are sharded as well."""

    name = "zero3"
    stage = 3

    def spread(self, share: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        deepspeed = import_deepspeed(self.head.device)
        self._shapes = super().shapes()
        # The engine's hooks partition a layer's weights as soon as it has run, on all ranks at once. Who reads the head
        # alone, a rank its own validation batches, reads one without hooks; its weights are there while they are gathered.
        self.plain = unhooked(self.head)
        spread = super().spread(share)
        for parameter in share.parameters():
            deepspeed.zero.register_external_parameter(share, parameter)
        return spread

    @property
    def stepped(self) -> list[Tensor]:
        return list(self.zero.fp32_partitioned_groups_flat)

    def link(self) -> None:
        """Parts are found by place."""

    @contextmanager
    def gathered(self) -> Iterator[Head]:
        import deepspeed

        pairs = list(zip(self.head.parameters(), self.plain.parameters(), strict=True))
        with deepspeed.zero.GatheredParameters([sharded for sharded, _ in pairs]):
            for sharded, own in pairs:
                own.data = sharded.data.clone()
        try:
            yield self.plain
        finally:
            for _, own in pairs:
                own.data = own.data.new_empty(0)

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        import deepspeed

        trained = self.head.trained_tensors()
        with deepspeed.zero.GatheredParameters(list(trained.values()), modifier_rank=0):
            for name, parameter in trained.items():
                parameter.data.copy_(tensors[name])
        for name, parameter in trained.items():
            self.put(parameter, tensors[name].to(self.head.device), None)

    def put(self, parameter: Tensor, value: Tensor, moment: str | None) -> None:
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = value.new_zeros(size * self.ranks.world)
        padded[: value.numel()] = value.flatten()
        part = padded[self.ranks.rank * size :][:size]
        if moment is None:
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_local_optimizer_state(parameter, part, moment)

    def parts(self) -> list[Tensor]:
        return [parameter.ds_tensor for parameter in self.head.trained_tensors().values()]  # type: ignore[attr-defined]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes


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
    # Its own sums in shared memory would be compiled first, which takes a compiler and half a minute; gloo is there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def unhooked(head: Head) -> Head:
    """The same head without weights; the buffers that it borrows from the target are shared."""
    twin = copy.deepcopy(head, {id(tensor): tensor for tensor in (*head.buffers(), *head.parameters())})
    for module in twin.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().new_empty(0), parameter.requires_grad))
    return twin


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
