"""The eval stage: what a head accepts, whether its output is the target's own, and what it is worth in time.

Three measurements of one checkpoint on the held-out replies, in this order, each in a file of its own:

    acceptance.json   exact offline acceptance in float32, per position and route; n-gram lookup and a live run beside it
    lossless.json     greedy identity of live replies with the recorded ones, plain decoding and transformers.generate
    speed.json        tokens per second against plain decoding, interleaved, at concurrency 1
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch

from headstart.eval.acceptance import (
    PromptCounts,
    ReplyAcceptance,
    acceptance_row,
    count_replies,
    reply_acceptance,
)
from headstart.eval.decode import Reply, decode, live_counts
from headstart.eval.drafters import HeadDrafter, ngram_acceptance
from headstart.eval.gate import SCHEMAS, read_evals, same_checkpoint, settings_hash
from headstart.eval.identity import (
    Rescorer,
    first_unequal_step,
    identity_check,
    is_draft_tie,
    overall_verdict,
)
from headstart.eval.settings import EvalSettings
from headstart.eval.speed import (
    absolute_speeds,
    balanced,
    choose_speed_dtype,
    generate,
    hardware,
    measure_speed,
    memory_bandwidth_bound,
    recommend,
    speed_checks,
    speed_row,
)
from headstart.eval.statistics import LEVEL
from headstart.eval.summary import summary
from headstart.heads.batch import Batch, pack
from headstart.heads.checkpoint import checkpoint_identity, load_head
from headstart.heads.contract import Head
from headstart.heads.errors import WrongInput
from headstart.heads.paths import Path
from headstart.heads.store import hash_json, read_json, write_json
from headstart.heads.target import Target

READ_PATHS = 16  # held-out paths whose features are in memory at once
IDENTITY_PROMPTS = 16  # prompts also decoded plainly and by transformers.generate
REPEAT_LENGTH = 8  # tokens of the n-grams whose repetition is told beside acceptance


@dataclass
class Subject:
    """What is measured: one head on one target (in float32), on recorded replies of one sampling setting."""

    target: Target
    head: Head
    paths: list[Path]
    settings: EvalSettings
    seed: int
    tell: Callable[[str], None]

    @property
    def sampling(self) -> tuple[float, int, float]:
        sampling = self.paths[0].sampling
        return (
            float(sampling.get("temperature", 0.0)),
            int(sampling.get("top_k", 0)),
            float(sampling.get("top_p", 1.0)),
        )

    def row(self, counts: Sequence[PromptCounts], **names: Any) -> dict[str, Any]:
        temperature, top_k, top_p = self.sampling
        return acceptance_row(
            counts,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            replicates=self.settings.replicates,
            seed=self.seed,
            **names,
        )


def evaluate(
    load_target: Callable[[str], Target],
    head_folder: FilePath,
    paths: Sequence[Path],
    settings: EvalSettings,
    folder: FilePath,
    *,
    parts: Sequence[str] = (),
    prompts_name: str = "heldout",
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure a saved head on held-out paths, write the three files, and print the table.

    Args:
        load_target: gives the target, with the head's taps, in a named dtype.
        paths: held-out replies, recorded in float32 at one sampling setting.
        parts: of `live`, `lossless`, `speed`: what is measured beside offline acceptance; none named means all.

    Returns:
        The contents of acceptance.json, lossless.json and speed.json by name; None for a file that does not exist.

    Raises:
        WrongInput: no paths, or paths of several sampling settings.
    """
    check_paths(paths)
    wanted = set(parts) or {"live", "lossless", "speed"}
    target = load_target("float32")
    head = load_head(head_folder, target).to(target.device).eval().pack()
    subject = Subject(target, head, list(paths), settings, seed, tell)
    names = identity_of(head_folder, target, subject.paths, prompts_name)
    names["settings_sha256"] = settings_hash(settings, seed)
    greedy = subject.sampling[0] == 0
    if not greedy and wanted & {"live", "lossless"}:
        tell("replies were sampled: greedy identity does not apply, the verdict stays inconclusive")

    replies, rows = measure_acceptance(subject)
    extra: dict[str, Any] = {"repeated_8grams": repeated_ngrams(subject.paths)}
    checks: list[dict[str, Any]] = []
    if greedy and wanted & {"live", "lossless"}:
        live_rows, checks, extra["live_agreement"] = measure_live(subject, replies)
        rows += live_rows
    environment = {"device": str(target.device), "dtype": "float32", "threads": torch.get_num_threads()}
    interval = {"level": LEVEL, "kind": "bootstrap over prompts", "replicates": settings.replicates, "seed": seed}
    folder.mkdir(parents=True, exist_ok=True)
    kept = [row for row in kept_entries(folder, "acceptance", "rows", names) if not measured_again(row, rows)]
    body = {"environment": environment, "interval": interval, "rows": rows + kept, **extra}
    write_json(folder / "acceptance.json", {"schema": SCHEMAS["acceptance"], **names, **body})

    if greedy and "speed" in wanted:
        prompt = subject.paths[0].token_N[: subject.paths[0].num_prompt_tokens].tolist()
        del target, head, subject.target, subject.head  # two copies of a large target may not fit
        dtype, _ = choose_speed_dtype(load_target, settings.speed_dtype, prompt)
        checks += write_speed(load_target(dtype), head_folder, subject, folder, names, rows)
    if checks or not greedy:
        checks += [
            check
            for check in kept_entries(folder, "lossless", "checks", names)
            if not any(same_check(check, new) for new in checks)
        ]
        body = {"verdict": overall_verdict(checks), "checks": checks, "faults": []}
        named = {name: names[name] for name in ("checkpoint", "target", "settings_sha256")}
        write_json(folder / "lossless.json", {"schema": SCHEMAS["lossless"], **named, **body})
    results = read_evals(folder)
    tell(summary(results, settings.draft_length))
    return results


