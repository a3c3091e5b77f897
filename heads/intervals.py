"""How a measured value is written, on cards, in tables and in reports alike."""

from collections.abc import Mapping


def interval_text(value: Mapping[str, float | None] | None, digits: int = 2, missing: str = "-") -> str:
    """`1.79 [1.72, 1.86]`; the value alone where it has no interval; `missing` where nothing was measured."""
    if value is None or (middle := value.get("value")) is None:
        return missing
    low, high = value.get("low"), value.get("high")
    text = f"{middle:.{digits}f}"
    return text if low is None or high is None else f"{text} [{low:.{digits}f}, {high:.{digits}f}]"
