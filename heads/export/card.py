"""The README.md of an exported folder: what the head is, what it measured, and the commands that serve it.

Everything on the card comes from two records, `headstart.json` in the folder and the run's eval files, so the card can be
written again after an engine has loaded the folder.
"""

import math
import re
from pathlib import Path
from typing import Any

from headstart.heads.export.serving import serving_text
from headstart.heads.intervals import interval_text
from headstart.heads.store import atomic_path, read_json

CARD, RECORD = "README.md", "headstart.json"
TARGET_CARD = f"TARGET_{CARD}"  # the target's own, where ours stands in its place
RECORD_SCHEMA = "headstart.export/1"
UNTESTED = "**UNTESTED.** Exported with `--untested`: the gate was not asked whether this head may be served."

DEFINITIONS = """\
| word | meaning |
| --- | --- |
| accept_len | emitted tokens / target steps, corrected and bonus tokens included, all prompts together |
| prefill | gives a reply's first token, which counts neither as a step nor as a token |
| conditional a_j | share of drafts at depth j (0 is the first) that were accepted, given that all before it were |
| survival s_j | a_0 x .. x a_j; engines report it as accepted at position j / drafts |
| counting `reply` | tokens after a stop or limit do not count, and a draft beyond the reply's end is not judged |
| counting `engine` | the last block counts whole, as engines count it |
| lossless | greedy replies with the head are the target's own, token for token (but for ties of rounding); sampled ones \
follow its law, by test |
| speedup | tokens/s with the head / tokens/s of plain decoding in the same program, dtype and cache |
| [low, high] | 95 % bootstrap interval over prompts |
"""


def write_card(folder: Path, evals: dict[str, Any]) -> None:
    """Write README.md from the folder's record and the eval files {"acceptance", "lossless", "speed"} (None: absent)."""
    with atomic_path(folder / CARD) as temporary:
        temporary.write_text(card_text(read_json(folder / RECORD, RECORD_SCHEMA), evals), encoding="utf-8")