def check_paths(paths: Sequence[Path]) -> None:
    if not paths:
        raise WrongInput("found no held-out replies, expected at least one.\nGive the recipe prompts.heldout.")
    settings = {hash_json(path.sampling): path.sampling for path in paths}
    if len(settings) > 1:
        raise WrongInput(
            f"found replies of {len(settings)} sampling settings {list(settings.values())}, expected one: acceptance "
            "is exact only on replies of the setting it is reported for.\nMeasure each setting by itself."
        )


def identity_of(head_folder: FilePath, target: Target, paths: Sequence[Path], prompts_name: str) -> dict[str, Any]:
    """The first entries of every file: which checkpoint, target and prompts it speaks of."""
    return {
        "checkpoint": checkpoint_identity(head_folder),
        "target": {"name": target.facts.name, "fingerprint": hash_json(target.facts.fingerprint)},
        "prompts": {
            "name": prompts_name,
            "sha256": hash_json([path.prompt_id for path in paths]),
            "max_new_tokens": max(path.num_reply_tokens for path in paths),
        },
    }


def read_batches(target: Target, head: Head, paths: Sequence[Path]) -> Iterator[Batch]:
    """Held-out paths with teacher-forced features, a few at a time."""
    for begin in range(0, len(paths), READ_PATHS):
        chunk = paths[begin : begin + READ_PATHS]
        states = target.read([path.token_N for path in chunk])
        batch = pack([(path, s.taps, s.final) for path, s in zip(chunk, states, strict=True)])
        yield batch.to(head.device)


