"""Traffic through a real server that is killed while it answers, against an uninterrupted run and against local replies.

    python bench/served.py [--engine vllm] [--prompts 2000] [--kills 2] [--max-new-tokens 32] [--target NAME] [--out FOLDER]

Replies are greedy and in float32; the target is a small random one unless named (llama.cpp converts no tokenizer that it
does not know: --target smollm2-135m). No prompt may be lost or doubled. A reply that differs has to part at a near tie,
judged in float64, and of the two served runs fewer than one reply in a thousand may; otherwise the exit code is 1.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as parquet

from headstart.eval.engines_setup import install_llamacpp, install_vllm
from headstart.eval.identity import Rescorer
from headstart.eval.llamacpp_engine import convert_to_gguf
from headstart.eval.local_server import LocalServer, fetch, free_port
from headstart.eval.vllm_engine import vllm_environment
from headstart.heads.builtin import resolve_model
from headstart.heads.paths import Path as ReplyPath
from headstart.heads.paths import Prompt, read_part
from headstart.heads.settings import TargetSettings
from headstart.heads.store import Stage, open_stage
from headstart.heads.target import TargetLoader
from headstart.trainer.settings import ServerSettings, TrafficSettings
from headstart.trainer.templates import builtin_prompts
from headstart.trainer.traffic import make_traffic

MODEL, CONTEXT, SLOTS, NUM_CHATS, MAX_SHARE = "target", 1024, 8, 50, 0.001


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "llamacpp"])
    parser.add_argument("--target", default="", help="name or folder of a target (default: a small random one)")
    parser.add_argument("--out", type=Path, help="folder that is kept (default: a temporary one)")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="headstart-served-"))
    out.mkdir(parents=True, exist_ok=True)
    target = resolve_model(options.target) if options.target else write_target(out / "target")
    port = free_port()
    command, url = server_command(options.engine, target, out, port), f"http://127.0.0.1:{port}"
    environment = vllm_environment()
    prompts = short_prompts(TargetLoader(settings_of(target)), options.prompts)
    local = TrafficSettings(max_new_tokens=options.max_new_tokens, max_prompt_tokens=400, slots=32, chunk=256)
    server = ServerSettings(urls=[url], engine=options.engine, model=MODEL)
    served = TrafficSettings(**{**vars(local), "backend": "openai", "server": server})
    with LocalServer(command, url, out / "server.log", environment) as engine:
        whole = timed("uninterrupted", out / "whole", target, prompts, served)
        as_chat = options.engine != "vllm" or asked_as_chat(engine.url, prompts, whole, options.max_new_tokens)
        with killing(engine, out / "killed", options.kills) as kills:
            killed = timed("killed", out / "killed", target, prompts, served)
    print(f"the server was killed {len(kills)} times, when {', '.join(map(str, kills))} chunks were recorded")
    here = timed("local", out / "local", target, prompts, local)
    loader = TargetLoader(settings_of(target))
    rescorer = Rescorer(loader("float32"))
    fine = as_chat
    fine &= report("killed against uninterrupted", prompts, whole, killed, rescorer, MAX_SHARE)
    fine &= report("served against local", prompts, here, whole, rescorer, 1.0)
    if options.out is None:
        shutil.rmtree(out)
    sys.exit(0 if fine and len(kills) == options.kills else 1)


def server_command(engine: str, target: Path, out: Path, port: int) -> list[str]:
    """What starts a server of the target in float32, without what makes a small model slow to start."""
    if engine == "vllm":
        options = ["-m", "vllm.entrypoints.openai.api_server", "--model", target, "--served-model-name", MODEL]
        options += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--max-model-len", CONTEXT]
        options += ["--max-num-seqs", 32, "--enforce-eager"]
        return [str(word) for word in (install_vllm(), *options)]
    llamacpp = install_llamacpp()
    file = convert_to_gguf(llamacpp, target, out / "target.gguf")
    options = ["--model", file, "--alias", MODEL, "--host", "127.0.0.1", "--port", port, "--threads", 1, "--no-warmup"]
    options += ["--ctx-size", SLOTS * CONTEXT, "--parallel", SLOTS, "--cache-ram", 0]
    options += ["--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off"]
    return [str(word) for word in (llamacpp.server, *options)]


def write_target(folder: Path) -> Path:
    """A random Llama with the tokenizer of `tiny`, and heads as wide as engines on a CPU have kernels for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not folder.exists():
        shutil.copytree(resolve_model("tiny"), folder)
        config = AutoConfig.from_pretrained(folder)
        config.hidden_size, config.head_dim, config.intermediate_size = 256, 64, 384
        torch.manual_seed(11)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def settings_of(target: Path) -> TargetSettings:
    return TargetSettings(model=str(target), dtype="float32", device="cpu")


