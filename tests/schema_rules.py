"""The files of a run against their forms (tests/schema_forms.py), and the laws between their numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from safetensors import safe_open

from tests.schema_forms import (
    ACCEPTANCE,
    BAKEOFF,
    CALIBRATION,
    CUT_VOCABULARY,
    HEAD,
    INTERVAL,
    LOSSLESS,
    MANIFEST,
    METRICS_LINE,
    NUMBER,
    NUMBER_OR_NULL,
    OUTPUT,
    PROMPT_SUMS,
    SPEED,
    TRAFFIC_COLUMNS,
    TRAIN_KEYS,
    Length,
)


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
    for name in [] if found else ("routes", "prompt_tokens", "num_tokens", "conversations"):
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
    recorded, replied = (read_strict(stage / "manifest.json")["outputs"] for stage in (folder, traffic))
    for shard in shards:
        part = f"part-{shard.stem.removeprefix('shard-')}.parquet"
        if recorded[shard.name]["replies"] != replied[part]["sha256"]:
            found.append(f"{shard.name}: not of the replies of {part}")
        with safe_open(shard, "pt") as tensors:
            shape = {name: tensors.get_slice(name).get_shape() for name in ("taps", "final", "offsets")}
            kind = {name: tensors.get_slice(name).get_dtype() for name in ("taps", "final", "offsets")}
            offsets = tensors.get_tensor("offsets").tolist()
            replies = parquet.read_table(traffic / part, columns=["split"])
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
