"""How the processes of one training share it. Each strategy is one code path, on CPUs (gloo) and on accelerators (nccl).

    single   one process
    ddp      each holds the whole head and optimiser; gradients are added up (torch's DistributedDataParallel)
    fsdp2    each holds a part of every weight, gradient and moment; the head is whole while it computes (`fully_shard`)
    zero2    weights on each, the rest sharded (DeepSpeed, in `zero.py`)
    zero3    as fsdp2, by DeepSpeed

Gradients are summed, never averaged: each process brings its share of one loss, whose normaliser all of them know. So two
processes do what one does with twice the micro-batches, and a process without a pair adds zero.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from headstart.heads.contract import Head
from headstart.heads.errors import WrongInput
from headstart.trainer.optim import clip_gradients, load_optimizer, make_optimizer, optimizer_tensors, set_learning_rate
from headstart.trainer.ranks import Ranks
from headstart.trainer.settings import TrainSettings
from headstart.trainer.sharding import laid_out, megabytes, num_bytes, own_part, whole


class Strategy:
    """One process: the head and its optimiser as they are."""

    name: ClassVar[str] = "single"

    def __init__(self, share: nn.Module, head: Head, settings: TrainSettings, ranks: Ranks) -> None:
        """`share` computes a micro-batch's share of the loss from `head`, which is a part of it."""
        self.head, self.settings, self.ranks = head, settings, ranks
        self.share, self.optimizer = self.spread(share)

    def spread(self, share: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module as this process is to call it, and the optimiser of what it holds."""
        return share, make_optimizer(self.head, self.settings)

    @contextmanager
    def adding_up(self, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; gradients travel with the `last` one of a step."""
        yield

    @contextmanager
    def gathered(self) -> Iterator[Head]:
        """The head with whole weights, to be read by each rank for itself; all of them have to come here."""
        yield self.head

    def backward(self, loss: Tensor) -> None:
        """Add a share's gradient."""
        loss.backward()

    def step(self, rate: float, allowed: bool) -> float:
        """Clip the whole step's gradient (`clip_norm` 0: not), make one step if `allowed` and it is finite, and forget it.

        Returns:
            The norm before clipping.
        """
        trained = self.head.trained_tensors().values()
        for parameter in trained:
            # Nothing reached it on any rank: its gradient is zero, and its moments decay however many ranks there are.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(whole(clip_gradients(trained, self.settings.clip_norm)))
        if allowed and math.isfinite(norm):
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def warm(self) -> None:
        """Make the moments, which exist once a step is taken: one at rate 0 on zero gradients leaves the weights alone."""
        self.step(0.0, allowed=True)

    def reset(self) -> None:
        """Moments as before the first step."""
        self.optimizer.state.clear()

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state by parameter name, whole and in memory; all ranks have to ask."""
        return optimizer_tensors(self.head, self.optimizer)

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        load_optimizer(self.head, self.optimizer, tensors)

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self.head.trained_tensors().items():
            parameter.copy_(laid_out(tensors[name], parameter))

    def parts(self) -> list[Tensor]:
        """What lies on this rank of the trained weights."""
        return [own_part(parameter.detach()) for parameter in self.head.trained_tensors().values()]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights, as wholes."""
        return {name: tuple(parameter.shape) for name, parameter in self.head.named_parameters()}

    @property
    def num_trained(self) -> int:
        """Numbers in all trained weights."""
        shapes = self.shapes()
        return sum(math.prod(shapes[name]) for name in self.head.trained_tensors())

    def held_bytes(self) -> dict[str, int]:
        """Bytes of trained weights and of optimiser state that lie on this rank."""
        moments = [value for state in self.optimizer.state.values() for value in state.values() if value.dim()]
        return {"weights": num_bytes(self.parts()), "moments": num_bytes(moments)}

    def check(self) -> None:
        """Hold what was obtained against what was asked for.

        Raises:
            WrongInput: weights that are not spread as this strategy spreads them.
        """

    def describe(self) -> str:
        """One line for the console."""
        return "one process"


class Replicated(Strategy):
    """Every rank holds everything."""

    name = "ddp"

    def spread(self, share: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        wrapped = DistributedDataParallel(share, forward_sync_buffers=False)
        wrapped.register_comm_hook(None, _summed)
        return super().spread(wrapped)

    @contextmanager
    def adding_up(self, last: bool) -> Iterator[None]:
        if last:
            yield
        else:
            with self.share.no_sync():  # type: ignore[operator]
                yield

    def check(self) -> None:
        sums = [float(part.double().sum()) for part in self.parts()]
        if any(other != sums for other in self.ranks.collect(sums)):
            raise WrongInput("the processes hold different weights after torch's DDP has spread them.")

    def describe(self) -> str:
        return f"{self.ranks.world} processes, ddp: all of the head on each, {megabytes(self.held_bytes()['weights'])}"


class Sharded(Strategy):
    """Every rank holds a part of each tensor. The head is one unit: it is gathered for a pass, and let go after it."""

    name = "fsdp2"

    def spread(self, share: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        trained = list(self.head.trained_tensors().values())
        frozen = {parameter for parameter in share.parameters() if not parameter.requires_grad}
        for parameter in trained:
            dist.broadcast(parameter.data, 0)
        mesh = dist.init_device_mesh(self.head.device.type, (self.ranks.world,))
        sharded = fully_shard(share, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_reduce_scatter_unused_params(True)
        return super().spread(share)  # whose class is another now

    @contextmanager
    def adding_up(self, last: bool) -> Iterator[None]:
        self.share.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    @contextmanager
    def gathered(self) -> Iterator[Head]:
        self.share.unshard()  # type: ignore[operator]
        try:
            yield self.head
        finally:
            self.share.reshard()  # type: ignore[operator]

    def check(self) -> None:
        for name, parameter in self.head.trained_tensors().items():
            if not isinstance(parameter, DTensor):
                raise WrongInput(f"asked for fsdp2, but {name} is whole on every process; use train.strategy=ddp.")
            parts = self.ranks.collect(own_part(parameter).numel())
            most = math.ceil(parameter.shape[0] / self.ranks.world) * parameter[0].numel()
            if sum(parts) != parameter.numel() or max(parts) > most:
                raise WrongInput(
                    f"asked for fsdp2, but of the {parameter.numel()} numbers of {name} the processes hold {parts}; "
                    "use train.strategy=ddp."
                )

    def describe(self) -> str:
        total = sum(tensor.numel() * tensor.element_size() for tensor in self.head.trained_tensors().values())
        parts = " and ".join(megabytes(held["weights"]) for held in self.ranks.collect(self.held_bytes()))
        return f"{self.ranks.world} processes, fsdp2: of the {megabytes(total)} of the head they hold {parts}"


def _summed(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Adds gradients up, where DDP alone would average them."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
