"""How many CPU threads a process takes, and why: the same number under every launcher."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Threads:
    """A thread count with its reason."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.number} ({self.reason})"


def usable_cores() -> tuple[int, str]:
    """Cores this process may use: its affinity, or fewer where a container's CPU quota is lower."""
    if hasattr(os, "sched_getaffinity"):
        cores, reason = len(os.sched_getaffinity(0)), "cores this process may use"
    else:
        cores, reason = os.cpu_count() or 1, "cores of this machine"
    quota = cpu_quota()
    if quota is not None and quota < cores:
        return max(1, math.floor(quota)), f"CPU quota of this container, {quota:g} of {cores} cores"
    return cores, reason


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs granted by the control group (version 2, then 1); None where unlimited or unknown."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return float(quota) / float(period) if quota not in ("max", "-1") else None


def choose_threads(setting: int, local_world_size: int) -> Threads:
    """Threads of one of `local_world_size` processes here; `setting` is `run.threads`, 0 to derive.

    The number is the recipe's or derived from the cores, never OMP_NUM_THREADS: `accelerate launch` sets that to 1 on a
    machine without accelerator, and a value from there cannot be told from a user's own.
    """
    if setting:
        return Threads(setting, "run.threads")
    cores, reason = usable_cores()
    if local_world_size == 1:
        return Threads(cores, reason)
    return Threads(max(1, cores // local_world_size), f"{cores} {reason}, shared by {local_world_size} processes")


def apply_threads(threads: Threads) -> None:
    """Set the count for OpenMP and MKL, which read it when torch is first imported, and for torch if it already is."""
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(threads.number)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads.number)
