"""The processes of one training: which of them this one is, and what they tell each other beside gradients and states."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from headstart.heads.errors import TrainingFailed, WrongInput
from headstart.heads.target import choose_device

PATIENCE = timedelta(days=30)  # the others wait while the first one lets the target answer, however long that takes
LOST = "The message of the process that ended first says why. The same command continues from the last checkpoint."


@dataclass(frozen=True)
class Ranks:
    """This process among `world` that train one head; alone unless told otherwise, and then every call is free."""

    rank: int = 0
    world: int = 1
    group: Any = None
    """Of words (gloo, in memory), which may be waited for as long as it takes; None: there is nobody to talk to."""
    step_group: Any = None
    """The same for words that come soon, unless a process hangs."""

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def in_step(self) -> "Ranks":
        """The same processes while they train: a word is waited for as long as torch waits for a gradient."""
        return replace(self, group=self.step_group)

    def wait(self) -> None:
        """Until all are here."""
        if self.group is not None:
            with naming_the_lost():
                dist.barrier(group=self.group)

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Around what the first one may have to make for all of them."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def total(self, values: Tensor) -> Tensor:
        """Sum over all processes, in place."""
        if self.group is not None:
            with naming_the_lost():
                dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it holds for one of them."""
        if self.group is None:
            return flag
        votes = torch.tensor(int(flag))
        with naming_the_lost():
            dist.all_reduce(votes, group=self.group)
        return bool(votes)

    def collect(self, value: Any) -> list[Any]:
        """What each of them has, by rank."""
        found = [value] * (self.world if self.group is not None else 1)
        if self.group is not None:
            with naming_the_lost():
                dist.all_gather_object(found, value, group=self.group)
        return found


@contextmanager
def naming_the_lost() -> Iterator[None]:
    """Say of a broken connection what it means.

    Raises:
        TrainingFailed: another process has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        told = str(error).strip().partition("\n")[0]
        raise TrainingFailed(
            f"another process of this training has ended, or does not answer ({told}).\n{LOST}"
        ) from None


def is_lost(error: Exception) -> bool:
    """Whether a collective broke because another process is gone (gloo raises plain RuntimeErrors)."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in ("by peer", "gloo", "broken pipe"))


@contextmanager
def joined(rank: int, world: int, local_rank: int, device: str, patience: timedelta | None = None) -> Iterator[Ranks]:
    """Meet the other processes that a launcher started, at the address in the environment, and part from them at the end.

    Args:
        device: `target.device` of the recipe. Of accelerators, each process takes the one of its `local_rank`.
        patience: with a process that is silent in the midst of training; default: torch's (half an hour for gloo).

    Raises:
        WrongInput: a device that several processes cannot share, or not as many different processes as were asked for.
    """
    chosen = choose_device(device)
    if chosen.type != "cpu":
        take_accelerator(chosen, local_rank, world)
    backend = "gloo" if chosen.type == "cpu" else f"cpu:gloo,{chosen.type}:nccl"
    with naming_the_lost():
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=patience)
        words = dist.new_group(backend="gloo", timeout=PATIENCE)
        ranks = Ranks(rank, world, words, dist.new_group(backend="gloo", timeout=patience))
    present = set(ranks.collect((socket.gethostname(), os.getpid())))
    if len(present) != world or dist.get_world_size() != world:
        raise WrongInput(f"found {len(present)} processes, expected {world}. Start them anew, with one launcher.")
    yield ranks
    # Not after an error: those that still compute would be waited for.
    dist.destroy_process_group()


def take_accelerator(device: torch.device, local_rank: int, world: int) -> None:
    """Make the accelerator of this process the current one."""
    number = torch.accelerator.device_count()
    if device.index is not None and world > 1:
        raise WrongInput(
            f"target.device: found {device} for {world} processes, expected auto or {device.type}: each takes its own."
        )
    if local_rank >= number:
        raise WrongInput(
            f"found {number} accelerators for process {local_rank} of this machine; start at most {number} here, or train "
            "on its cores with target.device=cpu."
        )
    if device.index is None:
        torch.accelerator.set_device_index(local_rank)


def refuse_differences(ranks: Ranks, found: dict[str, Any]) -> None:
    """Training is one only where all processes do the same.

    Raises:
        WrongInput: values differ between processes; the fields are named.
    """
    others: Sequence[dict[str, Any]] = ranks.collect(found)
    differing = sorted({name for other in others for name in other if other[name] != others[0].get(name)})
    if differing:
        shown = "\n".join(f"  {name}: {[other.get(name) for other in others]}" for name in differing[:8])
        raise WrongInput(
            f"the processes do not train the same:\n{shown}\n"
            "Give every machine the same recipe, files and versions, and run.root on storage that all of them share."
        )
