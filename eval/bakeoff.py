"""bakeoff.json: heads of one target side by side, from the files of their own runs. Nothing is measured, no model loaded.

    {"schema":"headstart.bakeoff/1","target":..,"prompts":..,"sampling":..,"hardware":..,
     "rule":{"name":"equal_tokens|equal_time","num_tokens"},"draft_length","num_prompts","best":"eagle3",
     "rows":[{"variant","run","kind","checkpoint","num_steps","num_tokens","num_parameters",
       "accept_len":{..},"conditional":[{..}],"against_best":{"ratio":{..},"p","verdict"},"against_ngram":{..},"above_ngram":true,
       "speed":{"draft_length","concurrency","tokens_per_s","speedup":{..},"predicted_speedup","cost_ratio"},
       "train_seconds","eval_seconds","engines":[..],"failed":null}],
     "ngram":{"accept_len","conditional","speed"},
     "seconds":{"prompts","traffic","features","shared","heads","one_pass","apart","share"}}

Two families of comparisons, each by Holm's rule: every head with the best one, and every head with n-gram lookup, paired by
prompt. The best is the one with the largest accept_len of these prompts, so a head that is tied with it may as well be it.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headstart.eval.compare import Comparison, compare_whole
from headstart.eval.gate import of_checkpoint, read_evals
from headstart.eval.prompt_sums import PromptSums, read_lookup_sums, read_sums
from headstart.eval.report import best_speeds
from headstart.eval.summary import find_rows
from headstart.heads.description import WEIGHTS
from headstart.heads.start import stored_tensors
from headstart.heads.store import MANIFEST, MANIFEST_SCHEMA, read_json

SCHEMA = "headstart.bakeoff/1"
NOTHING = {"value": None, "low": None, "high": None}
SPEED = ("draft_length", "concurrency", "tokens_per_s", "speedup", "predicted_speedup", "cost_ratio")


@dataclass(frozen=True)
class Entry:
    """One head of a bake-off: where its run is, and what the recipe says about it."""

    variant: str
    run: Path
    kind: str
    num_steps: int
    num_tokens: int
    engines: list[str]
    failed: str | None = None


def bakeoff_content(entries: Sequence[Entry], folder: Path, draft_length: int, rule: str) -> dict[str, Any]:
    """The document over all heads; a head that is not measured (yet) has null figures.

    Args:
        folder: of the bake-off, with links to the stages that its heads share.

    Raises:
        WrongInput: heads were measured on other prompts or at other settings, or a file is damaged.
    """
    evals = {entry.variant: head_evals(entry) for entry in entries}
    measured = [entry for entry in entries if evals[entry.variant]["acceptance"] is not None]
    rows = [head_row(entry, evals[entry.variant], draft_length) for entry in entries]
    named = evals[measured[0].variant] if measured else dict.fromkeys(("acceptance", "speed"))
    lookup = lookup_row(named, draft_length)
    lengths = {row["variant"]: row["accept_len"]["value"] for row in rows if row["accept_len"]["value"] is not None}
    best = max(lengths, key=lambda name: lengths[name]) if lengths else None
    add_comparisons(rows, [entry for entry in measured if entry.variant in lengths], best, draft_length)
    for row in rows:
        ends = row["accept_len"]["low"], (lookup or {"accept_len": NOTHING})["accept_len"]["high"]
        row["above_ngram"] = None if None in ends else ends[0] > ends[1]
    acceptance, tokens = named["acceptance"] or {}, {entry.num_tokens for entry in entries}
    return {
        "schema": SCHEMA,
        "target": acceptance.get("target"),
        "prompts": acceptance.get("prompts"),
        "sampling": acceptance.get("sampling"),
        "hardware": (named["speed"] or {}).get("hardware"),
        "rule": {"name": rule, "num_tokens": tokens.pop() if len(tokens) == 1 else None},
        "draft_length": draft_length,
        "num_prompts": max((row["num_prompts"] or 0 for row in rows), default=0),
        "best": best,
        "rows": rows,
        "ngram": lookup,
        "seconds": stage_seconds(folder, rows),
    }


def head_evals(entry: Entry) -> dict[str, Any]:
    """What was measured of a run's head, its other checkpoints left out."""
    evals = read_evals(entry.run / "eval")
    if evals["acceptance"] is None:
        return dict.fromkeys(evals)
    return of_checkpoint(evals, evals["acceptance"]["checkpoint"])


def head_row(entry: Entry, evals: dict[str, Any], draft_length: int) -> dict[str, Any]:
    acceptance = evals["acceptance"]
    row = whole_row(acceptance, entry.kind, draft_length) or {}
    checkpoint = acceptance["checkpoint"] if acceptance else None
    speeds = best_speeds(evals["speed"])
    return {
        "variant": entry.variant,
        "run": entry.run.name,
        "kind": entry.kind,
        "checkpoint": checkpoint,
        "num_steps": entry.num_steps,
        "num_tokens": entry.num_tokens,
        "num_parameters": num_parameters(entry.run, checkpoint) if checkpoint else None,
        "num_prompts": row.get("num_prompts"),
        "accept_len": row.get("accept_len", NOTHING),
        "conditional": row.get("conditional", []),
        "against_best": None,
        "against_ngram": None,
        "above_ngram": None,
        "speed": {name: speeds[0][name] for name in SPEED} if speeds else None,
        "train_seconds": train_seconds(entry.run / "metrics.jsonl", entry.num_steps),
        "eval_seconds": seconds_of(entry.run / "eval"),
        "engines": entry.engines,
        "failed": entry.failed,
    }


