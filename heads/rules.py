"""What a setting may be, said in its type: `Positive`, `Share`, `Literal[..]`. Read by the recipe checks; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

Conflicts = Iterator[tuple[str, str]]
"""What a settings class's `conflicts()` yields: a field's name (dotted for a nested one), and what is wrong with it.

It speaks only about values that do not go together: where it reads a field that is wrong by itself, it is asked no further.
"""


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest value; `above` excludes its own value."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def expected(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"at least {self.low:g}")
        if self.above is not None:
            parts.append(f"more than {self.above:g}")
        if self.high is not None:
            parts.append(f"at most {self.high:g}")
        return " and ".join(parts)

    def admits(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
        )


@dataclass(frozen=True)
class Pattern:
    """A regular expression for the whole text, and how to say it."""

    expression: str
    expected: str


@dataclass(frozen=True)
class RecipePath:
    """Text that may name a file or folder; a relative one counts from the recipe's file."""

    def resolve(self, text: str, base: Path) -> str:
        """Absolute if it exists beside the recipe or can only be a path; otherwise a name, kept as it is."""
        if not text:
            return text
        path = Path(text).expanduser()
        candidate = (base / path).resolve()
        only_a_path = text.startswith(("/", "./", "../", "~")) or path.suffix in (".jsonl", ".json", ".parquet")
        return str(candidate) if only_a_path or candidate.exists() else text


@dataclass(frozen=True)
class Choice:
    """A section whose dataclass is named by one of its keys; the first is the default."""

    key: str
    options: dict[str, Any]


Count = Annotated[int, Bounds(low=0)]
Positive = Annotated[int, Bounds(low=1)]
NonNegative = Annotated[float, Bounds(low=0)]
Share = Annotated[float, Bounds(low=0, high=1)]
PositiveShare = Annotated[float, Bounds(above=0, high=1)]
PathText = Annotated[str, RecipePath()]
