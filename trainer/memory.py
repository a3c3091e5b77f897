"""Memory that a step frees stays with the process, for the next step to use."""

import ctypes
import platform

# Parameters of glibc's mallopt(3).
TRIM_THRESHOLD, MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Stop the allocator from giving freed memory back to the system, where the allocator is glibc's.

    A step frees and asks again for a hundred megabytes; given back in between, every page of it is faulted in anew,
    which costs several per cent of a step. The process keeps its largest size until it ends.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(MMAP_MAX, 0)
