"""report.md of a run: its figures in tables, plots, and how to read them. Made from files only; nothing is measured."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headstart.eval.calibration_text import reliability_table, stop_text, threshold_table
from headstart.eval.contexts import break_even_text, context_rows, counted, step_cost
from headstart.eval.gate import of_checkpoint, read_evals
from headstart.eval.lossless_text import certificate_lines, named_checks
from headstart.eval.plots import plot_acceptance, plot_lengths, plot_reliability, plot_training
from headstart.eval.summary import (
    agreement_text,
    at_temperature,
    context_table,
    drafter_text,
    drafts_kept,
    find_rows,
    main_row,
    near_ties_text,
    plain_below_generate,
    previous_text,
    recommended_text,
    route_table,
    routes_lost_to_ngram,
    whole_rows,
)
from headstart.eval.tables import number_text, tree_text
from headstart.eval.temperatures import temperature_table
from headstart.eval.vocabulary_text import vocabulary_table
from headstart.heads.errors import WrongInput
from headstart.heads.intervals import interval_text
from headstart.heads.paths import count_cut, trained_on
from headstart.heads.store import atomic_path

REPORT = "report.md"
ACCEPTANCE_PLOT, LENGTHS_PLOT, TRAINING_PLOT = "acceptance.png", "lengths.png", "training.png"
RELIABILITY_PLOT = "reliability.png"

HOW_TO_READ = """\
## How to read this

- **accept_len** is emitted tokens / target steps, the target's own corrected or bonus token included. 1 means that drafts
  never help, draft length + 1 is the most there can be. The first token of a reply comes from reading the prompt: it is
  no step and no token. Tokens after a stop or limit do not count, and a draft beyond the reply's end is not judged.
- **a_k** is the share of drafts at position k (the first is 0) that were accepted, among those that were judged because
  all before them were accepted. Serving engines report s_k = a_0 x .. x a_k instead, and count the last block whole.
- **offline** is exact for the recorded replies: the steps a live run takes are summed over with their probabilities, so
  no draft is sampled and nothing is averaged over starts that serving never meets. **live** decoded the prompts for real.
- **[low, high]** is a 95 % interval from drawing the prompts anew with replacement: what other prompts of the same kind
  would give. It does not cover other kinds of prompts.
- **prompt length** counts the tokens the target reads before its reply; bucket a-b holds prompts of a to b - 1 tokens.
- **lossless** is a verdict: greedy replies with the head are token for token the target's own, or part where two tokens'
  logits are equal but for rounding (each such place was scored again in float64 and is listed in `eval/lossless.json`). At
  a temperature, or with `--lossless`, the rules of verification are enumerated exactly on a toy target, and sampled replies
  of this head are held against the target's law: their first tokens jointly, and the surprise of all their tokens.
- **speedup** is tokens/s with the head over tokens/s of plain decoding by the same code at draft length 0, in the same
  process, dtype and cache, timed in turns. Values below 1 are slowdowns and are shown.
- **confidence** of a draft is the largest probability of the head's own law there. Drafts may be ended where the product
  of the confidences so far falls below a threshold: decided before the token is drawn, so the output stays the target's.
- **n-gram lookup** drafts by repeating what followed the same words earlier. It costs nothing to train or run, so a head
  has to beat it; replies that repeat themselves flatter it (the share of repeated 8-grams stands beside it).
