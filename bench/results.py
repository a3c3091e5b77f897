"""Print the rows of docs/results.md that a finished run or bake-off fills.     Run: python bench/results.py runs/eagle"""

import sys
from pathlib import Path
from typing import Any

from headstart.eval.bakeoff import SCHEMA
from headstart.eval.bakeoff_text import bakeoff_table, caption, findings
from headstart.eval.report import markdown_table
from headstart.eval.temperatures import split_settings
from headstart.heads.intervals import interval_text
from headstart.heads.store import read_json

MISSING = "not measured"


def offline(rows: list[dict[str, Any]], drafter: str, draft_length: int) -> str:
    """accept_len of the head's kind or of n-gram lookup, over all routes."""
    for row in rows:
        whole = row["source"] == "offline" and row["route"] == row["context"] == "all" and row["draft"] == "greedy"
        whole = whole and row["tree"] is None
        if whole and row["draft_length"] == draft_length and row["drafter"] == drafter:
            return interval_text(row["accept_len"], missing=MISSING)
    return MISSING


def main(run: Path) -> None:
    if (file := run / "bakeoff.json").exists():
        content = read_json(file, SCHEMA)
        print("\n\n".join([caption(content), markdown_table(*bakeoff_table(content)), *findings(content)]))
        return
    acceptance = split_settings(read_json(run / "eval" / "acceptance.json"))
    speed_file = run / "eval" / "speed.json"
    speed = read_json(speed_file) if speed_file.exists() else {"rows": [], "hardware": {}}
    hardware = speed["hardware"]
    machine = hardware.get("gpu") or f"{hardware.get('cores', '?')} cores of {hardware.get('cpu', 'a CPU')}"
    print("| machine | draft length | accept_len | speedup, one request | n-gram lookup accept_len |")
    print("| --- | --- | --- | --- | --- |")
    for length in sorted({row["draft_length"] for row in acceptance["rows"] if row["source"] == "offline"}):
        timed = [row for row in speed["rows"] if row["draft_length"] == length and row["drafter"] != "ngram"]
        speedup = interval_text(timed[0]["speedup"] if timed else None, missing=MISSING)
        kind = acceptance["checkpoint"]["kind"]
        head, lookup = (offline(acceptance["rows"], drafter, length) for drafter in (kind, "ngram"))
        print(f"| {machine} | {length} | {head} | {speedup} | {lookup} |")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} RUN_FOLDER")
    main(Path(sys.argv[1]))
