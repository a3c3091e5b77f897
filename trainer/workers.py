"""Several chunks of work at once on a CPU: one thread each, which waits for nobody.

Two threads that share every small matrix product spend much of their time waiting for each other; two that work on
chunks of their own do not. Weights are shared, and what a chunk gives does not depend on the number of workers.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from headstart.heads.target import Target
from headstart.trainer.progress import Stopped

J = TypeVar("J")
R = TypeVar("R")


def num_workers(target: Target, num_jobs: int) -> int:
    """One a CPU thread this process was given; one where the target cannot be run by several threads."""
    return max(1, min(torch.get_num_threads(), num_jobs)) if target.concurrent else 1


def in_order(
    jobs: Sequence[J],
    make_worker: Callable[[], Callable[[J], R]],
    workers: int,
    stop: Callable[[], None] = lambda: None,
) -> Generator[R, None, None]:
    """Yield the result of every job in order, computed by `workers` threads; each makes its worker once.

    Args:
        stop: called when the caller gives up (an error, Ctrl-C), so that running jobs can end early.

    Raises:
        Stopped: a worker was told to end; what others have finished of the jobs behind its own is yielded before.
    """
    if workers == 1:
        yield from map(make_worker(), jobs)
        return
    own = threading.local()
    threads = torch.get_num_threads()

    def run(job: J) -> R:
        if not hasattr(own, "worker"):
            torch.set_num_threads(1)  # of this thread
            own.worker = make_worker()
        result: R = own.worker(job)
        return result

    pool = ThreadPoolExecutor(workers, thread_name_prefix="worker")
    running: deque[Future[R]] = deque()
    try:
        for job in jobs:
            # Bounded, because finished chunks wait in memory for the ones before them.
            while len(running) > workers:
                yield running.popleft().result()
            running.append(pool.submit(run, job))
        while running:
            yield running.popleft().result()
    except Stopped:
        pool.shutdown(wait=True, cancel_futures=True)
        yield from (future.result() for future in running if not future.cancelled() and future.exception() is None)
        raise
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)
