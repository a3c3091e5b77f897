"""Numbers, trees and tables as text."""

from collections.abc import Sequence
from typing import Any

from headstart.heads.tree import Tree


def number_text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first flush left, the rest flush right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, all flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def tree_text(entry: dict[str, Any]) -> str:
    """The tree of a row or check, to stand behind its drafter; nothing for chains."""
    return f", {Tree(tuple(entry['tree']))}" if entry.get("tree") else ""
