"""Wall-clock speed at concurrency 1: speculative decoding against plain decoding in the same program.

Plain decoding is the reference decoder at draft length 0: same forward, cache, dtype and threads. Every prompt is timed
with every variant in one process, in one order and then in the reverse one (ABBA), so that a drift of the machine
falls on all alike. A request's time is all of it: prefill, the head's reading of the prompt, drafting, verification.
"""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from headstart.eval.acceptance import accept_len_interval
from headstart.eval.decode import Clock, Reply, decode, live_counts
from headstart.eval.drafters import Drafter, HeadDrafter, NgramDrafter
from headstart.eval.identity import Rescorer, identity_check
from headstart.eval.settings import EvalSettings
from headstart.eval.statistics import geometric_mean_interval, quantile, resampling_weights, speedup_interval
from headstart.heads.contract import Head
from headstart.heads.paths import Path
from headstart.heads.store import versions
from headstart.heads.target import Target

GENERATE_PROMPTS = 4  # prompts also timed with transformers.generate
GENERATE_REPEATS = 2
TRIAL_TOKENS = 24  # tokens of the trial that chooses the dtype


@dataclass(frozen=True)
class Variant:
    """One way to decode a prompt. No drafter: plain decoding; `generate`: transformers' own loop."""

    name: str  # plain | generate | ngram | the head's kind
    draft_length: int
    drafter: Drafter | None = None

    def run(self, target: Target, prompt: list[int], max_new_tokens: int) -> Reply:
        if self.name == "generate":
            return timed_generate(target, prompt, max_new_tokens)
        return decode(target, [prompt], self.drafter, self.draft_length, max_new_tokens)[0]


@dataclass
class Timings:
    """Replies of one variant: `replies[prompt][repeat]`."""

    variant: Variant
    replies: list[list[Reply]]

    @property
    def seconds_R(self) -> np.ndarray:
        return np.array([sum(reply.total_s for reply in row) for row in self.replies])

    @property
    def tokens_R(self) -> np.ndarray:
        return np.array([sum(len(reply.token_ids) for reply in row) for row in self.replies], dtype=float)

    def all(self) -> list[Reply]:
        return [reply for row in self.replies for reply in row]

    def tokens_per_s(self, num_prompts: int | None = None) -> float | None:
        seconds = self.seconds_R[:num_prompts].sum()
        return float(self.tokens_R[:num_prompts].sum() / seconds) if seconds > 0 else None


def timed_generate(target: Target, prompt: list[int], max_new_tokens: int) -> Reply:
    """One greedy reply by transformers.generate, timed as a whole."""
    clock = Clock(target.device)
    began = clock.now()
    tokens = generate(target, [prompt], max_new_tokens)[0]
    return Reply(token_ids=tokens, total_s=clock.now() - began)


