"""A server on this machine: started, asked past any proxy, and ended with all processes that it started."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.eval.engine_runs import last_lines
from headstart.heads.errors import WrongInput

SERVER_START_S, REQUEST_S, END_S = 1800, 600, 30  # beside other work an engine takes minutes to start


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class LocalServer:
    """A server's process and those it starts. As a context manager it is started, and ended politely."""

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        log: Path,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        start_s: float = SERVER_START_S,
    ) -> None:
        """`log` gets what it prints; it runs in `folder`, with `environment` in place of this process's own.

        `start_s`: seconds in which it has to be healthy.
        """
        self.command, self.url, self.log, self._start_s = list(command), url, log, start_s
        self._environment, self._folder = environment, folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "LocalServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGTERM)

    def start(self) -> None:
        """Start it, and return once it is healthy. Raises WrongInput with its last lines: it ended, or does not answer."""
        with self.log.open("ab") as log:
            # In a session of its own: engines start processes, which have to end with them.
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + self._start_s
        while not healthy(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise WrongInput(f"{self.command[0]} did not start:\n{last_lines(self.log)}")
            time.sleep(0.2)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it and every process that it started."""
        if self._process is None or self._process.poll() is not None:
            return
        os.killpg(self._process.pid, how)
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def running_server(
    command: list[str], url: str, environment: dict[str, str] | None = None, folder: Path | None = None
) -> Iterator[str]:
    """Start a server, yield its address once it is healthy, and end it.

    Raises:
        WrongInput: it ended, or does not answer; its last lines are in the message.
    """
    with (
        tempfile.TemporaryDirectory(prefix="headstart-server-") as scratch,
        LocalServer(command, url, Path(scratch) / "log", environment, folder) as server,
    ):
        try:
            yield url
        except OSError as error:
            raise WrongInput(f"{command[0]} stopped answering ({error}):\n{last_lines(server.log)}") from error


def healthy(url: str) -> bool:
    try:
        fetch(f"{url}/health")
    except (OSError, urllib.error.URLError):
        return False
    return True


def fetch(url: str, request: dict[str, Any] | None = None) -> str:
    """GET, or POST of a JSON request, past any proxy: the server is on this machine."""
    data = None if request is None else json.dumps(request).encode()
    call = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(call, timeout=REQUEST_S) as answer:
        return str(answer.read().decode())
