"""Stage folders: one input, one output, and a manifest whose key hashes everything that changes the result.

A stage folder lives once under `<root>/.stages/<stage>-<key12>/` and runs link to it, so that two recipes share traffic
and features. A stage with a complete manifest of the same key is reused; a running one is continued.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart import __version__
from headstart.heads.errors import WrongInput

if TYPE_CHECKING:
    from headstart.heads.object_store import ObjectStore, StageCopy

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = "headstart.manifest/1"
STAGES = ".stages"
ABSENT = "absent"  # state of a stage that has no folder


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that replaces it on success: readers never see half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if temporary.is_file():
            with temporary.open("rb") as handle:
                os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path, *, locked: bool, of: str = "*") -> None:
    """Delete what processes that are gone left half written in `folder` (their id is in the name, see `atomic_path`).

    Args:
        locked: whether the caller is the only writer there. Then every such file is left over, also where another process
            has the id of its writer now, as it often has in a container.
        of: pattern of the names that were to be written; default: any.
    """
    for path in folder.glob(f".{of}.*.tmp"):
        writer = path.name.split(".")[-2]
        if writer.isdigit() and (locked or not _alive(int(writer))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    """Whether another process of that id runs."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path, schema: str = "") -> Any:
    """The value in a JSON file.

    Args:
        schema: which kind of our own files it has to be.

    Raises:
        WrongInput: the file is damaged, or is of another kind or version.
    """
    advice = "Restore it, or move it away and run again."
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WrongInput(f"{path}: found no JSON ({error}); the file is damaged.\n{advice}") from None
    found = value.get("schema") if isinstance(value, dict) else None
    if schema and found != schema:
        raise WrongInput(f"{path}: found schema {found!r}, expected {schema!r}.\n{advice}")
    return value


