"""Values of raw rows, and why a row is not used."""

import json
from typing import Any


class BadRow(Exception):
    """Why one row is skipped."""


def parsed(value: Any) -> Any:
    """Columns of mixed types are stored as JSON text in Parquet."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow("a column is text and not JSON") from None
    return value


def parsed_or_text(value: Any) -> Any:
    """The same for a column that may be plain text."""
    try:
        return parsed(value)
    except BadRow:
        return value
