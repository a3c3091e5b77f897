"""Rounds in which processes answer a chunk each, until they are through or one of them is asked to stop."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TypeVar

from headstart.heads.target import Target
from headstart.trainer.interruption import Interruption, interruption
from headstart.trainer.progress import Stopped
from headstart.trainer.ranks import Ranks
from headstart.trainer.workers import in_order

J = TypeVar("J")
R = TypeVar("R")


def in_rounds(
    jobs: Sequence[J],
    make_worker: Callable[[], Callable[[J], R]],
    workers: int,
    stop: Callable[[], None],
    number: int,
    target: Target,
    ranks: Ranks,
) -> Generator[R | None, None, None]:
    """The result of one of this process's jobs a round, in order; None in a round in which it has none.

    Args:
        stop: ends running jobs early (`in_order`).
        number: of rounds, as many as the process has jobs that has the most.
        target: what the jobs run, with that of the other processes where it is spread over them.

    Raises:
        KeyboardInterrupt: one of the processes was asked to stop. What is whole then has had rounds of its own.
    """
    with (
        closing(in_order(jobs, make_worker, workers, stop)) as results,
        interruption("keeping the replies of chunks that are whole", stop) as stopping,
    ):
        left = until_stopped(results, stopping)
        for _ in range(number):
            with target.together():
                result = next(left, None)
            yield result
            if ranks.any(stopping.requested):  # a signal reaches processes in different rounds
                stopping.request()
                with target.together():
                    whole = list(left)
                while ranks.any(bool(whole)):
                    yield whole.pop(0) if whole else None
                raise KeyboardInterrupt


def until_stopped(results: Iterator[R], stopping: Interruption) -> Iterator[R]:
    """Results as they come; where it was asked to stop, that workers did is no error."""
    try:
        yield from results
    except Stopped:
        if not stopping.requested:
            raise
