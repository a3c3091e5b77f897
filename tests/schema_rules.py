"""The forms of the files that other tools read, as rules that a run's files are checked against.

A form is a type, a tuple of allowed forms or values, a list of one form, `Length(form, n)`, or a dict of keys in their
order. Unknown keys are allowed between and after known ones; a known key is never absent; NULL admits null.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from safetensors import safe_open

NULL = None
NUMBER = (float, int)
TEXT_OR_NULL = (str, NULL)
NUMBER_OR_NULL = (float, int, NULL)
INTERVAL = {"value": NUMBER_OR_NULL, "low": NUMBER_OR_NULL, "high": NUMBER_OR_NULL}
CHECKPOINT = {"kind": str, "step": (int, NULL), "sha256": str}
TARGET = {"name": str, "fingerprint": str}
PROMPTS = {"name": str, "sha256": str, "max_new_tokens": int}
PERCENTILES = {"p50": NUMBER_OR_NULL, "p95": NUMBER_OR_NULL}

ACCEPTANCE_ROW = {
    "source": str,
    "drafter": str,
    "route": str,
    "context": str,
    "temperature": NUMBER,
    "top_k": int,
    "top_p": NUMBER,
    "draft": ("greedy", "sampled"),
    "draft_length": int,
    "tree": (NULL, list),
    "counting": ("reply", "engine"),
    "num_prompts": int,
    "num_tokens": int,
    "num_steps": NUMBER,
    "num_short_steps": NUMBER,
    "accept_len": INTERVAL,
    "accept_len_macro": INTERVAL,
    "conditional": [INTERVAL],
    "survival": [INTERVAL],
    "accepted_histogram": [NUMBER],
    "uniform_start_estimate": NUMBER_OR_NULL,
    "product_of_marginals": NUMBER_OR_NULL,
    "out_of_vocab_share": NUMBER_OR_NULL,
}
ACCEPTANCE = {
    "schema": ("headstart.acceptance/1",),
    "checkpoint": CHECKPOINT,
    "target": TARGET,
    "prompts": PROMPTS,
    "environment": {"device": str, "dtype": str, "threads": int},
    "interval": {"level": NUMBER, "kind": ("bootstrap over prompts",), "replicates": int, "seed": int},
    "rows": [ACCEPTANCE_ROW],
}
CUT_VOCABULARY = {**ACCEPTANCE_ROW, "draft_vocab_size": int, "ratio": INTERVAL}
PROMPT_SUMS = {
    "schema": ("headstart.prompts/1",),
    "target": TARGET,
    "prompts": PROMPTS,
    "sampling": {"temperature": NUMBER, "top_k": int, "top_p": NUMBER},
    "prompt_ids": [str],
    "routes": [str],
    "prompt_tokens": [int],
    "num_tokens": [int],
    "rows": [
        {
            "checkpoint": (NULL, dict),
            "drafter": str,
            "draft": ("greedy", "sampled"),
            "draft_length": int,
            "num_steps": [NUMBER],
        }
    ],
}
SPEED_ROW = {
    "engine": str,
    "drafter": str,
    "route": str,
    "temperature": NUMBER,
    "dtype": str,
    "threads": int,
    "concurrency": int,
    "draft_length": int,
    "tree": (NULL, dict),
    "num_prompts": int,
    "num_repeats": int,
    "order": str,
    "num_tokens": int,
    "plain_tokens_per_s": NUMBER,
    "tokens_per_s": NUMBER,
    "speedup": INTERVAL,
    "predicted_speedup": NUMBER_OR_NULL,
    "accept_len": NUMBER_OR_NULL,
    "target_step_ms": NUMBER_OR_NULL,
    "verify_step_ms": NUMBER_OR_NULL,
    "draft_step_ms": NUMBER_OR_NULL,
    "cost_ratio": NUMBER_OR_NULL,
    "ttft_ms": PERCENTILES,
    "tpot_ms": PERCENTILES,
    "num_divergences": (int, NULL),
    "num_near_ties": (int, NULL),
}
SPEED = {
    "schema": ("headstart.speed/1",),
    "checkpoint": CHECKPOINT,
    "target": TARGET,
    "prompts": PROMPTS,
    "hardware": {"cpu": TEXT_OR_NULL, "cores": int, "gpu": TEXT_OR_NULL, "versions": dict},
    "absolute": {
        "generate_tokens_per_s": NUMBER_OR_NULL,
        "plain_tokens_per_s": NUMBER_OR_NULL,
        "memory_bandwidth_bound_tokens_per_s": NUMBER_OR_NULL,
    },
    "rows": [SPEED_ROW],
    "recommended": [{"engine": str, "concurrency": [int], "draft_length": int, "routes_off": [str], "flags": str}],
    "crossover_concurrency": (int, NULL),
}
RELIABILITY_BIN = {
    "low": NUMBER,
    "high": NUMBER,
    "weight": NUMBER,
    "confidence": NUMBER_OR_NULL,
    "acceptance": INTERVAL,
}
CALIBRATION = {
    "schema": ("headstart.calibration/1",),
    "checkpoint": CHECKPOINT,
    "target": TARGET,
    "prompts": PROMPTS,
    "interval": {"level": NUMBER, "kind": ("bootstrap over prompts",), "replicates": int, "seed": int},
    "sampling": {"temperature": NUMBER, "top_k": int, "top_p": NUMBER},
    "rows": [
        {
            "draft": ("greedy", "sampled"),
            "depth": int,
            "weight": NUMBER,
            "confidence": INTERVAL,
            "acceptance": INTERVAL,
            "calibration_error": INTERVAL,
            "bins": [RELIABILITY_BIN],
        }
    ],
    "thresholds": [
        {
            "draft": ("greedy", "sampled"),
            "draft_length": int,
            "stop_below": NUMBER,
            "accept_len": INTERVAL,
            "drafts_per_step": INTERVAL,
            "draft_steps_per_step": INTERVAL,
            "predicted_speedup": INTERVAL,
            "gain": INTERVAL,
        }
    ],
    "recommended": [{"draft": ("greedy", "sampled"), "draft_length": int, "stop_below": NUMBER_OR_NULL}],
}
TIMED = {
    "draft_length": int,
    "concurrency": int,
    "tokens_per_s": NUMBER,
    "speedup": INTERVAL,
    "predicted_speedup": NUMBER_OR_NULL,
    "cost_ratio": NUMBER_OR_NULL,
}
COMPARED = {"ratio": INTERVAL, "p": NUMBER_OR_NULL, "verdict": ("better", "worse", "tied", "too few prompts")}
BAKEOFF = {
    "schema": ("headstart.bakeoff/1",),
    "target": (TARGET, NULL),
    "prompts": (PROMPTS, NULL),
    "sampling": (dict, NULL),
    "hardware": (dict, NULL),
    "rule": {"name": ("equal_tokens", "equal_time"), "num_tokens": (int, NULL)},
    "draft_length": int,
    "num_prompts": int,
    "best": TEXT_OR_NULL,
    "rows": [
        {
            "variant": str,
            "run": str,
            "kind": str,
            "checkpoint": (CHECKPOINT, NULL),
            "num_steps": int,
            "num_tokens": int,
            "num_parameters": (int, NULL),
            "num_prompts": (int, NULL),
            "accept_len": INTERVAL,
            "conditional": [INTERVAL],
            "against_best": (COMPARED, NULL),
            "against_ngram": (COMPARED, NULL),
            "above_ngram": (bool, NULL),
            "speed": (TIMED, NULL),
            "train_seconds": NUMBER_OR_NULL,
            "eval_seconds": NUMBER_OR_NULL,
            "engines": [str],
            "failed": TEXT_OR_NULL,
        }
    ],
    "ngram": ({"accept_len": INTERVAL, "conditional": [INTERVAL], "speed": (TIMED, NULL)}, NULL),
    "seconds": dict.fromkeys(
        ("prompts", "traffic", "features", "shared", "heads", "one_pass", "apart", "share"), NUMBER_OR_NULL
    ),
}
REHEARSAL = {"schema": ("headstart.rehearsal/1",), "num_steps": int, "variants": dict}
DIVERGENCE = {
    "prompt_id": str,
    "position": int,
    "plain": (int, NULL),
    "speculative": (int, NULL),
    "gap": NUMBER_OR_NULL,
    "verdict": ("tie", "bug"),
}
CHECK = {
    "name": ("enumeration", "first_tokens", "martingale", "greedy_identity"),
    "target": str,
    "dtype": str,
    "sampler": {"temperature": NUMBER, "top_k": int, "top_p": NUMBER},
    "draft": ("greedy", "sampled"),
    "shape": ("chain", "tree"),
    "draft_length": int,
    "batch": int,
    "num_samples": int,
    "num_tokens": int,
    "statistic": NUMBER_OR_NULL,
    "p_value": NUMBER_OR_NULL,
    "level": NUMBER_OR_NULL,
    "max_difference": NUMBER_OR_NULL,
    "verdict": ("pass", "fail"),
    "divergences": [DIVERGENCE],
}
LOSSLESS = {
    "schema": ("headstart.lossless/1",),
    "checkpoint": CHECKPOINT,
    "target": TARGET,
    "verdict": ("lossless", "lossy", "inconclusive"),
    "checks": [CHECK],
    "faults": [{"name": str, "caught_by": TEXT_OR_NULL, "p_value": NUMBER_OR_NULL, "target": ("tiny", "toy")}],
}
MANIFEST = {
    "schema": ("headstart.manifest/1",),
    "stage": str,
    "state": ("running", "complete"),
    "key": str,
    "inputs": {"stage_version": int, "settings": dict, "parents": dict, "target": (dict, NULL)},
    "outputs": dict,
    "made_by": {
        "headstart": str,
        "commit": TEXT_OR_NULL,
        "argv": [str],
        "versions": dict,
        "seed": int,
        "started": str,
        "finished": TEXT_OR_NULL,
        "seconds": NUMBER,
    },
}
OUTPUT = {"sha256": str, "bytes": int, "rows": (int, NULL)}
METRICS_LINE = {"step": int, "time": NUMBER, "stage": str, "tokens": int}
TRAIN_KEYS = {
    "train/loss": NUMBER,
    "train/lr": NUMBER,
    "train/grad_norm": NUMBER,
    "train/num_supervised": int,
    "train/tokens_per_s": NUMBER,
}
HEAD = {"schema": str, "kind": str, "step": int, "settings": dict, "target": dict, "taps": [int]}
TRAFFIC_COLUMNS = {
    "prompt_id": "string",
    "route": "string",
    "split": "string",
    "messages": "string",
    "template_kwargs": "string",
    "token_ids": "list<int32>",
    "generated": "list<bool>",
    "logprob": "list<float>",
    "finish_reason": "string",
    "stop_token_id": "int",
    "sampling": "string",
    "backend": "string",
    "chunk": "int",
}


@dataclass(frozen=True)
class Length:
    """A list of `number` items of one form."""

    form: Any
    number: int


def violations(value: Any, form: Any, path: str = "") -> list[str]:
    """Every place where a value does not have its form."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return [f"{path}: {value!r} is not an object"]
        found = [f"{path}.{key}: absent" for key in form if key not in value]
        known = [key for key in value if key in form]
        if not found and known != list(form):
            found.append(f"{path}: keys {known} are not in the order {list(form)}")
        return found + [v for key in known for v in violations(value[key], form[key], f"{path}.{key}")]
    if isinstance(form, Length):
        found = violations(value, [form.form], path)
        return found if found or len(value) == form.number else [f"{path}: {len(value)} items, not {form.number}"]
    if isinstance(form, list):
        if not isinstance(value, list):
            return [f"{path}: {value!r} is not a list"]
        return [v for i, item in enumerate(value) for v in violations(item, form[0], f"{path}[{i}]")]
    allowed = form if isinstance(form, tuple) else (form,)
    if any(admits(value, option) for option in allowed):
        return []
    return [f"{path}: {value!r} is none of {allowed}"]