def measure_acceptance(subject: Subject) -> tuple[list[ReplyAcceptance], list[dict[str, Any]]]:
    """Offline rows of the head and n-gram lookup: every draft length, all prompts and each route."""
    target, head, paths, settings = subject.target, subject.head, subject.paths, subject.settings
    longest = max(settings.draft_lengths)
    subject.tell(f"acceptance: {len(paths)} held-out replies, draft lengths {settings.draft_lengths}")
    replies = reply_acceptance(head, read_batches(target, head, paths), longest)
    sources = [(head.kind, "greedy", replies)]
    if subject.sampling == (1.0, 0, 1.0):
        sampled = reply_acceptance(head, read_batches(target, head, paths), longest, temperature=1.0)
        sources.append((head.kind, "sampled", sampled))
    if settings.ngram:
        sources.append(("ngram", "greedy", ngram_acceptance(paths, longest)))
    rows = []
    for drafter, draft, accepted in sources:
        for length in settings.draft_lengths:
            counts = count_replies(accepted, length)
            for route in ("all", *sorted({path.route for path in paths})):
                names = {"source": "offline", "drafter": drafter, "draft": draft}
                rows.append(subject.row(counts, draft_length=length, route=route, **names))
    return replies, rows


def measure_live(
    subject: Subject, offline: Sequence[ReplyAcceptance]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Decode held-out prompts live in float32: rows by both counting rules, identity checks, agreement with offline."""
    target, head, settings = subject.target, subject.head, subject.settings
    paths = balanced(subject.paths, settings.live_prompts or len(subject.paths))
    prompt_ids, routes = [path.prompt_id for path in paths], [path.route for path in paths]
    prompts = [path.token_N[: path.num_prompt_tokens].tolist() for path in paths]
    recorded = [path.token_N[path.num_prompt_tokens :].tolist() for path in paths]
    limit = max(path.num_reply_tokens for path in paths)
    length, batch = settings.draft_length, settings.live_batch

    def progress(done: int, num: int) -> None:
        subject.tell(f"live: {done} of {num} replies")

    live = decode(target, prompts, HeadDrafter(head), length, limit, batch=batch, whole_blocks=True, progress=progress)
    stored = {path.prompt_id: i for i, path in enumerate(subject.paths)}

    def counts(counting: str) -> list[PromptCounts]:
        """In stored order, so that the replicates are those of the offline rows."""
        return sorted(live_counts(live, prompt_ids, routes, length, counting), key=lambda c: stored[c.prompt_id])

    rows = [
        subject.row(
            counts(counting),
            source="live",
            drafter=head.kind,
            draft_length=length,
            counting=counting,
        )
        for counting in ("reply", "engine")
    ]
    rescorer = Rescorer(target)
    few = slice(0, IDENTITY_PROMPTS)
    plain = decode(target, prompts[few], None, 0, limit, batch=batch)
    replies = {
        ("recorded", length): [reply.token_ids for reply in live],
        ("recorded", 0): [reply.token_ids for reply in plain],
        ("generate", 0): [reply.token_ids for reply in plain],
    }
    generated: list[list[int]] = []
    for begin in range(0, len(prompts[few]), batch):
        generated += generate(target, prompts[few][begin : begin + batch], limit)
    checks: list[dict[str, Any]] = []
    for (against, draft_length), tokens in replies.items():
        reference = generated if against == "generate" else recorded
        num = len(tokens)
        checks.append(
            identity_check(
                rescorer,
                prompt_ids[:num],
                prompts[:num],
                reference[:num],
                tokens,
                against=against,
                draft_length=draft_length,
                batch=batch,
            )
        )
        checks[-1]["drafter"] = head.kind if draft_length else "plain"
    by_id = {reply.prompt_id: reply for reply in offline}
    return rows, checks, agreement(subject, paths, [by_id[i] for i in prompt_ids], live)


def agreement(
    subject: Subject, paths: Sequence[Path], offline: Sequence[ReplyAcceptance], live: Sequence[Reply]
) -> dict[str, Any]:
    """Whether live replies took exactly the steps computed offline; where not, whether a tie of draft logits is why."""
    equal, certified, unexplained, parted = 0, 0, [], 0
    for path, expected, reply in zip(paths, offline, live, strict=True):
        if reply.token_ids != path.token_N[path.num_prompt_tokens :].tolist():
            parted += 1  # other tokens, other steps: the identity check judges it
            continue
        differing = first_unequal_step(expected, reply)
        if differing is None:
            equal += 1
        elif is_draft_tie(subject.head, next(read_batches(subject.target, subject.head, [path])), *differing):
            certified += 1
        else:
            unexplained.append(path.prompt_id)
    return {
        "num_replies": len(live),
        "num_equal": equal,
        "num_draft_ties": certified,
        "num_other_tokens": parted,
        "unexplained": unexplained,
    }


def write_speed(
    target: Target,
    head_folder: FilePath,
    subject: Subject,
    folder: FilePath,
    names: dict[str, Any],
    acceptance_rows: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Time the head, write speed.json, and return the identity checks of the timed replies."""
    settings = subject.settings
    dtype = str(target.dtype).removeprefix("torch.")
    paths = balanced(subject.paths, settings.speed_prompts)
    head = load_head(head_folder, target).to(target.device, target.dtype).eval().pack()
    subject.tell(f"speed: {len(paths)} prompts at concurrency 1 in {dtype}, {settings.speed_repeats} repeats")
    timings = measure_speed(target, head, paths, settings, subject.tell)
    checks = speed_checks(timings, target, paths)
    rows = [
        speed_row(timing, timings[0], check, dtype, settings, subject.seed)
        for timing, check in zip(timings[2:], checks[1:], strict=True)
    ]
    by_route: dict[int, dict[str, float | None]] = {}
    for row in acceptance_rows:
        if (row["source"], row["drafter"], row["draft"]) == ("offline", head.kind, "greedy") and row["route"] != "all":
            by_route.setdefault(row["draft_length"], {})[row["route"]] = row["accept_len"]["value"]
    kept = [row for row in kept_entries(folder, "speed", "rows", names) if row["engine"] != "reference"]
    write_json(
        folder / "speed.json",
        {
            "schema": SCHEMAS["speed"],
            **names,
            "hardware": hardware(target.device),
            "absolute": absolute_speeds(timings, memory_bandwidth_bound(target)),
            "rows": rows + kept,
            "recommended": recommend(rows, head.kind, by_route),
            "crossover_concurrency": None,
        },
    )
    return checks


def repeated_ngrams(paths: Sequence[Path]) -> dict[str, float | None]:
    """Share of reply 8-grams that already occurred in the same reply, by route: loops flatter every drafter."""
    total: dict[str, int] = {}
    repeated: dict[str, int] = {}
    for path in paths:
        tokens = path.token_N[path.num_prompt_tokens :].tolist()
        ngrams = [tuple(tokens[i : i + REPEAT_LENGTH]) for i in range(len(tokens) - REPEAT_LENGTH + 1)]
        for route in ("all", path.route):
            total[route] = total.get(route, 0) + len(ngrams)
            repeated[route] = repeated.get(route, 0) + len(ngrams) - len(set(ngrams))
    return {route: repeated[route] / num if num else None for route, num in total.items()}


def kept_entries(folder: FilePath, name: str, entries: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows or checks already measured on this very checkpoint (and prompts, where the file names them)."""
    file = folder / f"{name}.json"
    if not file.exists():
        return []
    old = read_json(file, SCHEMAS[name])
    if (
        not same_checkpoint(old["checkpoint"], names["checkpoint"])
        or old.get("prompts", names["prompts"]) != names["prompts"]
    ):
        return []
    found: list[dict[str, Any]] = old[entries]
    return found


def measured_again(row: dict[str, Any], new: Sequence[dict[str, Any]]) -> bool:
    keys = ("source", "drafter", "route", "context", "draft", "draft_length", "counting")
    return any(all(row[key] == other[key] for key in keys) for other in new)


def same_check(check: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = ("name", "dtype", "draft_length", "against", "batch", "drafter")
    return all(check.get(key) == other.get(key) for key in keys)
