"""The cache of target folders that headstart makes itself, each written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Where converted and random targets live: $HEADSTART_CACHE, $XDG_CACHE_HOME/headstart or ~/.cache/headstart."""
    if chosen := os.environ.get("HEADSTART_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headstart"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Run `build` on a temporary folder and rename it to `folder`; two processes may race, one result stays."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet_transformers():
            build(temporary)
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o644)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars and reports of loading and writing weights off the console."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