def hash_json(value: Any) -> str:
    """sha256 of canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Versions of what results depend on."""
    found = {"python": sys.version.split()[0], "headstart": __version__}
    for name in ("torch", "transformers", "accelerate", "datasets", "safetensors"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


@cache
def source_commit() -> str | None:
    """Commit of the source this runs from, `-dirty` where files differ; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass
class Stage:
    """An open stage folder. `outputs` maps file name to {"sha256", "bytes", "rows"}."""

    folder: Path
    manifest: dict[str, Any]
    since: float = field(default_factory=time.perf_counter)
    """When what is not yet in `made_by.seconds` began: the time of a killed process counts as far as it committed."""
    copy: "StageCopy | None" = None
    """Where finished files are also kept."""

    @property
    def key(self) -> str:
        return str(self.manifest["key"])

    @property
    def begun(self) -> bool:
        return bool(self.manifest["state"] != ABSENT)

    @property
    def complete(self) -> bool:
        return bool(self.manifest["state"] == "complete")

    @property
    def outputs(self) -> dict[str, dict[str, Any]]:
        outputs: dict[str, dict[str, Any]] = self.manifest["outputs"]
        return outputs

    def record(self, name: str, rows: int) -> None:
        """Commit one finished file: from here on a rerun keeps it."""
        self.put({name: self.describe(name, rows)})

    def describe(self, name: str, rows: int) -> dict[str, Any]:
        """What the manifest says of a finished file."""
        path = self.folder / name
        return {"sha256": hash_file(path), "bytes": path.stat().st_size, "rows": rows}

    def put(self, outputs: dict[str, dict[str, Any]]) -> None:
        """Commit finished files, by name, as `describe` told of them."""
        if outputs:
            self.outputs.update(outputs)
            self._write()

    def damaged(self) -> list[str]:
        """Recorded files that are not there as they were written."""
        return [name for name, output in self.outputs.items() if not is_whole(self.folder / name, output)]

    def keep_in(self, store: "ObjectStore | None") -> None:
        """Keep finished files in a store too, if there is one, under the folder's name."""
        self.copy = None if store is None else store.copy_of(self.folder.name)

    def mend(self) -> None:
        """Take what a copy has of a stage that is not whole here, and let files be made again that are whole nowhere.

        What is here and damaged is put aside, to be looked at, and what was left half written is gone. The copy then is what
        the stage is here. Nobody else may write the folder meanwhile.

        Raises:
            StoreFailed: the copy cannot be read or written.
        """
        there = self.copy.manifest(self.key) if self.copy is not None else None
        taken = there if there is not None and self._is_behind(there) else None
        self.manifest = taken or self.manifest
        damaged = self.damaged() if self.complete or self.copy is not None else []
        if damaged or not self.complete:
            remove_leftovers(self.folder, locked=True)
        if damaged and self.copy is not None:
            damaged = self.copy.fetch(self.folder, {name: self.outputs[name] for name in damaged})
        if taken is not None:  # as it was written: what it took to come is no time of the stage
            write_json(self.folder / MANIFEST, taken)
            self.since = time.perf_counter()
        self.forget(damaged, "missing or damaged")
        if self.copy is not None and not self.copy.tells(self):
            self.publish()

    def forget(self, names: list[str], reason: str) -> None:
        """Let files be made again; what is there of them is put aside, to be looked at."""
        if names:
            print(f"{self.folder}: {', '.join(names)} {reason}, put aside as *.damaged and made again")
            for name in names:
                if (file := self.folder / name).exists():
                    file.replace(file.with_name(f"{name}.damaged"))
                del self.outputs[name]
            self.manifest["state"] = "running"
            self._write()

    def _is_behind(self, there: dict[str, Any]) -> bool:
        """Whether another manifest of this stage records more."""
        return not self.complete and (there["state"] == "complete" or len(there["outputs"]) > len(self.outputs))

    def send(self, outputs: dict[str, dict[str, Any]]) -> None:
        """Put finished files of this process into the copy, if there is one; their manifest follows (`publish`)."""
        if self.copy is not None:
            self.copy.send(self.folder, outputs)

    def publish(self) -> None:
        """Bring the copy, if there is one, to where the stage is here."""
        if self.copy is not None:
            self.copy.publish(self)

    def finish(self) -> None:
        self.manifest["state"] = "complete"
        self.manifest["made_by"]["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write()
        self.publish()

    def _write(self) -> None:
        now = time.perf_counter()
        made_by = self.manifest["made_by"]
        made_by["seconds"] = made_by.get("seconds", 0.0) + now - self.since
        self.since = now
        write_json(self.folder / MANIFEST, self.manifest)


def is_whole(path: Path, output: dict[str, Any]) -> bool:
    """Whether a file is what the manifest recorded."""
    return path.is_file() and path.stat().st_size == output["bytes"] and hash_file(path) == output["sha256"]


def finished_stage(folder: Path) -> Stage:
    """A complete stage folder for reading, every file as it was written.

    Raises:
        WrongInput: no finished stage, or files that are missing or damaged.
    """
    if not (folder / MANIFEST).is_file():
        raise WrongInput(
            f"{folder}: found no stage there, expected a finished one.\nRun its recipe: headstart train RECIPE"
        )
    stage = Stage(folder, read_json(folder / MANIFEST, MANIFEST_SCHEMA))
    damaged = stage.damaged() if stage.complete else []
    if not stage.complete or damaged:
        found = f"{', '.join(damaged)} missing or damaged" if damaged else f"a stage that is {stage.manifest['state']}"
        raise WrongInput(
            f"{folder}: found {found}, expected a finished stage.\n"
            "Run its recipe again, which makes what is missing: headstart train RECIPE"
        )
    return stage


def holds(folder: Path, inputs: dict[str, Any]) -> bool:
    """Whether a folder is the finished stage of these inputs, every recorded file as it was written."""
    if not (folder / MANIFEST).is_file():
        return False
    stage = Stage(folder, read_json(folder / MANIFEST, MANIFEST_SCHEMA))
    return stage.complete and stage.key == hash_json(inputs) and not stage.damaged()


def stage_inputs(
    stage_version: int, settings: dict[str, Any], parents: dict[str, str], target: dict[str, str] | None
) -> dict[str, Any]:
    """Everything that changes a stage's result; its hash is the stage's key."""
    return {"stage_version": stage_version, "settings": settings, "parents": parents, "target": target}


def stage_folder(root: Path, stage: str, key: str) -> Path:
    return root / STAGES / f"{stage}-{key[:12]}"


def open_stage(root: Path, stage: str, inputs: dict[str, Any], seed: int) -> Stage:
    """Open the stage folder of these inputs: fresh, interrupted (continue it) or complete (reuse it).

    Raises:
        WrongInput: the folder holds a manifest of another key or of a newer schema.
    """
    found = stage_there(root, stage, inputs)
    found.folder.mkdir(parents=True, exist_ok=True)
    return found if found.begun else new_stage(found.folder, stage, inputs, seed)


def stage_there(root: Path, stage: str, inputs: dict[str, Any]) -> Stage:
    """The stage of these inputs as it stands; of one that was not begun no folder is made, and nothing is recorded.

    Raises:
        WrongInput: as `open_stage`.
    """
    key = hash_json(inputs)
    folder = stage_folder(root, stage, key)
    if not (folder / MANIFEST).exists():
        return Stage(folder, {"key": key, "inputs": inputs, "outputs": {}, "state": ABSENT})
    manifest = read_json(folder / MANIFEST, MANIFEST_SCHEMA)
    if manifest.get("key") != key:
        raise WrongInput(
            f"{folder / MANIFEST}: found key {str(manifest.get('key'))[:12]!r}, expected {key[:12]!r}.\n"
            "Move that folder away and run again."
        )
    return Stage(folder, manifest)


def new_stage(folder: Path, stage: str, inputs: dict[str, Any], seed: int) -> Stage:
    """Begin a stage in an existing folder: nothing is recorded yet."""
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "stage": stage,
        "state": "running",
        "key": hash_json(inputs),
        "inputs": inputs,
        "outputs": {},
        "made_by": {
            "headstart": __version__,
            "commit": source_commit(),
            "argv": sys.argv,
            "versions": versions(),
            "seed": seed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "finished": None,
            "seconds": 0.0,
        },
    }
    stage_ = Stage(folder, manifest)
    stage_._write()
    return stage_
