"""Values of command line options. No torch here."""

import argparse

from headstart.trainer.settings import MIN_TEMPERATURE


def lengths(text: str) -> list[int]:
    """Whole numbers of at least 1 between commas, ascending and each once."""
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected whole numbers of at least 1 between commas")
    return found


def temperatures(text: str) -> list[float]:
    """Temperatures between commas, ascending and each once."""
    try:
        found = sorted({float(number) for number in text.split(",")})
    except ValueError:
        found = [float("nan")]
    if not all(number == 0 or MIN_TEMPERATURE <= number < float("inf") for number in found):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected numbers between commas, each 0 (greedy) or at least {MIN_TEMPERATURE:g}"
        )
    return found


def amount(text: str) -> float:
    """A number above 0, such as 100e6."""
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text}, expected a number above 0")
    return number


def positive(text: str) -> int:
    """A number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected at least 1")
    return number
