"""llama.cpp's server as an engine to compare with: GGUF files by its converter, and a server that answers one by one."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.eval.engine_runs import Drafts, Engine, EngineReply, EngineRun, Requests
from headstart.eval.engines_setup import LlamaCpp, engines_folder, install_llamacpp
from headstart.eval.local_server import fetch, free_port, running_server
from headstart.heads.errors import WrongInput
from headstart.heads.export.serving import BESIDE_TARGET, METHODS
from headstart.heads.store import hash_json

SPARE_SLOTS = 64


@contextmanager
def open_llamacpp() -> Iterator[Engine]:
    """llama.cpp, built if it is not there."""
    llamacpp = install_llamacpp()
    with tempfile.TemporaryDirectory(prefix="headstart-gguf-") as scratch:
        yield LlamaCppServer(llamacpp, Path(scratch))


class LlamaCppServer(Engine):
    """The built server and converter. Files of targets are kept for other runs, those of heads are not.

    Replies end at the end-of-generation tokens that llama.cpp finds in the target's vocabulary.
    """

    name = "llamacpp"

    def __init__(self, llamacpp: LlamaCpp, scratch: Path) -> None:
        super().__init__()
        self.llamacpp, self.scratch = llamacpp, scratch

    def run(self, requests: Requests, drafts: Drafts | None) -> EngineRun:
        prompts, limit, length = requests.prompts, requests.max_new_tokens, drafts.length if drafts else 0
        options = ["--ctx-size", max(map(len, prompts)) + limit + length + SPARE_SLOTS, "--parallel", 1]
        options += ["--threads", 1, "--cache-ram", 0, "--no-warmup", "--metrics"]
        options += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
        options += self.draft_options(requests.target, drafts) if drafts else []
        replies = []
        with llama_server(self.llamacpp, self.converted_target(requests.target), options) as url:
            before = llama_counters(url, length)
            for prompt in prompts:
                request = {
                    "prompt": prompt,
                    "n_predict": limit,
                    "temperature": 0,
                    "cache_prompt": False,
                    "return_tokens": True,
                }
                answer = json.loads(fetch(f"{url}/completion", request))
                after = llama_counters(url, length)
                num_drafts, *accepted_K = counted_since(before, after)
                replies.append(EngineReply(answer["tokens"], num_drafts, accepted_K))
                before = after
        return EngineRun(self.name, self.llamacpp.version, replies)

    def draft_options(self, target: Path, drafts: Drafts) -> list[Any]:
        beside = target if drafts.kind in BESIDE_TARGET else None
        head = self.scratch / "head.gguf"
        head.unlink(missing_ok=True)
        convert_to_gguf(self.llamacpp, drafts.folder, head, beside)
        options = ["--model-draft", head, "--spec-type", METHODS[drafts.kind][self.name]]
        options += ["--spec-draft-n-max", drafts.length, "--spec-draft-n-min", 0, "--spec-draft-p-min", 0]
        options += ["--spec-draft-threads", 1, "--spec-draft-type-k", "f32", "--spec-draft-type-v", "f32"]
        return options

    def converted_target(self, folder: Path) -> Path:
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
        identity = hash_json([str(folder), files])
        return convert_to_gguf(self.llamacpp, folder, engines_folder() / "gguf" / f"target-{identity[:12]}.gguf")


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
        hint = "\nInstall what it imports: pip install -e '.[engines]'" if "ModuleNotFoundError" in done.stdout else ""
        said = "\n".join(done.stdout.splitlines()[-12:])
        raise WrongInput(f"llama.cpp's converter could not read {folder}:\n{said}{hint}")
    os.replace(temporary, out)
    return out


@contextmanager
def llama_server(llamacpp: LlamaCpp, target: Path, options: list[Any]) -> Iterator[str]:
    """Yield the address of a running server that holds `target`."""
    port = free_port()
    command = [llamacpp.server, "--model", target, "--host", "127.0.0.1", "--port", port, *options]
    with running_server([str(word) for word in command], f"http://127.0.0.1:{port}") as url:
        yield url


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