def short_prompts(loader: TargetLoader, number: int) -> list[Prompt]:
    """Built-in prompts of at most 400 tokens, with a few held out, whose replies are always local."""
    everything = [prompt for prompt in builtin_prompts() if len(loader.render(prompt)) <= 400]
    held = [Prompt(p.route, p.messages, "heldout") for p in everything[number : number + 8]]
    return everything[:number] + held


def timed(name: str, root: Path, target: Path, prompts: list[Prompt], settings: TrafficSettings) -> Stage:
    stage = open_stage(root, "prompts", {"number": len(prompts)}, seed=0)
    with (stage.folder / "prompts.jsonl").open("w") as handle:
        for p in prompts:
            row = {"id": p.prompt_id, "route": p.route, "split": p.split, "messages": list(p.messages), "reply": None}
            handle.write(json.dumps({**row, "template_kwargs": p.template_kwargs}) + "\n")
    stage.record("prompts.jsonl", len(prompts))
    stage.finish()
    began = time.perf_counter()
    traffic, _ = make_traffic(TargetLoader(settings_of(target)), stage, settings, root)
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    return traffic


class killing:
    """Kill the server each time some more chunks are recorded under `root`, and start it again."""

    def __init__(self, engine: LocalServer, root: Path, times: int) -> None:
        self.engine, self.root, self.times, self.kills = engine, root, times, []  # type: ignore[var-annotated]
        self._thread, self._ended = threading.Thread(target=self._watch, daemon=True), threading.Event()

    def __enter__(self) -> list[int]:
        self._thread.start()
        return self.kills

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while len(self.kills) < self.times and not self._ended.wait(0.2):
            parts = len(list(self.root.glob(".stages/traffic-*/part-*.parquet")))
            if parts > 2 * len(self.kills):
                self.kills.append(parts)
                self.engine.kill()
                time.sleep(3)
                self.engine.start()


def asked_as_chat(url: str, prompts: list[Prompt], stage: Stage, max_new_tokens: int) -> bool:
    """Whether vLLM, given the messages, reports the prompt ids that are recorded: what training sees is what is served."""
    paths = train_paths(stage)
    asked = [prompt for prompt in prompts if prompt.prompt_id in paths][:NUM_CHATS]
    same_prompts = same_replies = 0
    for prompt in asked:
        request = {"model": MODEL, "messages": list(prompt.messages), "max_tokens": max_new_tokens, "temperature": 0}
        answer = json.loads(fetch(f"{url}/v1/chat/completions", {**request, "return_token_ids": True}))
        path, choice = paths[prompt.prompt_id], answer["choices"][0]
        same_prompts += answer["prompt_token_ids"] == path.prompt_token_ids
        same_replies += choice["token_ids"] == path.token_N[path.num_prompt_tokens :].tolist()
    print(
        f"asked as chats: {same_prompts} of {len(asked)} prompts and {same_replies} replies have the recorded token ids"
    )
    return same_prompts == len(asked)


def report(name: str, prompts: list[Prompt], first: Stage, second: Stage, rescorer: Rescorer, most: float) -> bool:
    """Print lost, doubled and different replies of the training split; whether they are as they have to be.

    Args:
        most: share of replies that may differ, by near ties.
    """
    one, two = train_paths(first), train_paths(second)
    expected = {prompt.prompt_id for prompt in prompts if prompt.split == "train"}
    ids = Counter(
        row["prompt_id"]
        for part in sorted(second.outputs)
        for row in parquet.read_table(second.folder / part).to_pylist()
        if row["split"] == "train"
    )
    lost, doubled = expected - ids.keys(), [i for i, number in ids.items() if number > 1]
    differences = []
    for prompt_id, path in one.items():
        other = two[prompt_id]
        replies = [p.token_N[p.num_prompt_tokens :].tolist() for p in (path, other)]
        if found := rescorer.judge(prompt_id, path.prompt_token_ids, *replies):
            differences.append(found)
    ties = sum(found.verdict == "tie" for found in differences)
    share = len(differences) / len(one)
    fine = not lost and not doubled and ties == len(differences) and share <= most
    print(
        f"{name}: {len(expected):,} prompts, {len(lost)} lost, {len(doubled)} doubled, {len(differences)} different "
        f"({share:.2%}), of which {ties} near ties: {'pass' if fine else 'FAIL'}"
    )
    for found in differences[:5]:
        print(f"  {found}")
    return fine


def train_paths(stage: Stage) -> dict[str, ReplyPath]:
    paths = (path for name in sorted(stage.outputs) for path in read_part(stage.folder / name))
    return {path.prompt_id: path for path in paths if path.split == "train"}


if __name__ == "__main__":
    main()
