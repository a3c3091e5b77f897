"""The run folder: one name, one training, one writer; stage folders are linked, never copied."""

import fcntl
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from headstart import __version__
from headstart.heads.builtin import BUILTIN_TARGETS
from headstart.heads.errors import GateFailed, StoreFailed, TrainingFailed, WrongInput
from headstart.heads.export.card import RECORD, RECORD_SCHEMA
from headstart.heads.store import atomic_path, hash_json, read_json, versions, write_json
from headstart.launch.schema import nearest

RUN_SCHEMA = "headstart.run/1"


def differing_fields(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Dotted paths at which two nested mappings differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = []
        for key in sorted({*ours, *theirs}):
            found += differing_fields(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if ours == theirs else [f"{path} ({theirs!r} there, {ours!r} here)"]


@contextmanager
def locked(folder: Path, wait_for: str = "") -> Iterator[None]:
    """Hold `folder` as its only writer; the lock goes with the process, even after `kill -9`.

    Args:
        wait_for: what the holder is doing, for a line that is printed while waiting for it; empty refuses instead.

    Raises:
        WrongInput: another process writes there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            holder = handle.read().strip() or "pid unknown"
            if not wait_for:
                raise WrongInput(
                    f"{folder} is being written by another process ({holder}).\n"
                    "Wait for it to end, stop it, or give this run another name: run.name=NAME"
                ) from None
            print(f"waiting for another process ({holder}): {wait_for}", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.truncate(0)
        handle.write(f"pid {os.getpid()}")
        handle.flush()
        yield


@dataclass
class RunFolder:
    """`<root>/<name>/`: the resolved recipe, the command, the console, links to stages, and what this run made."""

    folder: Path

    @property
    def root(self) -> Path:
        """Folder of all runs, which also holds the stage store."""
        return self.folder.parent

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def recipe(self) -> Path:
        """The resolved recipe: this run again, every setting written out."""
        return self.folder / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def eval(self) -> Path:
        return self.folder / "eval"

    def link(self, name: str, stage_folder: Path) -> None:
        """Point `<run>/<name>` at a stage folder by a relative link, so that `runs/` can be moved as a whole."""
        link = self.folder / name
        if link.exists() and not link.is_symlink():
            raise WrongInput(f"{link} is in the way of a link to {stage_folder}: move it away and run again.")
        with atomic_path(link) as temporary:
            temporary.symlink_to(os.path.relpath(stage_folder, self.folder))

    @property
    def inputs(self) -> dict[str, Any]:
        """What this name is bound to (`claim`); nothing before it is."""
        path = self.folder / "run.json"
        held: dict[str, Any] = read_json(path, RUN_SCHEMA)["inputs"] if path.exists() else {}
        return held

    def compare(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Check that this name is free or belongs to the training of these inputs; returns what it holds already.

        Raises:
            WrongInput: the name belongs to another training; the message names the differing fields.
        """
        held = self.inputs
        shared = {key: value for key, value in held.items() if key in inputs}
        differing = differing_fields({key: inputs[key] for key in shared}, shared)
        if differing:
            shown = differing[:8] + ([f"and {len(differing) - 8} more"] if len(differing) > 8 else [])
            raise WrongInput(
                f"{self.folder} belongs to another training. It differs in:\n  "
                + "\n  ".join(shown)
                + f"\nGive this run its own name (run.name={self.name}-2), or add --fresh to move the old one aside."
            )
        return held

    def claim(self, inputs: dict[str, Any]) -> None:
        """Bind this run's name to one training: everything that changes its result, as nested JSON.

        The first caller writes `run.json`; later ones must bring equal inputs. New top-level parts may be added by a
        later call (the settings are known before the parents' keys are).

        Raises:
            WrongInput: the name belongs to another training.
        """
        held = self.compare(inputs)
        merged = {**held, **inputs}
        if merged != held:
            write_json(self.folder / "run.json", {"schema": RUN_SCHEMA, "key": hash_json(merged), "inputs": merged})

    def set_aside(self) -> Path | None:
        """Rename an existing run out of the way (`--fresh`); nothing is deleted. Returns its new folder."""
        if not self.folder.exists():
            return None
        number = 1
        while (aside := self.root / f"{self.name}.old-{number}").exists():
            number += 1
        self.folder.rename(aside)
        return aside

    def write_recipe(self, text: str) -> None:
        with atomic_path(self.recipe) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_command(self) -> None:
        """Append how this run was called: time, folder, command line, versions."""
        with (self.folder / "command.txt").open("a", encoding="utf-8") as handle:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            handle.write(f"# {stamp}  headstart {__version__}  pid {os.getpid()}\n")
            handle.write(f"# {' '.join(f'{name}={value}' for name, value in versions().items())}\n")
            # Under `accelerate launch` or python the first argument is the recipe or a module, which only Python runs.
            program = [] if os.access(sys.argv[0], os.X_OK) else [sys.executable]
            handle.write(f"cd {shlex.quote(os.getcwd())}\n{shlex.join([*program, *sys.argv])}\n")

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Copy everything printed to `console.log` too."""
        with (self.folder / "console.log").open("a", encoding="utf-8", errors="replace") as log:
            stdout, stderr = sys.stdout, sys.stderr
            sys.stdout, sys.stderr = Tee(stdout, log), Tee(stderr, log)
            try:
                yield
            except BaseException as error:
                told = isinstance(error, WrongInput | GateFailed | StoreFailed | TrainingFailed | KeyboardInterrupt)
                log.write(f"{type(error).__name__}: {error}\n" if told else traceback.format_exc())
                raise
            finally:
                sys.stdout, sys.stderr = stdout, stderr


@dataclass
class Tee:
    """A text stream that also writes to a log; of a progress line redrawn by carriage returns only the last stays."""

    stream: IO[str]
    log: IO[str]
    _line: str = field(default="", repr=False)

    def write(self, text: str) -> int:
        self.stream.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self.log.write(line.rstrip("\r").rpartition("\r")[2] + "\n")
        if lines:
            self.log.flush()
        self._line = self._line if self._line.endswith("\r") else self._line.rpartition("\r")[2]
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def find_run(text: str, root: Path = Path("runs")) -> tuple[RunFolder, str | None]:
    """The run meant by a name or folder, and the checkpoint if its folder was given. An export folder means its run.

    Raises:
        WrongInput: there is no run; the message names the nearest.
    """
    path = Path(text).expanduser()
    if not path.exists():
        path = root / text
    path = path.resolve()
    if (path / "recipe.yaml").is_file():
        return RunFolder(path), None
    inside = path.parent.name if (path.parent.parent / "recipe.yaml").is_file() else ""
    if inside in ("checkpoints", "export") and path.is_dir():
        return RunFolder(path.parent.parent), path.name if inside == "checkpoints" else None
    if inside == "checkpoints":
        kept = sorted(folder.name for folder in path.parent.glob("step-*"))
        raise WrongInput(f"{text}: found no checkpoint of that name, expected one that is kept: {', '.join(kept)}.")
    expected = "expected a run's name or folder, or a checkpoint or export folder in it"
    if text in BUILTIN_TARGETS or (path / "config.json").is_file():
        raise WrongInput(
            f"{text}: found a model, {expected}.\nA target is measured with a head that was trained for it: headstart cp "
            "eagle mine.yaml begins one, headstart import makes a run of one that others published."
        )
    names = [folder.name for folder in run_folders(root)]
    near = nearest(text.rstrip("/").rpartition("/")[2], names)
    hint = f"did you mean {near}? " if near else ""
    raise WrongInput(
        f"{text}: found no run there, {expected}.\n{hint}`headstart ls runs` lists the runs in {root}; a target's name is "
        "none."
    )


def exported_checkpoint(run: RunFolder, text: str) -> dict[str, Any] | None:
    """Identity of the checkpoint that an export folder was made from; None where `text` names no export folder."""
    record = run.folder / "export" / Path(text).name / RECORD
    if Path(text).parent.name != "export" or not record.exists():
        return None
    identity: dict[str, Any] = read_json(record, RECORD_SCHEMA)["checkpoint"]
    return identity


def run_folders(root: Path) -> list[Path]:
    """Folders of all runs under `root`, the latest first."""
    found = [folder for folder in root.glob("*") if (folder / "recipe.yaml").is_file()]
    return sorted(found, key=lambda folder: -(folder / "recipe.yaml").stat().st_mtime)
