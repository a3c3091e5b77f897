"""Traffic through a real server that is killed while it answers, against an uninterrupted run and against local replies.

    python bench/served.py [--engine vllm] [--prompts 2000] [--talks 20] [--kills 2] [--max-new-tokens 32]
                           [--target NAME] [--out FOLDER]

Replies are greedy and in float32; the target is a small random one unless named (llama.cpp converts no tokenizer that it
does not know: --target smollm2-135m). No request may be lost or doubled. A reply that differs has to part at a near tie,
judged in float64, and of the two served runs fewer than one reply in a thousand may. Among the prompts are `--talks`
conversations of three turns: a client plays some of them with vLLM, turn by turn, and the ids that the server reports for
its requests and replies have to be those that are recorded, which training sees. Otherwise the exit code is 1.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import islice
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
MAX_PROMPT, MAX_QUESTION, TURNS = 400, 80, 3  # tokens of a prompt and of a question in a conversation; questions of one
START_S = 3600.0  # a machine with other work takes minutes to start an engine, and servers are away as long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--talks", type=int, default=20)
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
    prompts = short_prompts(TargetLoader(settings_of(target)), options.prompts, options.talks)
    chunk = max(16, min(256, options.prompts // 8))  # small enough for a kill to fall between the first and the last
    local = TrafficSettings(
        max_new_tokens=options.max_new_tokens, max_prompt_tokens=CONTEXT - 256, slots=32, chunk=chunk
    )
    server = ServerSettings(urls=[url], engine=options.engine, model=MODEL, timeout=int(START_S), retries=20)
    served = TrafficSettings(**{**vars(local), "backend": "openai", "server": server})
    with LocalServer(command, url, out / "server.log", environment, start_s=START_S) as engine:
        whole = timed("uninterrupted", out / "whole", target, prompts, served)
        as_chat = options.engine != "vllm" or played(engine.url, prompts, whole, options.max_new_tokens)
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


def short_prompts(loader: TargetLoader, number: int, num_talks: int) -> list[Prompt]:
    """Built-in prompts, conversations made of further ones, and a few held out, whose replies are always local."""
    short = (prompt for prompt in builtin_prompts() if len(loader.render(prompt)) <= MAX_PROMPT)
    alone, held = list(islice(short, number)), list(islice(short, 8))
    asked = (p.messages[0] for p in short if len(p.messages) == 1 and len(loader.render(p)) <= MAX_QUESTION)
    said = {"role": "assistant", "content": "Yes."}
    talks = []
    for _ in range(num_talks):
        *before, last = islice(asked, TURNS)
        talks.append(Prompt("talk", (*(turn for question in before for turn in (question, said)), last)))
    return [*alone, *talks, *(Prompt(p.route, p.messages, "heldout") for p in held)]


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
        self._failure: Exception | None = None

    def __enter__(self) -> list[int]:
        self._thread.start()
        return self.kills

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _watch(self) -> None:
        try:
            while len(self.kills) < self.times and not self._ended.wait(0.2):
                parts = len(list(self.root.glob(".stages/traffic-*/part-*.parquet")))
                if parts > 2 * len(self.kills):
                    self.kills.append(parts)
                    self.engine.kill()
                    print(f"killed the server when {parts} chunks were recorded", flush=True)
                    time.sleep(3)
                    self.engine.start()
        except Exception as error:  # it belongs to the thread that measures
            self._failure = error


def played(url: str, prompts: list[Prompt], stage: Stage, max_new_tokens: int) -> bool:
    """Play conversations with vLLM as a client does, each reply as the server tells it in the history of the next request.

    Returns:
        Whether every request and reply has the recorded token ids, until a reply parts from the recorded one.
    """
    paths = train_paths(stage)
    talks = [prompt for prompt in prompts if prompt.split == "train" and len(prompt.turns) > 1][:NUM_CHATS]
    alone = [prompt for prompt in prompts if prompt.split == "train" and len(prompt.turns) == 1][:NUM_CHATS]
    asked = same_prompts = same_replies = 0
    for prompt in [*talks, *alone]:
        history: list[dict[str, str]] = []
        begin = 0
        for place in prompt.turns:
            history += [turn for turn in prompt.messages[begin:place] if turn["role"] != "assistant"]
            begin = place
            request = {"model": MODEL, "messages": history, "max_tokens": max_new_tokens, "temperature": 0}
            answer = json.loads(fetch(f"{url}/v1/chat/completions", {**request, "return_token_ids": True}))
            path, choice = paths[prompt.request(place).prompt_id], answer["choices"][0]
            same = choice["token_ids"] == path.token_N[path.num_prompt_tokens :].tolist()
            asked += 1
            same_prompts += answer["prompt_token_ids"] == path.prompt_token_ids
            same_replies += same
            if not same:
                break
            history.append({"role": "assistant", "content": choice["message"]["content"] or ""})
    print(
        f"played by a client: {len(talks)} conversations of {TURNS} turns and {len(alone)} single requests; of {asked} "
        f"requests {same_prompts} have the recorded prompt ids and {same_replies} the recorded reply ids",
        flush=True,
    )
    return same_prompts == same_replies == asked


def report(name: str, prompts: list[Prompt], first: Stage, second: Stage, rescorer: Rescorer, most: float) -> bool:
    """Print lost, doubled and different replies of the training split; whether they are as they have to be.

    Args:
        most: share of replies that may differ, by near ties.
    """
    one, two = train_paths(first), train_paths(second)
    expected = {p.request(turn).prompt_id for p in prompts if p.split == "train" for turn in p.turns}
    ids = Counter(
        row["prompt_id"]
        for part in sorted(second.outputs)
        for row in parquet.read_table(second.folder / part).to_pylist()
        if row["split"] == "train"
    )
    lost, doubled = expected - ids.keys(), [i for i, number in ids.items() if number > 1]
    differences, followed = [], 0
    for prompt_id, path in one.items():
        other = two.get(prompt_id)
        if other is None:
            lost.add(prompt_id)
        elif other.prompt_token_ids != path.prompt_token_ids:
            followed += 1  # an earlier turn differs, which is counted by itself
        else:
            replies = [p.token_N[p.num_prompt_tokens :].tolist() for p in (path, other)]
            if found := rescorer.judge(prompt_id, path.prompt_token_ids, *replies):
                differences.append(found)
    ties = sum(found.verdict == "tie" for found in differences)
    share = len(differences) / len(one)
    fine = not lost and not doubled and ties == len(differences) and share <= most and followed <= 2 * ties
    print(
        f"{name}: {len(expected):,} requests, {len(lost)} lost, {len(doubled)} doubled, {len(differences)} different "
        f"({share:.2%}), of which {ties} near ties, and {followed} later turns behind them: {'pass' if fine else 'FAIL'}",
        flush=True,
    )
    for found in differences[:5]:
        print(f"  {found}", flush=True)
    return fine


def train_paths(stage: Stage) -> dict[str, ReplyPath]:
    paths = (path for name in sorted(stage.outputs) for path in read_part(stage.folder / name))
    return {path.prompt_id: path for path in paths if path.split == "train"}


if __name__ == "__main__":
    main()
