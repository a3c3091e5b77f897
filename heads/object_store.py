"""Copies of stage folders in an object store (`run.store`), reached through fsspec: `<url>/<stage>-<key12>/<file>`.

A file goes there before the manifest that names it, so no reader meets a manifest of what is not there. What comes back is
held against the sha256 of its manifest: a file that is lost or damaged there is made again, as a damaged one here is.
"""

import errno
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headstart.heads.errors import StoreFailed, WrongInput
from headstart.heads.store import MANIFEST, MANIFEST_SCHEMA, atomic_path, is_whole

if TYPE_CHECKING:
    from headstart.heads.store import Stage

T = TypeVar("T")
Outputs = Mapping[str, dict[str, Any]]
ATTEMPTS = 5
PAUSE = 1.0  # seconds before the second attempt; twice as long before each further one
TRANSFERS = 8  # files that come at a time
ACCESS = (
    "Name a place that this user may read, write and delete in. Credentials come from the environment or the configuration "
    "files of the store's package."
)
LOCAL_SCHEMES = ("file", "local")
HOPELESS = (PermissionError, NotADirectoryError, IsADirectoryError, ImportError)
HERE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # this machine's disk is full: no fault of the store


class ObjectStore:
    """A folder of a store that fsspec reaches; who may use it is told by the environment, never by the URL."""

    def __init__(self, url: str) -> None:
        """Nothing is asked of the store yet.

        Raises:
            WrongInput: fsspec knows no such scheme, or its package is not installed.
        """
        from fsspec.core import url_to_fs

        scheme = url.partition("://")[0]
        self.url = url.rstrip("/")
        self._is_folder = scheme in LOCAL_SCHEMES
        try:
            # Object stores have no folders to make; asked to, some try to make the bucket.
            self._files, self._root = url_to_fs(self.url, **({"auto_mkdir": True} if self._is_folder else {}))
        except (ImportError, ValueError) as error:
            raise WrongInput(
                f"run.store: found {self.url}, expected a store that can be reached here: {first_line(error)}.\n"
                "Object stores need their own package, for example: pip install s3fs (s3://), gcsfs (gs://), adlfs (abfs://)"
            ) from None

    def check(self) -> None:
        """Write a small file, read it and remove it.

        Raises:
            WrongInput: the store cannot be reached, or not be written.
        """
        probe, content = f"{self._root}/.probe-{uuid.uuid4().hex}", b"headstart"
        try:
            if self._is_folder:
                self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(probe, content)
            found = self._files.cat_file(probe)
            self._files.rm_file(probe)
        except Exception as error:
            raise WrongInput(f"run.store: {self._said(error)}\n{ACCESS}") from None
        if found != content:
            raise WrongInput(f"run.store: found {found[:20]!r} in {self.url} where {content!r} was put.\n{ACCESS}")

    def copy_of(self, stage: str) -> "StageCopy":
        """The copy of the stage folder of that name."""
        return StageCopy(self, stage)

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None where there is none."""
        try:
            content: bytes = self._tried(lambda: self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        return content

    def get(self, name: str, path: Path) -> bool:
        """Bring a file to `path`; whether there is one."""
        try:
            self._tried(lambda: self._files.get_file(f"{self._root}/{name}", str(path)))
        except FileNotFoundError:
            return False
        return True

    def put(self, path: Path, name: str) -> None:
        """Copy a file into the store: whole, or not at all."""
        place = f"{self._root}/{name}"

        def put() -> None:
            if not self._is_folder:  # a store puts objects whole; a folder has files while they are written
                self._files.put_file(str(path), place)
                return
            self._files.put_file(str(path), temporary := f"{place}.{uuid.uuid4().hex}.tmp")
            self._files.mv(temporary, place)

        try:
            self._tried(put)
        except FileNotFoundError as error:
            raise StoreFailed(self._said(error)) from None

    def _tried(self, transfer: Callable[[], T]) -> T:
        """The result of a transfer, tried a few times where that can help.

        Raises:
            FileNotFoundError: there is no such file.
            StoreFailed: the store does not answer, or refuses.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return transfer()
            except FileNotFoundError:
                raise
            except Exception as error:  # every store has errors of its own
                if isinstance(error, OSError) and error.errno in HERE:
                    raise
                if isinstance(error, HOPELESS) or attempt == ATTEMPTS:
                    raise StoreFailed(self._said(error)) from None
            time.sleep(PAUSE * 2 ** (attempt - 1))

    def _said(self, error: Exception) -> str:
        return f"{self.url} cannot be used: {type(error).__name__}: {first_line(error)}"


