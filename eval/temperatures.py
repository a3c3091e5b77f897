"""Acceptance at several temperatures in one file: which rows are of the run's own setting, and a table of them all.

Every row of eval/acceptance.json names its setting, and `sampling` beside the rows names the run's own: that of its recorded
replies, which the gate, the card and every table but one speak of. Rows of other settings (`headstart eval RUN --temperature
0,1`) only stand beside them.
"""

from typing import Any

from headstart.heads.intervals import interval_text

SETTING = ("temperature", "top_k", "top_p")


def split_settings(acceptance: dict[str, Any]) -> dict[str, Any]:
    """acceptance.json with the rows of the run's own setting in `rows` and all others in `other_rows`.

    A file that names no setting holds rows of one only.
    """
    own = acceptance.get("sampling")
    rows = acceptance["rows"]
    of_own = [own is None or all(row[name] == own[name] for name in SETTING) for row in rows]
    return {
        **acceptance,
        "rows": [row for row, is_own in zip(rows, of_own, strict=True) if is_own],
        "other_rows": [row for row, is_own in zip(rows, of_own, strict=True) if not is_own],
    }


def temperature_table(acceptance: dict[str, Any], draft_length: int) -> tuple[list[str], list[list[str]]]:
    """Header and lines: accept_len of chains by temperature and kind of drafts; no lines where one setting was measured.

    Args:
        acceptance: as `split_settings` returns it.
    """
    others = acceptance.get("other_rows", [])
    wanted = ("all", "all", "reply", draft_length, None)
    shown: dict[tuple[str, str], str] = {}
    for row in [*acceptance["rows"], *others] if others else []:
        if tuple(row[name] for name in ("route", "context", "counting", "draft_length", "tree")) == wanted:
            kept = [f"{name} {row[name]:g}" for name in SETTING[1:] if row[name] != {"top_k": 0, "top_p": 1.0}[name]]
            setting = ", ".join([f"{row['temperature']:g}", *kept])
            shown[setting, kind_of(row)] = interval_text(row["accept_len"])
    settings = sorted({setting for setting, _ in shown}, key=lambda text: float(text.partition(",")[0]))
    kinds = list(dict.fromkeys(kind for _, kind in shown))
    lines = [[setting, *(shown.get((setting, kind), "-") for kind in kinds)] for setting in settings]
    return ["temperature", *kinds], lines


def kind_of(row: dict[str, Any]) -> str:
    """Who drafted and how: `eagle3 sampled`, `ngram`; a live run says so."""
    words = [row["drafter"], *(["sampled"] if row["draft"] == "sampled" else [])]
    return " ".join([*words, *([] if row["source"] == "offline" else [row["source"]])])
