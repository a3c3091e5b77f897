"""Which processes run this job, and whether they are those that were asked for."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from headstart.heads.errors import WrongInput

FROM_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
"""Every launcher of accelerate sets this variable, and nothing else does."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the job, as the launcher set them up."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def find_processes(environment: Mapping[str, str] = os.environ) -> Processes:
    """Read what torchrun and accelerate put into the environment.

    Raises:
        WrongInput: several processes were asked for and one was started, or more run than this version trains with.
    """
    world_size = int(environment.get("WORLD_SIZE", "1"))
    # The launcher that accelerate takes for `--cpu` and MULTI_CPU names a meeting point for several processes but
    # starts a single one without a rank; training on a fraction of the batch would go unnoticed.
    if FROM_ACCELERATE in environment and "MASTER_ADDR" in environment and "RANK" not in environment:
        raise WrongInput(
            "accelerate was asked for several processes and started one (it does so with --cpu and with "
            "distributed_type MULTI_CPU).\nRun one process: accelerate launch --num_processes 1 RECIPE"
        )
    if world_size > 1:
        raise WrongInput(
            f"found {world_size} processes, expected 1: this version trains in one process, on all cores or one "
            "accelerator.\nRun: accelerate launch --num_processes 1 RECIPE, or headstart train RECIPE"
        )
    return Processes(
        rank=int(environment.get("RANK", "0")),
        world_size=world_size,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
    )