"""


def write_report(run: Path) -> Path:
    """Write `report.md` and its plots into a run folder from `eval/*.json` and `metrics.jsonl`.

    Raises:
        WrongInput: nothing was measured yet.
    """
    results = read_evals(run / "eval")
    if results["acceptance"] is None:
        raise WrongInput(f"{run}: found no eval/acceptance.json.\nMeasure the run first: headstart eval {run}")
    results = of_checkpoint(results, results["acceptance"]["checkpoint"])
    acceptance, curve = results["acceptance"], read_curve(run / "metrics.jsonl")
    plot_acceptance(acceptance, run / ACCEPTANCE_PLOT)
    main = main_row(acceptance, acceptance["checkpoint"]["kind"])
    parts = [
        headline(results),
        acceptance_part(acceptance),
        f"![Acceptance by position]({ACCEPTANCE_PLOT})\n\nShare of judged drafts that were accepted, by position; bars "
        "are 95 % intervals over prompts.",
        route_part(acceptance, main["draft_length"]) if main else "",
        length_part(acceptance, results["speed"], main["draft_length"], run / LENGTHS_PLOT) if main else "",
        temperature_part(acceptance, main["draft_length"]) if main else "",
        lossless_part(results["lossless"]),
        speed_part(results["speed"]),
        confidence_part(results["calibration"], run / RELIABILITY_PLOT),
    ]
    if curve:
        plot_training(curve, run / TRAINING_PLOT)
        parts.append(
            f"## Training\n\n![accept_len during training]({TRAINING_PLOT})\n\naccept_len on the validation replies, which "
            "choose the checkpoint; the figures above are of held-out replies, which choose nothing."
        )
    parts += [HOW_TO_READ, provenance(acceptance, results["speed"], training_lines(run))]
    path = run / REPORT
    with atomic_path(path) as temporary:
        temporary.write_text("\n\n".join(part.strip() for part in parts if part) + "\n", encoding="utf-8")
    return path


def headline(results: dict[str, Any]) -> str:
    acceptance, lossless, speed = results["acceptance"], results["lossless"], results["speed"]
    checkpoint, target = acceptance["checkpoint"], acceptance["target"]
    kind = checkpoint["kind"]
    row = main_row(acceptance, kind)
    lines = [f"# {kind} head for {target['name']}, step {checkpoint['step']}", ""]
    if row is not None:
        lines.append(
            f"- A target step emits {interval_text(row['accept_len'])} tokens at draft length {row['draft_length']} "
            f"({row['num_prompts']} held-out prompts, {row['num_tokens']} tokens{at_temperature(row)}; without a head it "
            "emits 1)."
        )
    if lossless is not None:
        lines.append(f"- Output: {lossless['verdict']}.")
    for best in best_speeds(speed):
        lines.append(
            f"- Speedup at concurrency {best['concurrency']}: {interval_text(best['speedup'])} at draft length "
            f"{best['draft_length']} in {best['dtype']} ({number_text(best['plain_tokens_per_s'])} to "
            f"{number_text(best['tokens_per_s'])} tokens/s)."
        )
    return "\n".join(lines)


def best_speeds(speed: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The head's row with the largest speed-up at every concurrency."""
    if speed is None:
        return []
    kind = speed["checkpoint"]["kind"]
    rows = [row for row in speed["rows"] if row["drafter"] == kind and row["speedup"]["value"] is not None]
    best: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["speedup"]["value"]):
        best[row["concurrency"]] = row
    return [best[concurrency] for concurrency in sorted(best)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def acceptance_part(acceptance: dict[str, Any]) -> str:
    rows = whole_rows(acceptance)
    depth = max(row["draft_length"] for row in rows)
    header = ["drafter", "source", "counting", "draft length", "accept_len", "drafts kept"]
    header += ["uniform starts", "product of marginals", *(f"a_{k}" for k in range(depth))]
    lines = [
        [
            drafter_text(row),
            row["source"],
            row["counting"],
            str(row["draft_length"]),
            interval_text(row["accept_len"]),
            number_text(drafts_kept(row), 2),
            number_text(row["uniform_start_estimate"], 2),
            number_text(row["product_of_marginals"], 2),
            *(interval_text(a) for a in row["conditional"]),
            *[""] * (depth - row["draft_length"]),
        ]
        for row in rows
    ]
    text = (
        "## Acceptance\n\n"
        + markdown_table(header, lines)
        + "\n\n`drafts kept` is accept_len without the target's own token: accepted drafts / steps. The two columns after "
        "it are the customary estimates: `uniform starts` is 1 + the mean survival over all positions of the replies, "
        "`product of marginals` 1 + the products of each depth's own mean acceptance over them. Both let drafting start "
        "anywhere; real steps begin where the last draft failed, so they report too much."
    )
    if cut := acceptance.get("vocabularies"):
        text += "\n\nWith fewer draft tokens, nothing trained anew:\n\n" + markdown_table(*vocabulary_table(cut))
    if found := acceptance.get("previous"):
        line = previous_text(found)
        text += f"\n\n{line[0].upper()}{line[1:]}."
    agreed = acceptance.get("live_agreement")
    if agreed and "num_equal" not in agreed:
        line = agreement_text(agreed)
        text += f"\n\n{line[0].upper()}{line[1:]}, a paired test over prompts."
    elif agreed:
        text += (
            f"\n\nLive replies that took exactly the steps computed offline: {agreed['num_equal']} of "
            f"{agreed['num_replies']} ({agreed['num_draft_ties']} part at a tie of draft logits, "
            f"{agreed['num_other_tokens']} have other tokens, {len(agreed['unexplained'])} are unexplained)."
        )
    return text


def route_part(acceptance: dict[str, Any], draft_length: int) -> str:
    header, lines = route_table(acceptance, draft_length)
    text = f"## By route, draft length {draft_length}\n\n" + markdown_table(header, lines)
    if find_rows(acceptance, source="offline", drafter="ngram", draft_length=draft_length):
        lost = routes_lost_to_ngram(acceptance, draft_length)
        text += f"\n\nRoutes where the head loses to n-gram lookup: {', '.join(lost) or 'none'}."
    return text


def length_part(acceptance: dict[str, Any], speed: dict[str, Any] | None, draft_length: int, plot: Path) -> str:
    """The curve over prompt lengths and where drafting stops to pay; plotted where there is more than one length."""
    header, lines = context_table(acceptance, draft_length, speed)
    rows = context_rows(acceptance, acceptance["checkpoint"]["kind"], draft_length)
    if not counted(rows):
        return ""
    cost = step_cost(acceptance, speed, draft_length)
    verdict = break_even_text(rows, cost)
    text = [
        f"## By prompt length, draft length {draft_length}",
        markdown_table(header, lines),
        f"{verdict[0].upper()}{verdict[1:]}. A predicted speedup is accept_len over that cost, which was timed on prompts "
        "of all lengths together.",
    ]
    if len(counted(rows)) > 1:
        plot_lengths(rows, cost, plot)
        text.append(f"![accept_len by prompt length]({plot.name})")
    return "\n\n".join(text)


def temperature_part(acceptance: dict[str, Any], draft_length: int) -> str:
    """accept_len by temperature and kind of drafts; empty where the run's own setting is the only one measured."""
    header, lines = temperature_table(acceptance, draft_length)
    if not lines:
        return ""
    title = f"## By temperature, draft length {draft_length}\n\n"
    return (
        title
        + markdown_table(header, lines)
        + "\n\nReplies to the same prompts at each temperature, offline unless it says live. Sampled drafts are drawn at "
        "the target's temperature. Every other figure here is of the run's own setting."
    )


def lossless_part(lossless: dict[str, Any] | None) -> str:
    if lossless is None:
        return "## Output\n\nNot measured."
    lines = []
    for check in named_checks(lossless, "greedy_identity"):
        ties = sum(d["verdict"] == "tie" for d in check["divergences"])
        lines.append(
            [
                check["name"],
                check.get("drafter", "-") + tree_text(check),
                check.get("against", "-"),
                check["dtype"],
                str(check["draft_length"]),
                f"{check['num_samples'] - len(check['divergences'])} of {check['num_samples']}",
                str(check["num_tokens"]),
                f"{ties} ties, {len(check['divergences']) - ties} bugs",
                check["verdict"],
            ]
        )
    header = [
        "check",
        "drafter",
        "against",
        "dtype",
        "draft length",
        "equal replies",
        "tokens",
        "differences",
        "verdict",
    ]
    parts = [markdown_table(header, lines)] if lines else []
    parts += ["\n".join(f"- {line}" for line in certificate_lines(lossless))]
    return "\n\n".join([f"## Output: {lossless['verdict']}", *filter(None, parts)])


def speed_part(speed: dict[str, Any] | None) -> str:
    if speed is None or not speed["rows"]:
        return "## Speed\n\nNot measured."
    absolute, hardware = speed["absolute"], speed["hardware"]
    lines = [
        [
            row["engine"],
            row["drafter"],
            row["dtype"],
            str(row["concurrency"]),
            str(row["draft_length"]),
            number_text(row["plain_tokens_per_s"]),
            number_text(row["tokens_per_s"]),
            interval_text(row["speedup"]),
            number_text(row["predicted_speedup"], 2),
            number_text(row["cost_ratio"], 2),
            near_ties_text(row),
        ]
        for row in speed["rows"]
    ]
    header = ["engine", "drafter", "dtype", "concurrency", "draft length", "plain tokens/s", "tokens/s", "speedup"]
    header += ["predicted", "c", "near ties of differing replies"]
    text = [
        "## Speed",
        f"On {hardware['gpu'] or hardware['cpu']}, {hardware['cores']} cores, {speed['rows'][0]['threads']} threads. "
        f"Plain decoding {number_text(absolute['plain_tokens_per_s'])} tokens/s, transformers.generate "
        f"{number_text(absolute['generate_tokens_per_s'])}, reading the weights once a token would allow "
        f"{number_text(absolute['memory_bandwidth_bound_tokens_per_s'])}.",
        markdown_table(header, lines),
        "`c` is one draft step / one plain target step; `predicted` is accept_len over the measured cost of a step with "
        "drafts.",
    ]
    if plain_below_generate(speed):
        text.append("**Plain decoding is slower than transformers.generate here: no speedup above counts.**")
    text += [f"{line[0].upper()}{line[1:]}." for line in recommended_text(speed, quote="`")]
    text.append(
        "They are the reference decoder's. An engine has costs of its own: time it there before you rely on it."
    )
    return "\n\n".join(text)


def confidence_part(calibration: dict[str, Any] | None, plot: Path) -> str:
    """Whether the head knows when it is right, and what ending drafts by that would be worth."""
    if calibration is None or not calibration["rows"]:
        return ""
    plot_reliability(calibration["rows"], plot)
    text = [
        "## Confidence",
        markdown_table(*reliability_table(calibration)),
        f"![Acceptance over confidence]({plot.name})",
    ]
    for advice in calibration["recommended"]:
        text += [
            f"{advice['draft'].capitalize()} drafts of length {advice['draft_length']}, ended where the product of "
            "confidences falls below a threshold:",
            markdown_table(*threshold_table(calibration, advice["draft"])),
            f"{stop_text(calibration, advice).capitalize()}.",
        ]
    return "\n\n".join(text)


def provenance(acceptance: dict[str, Any], speed: dict[str, Any] | None, more: Sequence[str] = ()) -> str:
    checkpoint, prompts = acceptance["checkpoint"], acceptance["prompts"]
    lines = [
        f"- head: {checkpoint['kind']}, step {checkpoint['step']}, sha256 {checkpoint['sha256']}",
        f"- target: {acceptance['target']['name']}, fingerprint {acceptance['target']['fingerprint']}",
        f"- prompts: {prompts['name']}, sha256 {prompts['sha256']}, replies of at most {prompts['max_new_tokens']} tokens",
    ]
    lines += more
    if speed is not None:
        lines.append("- versions: " + ", ".join(f"{k} {v}" for k, v in speed["hardware"]["versions"].items()))
    return "## Made from\n\n" + "\n".join(lines)


def training_lines(run: Path) -> list[str]:
    """What a head learned from: whose replies, and how many of them were cut."""
    lines = [f"- {remark}"] if (remark := trained_on(run)) else []
    number, total = count_cut(run / "traffic") if (run / "traffic").exists() else (0, 0)
    return lines + ([f"- training replies cut at a limit: {number / total:.0%} of {total:,}"] if total else [])


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl on which acceptance was measured."""
    if not path.exists():
        return []
    curve = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):  # a line that a killed training left half written
            line = json.loads(text)
            curve += [line] if line.get("accept_len") is not None else []
    return curve
