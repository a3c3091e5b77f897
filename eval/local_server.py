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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.eval.engine_runs import last_lines
from headstart.heads.errors import WrongInput

SERVER_START_S, REQUEST_S = 600, 600


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running_server(
    command: list[str], url: str, environment: dict[str, str] | None = None, folder: Path | None = None
) -> Iterator[str]:
    """Start a server, yield its address once it is healthy, and end it with all processes that it started.

    Raises:
        WrongInput: it ended, or does not answer; its last lines are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="headstart-server-") as scratch:
        log_file = Path(scratch) / "log"
        with log_file.open("w") as log:
            server = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
            )
        try:
            deadline = time.monotonic() + SERVER_START_S
            while not healthy(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise WrongInput(f"{command[0]} did not start:\n{last_lines(log_file)}")
                time.sleep(0.2)
            try:
                yield url
            except OSError as error:
                raise WrongInput(f"{command[0]} stopped answering ({error}):\n{last_lines(log_file)}") from error
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()


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
