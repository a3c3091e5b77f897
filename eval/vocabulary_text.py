"""What smaller draft vocabularies cost, as a table. Torch is not needed."""

from collections.abc import Sequence
from typing import Any

from headstart.heads.intervals import interval_text


def vocabulary_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the entry `vocabularies` of acceptance.json."""
    header = ["draft tokens", "drafts", "accept_len [95 %]", "ratio to the whole", "out of vocabulary"]
    return header, [
        [
            f"{row['draft_vocab_size']:,}",
            row["draft"],
            interval_text(row["accept_len"]),
            interval_text(row["ratio"], 3),
            "-" if row["out_of_vocab_share"] is None else f"{row['out_of_vocab_share']:.1%}",
        ]
        for row in rows
    ]
