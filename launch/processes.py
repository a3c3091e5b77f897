"""Which processes run this job, by which strategy, and whether they are those that were asked for. No torch here."""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import get_args, get_type_hints

from headstart.heads.errors import WrongInput
from headstart.trainer.settings import TrainSettings

FROM_ACCELERATE = "ACCELERATE_MIXED_PRECISION"
"""Every launcher of accelerate sets this variable, and nothing else does."""
NOT_THERE = {
    "ACCELERATE_MIXED_PRECISION": (
        "mixed_precision",
        ("no", "bf16"),
        "the precision is train.dtype, bfloat16 or float32",
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
        "offload_optimizer_device",
        ("none",),
        "moments stay on the device",
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param_device", ("none",), "weights stay on the device"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("deepspeed_config_file", ("none",), "the recipe says how to train"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", ("false",), "weights stay on the device"),
}
"""What an accelerate config can ask for and does not get here: variable, key of the config, values that ask nothing, why."""
WATCH_S = 1.0  # between two looks after the launcher
SEVERAL = "accelerate launch --multi_gpu --num_processes N RECIPE (on CPUs too), or torchrun --nproc_per_node N RECIPE"


@dataclass(frozen=True)
class Processes:
    """This process among those of the job, as the launcher set them up."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    """Whether a launcher gave this process a rank and a place to meet the others, even if there are none."""
    asked: str = ""
    """The strategy that an accelerate config asks for."""

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0


def find_processes(environment: Mapping[str, str] = os.environ) -> Processes:
    """Read what torchrun, accelerate and DeepSpeed's launcher put into the environment.

    Raises:
        WrongInput: several processes were asked for and one was started, or what is not there was asked for.
    """
    if FROM_ACCELERATE in environment:
        refuse_what_is_not_there(environment)
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys()
    # The launcher that accelerate takes for `--cpu`, for MULTI_CPU, and where it sees no accelerators, names a meeting point
    # for several processes but starts a single one without a rank; training on a fraction of the batch would go unnoticed.
    if FROM_ACCELERATE in environment and "MASTER_ADDR" in environment and not launched:
        raise WrongInput(
            "accelerate was asked for several processes and started one (it does so with --cpu, with distributed_type "
            f"MULTI_CPU, and without --multi_gpu where it sees no accelerators).\nSeveral processes: {SEVERAL}.\n"
            "One process: accelerate launch --num_processes 1 RECIPE"
        )
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 and not launched:
        raise WrongInput(f"found processes of mpirun, which know nothing of each other here. Start them by {SEVERAL}.")
    if not launched:
        return Processes()
    return Processes(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        launched=True,
        asked=asked_strategy(environment),
    )


def refuse_what_is_not_there(environment: Mapping[str, str]) -> None:
    """Refuse what an accelerate config asks for and would not get.

    Raises:
        WrongInput: naming every such key of the config.
    """
    found = [
        f"  {key}: {environment[variable]} ({why}); expected {' or '.join(nothing)}"
        for variable, (key, nothing, why) in NOT_THERE.items()
        if environment.get(variable, nothing[0]).lower() not in nothing
    ]
    if found:
        told = "\n".join(found)
        raise WrongInput(
            f"the accelerate config asks for what there is not:\n{told}\n"
            "Change it, or take one of ours: headstart train RECIPE --config-file fsdp2"
        )


def asked_strategy(environment: Mapping[str, str]) -> str:
    """The strategy of an accelerate config; none where it says no more than how many processes there are."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return f"zero{environment.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    if environment.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return f"fsdp{environment.get('FSDP_VERSION', '1')}"
    return ""


def choose_strategy(settings: TrainSettings, processes: Processes) -> str:
    """The strategy of this training: the recipe's, the launcher's, or ddp; `single` for one process.

    Raises:
        WrongInput: the two ask for different ones, one is not known, or there is no launcher for what the recipe asks for.
    """
    known = [name for name in get_args(get_type_hints(TrainSettings)["strategy"]) if name != "auto"]
    if processes.asked and processes.asked not in known:
        raise WrongInput(
            f"the accelerate config asks for {processes.asked}, expected one of {', '.join(known)} (fsdp2 is "
            "`fsdp_version: 2`): change it, or start without it and set train.strategy."
        )
    wanted = "" if settings.strategy == "auto" else settings.strategy
    if wanted and processes.asked and wanted != processes.asked:
        raise WrongInput(
            f"train.strategy is {wanted}, but the accelerate config asks for {processes.asked}; "
            "drop one of them (train.strategy=auto takes the config's)."
        )
    if wanted and not processes.launched:
        raise WrongInput(
            f"train.strategy is {wanted}, but this is one process without a launcher.\nSeveral processes: {SEVERAL}."
        )
    return wanted or processes.asked or ("ddp" if processes.world_size > 1 else "single")


def expect_one(processes: Processes, doing: str) -> None:
    """Refuse several processes for what one does.

    Raises:
        WrongInput: there are several.
    """
    if processes.world_size > 1:
        raise WrongInput(
            f"found {processes.world_size} processes, expected 1 for {doing}. Several share the training of one head; "
            "run this with headstart alone."
        )


def expect_several(processes: Processes, key: str) -> None:
    """Refuse one process where a setting asks for several.

    Raises:
        WrongInput: naming the setting.
    """
    if processes.world_size == 1:
        raise WrongInput(f"{key}: found true, but this is one process.\nSeveral processes: {SEVERAL}.")


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Stop as on SIGTERM once torchrun (accelerate's launcher too) is gone, however it ended.

    What it leaves behind nobody would miss: it would hold the run's folder, and the accelerators.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def muted(processes: Processes) -> Iterator[None]:
    """Only the first process prints; errors are told by all."""
    if processes.first:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield


def resume_command(processes: Processes) -> str:
    """The command line that goes on from here; of several processes, one by torchrun that does."""
    if not processes.launched:
        return shlex.join([*([] if os.access(sys.argv[0], os.X_OK) else ["python"]), *sys.argv])
    number = processes.local_world_size
    program = ["-m", "headstart.launch"] if sys.argv[0].endswith("__main__.py") else sys.argv[:1]
    machines = "" if number == processes.world_size else ", on every machine"
    return f"{shlex.join(['torchrun', '--nproc_per_node', str(number), *program, *sys.argv[1:]])}{machines}"
