"""What timings are worth: eval/speed.json's rows, the hardware they were measured on, and the setting they recommend.

A speed-up is against plain decoding, which is the reference decoder at draft length 0: same forward, cache, dtype, threads
and concurrency (`timings.py` has the measurement).
"""

import os
import platform
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import torch

from headstart.eval.acceptance_rows import accept_len_interval
from headstart.eval.decode import Clock
from headstart.eval.identity import Rescorer, identity_check
from headstart.eval.replies import Reply, live_counts
from headstart.eval.settings import EvalSettings
from headstart.eval.statistics import (
    MIN_PROMPTS,
    conversation_sums,
    geometric_mean_interval,
    quantile,
    resampling_weights,
    speedup_interval,
)
from headstart.eval.subject import Subject
from headstart.eval.timings import Timings, balanced, grouped, measure_speed
from headstart.heads.contract import Head
from headstart.heads.export.serving import METHODS
from headstart.heads.paths import Path
from headstart.heads.store import versions
from headstart.heads.target import Target

ABSOLUTE = tuple(f"{name}_tokens_per_s" for name in ("generate", "plain", "memory_bandwidth_bound"))


def timed_rows(
    target: Target, head: Head, subject: Subject
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float | None]]:
    """Time plain decoding, the head and lookup at every concurrency asked for that there are prompts for.

    Returns:
        Rows and `absolute` of eval/speed.json, and the identity checks of the timed replies, if they are greedy.
    """
    settings, dtype = subject.settings, str(target.dtype).removeprefix("torch.")
    sampling = subject.sampling
    rows: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    absolute: dict[str, float | None] = {"memory_bandwidth_bound_tokens_per_s": memory_bandwidth_bound(target)}
    for concurrency in settings.concurrency:
        paths = balanced(
            subject.paths, max(settings.speed_prompts, MIN_PROMPTS * concurrency if concurrency > 1 else 0)
        )
        if concurrency > len(paths):
            subject.tell(f"speed at concurrency {concurrency}: left out, there are {len(paths)} held-out prompts")
            continue
        subject.tell(
            f"speed at concurrency {concurrency}: {len(paths)} prompts in {dtype}, {settings.speed_repeats} repeats"
        )
        timings = measure_speed(target, head, paths, settings, concurrency, subject.tell, sampling, subject.seed)
        if concurrency == 1:
            absolute |= absolute_speeds(timings)
        found: Sequence[dict[str, Any] | None] = [None] * len(timings[1:])
        if sampling.temperature == 0:
            found = compared = speed_checks(timings, target, paths)
            checks += compared
        names = subject.conversations
        names_G = drawn_together(grouped([names[path.prompt_id] for path in paths], concurrency))
        rows += [
            speed_row(timing, timings[0], check, dtype, settings, subject.seed, sampling.temperature, names_G)
            for timing, check in zip(timings[1:], found, strict=True)
            if timing.variant.draft_length
        ]
    return rows, checks, absolute