def generate(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy replies of transformers.generate, prompts left-padded into one batch, cut after the stop token.

    Rows of the embedding table behind the tokenizer's ids are padding; generate is told to leave them out, as we do.
    """
    stops = set(target.facts.stop_ids)
    padding = list(range(target.facts.num_tokens, target.facts.vocab_size))
    width = max(len(prompt) for prompt in prompts)
    tokens_BT = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask_BT[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        output = target.model.generate(
            input_ids=tokens_BT.to(target.device),
            attention_mask=mask_BT.to(target.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(stops) or None,
            pad_token_id=min(stops, default=0),
            suppress_tokens=padding or None,
        )
    replies = []
    for row in output[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        replies.append(row[:end])
    return replies


def choose_speed_dtype(
    load_target: Callable[[str], Target], wanted: str, prompt: list[int]
) -> tuple[str, dict[str, float]]:
    """The dtype that is timed; `auto` decodes one prompt plainly in float32 and bfloat16 and takes the faster.

    Returns:
        The dtype's name, and the seconds a token took in each dtype that was tried.
    """
    if wanted != "auto":
        return wanted, {}
    seconds = {}
    for name in ("float32", "bfloat16"):
        target = load_target(name)
        decode(target, [prompt], None, 0, 4)
        trials = [decode(target, [prompt], None, 0, TRIAL_TOKENS)[0] for _ in range(2)]
        seconds[name] = min(sum(trial.verify_s) / max(len(trial.verify_s), 1) for trial in trials)
        del target  # before the next copy is loaded
    return min(seconds, key=lambda name: seconds[name]), seconds


def balanced(paths: Sequence[Path], num_prompts: int) -> list[Path]:
    """`num_prompts` paths, taken from the routes in turn, in stored order."""
    routes: dict[str, list[Path]] = {}
    for path in paths:
        routes.setdefault(path.route, []).append(path)
    queues = list(routes.values())
    chosen: list[Path] = []
    for depth in range(max((len(queue) for queue in queues), default=0)):
        chosen.extend(queue[depth] for queue in queues if depth < len(queue))
    return chosen[:num_prompts]


def measure_speed(
    target: Target,
    head: Head,
    paths: Sequence[Path],
    settings: EvalSettings,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Timings]:
    """Time every variant on every prompt, interleaved; the first entry is plain decoding, then generate."""
    head_drafter = HeadDrafter(head)
    variants = [Variant("plain", 0), Variant("generate", 0)]
    variants += [Variant(head.kind, length, head_drafter) for length in settings.speed_draft_lengths]
    if settings.ngram:
        variants.append(Variant("ngram", max(settings.speed_draft_lengths), NgramDrafter()))
    prompts = [path.token_N[: path.num_prompt_tokens].tolist() for path in paths]
    timings = [Timings(variant, [[] for _ in prompts]) for variant in variants]
    for variant in variants:  # warm-up: first calls allocate and choose kernels
        variant.run(target, prompts[0], min(8, settings.speed_new_tokens))
    for repeat in range(settings.speed_repeats):
        for i, prompt in enumerate(prompts):
            for timing in timings if repeat % 2 == 0 else reversed(timings):
                is_generate = timing.variant.name == "generate"
                if is_generate and (i >= GENERATE_PROMPTS or repeat >= GENERATE_REPEATS):
                    continue
                timing.replies[i].append(timing.variant.run(target, prompt, settings.speed_new_tokens))
        progress(f"speed: repeat {repeat + 1} of {settings.speed_repeats}")
    return timings


def speed_row(
    timing: Timings,
    plain: Timings,
    check: dict[str, Any],
    dtype: str,
    settings: EvalSettings,
    seed: int,
    concurrency: int = 1,
) -> dict[str, Any]:
    """One row of eval/speed.json; `check` is the identity check of these replies against the plain ones."""
    num_prompts = len(plain.replies)
    weights_BR = resampling_weights(num_prompts, settings.replicates, seed)
    speedup = speedup_interval(timing.seconds_R, timing.tokens_R, plain.seconds_R, plain.tokens_R, weights_BR)
    per_prompt_R = (timing.tokens_R / timing.seconds_R) / (plain.tokens_R / plain.seconds_R)
    names = [str(i) for i in range(num_prompts)]
    first = [row[0] for row in timing.replies]
    accept_len = accept_len_interval(live_counts(first, names, names, timing.variant.draft_length), 1)["value"]
    target_step = median_ms([s for reply in plain.all() for s in reply.verify_s])
    verify_step = median_ms([s for reply in timing.all() for s in reply.verify_s])
    draft = median_ms([s for reply in timing.all() for s in reply.draft_s])
    draft_step = None if draft is None else draft / timing.variant.draft_length
    step_ratio = None
    if target_step and verify_step is not None and draft is not None:
        step_ratio = (verify_step + draft) / target_step
    return {
        "engine": "reference",
        "drafter": timing.variant.name,
        "route": "all",
        "temperature": 0.0,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "concurrency": concurrency,
        "draft_length": timing.variant.draft_length,
        "tree": None,
        "num_prompts": num_prompts,
        "num_repeats": settings.speed_repeats,
        "order": "ABBA",
        "num_tokens": sum(len(row[0].token_ids) for row in timing.replies),
        "plain_tokens_per_s": plain.tokens_per_s(),
        "tokens_per_s": timing.tokens_per_s(),
        "speedup": speedup,
        "predicted_speedup": accept_len / step_ratio if accept_len and step_ratio else None,
        "accept_len": accept_len,
        "target_step_ms": target_step,
        "verify_step_ms": verify_step,
        "draft_step_ms": draft_step,
        "cost_ratio": draft_step / target_step if draft_step is not None and target_step else None,
        "ttft_ms": latency_ms([reply.first_token_s for reply in timing.all()]),
        "tpot_ms": latency_ms(
            [(r.total_s - r.first_token_s) / (len(r.token_ids) - 1) for r in timing.all() if len(r.token_ids) > 1]
        ),
        "num_divergences": len(check["divergences"]),
        "num_near_ties": sum(d["verdict"] == "tie" for d in check["divergences"]),
        "speedup_geometric": geometric_mean_interval(per_prompt_R, weights_BR),
    }


def speed_checks(timings: Sequence[Timings], target: Target, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Identity of every variant's replies with plain decoding's, in the dtype that was timed; plain itself left out."""
    rescorer = Rescorer(target)
    prompts = [path.token_N[: path.num_prompt_tokens].tolist() for path in paths]
    plain = [row[0].token_ids for row in timings[0].replies]
    checks = []
    for timing in timings[1:]:
        known = [i for i, row in enumerate(timing.replies) if row]
        checks.append(
            identity_check(
                rescorer,
                [paths[i].prompt_id for i in known],
                [prompts[i] for i in known],
                [plain[i] for i in known],
                [timing.replies[i][0].token_ids for i in known],
                against="plain",
                draft_length=timing.variant.draft_length,
                batch=1,
            )
        )
        checks[-1]["drafter"] = timing.variant.name
    return checks


def absolute_speeds(timings: Sequence[Timings], bound: float | None) -> dict[str, float | None]:
    """Tokens per second of generate and plain decoding, and the hardware's bound.

    On the prompts and repeats that both were timed on, the fastest repeat of each: a stall of the machine in one of them
    says nothing about the two loops.
    """
    plain, generated = timings[0], timings[1]
    both = [(row[: len(other)], other) for row, other in zip(plain.replies, generated.replies, strict=True) if other]

    def rate(rows: list[list[Reply]]) -> float | None:
        fastest = [min(row, key=lambda reply: reply.total_s) for row in rows]
        seconds = sum(reply.total_s for reply in fastest)
        return sum(len(reply.token_ids) for reply in fastest) / seconds if seconds else None

    return {
        "generate_tokens_per_s": rate([other for _, other in both]),
        "plain_tokens_per_s": rate([row for row, _ in both]),
        "memory_bandwidth_bound_tokens_per_s": bound,
    }


def memory_bandwidth_bound(target: Target) -> float:
    """Tokens per second if reading every weight once a token, at the measured read bandwidth, were all there is."""
    model = target.model
    weights = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    embedding = model.get_input_embeddings().weight
    if embedding is not model.get_output_embeddings().weight:
        weights.pop(id(embedding), None)  # one row is read
    block = torch.ones(64 * 2**20, dtype=torch.float32, device=target.device)  # 256 MiB: beyond the caches
    clock = Clock(target.device)
    seconds = []
    for _ in range(4):
        clock.lap()
        block.sum()
        seconds.append(clock.lap())
    return block.numel() * 4 / min(seconds[1:]) / sum(weights.values())


def recommend(
    rows: Sequence[dict[str, Any]], kind: str, route_accept_len: dict[int, dict[str, float | None]]
) -> list[dict[str, Any]]:
    """For every span of measured concurrencies the draft length with the best speed-up, 0 where none beats plain decoding.

    Args:
        route_accept_len: offline accept_len by draft length and route; with the measured step times it predicts the
            speed-up of a route.
    """
    mine = [row for row in rows if row["drafter"] == kind and row["speedup"]["value"] is not None]
    spans: list[dict[str, Any]] = []
    for concurrency in sorted({row["concurrency"] for row in mine}):
        at = [row for row in mine if row["concurrency"] == concurrency]
        found = advice(max(at, key=lambda row: row["speedup"]["value"]), kind, route_accept_len)
        if spans and spans[-1] == {**found, "concurrency": spans[-1]["concurrency"]}:
            spans[-1]["concurrency"][1] = concurrency
        else:
            spans.append(found)
    return spans


def advice(best: dict[str, Any], kind: str, route_accept_len: dict[int, dict[str, float | None]]) -> dict[str, Any]:
    """One entry of `recommended` from the fastest row: routes where drafting costs more than it gives, flags to paste."""
    entry: dict[str, Any] = {"engine": "reference", "concurrency": [best["concurrency"]] * 2}
    if best["speedup"]["value"] <= 1:
        return {**entry, "draft_length": 0, "routes_off": ["all"], "flags": ""}
    step_ratio = best["accept_len"] / best["predicted_speedup"] if best["predicted_speedup"] else 1.0
    routes = route_accept_len.get(best["draft_length"], {})
    flags = (
        "--speculative-config '"
        f'{{"method": "{kind}", "model": "HEAD_FOLDER", "num_speculative_tokens": {best["draft_length"]}}}'
        "'"
    )
    off = [route for route, value in routes.items() if value is not None and value < step_ratio]
    return {**entry, "draft_length": best["draft_length"], "routes_off": off, "flags": flags}


def crossover(recommended: Sequence[dict[str, Any]]) -> int | None:
    """The smallest measured concurrency from which on no draft length beats plain decoding; None where one always does."""
    last = recommended[-1] if recommended else None
    return last["concurrency"][0] if last and last["draft_length"] == 0 else None


def hardware(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": cpu_name(), "cores": num_cores(), "gpu": gpu, "versions": versions()}


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    info = FilePath("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def median_ms(seconds: list[float]) -> float | None:
    value = quantile(seconds, 0.5)
    return None if value is None else 1000 * value


def latency_ms(seconds: list[float]) -> dict[str, float | None]:
    return {
        name: None if (value := quantile(seconds, share)) is None else 1000 * value
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }
