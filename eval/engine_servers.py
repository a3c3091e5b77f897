"""Start an engine's server as a process of its own, wait until it answers, and end it, kindly or not."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from headstart.eval.engine_runs import SERVER_START_S, VLLM_ENVIRONMENT, healthy, last_lines
from headstart.heads.errors import WrongInput


class EngineServer:
    """A server at a fixed port of this machine; a context manager, which ends it."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        """`log` holds what the server prints."""
        self.command, self.log = list(command), log
        self.url = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "EngineServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGTERM)

    def start(self) -> None:
        """Start it, and return once it answers. Raises WrongInput: it does not."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | VLLM_ENVIRONMENT
        with self.log.open("ab") as log:
            # A session of its own: engines start processes, which have to end with them.
            self._process = subprocess.Popen(
                self.command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + SERVER_START_S
        while not healthy(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise WrongInput(f"{self.command[0]} did not start:\n{last_lines(self.log)}")
            time.sleep(0.5)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it and every process it started."""
        if self._process is None or self._process.poll() is not None:
            return
        os.killpg(self._process.pid, how)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def vllm_command(python: Path, target: Path, name: str, port: int, max_length: int, batch: int = 32) -> list[str]:
    """vLLM's OpenAI server for a target in float32, without what makes a small model slow to start."""
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(max_length)),
        *("--max-num-seqs", str(batch), "--enforce-eager"),
    ]