def card_text(record: dict[str, Any], evals: dict[str, Any]) -> str:
    """The card as Markdown; an untested export says so in its first line."""
    what = "Draft model" if record["kind"] == "draft" else f"{record['kind'].upper()} draft head"
    title = f"# {what} for {record['target']['name']}, for {record['engine']}"
    parts = [title, _verdicts(record, evals), _acceptance(record, evals), _speed(record, evals), serving_text(record)]
    parts += ["## Definitions\n\n" + DEFINITIONS.strip(), _contents(record), _lengths(record), _provenance(record)]
    if record["untested"]:
        parts.insert(0, "\n".join([UNTESTED, "", *(f"- {reason}" for reason in record["gate"] or ["it would pass"])]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdicts(record: dict[str, Any], evals: dict[str, Any]) -> str:
    lossless = evals.get("lossless")
    lines = [f"- lossless: {lossless['verdict'] if lossless else 'not measured'}"]
    main = _main_row(record, evals)
    if main is None:
        lines.append("- accept_len: not measured")
    else:
        lines.append(
            f"- accept_len: {interval_text(main['accept_len'])} at draft length {main['draft_length']}, "
            f"{main['num_prompts']} held-out prompts ({main['source']}, temperature {main['temperature']:g})"
        )
    rows = [row for row in (evals.get("speed") or {}).get("rows", []) if row["drafter"] == record["kind"]]
    known = [row for row in rows if row["speedup"]["value"] is not None]
    best = max(known, key=lambda row: row["speedup"]["value"], default=None)
    if best is None:
        lines.append("- speedup: not measured")
    else:
        lines.append(
            f"- best speedup: {interval_text(best['speedup'])} ({best['engine']}, {best['dtype']}, concurrency "
            f"{best['concurrency']}, draft length {best['draft_length']})"
        )
    loaded = [f"{entry['engine']} {entry['version']}" for entry in record["loaded_in"]]
    lines.append(f"- loaded and compared in: {', '.join(loaded) or 'no engine yet (`make engines`)'}")
    if rules := record.get("rules"):  # older folders have none
        lines.append(f"- read back by the rules of: {', '.join(f'{engine} ({rules[engine]})' for engine in rules)}")
    return "\n".join(lines)


def _main_row(record: dict[str, Any], evals: dict[str, Any]) -> dict[str, Any] | None:
    rows = [row for row in _rows(record, evals) if row["counting"] == "reply" and row["route"] == "all"]
    wanted = [row for row in rows if row["draft_length"] == record["draft_length"]]
    candidates: list[dict[str, Any]] = wanted or rows
    return candidates[0] if candidates else None


def _rows(record: dict[str, Any], evals: dict[str, Any]) -> list[dict[str, Any]]:
    """Acceptance rows of this head's chains, over all context lengths."""
    found: list[dict[str, Any]] = (evals.get("acceptance") or {}).get("rows", [])
    return [r for r in found if r["drafter"] == record["kind"] and r["context"] == "all" and r["tree"] is None]


def _acceptance(record: dict[str, Any], evals: dict[str, Any]) -> str:
    """The head at every draft length, then by route beside n-gram lookup, which costs nothing."""
    rows, length = _rows(record, evals), record["draft_length"]
    if not rows:
        return "## Acceptance\n\nNot measured."
    lookup = [row for row in evals["acceptance"]["rows"] if row["drafter"] == "ngram" and row["context"] == "all"]
    rows = [row for row in rows if row["route"] == "all" or row["draft_length"] == length]
    rows += [row for row in lookup if row["draft_length"] == length]
    lines = [
        "## Acceptance",
        "",
        "| drafter | source | route | temperature | draft length | counting | accept_len | s_0, s_1, .. | prompts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        survival = ", ".join(interval_text({"value": s["value"]}, 3) for s in row["survival"])
        drafter = row["drafter"] + ("" if row["draft"] == "greedy" else f" ({row['draft']})")
        lines.append(
            f"| {drafter} | {row['source']} | {row['route']} | {row['temperature']:g} | {row['draft_length']} "
            f"| {row['counting']} | {interval_text(row['accept_len'])} | {survival} | {row['num_prompts']} |"
        )
    return "\n".join(lines)


def _speed(record: dict[str, Any], evals: dict[str, Any]) -> str:
    speed = evals.get("speed")
    if not speed or not speed["rows"]:
        return "## Speed\n\nNot measured."
    lines = [
        "## Speed",
        "",
        "| engine | drafter | dtype | concurrency | draft length | plain tokens/s | tokens/s | speedup |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in speed["rows"]:
        if row["route"] == "all":
            figures = [f"{row[k]:.1f}" if row[k] is not None else "-" for k in ("plain_tokens_per_s", "tokens_per_s")]
            lines.append(
                f"| {row['engine']} | {row['drafter']} | {row['dtype']} | {row['concurrency']} | {row['draft_length']} "
                f"| {' | '.join(figures)} | {interval_text(row['speedup'])} |"
            )
    hardware = speed["hardware"]
    lines += ["", f"Measured on {hardware.get('gpu') or hardware['cpu']}, {hardware['cores']} cores.", ""]
    for entry in speed.get("recommended", []):
        advice = f"draft length {entry['draft_length']}" if entry["draft_length"] else NO_DRAFTS
        off = f"; off for {', '.join(entry['routes_off'])}" if entry["draft_length"] and entry.get("routes_off") else ""
        span = "-".join(str(end) for end in sorted(set(entry["concurrency"])))
        lines.append(f"- recommended at concurrency {span} ({entry['engine']}): {advice}{off}")
    return "\n".join(lines)


NO_DRAFTS = "no speculation (the commands below are for other traffic or machines)"
# What a folder is, by the form of its kind where there are several.
HELD = {
    "eagle3": "the head; shared with the target at load time: its token embedding. The target itself is untouched",
    "eagle1": "the head; shared with the target at load time: its token embedding and its output layer. The target itself "
    "is untouched",
    "medusa": "the heads, which share nothing with the target. The target itself is untouched",
    "draft": "a whole language model and the target's tokenizer; it reads the text alone, no states",
    "shipped": "the target as it was, bit by bit, but for its MTP layer; a card of its own is TARGET_README.md",
    "mimo": "the target as a Qwen2 with zero biases, else bit by bit as it was; with the MTP layer it is a MiMo; a card of "
    "its own is TARGET_README.md",
}
# Of kinds that read states of the target: which token a state and a token give.
ALIGNMENT = {
    "eagle3": "slot t reads the target's taps of token t and the embedding of token t + 1, and predicts t + 2",
    "eagle1": "slot t reads the target's final state of token t and the embedding of token t + 1, and predicts t + 2",
    "medusa": "head j, from 0, reads the target's final state of token t and predicts t + 2 + j",
    "mtp": "slot t reads the target's final state of token t and the embedding of token t + 1, and predicts t + 2; the next "
    "slot reads the layer's own normed state",
}


def _contents(record: dict[str, Any]) -> str:
    kind, tensors = record["kind"], record["tensors"]
    maps = [name for name in ("d2t", "t2d", "token_map") if name in tensors]
    own = tensors.keys() - set(maps)
    names = sorted({re.sub(r"\.experts\.\d+\.", ".experts.*.", name) for name in own})
    size = f"{sum(math.prod(tensors[name]) for name in own) / 1e6:.1f} M parameters, {record['dtype']}"
    lines = ["## What is in the folder", "", f"- {HELD[record.get('form', kind)]}"]
    lines.append(f"- {size}" if kind == "draft" else f"- trained ({size}): {', '.join(names)}")
    if kind in ALIGNMENT:
        lines.append(f"- alignment: {ALIGNMENT[kind]}")
    if record["taps"]:
        lines.append(f"- taps: {record['taps']}; {record['tap_convention']}")
    if maps:
        ids = "target id = i + d2t[i], and t2d marks the tokens that can be drafted" if "d2t" in maps else "their ids"
        lines.append(
            f"- draft vocabulary: {tensors[maps[0]][0]} tokens ({', '.join(maps)}: {ids}). Replies can hold every token: "
            "the rest is simply never drafted"
        )
    return "\n".join(lines)


def _lengths(record: dict[str, Any]) -> str:
    """Two lengths that are not one: the target's context is what the config says, whatever the texts trained on."""
    if "context" not in record:
        return ""
    trained = record["trained_length"]
    seen = (
        "not known here" if trained is None else f"at most {trained} tokens long; beyond that acceptance is not known"
    )
    return (
        f"## Lengths\n\n- texts trained on: {seen}\n- positions written for: {record['context']}, the target's context"
    )


def _provenance(record: dict[str, Any]) -> str:
    checkpoint, target = record["checkpoint"], record["target"]
    lines = ["## Provenance", "", f"- checkpoint: step {checkpoint['step']}, sha256 {checkpoint['sha256']}"]
    lines += [f"- target {name}: {value}" for name, value in target["fingerprint"].items()]
    lines += [f"- {record['trained_on']}"] if record.get("trained_on") else []
    lines += [f"- {name} stage: {key}" for name, key in record["data"].items()]
    lines += [f"- {name}: {value}" for name, value in record["made_by"]["versions"].items()]
    for entry in record["loaded_in"]:
        survival = ", ".join(f"{value:.3f}" for value in entry["survival"])
        lines.append(
            f"- {entry['engine']} {entry['version']}: survival {survival} over {entry['num_drafts']} drafts "
            f"({entry['num_prompts']} prompts), verdict {entry['verdict']}"
        )
    return "\n".join(lines)