def object_store(url: str) -> ObjectStore | None:
    """The store of a URL (`run.store`); none where that is empty."""
    return ObjectStore(url) if url else None


class StageCopy:
    """One stage folder's copy in a store, as far as this process knows it."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store, self.name = store, name
        self.outputs: dict[str, dict[str, Any]] = {}
        """Files that are there, as they were described."""
        self._state = ""

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.name}"

    def manifest(self, key: str) -> dict[str, Any] | None:
        """The manifest there; None where there is none that can be read.

        Raises:
            WrongInput: it is of another key or schema, or names files outside its folder.
        """
        content = self.store.read(f"{self.name}/{MANIFEST}")
        if content is None:
            return None
        try:
            found: dict[str, Any] = json.loads(content)
        except ValueError:  # broken off, in a folder; stores put whole objects
            print(f"{self.url}/{MANIFEST}: found no JSON; nothing is taken from there, and it is written again")
            return None
        if (found.get("schema"), found.get("key")) != (MANIFEST_SCHEMA, key):
            raise WrongInput(
                f"{self.url}/{MANIFEST}: found {found.get('schema')!r} of the key {str(found.get('key'))[:12]!r}, expected "
                f"{MANIFEST_SCHEMA!r} of {key[:12]!r}.\nMove that folder away, or name another store: run.store=URL"
            )
        if outside := [name for name in found["outputs"] if Path(name).name != name]:
            raise WrongInput(f"{self.url}/{MANIFEST}: found the file {outside[0]!r}, expected names without folders.")
        self.outputs, self._state = dict(found["outputs"]), found["state"]
        return found

    def fetch(self, folder: Path, outputs: Outputs) -> list[str]:
        """Bring recorded files into a stage folder.

        Returns:
            Names of those that are not there as they were written.
        """
        if not outputs:
            return []

        def bring(name: str) -> bool:
            try:
                with atomic_path(folder / name) as temporary:
                    if not self.store.get(f"{self.name}/{name}", temporary) or not is_whole(temporary, outputs[name]):
                        raise NotWhole
            except NotWhole:
                return False
            return True

        print(f"{len(outputs):,} files, {num_bytes(outputs):,} bytes, are looked for in {self.url}", flush=True)
        with ThreadPoolExecutor(TRANSFERS) as transfers:
            came = dict(zip(outputs, transfers.map(bring, outputs), strict=True))
        if lost := [name for name, whole in came.items() if not whole]:
            print(f"{self.url}: {', '.join(lost)} missing or damaged")
        return lost

    def send(self, folder: Path, outputs: Outputs) -> None:
        """Put finished files there that are not there yet.

        Raises:
            StoreFailed: the store does not take them.
        """
        for name, output in unlike(outputs, self.outputs).items():
            self.store.put(folder / name, f"{self.name}/{name}")
            self.outputs[name] = output

    def others_sent(self, outputs: Iterable[Outputs]) -> None:
        """Note files that other processes have put there."""
        for theirs in outputs:
            self.outputs.update(theirs)

    def publish(self, stage: "Stage") -> None:
        """Put the manifest there, after every file that it names.

        Raises:
            StoreFailed: as `send`.
        """
        self.send(stage.folder, stage.outputs)
        self.outputs, self._state = dict(stage.outputs), stage.manifest["state"]
        self.store.put(stage.folder / MANIFEST, f"{self.name}/{MANIFEST}")

    def tells(self, stage: "Stage") -> bool:
        """Whether the manifest there is that of the stage as it stands here."""
        return (self.outputs, self._state) == (stage.outputs, stage.manifest["state"])


def unlike(outputs: Outputs, others: Outputs) -> dict[str, dict[str, Any]]:
    """Files that are not recorded alike in `others`."""
    return {name: output for name, output in outputs.items() if others.get(name) != output}


class NotWhole(Exception):
    """A file in the store is not what was put there."""


def num_bytes(outputs: Outputs) -> int:
    return sum(output["bytes"] for output in outputs.values())


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
