"""How long an optimiser step takes here: a few are made with a head that is thrown away."""

import statistics
import time

from headstart.heads.memory import keep_freed_memory
from headstart.trainer.loop import Job, optimizer_step

UNTIMED = 2  # first steps meet new shapes and empty caches


def seconds_per_step(job: Job, num_steps: int) -> float:
    """Median time of the job's first steps, after those that are not timed. Its head is changed, and of no more use."""
    keep_freed_memory()
    seconds = []
    for step in range(1, UNTIMED + num_steps + 1):
        began = time.perf_counter()
        optimizer_step(job, step)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[UNTIMED:])
