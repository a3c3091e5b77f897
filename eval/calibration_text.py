"""Calibration in words and tables, for the console and the report."""

from typing import Any

from headstart.eval.tables import number_text, table
from headstart.heads.intervals import interval_text


def calibration_text(calibration: dict[str, Any]) -> str:
    """The head's confidence beside its acceptance by depth, and what stopping drafts early is worth."""
    header, lines = reliability_table(calibration)
    parts = ["confidence: largest probability of the head's own law, beside what was accepted", table(header, lines)]
    for advice in calibration["recommended"]:
        header, lines = threshold_table(calibration, advice["draft"])
        parts += ["", f"drafts of length {advice['draft_length']}, ended below a product of confidences"]
        parts += [table(header, lines), stop_text(calibration, advice)]
    return "\n".join(parts)


def reliability_table(calibration: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and lines by depth."""
    lines = [
        [
            f"{row['draft']} {row['depth']}",
            number_text(row["weight"], 0),
            *(interval_text(row[name], 3) for name in ("confidence", "acceptance", "calibration_error")),
        ]
        for row in calibration["rows"]
    ]
    return ["depth", "drafts judged", "confidence", "acceptance", "calibration error"], lines


def threshold_table(calibration: dict[str, Any], draft: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines by threshold."""
    lines = [
        [
            f"{row['stop_below']:g}",
            interval_text(row["accept_len"]),
            number_text(row["drafts_per_step"]["value"], 2),
            number_text(row["predicted_speedup"]["value"], 2),
            interval_text(row["gain"], 3),
        ]
        for row in calibration["thresholds"]
        if row["draft"] == draft
    ]
    return ["stop below", "accept_len", "drafts a step", "predicted speedup", "against no threshold"], lines


def stop_text(calibration: dict[str, Any], advice: dict[str, Any]) -> str:
    """One sentence on where to stop drafts."""
    rows = [row for row in calibration["thresholds"] if row["draft"] == advice["draft"]]
    if all(row["gain"]["value"] is None for row in rows):
        return "recommended threshold: unknown, no step of this draft length was timed"
    if advice["stop_below"] is None:
        return "recommended threshold: none, no gain is sure"
    (best,) = [row for row in rows if row["stop_below"] == advice["stop_below"]]
    if best["predicted_speedup"]["value"] <= 1:
        return f"recommended threshold: none, drafting is slower at every one (least at {advice['stop_below']:g})"
    return f"recommended threshold: {advice['stop_below']:g}"
