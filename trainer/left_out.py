"""Requests and replies that become no row of traffic, each named with its reason."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from headstart.heads.store import atomic_path

NUM_NAMED = 5  # of them on the console
SHOWN = 60  # characters of a text
FILE = "left_out.jsonl"  # all of them, in the folder of the traffic


@dataclass
class LeftOut:
    """What is left out, in the order it was found."""

    rows: list[dict[str, str]] = field(default_factory=list)

    def add(self, prompt_id: str, text: str, reason: str) -> None:
        """`text` is what a user knows it by: the end of a request, or the reply that a source brought."""
        self.rows.append({"prompt_id": prompt_id, "text": text[:SHOWN], "reason": reason})

    def lines(self) -> list[str]:
        """Counts by reason, and the first few."""
        lines = [f"left out {n:,}: {reason}" for reason, n in Counter(row["reason"] for row in self.rows).most_common()]
        lines += [f"left out: {named(row)}" for row in self.rows[:NUM_NAMED]]
        return lines + ([f"each of them is named in the run's traffic/{FILE}"] if self.rows[NUM_NAMED:] else [])

    def write(self, folder: Path) -> None:
        """Name each of them, with its reason; without any there is no file."""
        if not self.rows:
            (folder / FILE).unlink(missing_ok=True)
            return
        with atomic_path(folder / FILE) as temporary, temporary.open("w", encoding="utf-8") as handle:
            handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)


def named(row: dict[str, str]) -> str:
    return f"prompt {row['prompt_id'][:12]} ({row['text']!r})"
