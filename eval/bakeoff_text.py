"""The one table that a bake-off ends in, on the console and in its report.md."""

from pathlib import Path
from typing import Any

from headstart.eval.report import markdown_table
from headstart.eval.summary import number_text, table
from headstart.heads.intervals import interval_text
from headstart.heads.store import atomic_path

REPORT = "report.md"
DEFINITIONS = """\
accept_len      tokens emitted / target steps, all prompts together, exact on recorded replies, with its 95 % interval
a_k             accepted at position k / judged there, which needs all drafts before it to be accepted
against best    accept_len / that of the best head on the same prompts (paired; Holm's rule over all heads); tied: p >= 0.05
against n-gram  the same against n-gram lookup, which needs no training
c               cost of one drafted token / cost of one plain step of the target, measured
training        optimiser steps and validations
speedup         over plain decoding by the same code, measured at the draft length that was fastest, for the fewest requests
                together that were timed; predicted: accept_len of the timed replies / measured cost of a step with drafts
engines         those that a folder of this head, with its settings, can be written for"""


def bakeoff_table(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: every head in the order of the recipe, then n-gram lookup."""
    depth = content["draft_length"]
    header = ["head", "accept_len [95 %]", *(f"a_{k}" for k in range(depth)), "against best", "against n-gram", "c"]
    header += ["parameters", "training", "speedup [95 %]", "predicted", "engines"]
    lines = []
    for row in content["rows"]:
        against_best = "best" if row["variant"] == content["best"] else verdict_text(row["against_best"])
        figures = [against_best, verdict_text(row["against_ngram"])]
        engines = ", ".join(row["engines"]) or "none"
        size = "-" if row["num_parameters"] is None else f"{row['num_parameters'] / 1e6:.1f} M"
        lines.append(line_of(row["variant"], row, depth, figures, [size, time_text(row["train_seconds"])], engines))
    if content["ngram"] is not None:
        lines.append(line_of("n-gram lookup", content["ngram"], depth, ["-", "-"], ["0", "-"], "-"))
    return header, lines


def line_of(
    name: str, row: dict[str, Any], depth: int, verdicts: list[str], training: list[str], engines: str
) -> list[str]:
    conditional = [number_text(a["value"], 3) for a in row["conditional"]]
    conditional += ["-"] * (depth - len(conditional))
    speed = row["speed"] or dict.fromkeys(("cost_ratio", "speedup", "predicted_speedup"))
    speedup = interval_text(speed["speedup"]) + (f" at {speed['draft_length']}" if row["speed"] else "")
    figures = [*verdicts, number_text(speed["cost_ratio"], 2), *training]
    return [
        name,
        interval_text(row["accept_len"]),
        *conditional,
        *figures,
        speedup,
        number_text(speed["predicted_speedup"], 2),
        engines,
    ]


def verdict_text(found: dict[str, Any] | None) -> str:
    """`0.93 worse`, or `tied`."""
    if found is None:
        return "-"
    tied = found["verdict"] in ("tied", "too few prompts")
    return str(found["verdict"]) if tied else f"{number_text(found['ratio']['value'], 2)} {found['verdict']}"


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def caption(content: dict[str, Any]) -> str:
    """What was compared, by which rule, and where."""
    rule, prompts, hardware = content["rule"], content["prompts"], content["hardware"]
    heads = f"{len(content['rows'])} heads"
    heads += f" for {content['target']['name']}" if content["target"] else ""
    tokens = sorted(row["num_tokens"] for row in content["rows"])
    trained = f"each trained on {tokens[0]:,} tokens (equal tokens)"
    if rule["name"] == "equal_time":
        trained = f"each trained for equal time, as rehearsed: on {tokens[0]:,} to {tokens[-1]:,} tokens"
    text = f"{heads}, {trained}, draft length {content['draft_length']}"
    if prompts:
        text += f", {content['num_prompts']} held-out prompts, replies of at most {prompts['max_new_tokens']} tokens"
    if hardware:
        text += f", on {hardware['gpu'] or hardware['cpu']}, {hardware['cores']} cores"
    return text


def findings(content: dict[str, Any]) -> list[str]:
    """What the table shows, one sentence each: ties, heads that do not beat lookup, times, failures."""
    rows, lines = content["rows"], []
    if content["best"] is not None:
        tied = [row["variant"] for row in rows if row["against_best"] and row["against_best"]["verdict"] == "tied"]
        lines.append(
            f"tied with the best, {content['best']}: {', '.join(tied)}"
            if tied
            else f"the best is {content['best']}; no other head is tied with it"
        )
    below = [f"{row['variant']} ({interval_text(row['accept_len'])})" for row in rows if row["above_ngram"] is False]
    if below:
        lookup = interval_text(content["ngram"]["accept_len"])
        lines.append(f"accept_len does not lie above n-gram lookup's {lookup}: {', '.join(below)}")
    elif any(row["above_ngram"] for row in rows):
        lines.append("every head's accept_len interval lies above n-gram lookup's")
    lines += time_lines(content["seconds"], len(rows))
    lines += [f"failed: {row['variant']}: {row['failed']}" for row in rows if row["failed"]]
    if waiting := [row["variant"] for row in rows if not row["failed"] and not row["checkpoint"]]:
        lines.append(f"not measured yet: {', '.join(waiting)}")
    return lines


def time_lines(seconds: dict[str, float | None], num_heads: int) -> list[str]:
    """One target pass for all heads, against one for each."""
    if seconds["share"] is None:
        return []
    shared, heads, one_pass, apart = (time_text(seconds[name]) for name in ("shared", "heads", "one_pass", "apart"))
    return [
        f"one target pass for all: {shared} shared + {heads} for the heads = {one_pass}, which is {seconds['share']:.0%} of "
        f"the {apart} with one pass for each ({num_heads} x {shared} + {heads}); heads: training and evaluation"
    ]


def bakeoff_text(content: dict[str, Any]) -> str:
    """The table on the console."""
    header, lines = bakeoff_table(content)
    return "\n".join([f"bake-off: {caption(content)}", table(header, lines), *findings(content), "", DEFINITIONS])


def write_bakeoff_report(folder: Path, content: dict[str, Any]) -> Path:
    """report.md of a bake-off: the table, what it shows, and the runs behind it."""
    text = caption(content)
    parts = [
        "# Bake-off",
        f"{text[0].upper()}{text[1:]}.",
        markdown_table(*bakeoff_table(content)),
        "\n".join(f"- {line[0].upper()}{line[1:]}." for line in findings(content)),
        "## Comparisons\n\n" + markdown_table(*comparison_table(content)),
        f"## How to read this\n\n```\n{DEFINITIONS}\n```",
        "## Runs\n\n" + markdown_table(*run_table(content)),
    ]
    path = folder / REPORT
    with atomic_path(path) as temporary:
        temporary.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def comparison_table(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Ratios with their intervals and adjusted p-values."""
    header = ["head", "against", "ratio of accept_len", "p", "verdict"]
    named = (("against_best", content["best"] or "-"), ("against_ngram", "n-gram lookup"))
    return header, [
        [row["variant"], against, interval_text(found["ratio"], 3), number_text(found["p"], 4), found["verdict"]]
        for name, against in named
        for row in content["rows"]
        if (found := row[name]) is not None
    ]


def run_table(content: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Where each head's own report is, and which checkpoint was measured."""
    header = ["head", "run", "kind", "steps", "tokens", "measured step", "sha256", "training", "evaluation"]
    return header, [
        [
            row["variant"],
            row["run"],
            row["kind"],
            f"{row['num_steps']:,}",
            f"{row['num_tokens']:,}",
            str((row["checkpoint"] or {}).get("step", "-")),
            str((row["checkpoint"] or {}).get("sha256", "-"))[:12],
            time_text(row["train_seconds"]),
            time_text(row["eval_seconds"]),
        ]
        for row in content["rows"]
    ]
