"""vLLM as an engine to compare with: its own Python runs `vllm_runner.py`, which stays for further jobs.

A job is one process, unbound to cores: vLLM's own split into three imports it three times, and what it binds to cores by
itself always ends up on the first ones.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.eval.engine_runs import (
    Drafts,
    Engine,
    EngineReply,
    EngineRun,
    Requests,
    accepted_per_position,
    last_lines,
)
from headstart.eval.engines_setup import install_vllm
from headstart.heads.errors import WrongInput
from headstart.heads.export.card import RECORD, RECORD_SCHEMA
from headstart.heads.export.serving import METHODS, WHOLE, loader_options
from headstart.heads.store import read_json

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",  # or the runner's own folder would shadow modules of the standard library
}
BATCH = 4
SPARE_SLOTS = 8


def vllm_environment() -> dict[str, str]:
    """This process's environment as vLLM is to have it: on a CPU, without telling anyone, with its own packages."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT


@contextmanager
def open_vllm() -> Iterator[Engine]:
    """vLLM, installed if it is not there; its process starts with the first request."""
    python = install_vllm()
    with tempfile.TemporaryDirectory(prefix="headstart-vllm-") as scratch:
        engine = Vllm(python, Path(scratch))
        try:
            yield engine
        finally:
            engine.close()


class Vllm(Engine):
    """The running process, and the folder that holds its jobs."""

    name = "vllm"

    def __init__(self, python: Path, scratch: Path) -> None:
        super().__init__()
        self.python, self.scratch = python, scratch
        self.process: subprocess.Popen[str] | None = None
        self.num_jobs = 0

    def run(self, requests: Requests, drafts: Drafts | None) -> EngineRun:
        length = drafts.length if drafts else 0
        result = self.submit(
            {
                "model": str(requests.target),
                "prompts": requests.prompts,
                "max_new_tokens": requests.max_new_tokens,
                # Near the longest length it has, vLLM stops drafting for the whole batch.
                "max_model_len": max(map(len, requests.prompts)) + requests.max_new_tokens + 2 * length + SPARE_SLOTS,
                "stop_ids": requests.stop_ids,
                "batch": BATCH,
                "speculative_config": self.speculative_config(drafts) if drafts else None,
                "loader": loader_options(read_json(drafts.folder / RECORD, RECORD_SCHEMA)) if drafts else {},
            }
        )
        replies = [
            EngineReply(r["token_ids"], len(r["accepted"]), accepted_per_position(r["accepted"], length))
            for r in result["replies"]
        ]
        if drafts:
            counted = result["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
            summed = [sum(reply.accepted_K[k] for reply in replies) for k in range(length)]
            if list(counted) != summed:
                raise WrongInput(f"vLLM counts {counted} accepted per position in all, {summed} over its requests.")
        return EngineRun(self.name, result["version"], replies)

    def speculative_config(self, drafts: Drafts) -> dict[str, Any]:
        """The method by its name, and the folder by a path that says nothing: vLLM takes words in it for methods."""
        config = {"method": METHODS[drafts.kind][self.name], "num_speculative_tokens": drafts.length}
        if drafts.kind in WHOLE:
            return config
        link = self.scratch / f"head-{self.num_jobs}"
        link.symlink_to(drafts.folder.resolve())
        return {**config, "model": str(link)}

    def submit(self, job: dict[str, Any]) -> Any:
        """The result of a job; a process that ended is started anew."""
        log_file, job_file, result_file = (
            self.scratch / name for name in ("log", f"job-{self.num_jobs}.json", f"result-{self.num_jobs}.json")
        )
        self.num_jobs += 1
        job_file.write_text(json.dumps(job))
        if self.process is None or self.process.poll() is not None:
            environment = vllm_environment()
            with log_file.open("w") as log:
                self.process = subprocess.Popen(
                    [self.python, Path(__file__).with_name("vllm_runner.py")],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
        assert self.process.stdin is not None
        print(json.dumps([str(job_file), str(result_file)]), file=self.process.stdin, flush=True)
        while not result_file.exists():
            if self.process.poll() is not None:
                raise WrongInput(f"vLLM ended with code {self.process.returncode}:\n{last_lines(log_file)}")
            time.sleep(0.1)
        return json.loads(result_file.read_text())

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()
