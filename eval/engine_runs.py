"""Run an exported head in vLLM and in llama.cpp's server: token ids in; replies and what was drafted and accepted out.

Both run in float32 and greedily, with their confidence cut-offs off, so that their counts can be compared with ours.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.eval.engines_setup import LlamaCpp
from headstart.heads.errors import WrongInput

VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONSAFEPATH": "1",  # or the runner's own folder would shadow modules of the standard library
}
SERVER_START_S, REQUEST_S = 300, 600


@dataclass
class EngineReply:
    """One reply: how many drafts were verified for it, and how many of them reached each position."""

    token_ids: list[int]
    num_drafts: int
    accepted_K: list[int]  # drafts whose position k was accepted


@dataclass
class EngineRun:
    engine: str  # vllm | llamacpp
    version: str
    replies: list[EngineReply]


def accepted_per_position(accepted: Sequence[int], draft_length: int) -> list[int]:
    """Drafts that were accepted beyond position k, from the number accepted at every step."""
    return [sum(count > k for count in accepted) for k in range(draft_length)]


def run_vllm(
    python: Path,
    target: Path,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: list[int],
    head: Path | None = None,
    draft_length: int = 0,
    method: str = "",
    batch: int = 4,
) -> EngineRun:
    """Generate in vLLM; without a head it decodes plainly, else by the method that the head is called there.

    Raises:
        WrongInput: vLLM ended with an error; its last lines are in the message.
    """
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": draft_length} if head else None
    job = {
        "model": str(target),
        "dtype": "float32",
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "max_model_len": max(map(len, prompts)) + max_new_tokens + draft_length + 8,
        "stop_ids": stop_ids,
        "batch": batch,
        "speculative_config": speculative,
    }
    with tempfile.TemporaryDirectory(prefix="headstart-vllm-") as scratch:
        job_file, result_file, log_file = (Path(scratch) / name for name in ("job.json", "result.json", "log"))
        job_file.write_text(json.dumps(job))
        command = [python, Path(__file__).with_name("vllm_runner.py"), job_file, result_file]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | VLLM_ENVIRONMENT
        with log_file.open("w") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0 or not result_file.exists():
            raise WrongInput(f"vLLM ended with code {done.returncode}:\n{last_lines(log_file)}")
        result = json.loads(result_file.read_text())
    replies = [
        EngineReply(r["token_ids"], len(r["accepted"]), accepted_per_position(r["accepted"], draft_length))
        for r in result["replies"]
    ]
    if head:
        counted = result["counters"]["vllm:spec_decode_num_accepted_tokens_per_pos"]
        summed = [sum(reply.accepted_K[k] for reply in replies) for k in range(draft_length)]
        if list(counted) != summed:
            raise WrongInput(f"vLLM counts {counted} accepted per position in all, {summed} over its requests.")
    return EngineRun("vllm", result["version"], replies)


def convert_to_gguf(llamacpp: LlamaCpp, folder: Path, out: Path, target: Path | None = None) -> Path:
    """Write a target, or a head that names its target, as a float32 GGUF file; an existing file is kept."""
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.stem}.{os.getpid()}.gguf")
    command = [sys.executable, str(llamacpp.convert), str(folder), "--outtype", "f32", "--outfile", str(temporary)]
    command += ["--target-model-dir", str(target)] if target else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        raise WrongInput(f"llama.cpp could not convert {folder}:\n" + "\n".join(done.stdout.splitlines()[-12:]))
    os.replace(temporary, out)
    return out


def run_llamacpp(
    llamacpp: LlamaCpp,
    target: Path,
    prompts: list[list[int]],
    max_new_tokens: int,
    head: Path | None = None,
    draft_length: int = 0,
) -> EngineRun:
    """Generate in llama.cpp's server from GGUF files, one request at a time; without a head it decodes plainly.

    Replies end at the end-of-generation tokens that llama.cpp finds in the target's vocabulary.
    """
    context = max(map(len, prompts)) + max_new_tokens + draft_length + 64
    options = ["--ctx-size", context, "--parallel", 1, "--threads", 1, "--cache-ram", 0, "--no-warmup", "--metrics"]
    options += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    if head:
        options += ["--model-draft", head, "--spec-type", "draft-eagle3", "--spec-draft-n-max", draft_length]
        options += ["--spec-draft-n-min", 0, "--spec-draft-p-min", 0, "--spec-draft-threads", 1]
        options += ["--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
    replies = []
    with llama_server(llamacpp, target, options) as url:
        before = llama_counters(url, draft_length)
        for prompt in prompts:
            request = {
                "prompt": prompt,
                "n_predict": max_new_tokens,
                "temperature": 0,
                "cache_prompt": False,
                "return_tokens": True,
            }
            answer = json.loads(fetch(f"{url}/completion", request))
            after = llama_counters(url, draft_length)
            num_drafts, *accepted_K = counted_since(before, after)
            replies.append(EngineReply(answer["tokens"], num_drafts, accepted_K))
            before = after
    return EngineRun("llamacpp", llamacpp.version, replies)


@contextmanager
def llama_server(llamacpp: LlamaCpp, target: Path, options: list[Any]) -> Iterator[str]:
    """Yield the address of a running server that holds `target`."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="headstart-llama-") as scratch:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [llamacpp.server, "--model", target, "--host", "127.0.0.1", "--port", port, *options]
        log_file = Path(scratch) / "log"
        with log_file.open("w") as log:
            server = subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT)
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + SERVER_START_S
            while not healthy(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise WrongInput(f"llama-server did not start:\n{last_lines(log_file)}")
                time.sleep(0.2)
            try:
                yield url
            except OSError as error:
                raise WrongInput(f"llama-server stopped answering ({error}):\n{last_lines(log_file)}") from error
        finally:
            server.terminate()
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


def llama_counters(url: str, draft_length: int) -> list[int]:
    """Drafts verified since the server started, then drafts accepted at each position."""
    text = fetch(f"{url}/metrics")
    names = ["spec_decode_num_drafts_total"]
    names += [f'spec_decode_num_accepted_tokens_per_pos_total{{position="{k}"}}' for k in range(draft_length)]
    found = [re.search(rf"^llamacpp:{re.escape(name)} (\S+)$", text, re.MULTILINE) for name in names]
    return [int(float(match[1])) if match else 0 for match in found]


def counted_since(before: list[int], after: list[int]) -> list[int]:
    """What was counted between two readings of counters that a server keeps from its start on.

    Raises:
        WrongInput: a counter went back, so the server was started anew between the readings.
    """
    if any(new < old for new, old in zip(after, before, strict=True)):
        raise WrongInput(
            f"the server's counters went back, from {before} to {after}: it was restarted or they were reset while it was "
            "measured.\nMeasure again, on a server that nobody else stops."
        )
    return [new - old for new, old in zip(after, before, strict=True)]


def last_lines(file: Path, count: int = 25) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-count:])