def whole_row(acceptance: dict[str, Any] | None, drafter: str, draft_length: int) -> dict[str, Any] | None:
    """The exact offline row of greedy chains over all prompts."""
    if acceptance is None:
        return None
    wanted = {"route": "all", "context": "all", "counting": "reply", "draft": "greedy", "draft_length": draft_length}
    rows = find_rows(acceptance, source="offline", drafter=drafter, **wanted)
    return rows[0] if rows else None


def lookup_row(evals: dict[str, Any], draft_length: int) -> dict[str, Any] | None:
    """n-gram lookup, which is the same beside every head but for its clock."""
    row, speed = whole_row(evals["acceptance"], "ngram", draft_length), evals["speed"]
    if row is None:
        return None
    speeds = best_speeds({**speed, "checkpoint": {"kind": "ngram"}}) if speed else []
    timed = {name: speeds[0][name] for name in SPEED} if speeds else None
    return {"accept_len": row["accept_len"], "conditional": row["conditional"], "speed": timed}


def add_comparisons(rows: list[dict[str, Any]], entries: Sequence[Entry], best: str | None, draft_length: int) -> None:
    """Every measured head against the best one, and against n-gram lookup."""
    if best is None:
        return
    sums = {entry.variant: read_sums(entry.run, label=entry.variant, draft_length=draft_length) for entry in entries}
    lookup = next((found for e in entries if (found := read_lookup_sums(e.run, draft_length)) is not None), None)
    others = [one for name, one in sums.items() if name != best]
    families: list[tuple[str, list[PromptSums]]] = [("against_best", [sums[best], *others])]
    if lookup is not None:
        families.append(("against_ngram", [lookup, *sums.values()]))
    for name, heads in families:
        compared = {one.label: told(one) for one in compare_whole(heads)} if len(heads) > 1 else {}
        for row in rows:
            row[name] = compared.get(row["variant"])


def told(one: Comparison) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name in ("ratio", "p", "verdict")}


def num_parameters(run: Path, checkpoint: dict[str, Any]) -> int | None:
    """Trained numbers of the measured checkpoint: what it holds, but for the map of the draft vocabulary."""
    file = run / "checkpoints" / f"step-{checkpoint['step'] or 0:06d}" / WEIGHTS
    if not file.exists():
        return None
    return sum(math.prod(tensor.shape) for name, tensor in stored_tensors([file]).items() if name != "draft_ids")


def train_seconds(metrics: Path, num_steps: int) -> float | None:
    """Time of all optimiser steps and validations of a finished training, whichever processes did them.

    Lines carry the rate since the line before, which a resume keeps: what a killed process had to do twice counts once.
    """
    if not metrics.exists():
        return None
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    if not lines or lines[-1]["step"] < num_steps:
        return None
    seconds, tokens = 0.0, 0
    for line in lines:
        rate = line.get("train/tokens_per_s")
        seconds += (line["tokens"] - tokens) / rate if rate else 0.0
        seconds += line.get("validation/seconds", 0.0)
        tokens = line["tokens"]
    return seconds


def seconds_of(folder: Path) -> float | None:
    """Time that a finished stage took, over all processes that worked on it."""
    manifest = read_manifest(folder)
    return manifest["made_by"].get("seconds") if manifest and manifest["state"] == "complete" else None


def read_manifest(folder: Path) -> dict[str, Any] | None:
    file = folder / MANIFEST
    found: dict[str, Any] | None = read_json(file, MANIFEST_SCHEMA) if file.exists() else None
    return found


def stage_seconds(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Times of the shared stages and of all heads, and what one target pass for all saves against one for each.

    Features come from the pass that answers, unless that was over when they were begun; both times are whole seconds.
    """
    shared = {name: seconds_of(folder / name) for name in ("prompts", "traffic", "features")}
    traffic, features = (read_manifest(folder / name) for name in ("traffic", "features"))
    if traffic and features and features["made_by"]["started"] <= (traffic["made_by"]["finished"] or "9"):
        shared["features"] = 0.0
    once = added(list(shared.values()))
    heads = added([row[f"{name}_seconds"] for row in rows for name in ("train", "eval")])
    one_pass, apart = added([once, heads]), added([once] * len(rows) + [heads])
    share = one_pass / apart if one_pass is not None and apart else None
    return {**shared, "shared": once, "heads": heads, "one_pass": one_pass, "apart": apart, "share": share}


def added(seconds: Sequence[float | None]) -> float | None:
    """Their sum; unknown where one is."""
    return None if None in seconds else sum(second for second in seconds if second is not None)
