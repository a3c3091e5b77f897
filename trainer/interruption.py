"""Ctrl-C and a polite kill end training between two steps, with a checkpoint."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 2.0  # seconds in which a second signal is the first one: a launcher sends on what a terminal has sent to all


class Interruption:
    """Whether the user asked to stop. The first signal waits for the step's end, the second one does not."""

    def __init__(self) -> None:
        self.requested = False
        self.since = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self.since > ECHO:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self.since = True, now
            print(f"\n{signal.Signals(number).name}: saving after this step; once more stops at once", flush=True)


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Catch the signals while training runs. Outside the main thread signals cannot be caught and act as usual."""
    state = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    previous = {number: signal.signal(number, state.handle) for number in SIGNALS}
    try:
        yield state
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