def admits(value: Any, option: Any) -> bool:
    if isinstance(option, dict):
        return not violations(value, option)
    if isinstance(option, type):
        return isinstance(value, option) and not (isinstance(value, bool) and option is not bool)
    return value == option and type(value) is type(option)


def read_strict(path: Path) -> Any:
    """JSON without NaN or infinities, which other languages cannot read."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{path}: {constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def acceptance_violations(path: Path) -> list[str]:
    """The form of acceptance.json, and the laws between its numbers."""
    content = read_strict(path)
    found = violations(content, ACCEPTANCE, path.name)
    cut = content.get("vocabularies", [])
    found += violations(cut, [CUT_VOCABULARY], f"{path.name}.vocabularies") if cut else []
    for i, row in enumerate([] if found else content["rows"] + cut):
        where, length = f"{path.name}.rows[{i}]", row["draft_length"]
        found += violations(row["conditional"], Length(INTERVAL, length), f"{where}.conditional")
        found += violations(row["survival"], Length(INTERVAL, length), f"{where}.survival")
        found += violations(row["accepted_histogram"], Length(NUMBER, length + 1), f"{where}.accepted_histogram")
        found += [f"{where}: {law}" for law in broken_laws(row)]
    return found


def broken_laws(row: dict[str, Any]) -> list[str]:
    """Laws of a row under its counting, to rounding."""
    histogram = np.array(row["accepted_histogram"], float)
    steps, tokens, value = row["num_steps"], row["num_tokens"], row["accept_len"]["value"]
    survival = [s["value"] for s in row["survival"]]
    conditional = [a["value"] for a in row["conditional"]]
    laws = {"histogram sums to num_steps": np.isclose(histogram.sum(), steps)}
    if row["counting"] == "reply":
        emitted = steps + float(histogram @ np.arange(len(histogram))) - row["num_short_steps"]
        laws["tokens = steps + accepted - short steps"] = np.isclose(tokens, emitted)
        laws["accept_len = tokens / steps"] = value is None or np.isclose(value, tokens / steps)
    elif None not in survival:
        laws["accept_len = 1 + sum of survival"] = value is None or np.isclose(value, 1 + sum(survival))
    if None not in conditional and None not in survival:
        laws["survival = product of conditional"] = np.allclose(survival, np.cumprod(conditional))
    return [law for law, holds in laws.items() if not holds]


def prompts_violations(path: Path) -> list[str]:
    """The form of prompts.json; every list has one entry a prompt."""
    content = read_strict(path)
    found = violations(content, PROMPT_SUMS, path.name)
    for row in [] if found else content["rows"]:
        found += violations(row["num_steps"], Length(NUMBER, len(content["prompt_ids"])), f"{path.name}.num_steps")
    for name in [] if found else ("routes", "prompt_tokens", "num_tokens"):
        found += [f"{path.name}.{name}: not one a prompt"] * (len(content[name]) != len(content["prompt_ids"]))
    return found


def metrics_violations(path: Path) -> list[str]:
    """metrics.jsonl: its form, steps that rise, and acceptance keys that come together."""
    found, last = [], -1
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line, where = json.loads(text), f"{path.name}:{number}"
        found += violations(line, METRICS_LINE, where)
        if "train/loss" in line:
            found += violations(line, TRAIN_KEYS, where)
        if line["step"] <= last:
            found.append(f"{where}: step {line['step']} after {last}")
        last = line["step"]
        positions = [key for key in line if key.startswith("acceptance/position_")]
        survivals = [key for key in line if key.startswith("survival/position_")]
        if len(positions) != len(survivals) or ("accept_len" in line) != bool(positions):
            found.append(f"{where}: acceptance, survival and accept_len do not come together")
        if "accept_len" in line:
            found += violations(
                line, {"accept_len": NUMBER, "accept_len_low": NUMBER_OR_NULL, "accept_len_high": NUMBER_OR_NULL}, where
            )
            found += violations(line, {"validation/seconds": NUMBER}, where)
    return found


def stage_violations(folder: Path) -> list[str]:
    """A finished stage: its manifest, and every output as the manifest records it."""
    from headstart.heads.store import hash_file, hash_json

    manifest = read_strict(folder / "manifest.json")
    found = violations(manifest, MANIFEST, f"{folder.name}/manifest.json")
    if manifest["key"] != hash_json(manifest["inputs"]):
        found.append(f"{folder.name}: the key is not the hash of the inputs")
    if not folder.resolve().name.endswith(manifest["key"][:12]):
        found.append(f"{folder.name}: the folder does not carry the key")
    for name, output in manifest["outputs"].items():
        found += violations(output, OUTPUT, f"{folder.name}/{name}")
        if hash_file(folder / name) != output["sha256"]:
            found.append(f"{folder.name}/{name}: not the recorded content")
    return found


def traffic_violations(folder: Path) -> list[str]:
    """Columns and types of the recorded replies, and rows that agree with themselves."""
    found = []
    for part in sorted(folder.glob("part-*.parquet")):
        table = parquet.read_table(part)
        for name, kind in TRAFFIC_COLUMNS.items():
            if name not in table.column_names:
                found.append(f"{part.name}: no column {name}")
                continue
            actual = str(table.schema.field(name).type).replace("element: ", "").replace("item: ", "")
            if not actual.replace("large_", "").startswith(kind):
                found.append(f"{part.name}: column {name} is {actual}, not {kind}")
        for row in table.to_pylist():
            same = len(row["token_ids"]) == len(row["generated"]) == len(row["logprob"])
            told = all((p is None) != g for p, g in zip(row["logprob"], row["generated"], strict=False))
            stopped = (row["finish_reason"] == "stop") == (row["stop_token_id"] is not None)
            if not (same and told and stopped):
                found.append(f"{part.name}: row {row['prompt_id'][:12]} does not agree with itself")
    return found


def feature_violations(folder: Path, traffic: Path) -> list[str]:
    """Shards of packed states: types, shapes and offsets that fit; held-out states are as exact as float32 replies."""
    found = []
    shards = sorted(folder.glob("shard-*.safetensors"))
    for shard in shards:
        with safe_open(shard, "pt") as tensors:
            shape = {name: tensors.get_slice(name).get_shape() for name in ("taps", "final", "offsets")}
            kind = {name: tensors.get_slice(name).get_dtype() for name in ("taps", "final", "offsets")}
            offsets = tensors.get_tensor("offsets").tolist()
            replies = parquet.read_table(
                traffic / f"part-{shard.stem.removeprefix('shard-')}.parquet", columns=["split"]
            )
            states = "F32" if replies["split"][0].as_py() == "heldout" else "BF16"
            if kind != {"taps": states, "final": states, "offsets": "I64"}:
                found.append(f"{shard.name}: types {kind}")
            if not (shape["taps"][0] == shape["final"][0] == offsets[-1]) or offsets != sorted(offsets):
                found.append(f"{shard.name}: shapes {shape} do not fit offsets that end at {offsets[-1]}")
            if not tensors.metadata():
                found.append(f"{shard.name}: no metadata")
    return found or ([] if shards else [f"{folder.name}: no shards"])


def bakeoff_violations(folder: Path) -> list[str]:
    """The form of bakeoff.json, and the laws between its numbers."""
    content = read_strict(folder / "bakeoff.json")
    found = violations(content, BAKEOFF, "bakeoff.json")
    if found or content["seconds"]["share"] is None:
        return found
    seconds, rows = content["seconds"], content["rows"]
    laws = {
        "shared = prompts + traffic + features": np.isclose(
            seconds["shared"], sum(seconds[name] for name in ("prompts", "traffic", "features"))
        ),
        "heads = training + evaluation of all": np.isclose(
            seconds["heads"], sum(row["train_seconds"] + row["eval_seconds"] for row in rows)
        ),
        "share = (shared + heads) / (heads x shared + heads)": np.isclose(
            seconds["share"],
            (seconds["shared"] + seconds["heads"]) / (len(rows) * seconds["shared"] + seconds["heads"]),
        ),
        "the best has the largest accept_len": all(
            (row["accept_len"]["value"] or 0)
            <= next(own["accept_len"]["value"] for own in rows if own["variant"] == content["best"])
            for row in rows
        ),
    }
    return [f"bakeoff.json: {law}" for law, holds in laws.items() if not holds]


def run_violations(run: Path) -> list[str]:
    """Every file of a finished run that has a schema."""
    found = acceptance_violations(run / "eval" / "acceptance.json")
    found += prompts_violations(run / "eval" / "prompts.json")
    for name, form in (("speed", SPEED), ("lossless", LOSSLESS), ("calibration", CALIBRATION)):
        found += violations(read_strict(run / "eval" / f"{name}.json"), form, f"{name}.json")
    found += metrics_violations(run / "metrics.jsonl")
    for stage in ("prompts", "traffic", "features"):
        if not (run / stage).is_symlink():
            found.append(f"{stage}: not a link")
        found += stage_violations(run / stage)
    found += traffic_violations(run / "traffic") + feature_violations(run / "features", run / "traffic")
    for checkpoint in sorted((run / "checkpoints").glob("step-*")):
        found += violations(read_strict(checkpoint / "head.json"), HEAD, f"{checkpoint.name}/head.json")
        if not (checkpoint / "head.safetensors").is_file() or not (checkpoint / "trainer").is_dir():
            found.append(f"{checkpoint.name}: no head.safetensors or trainer/")
    for name in ("best", "last"):
        if not (run / "checkpoints" / (run / "checkpoints" / name).read_text().strip()).is_dir():
            found.append(f"checkpoints/{name}: names no checkpoint")
    for name in ("recipe.yaml", "command.txt", "console.log", "report.md"):
        if not (run / name).is_file():
            found.append(f"{name}: absent")
    return found
