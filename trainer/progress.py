"""One line every few seconds: how far, how fast, how long still."""

import threading
import time

INTERVAL_S = 10.0


class Stopped(Exception):
    """A worker gives up because the run is ending."""


class Progress:
    """Counts reply tokens and finished requests of a stage and prints a line now and then."""

    def __init__(self, label: str, total: int, most_tokens: float = float("inf")) -> None:
        """
        Args:
            total: requests.
            most_tokens: of a reply.
        """
        self.label = label
        self.total = total
        self.most_tokens = most_tokens
        self.tokens = 0
        self.finished = 0
        self._stopped = False
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._printed = self._began

    def add(self, tokens: int, finished: int, read: int = 0) -> None:
        """Count new tokens and finished requests, of a pass that read so many prompt tokens; called from every worker.

        Raises:
            Stopped: `stop` was called.
        """
        if self._stopped:
            raise Stopped
        with self._lock:
            self.tokens += tokens
            self.finished += finished
            now = time.monotonic()
            if now - self._printed >= INTERVAL_S:
                self._printed = now
                self._print(now)

    def stop(self) -> None:
        """End workers at their next pass."""
        self._stopped = True

    def finish(self) -> None:
        """Print the last line."""
        if self.total:
            self._print(time.monotonic())

    def left(self) -> float:
        """What is left, as a multiple of what is done, once a request is finished.

        Of many replies in progress the first to end are few and short, so work is told by tokens where there are some.
        """
        if not self.tokens:
            return (self.total - self.finished) / self.finished
        length = min(self.tokens / self.finished, self.most_tokens)
        return max(self.total * length / self.tokens - 1, 0)

    def _print(self, now: float) -> None:
        elapsed = max(now - self._began, 1e-9)
        left = ""
        if 0 < self.finished < self.total:
            left = f", about {duration(elapsed * self.left())} left"
        speed = f", {self.tokens:,} tokens at {self.tokens / elapsed:,.0f} tokens/s" if self.tokens else ""
        print(
            f"{self.label}: {self.finished:,} of {self.total:,} replies{speed}, {duration(elapsed)}{left}", flush=True
        )


def duration(seconds: float) -> str:
    """3 s, 4:05 min or 1:02:03 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"
