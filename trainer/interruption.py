"""Ctrl-C and a polite kill end what can be continued at a place where it can, and everything else at once."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 2.0  # seconds in which a second signal is the first one: a launcher sends on what a terminal has sent to all
Handler = Callable[[int, FrameType | None], None]


class Interruption:
    """Whether the user asked to stop. The first signal waits for what `told` says, the second one does not."""

    def __init__(self, told: str, stop: Callable[[], None]) -> None:
        """`stop` is called by the first signal, in the midst of whatever the main thread does."""
        self.requested = False
        self._since = 0.0
        self._told, self._stop = told, stop

    def request(self) -> None:
        if not self.requested:
            self.requested, self._since = True, time.monotonic()
            self._stop()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and time.monotonic() - self._since > ECHO:
            raise KeyboardInterrupt
        if not self.requested:
            print(f"\n{signal.Signals(number).name}: {self._told}; once more stops at once", flush=True)
            self.request()


@contextmanager
def interruption(
    told: str = "saving after this step", stop: Callable[[], None] = lambda: None
) -> Iterator[Interruption]:
    """Catch the signals while something runs that is to end in good order."""
    state = Interruption(told, stop)
    with handled(SIGNALS, state.handle):
        yield state


@contextmanager
def polite_kill() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, where nothing else is said."""
    with handled((signal.SIGTERM,), signal.default_int_handler):
        yield


@contextmanager
def handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    """Handle signals here. Outside the main thread they cannot be caught and act as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
