"""Curves in Weights & Biases, offline unless logged in. A tracker never fails a run; metrics.jsonl is the record."""

import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headstart.trainer.settings import TrackingSettings


class Tracker:
    """One W&B run in the run's own folder (`wandb/`), or nothing. It stops at its first error and says so once."""

    def __init__(self, run: Any = None) -> None:
        self.run = run

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def log(self, line: dict[str, Any]) -> None:
        """Show one line of metrics.jsonl under the same keys."""
        values = {k: v for k, v in line.items() if k not in ("step", "time", "stage") and isinstance(v, int | float)}
        self._attempt(lambda run: run.log(values, step=line["step"]))

    def finish(self) -> None:
        """Close the run and wait until its record is on the disk, which `Run.finish` alone does not."""
        self._attempt(_close)
        self.run = None

    def _attempt(self, call: Any) -> None:
        if self.run is None:
            return
        try:
            call(self.run)
        except Exception as error:  # whatever the client or its service does, training goes on
            print(f"tracking stops ({type(error).__name__}: {error}); metrics.jsonl goes on")
            self.run = None


def _close(run: Any) -> None:
    import wandb

    run.finish()
    wandb.teardown()


def start_tracker(
    settings: TrackingSettings | None,
    folder: Path,
    name: str,
    config: dict[str, Any] | None,
    earlier: list[dict[str, Any]],
) -> Tracker:
    """Open a W&B run named `name` in `folder`; without settings, or where W&B does not start, a tracker of nothing.

    A resumed training opens a new run of the same group and shows the `earlier` lines again: the client cannot continue
    an offline run without a later sync losing steps.
    """
    if settings is None or not settings.wandb or os.environ.get("WANDB_MODE") == "disabled":
        return Tracker()
    try:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        import wandb

        run = wandb.init(
            project=settings.project,
            name=name,
            group=name,
            dir=folder,
            mode=tracking_mode(),
            config=config,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
    except Exception as error:
        print(f"tracking is off ({type(error).__name__}: {error}); metrics.jsonl goes on")
        return Tracker()
    tracker = Tracker(run)
    for line in earlier:
        tracker.log(line)
    return tracker


def tracking_mode() -> Any:
    """What WANDB_MODE asks for; else online where a key is at hand, and offline where a login would be asked for."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        known = None
    return "online" if known else "offline"
