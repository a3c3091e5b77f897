"""What the allocator does with memory that was freed: keep it for the process, or give it back to the system."""

import ctypes
import platform

# Parameters of glibc's mallopt(3).
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
LARGE = 1 << 20  # bytes from which on a tensor gets pages of its own


def keep_freed_memory() -> None:
    """Stop the allocator from giving freed memory back to the system, where the allocator is glibc's.

    A step frees and asks again for a hundred megabytes; given back in between, every page of it is faulted in anew,
    which costs several per cent of a step. The process keeps its largest size until it ends.
    """
    _mallopt({TRIM_THRESHOLD: 2**31 - 1, MMAP_MAX: 0})


def return_freed_memory() -> None:
    """Give tensors pages of their own, which go back to the system with them, where the allocator is glibc's.

    Left alone it learns from the first large tensors that are freed to keep such sizes, in pieces: a model whose layers come
    and go would in the end take what all of them take together.
    """
    _mallopt({MMAP_THRESHOLD: LARGE})


def _mallopt(values: dict[int, int]) -> None:
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for parameter, value in values.items():
            libc.mallopt(parameter, value)