def speed_row(
    timing: Timings,
    plain: Timings,
    check: dict[str, Any] | None,
    dtype: str,
    settings: EvalSettings,
    seed: int,
    temperature: float = 0.0,
    names_G: Sequence[str] = (),
) -> dict[str, Any]:
    """One row of eval/speed.json; `check` is the identity check of greedy replies against the plain ones.

    Groups of one name in `names_G` are drawn together for its intervals; without names each stands alone.
    """
    names_G = names_G or [str(g) for g in range(len(plain.runs))]
    sums = (timing.seconds_G, timing.tokens_G, plain.seconds_G, plain.tokens_G)
    seconds_C, tokens_C, plain_seconds_C, plain_tokens_C = (conversation_sums(x_G, names_G) for x_G in sums)
    weights_BC = resampling_weights(len(seconds_C), settings.replicates, seed)
    speedup = speedup_interval(seconds_C, tokens_C, plain_seconds_C, plain_tokens_C, weights_BC)
    per_group_G = (timing.tokens_G / timing.seconds_G) / (plain.tokens_G / plain.seconds_G)
    replies = timing.replies
    names = [str(i) for i in range(len(timing.all()))]
    accept_len = accept_len_interval(live_counts(timing.all(), names, names, timing.variant.draft_length), 1)["value"]
    target_step = median_ms([s for reply in plain.all() for s in reply.verify_s])
    verify_step = median_ms([s for reply in timing.all() for s in reply.verify_s])
    draft = median_ms([s for reply in timing.all() for s in reply.draft_s])
    # where drafts end by confidence, a step has no fixed number of them
    draft_step = None if draft is None or timing.variant.stop_below else draft / timing.variant.draft_length
    step_ratio = None
    if target_step and verify_step is not None and draft is not None:
        step_ratio = (verify_step + draft) / target_step
    return {
        "engine": "reference",
        "drafter": timing.variant.name,
        "route": "all",
        "temperature": temperature,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "concurrency": timing.concurrency,
        "draft_length": timing.variant.draft_length,
        "tree": None,
        "num_prompts": len(replies),
        "num_repeats": settings.speed_repeats,
        "order": "ABBA",
        "num_tokens": sum(len(reply.token_ids) for reply in replies),
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
        "num_divergences": None if check is None else len(check["divergences"]),
        "num_near_ties": None if check is None else sum(d["verdict"] == "tie" for d in check["divergences"]),
        "speedup_geometric": geometric_mean_interval(per_group_G, names_G, weights_BC),
        "stop_below": timing.variant.stop_below,
    }


def drawn_together(groups: Sequence[Sequence[str]]) -> list[str]:
    """A name for each group of conversations: the same for groups that have one in common, or are linked by others."""
    parents: dict[str, str] = {}

    def root(name: str) -> str:
        while parents.setdefault(name, name) != name:
            name = parents[name]
        return name

    for group in groups:
        for name in group:
            parents[root(name)] = root(group[0])
    return [root(group[0]) for group in groups]


def speed_checks(timings: Sequence[Timings], target: Target, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Identity of every variant's replies with plain decoding's, in the dtype that was timed; plain itself left out."""
    rescorer = Rescorer(target)
    prompts = [path.prompt_token_ids for path in paths]
    plain = [reply.token_ids for reply in timings[0].replies]
    checks = []
    for timing in timings[1:]:
        num = len(timing.replies)
        checks.append(
            identity_check(
                rescorer,
                [path.prompt_id for path in paths[:num]],
                prompts[:num],
                plain[:num],
                [reply.token_ids for reply in timing.replies],
                against="plain",
                draft_length=timing.variant.draft_length,
                batch=timing.concurrency,
            )
        )
        checks[-1]["drafter"] = timing.variant.name
    return checks


def absolute_speeds(timings: Sequence[Timings]) -> dict[str, float | None]:
    """Tokens per second of generate and plain decoding.

    One request at a time, on the prompts and repeats that both were timed on, the fastest repeat of each: a stall of the
    machine in one of them says nothing about the two loops. (Sampled repeats differ in length: the most tokens/s count.)
    """
    plain, generated = timings[0], timings[1]
    both = [(row[: len(other)], other) for row, other in zip(plain.runs, generated.runs, strict=True) if other]

    def rate(groups: list[list[list[Reply]]]) -> float | None:
        fastest = [min((run[0] for run in group), key=lambda r: r.total_s / len(r.token_ids)) for group in groups]
        seconds = sum(reply.total_s for reply in fastest)
        return sum(len(reply.token_ids) for reply in fastest) / seconds if seconds else None

    return {
        "generate_tokens_per_s": rate([other for _, other in both]),
        "plain_tokens_per_s": rate([row for row, _ in both]),
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
    method = METHODS.get(kind, {}).get("vllm")
    speculative = f'{{"method": "{method}", "model": "HEAD_FOLDER", "num_speculative_tokens": {best["draft_length"]}}}'
    flags = f"--speculative-config '{speculative}'" if method else ""
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
