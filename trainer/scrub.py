"""Personal data by named patterns: replaced in every text of a row before anything is stored."""

import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_DIGIT_GROUPS = r"\d(?:[ -]?\d){12,18}"

PATTERNS: dict[str, re.Pattern[str]] = {
    "email": re.compile(r"[\w.%+-]+@[\w-]+(?:\.[\w-]+)+"),
    "secret": re.compile(
        r"\b(?:sk|pk|rk)[-_][\w-]{16,}|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}|\bhf_\w{20,}"
        r"|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}|\bxox[abprs]-[\w-]{10,}"
        r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
        r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    ),
    "iban": re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"),
    "card": re.compile(rf"(?<![\d.]){_DIGIT_GROUPS}(?![\d.])"),
    "ip": re.compile(
        r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.])"
        r"|(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}(?![\w:])"
    ),
    "phone": re.compile(
        r"(?<![\w+])\+\d[\d ()./-]{6,18}\d(?!\w)|(?<!\w)\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?!\w)"
        r"|(?<!\w)\(?0\d{2,5}\)?[ /-]{1,3}\d{2,4}(?:[ -]?\d{2,4}){1,3}(?!\w)"
    ),
}
ORDER = tuple(PATTERNS)  # the narrower first: what one has replaced, a later one does not see


def luhn(text: str) -> bool:
    """Whether the digits are those of a payment card."""
    digits = [int(character) for character in reversed(text) if character.isdigit()]
    doubled = (sum(divmod(2 * digit, 10)) if i % 2 else digit for i, digit in enumerate(digits))
    return sum(doubled) % 10 == 0


def is_address(text: str) -> bool:
    """Whether it is an IP address and no time of day, nor a name in a program, as a::b is."""
    if "." in text:
        return True
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return len(text.replace(":", " ").split()) >= 3


CHECKS: dict[str, Callable[[str], bool]] = {"card": luhn, "ip": is_address}


def replaced(name: str, match: re.Match[str]) -> str:
    """What stands for a match: the pattern's name, or the text itself where a check finds it to be something else."""
    text = match[0]
    return f"[{name}]" if name not in CHECKS or CHECKS[name](text) else text


def held_json(text: str) -> Any:
    """The object or list that a text is in JSON; None where it is no such text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        held = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return held if isinstance(held, dict | list) else None


def scrub(value: Any, names: Sequence[str]) -> Any:
    """The same value with every match of the named patterns, in any text or number of it, replaced by [email], [phone], ..

    Text that is JSON (arguments of a call, a column of a log) is scrubbed as what it holds: as text, an escaped character
    beside a match would belong to it, or hide it.
    """
    if isinstance(value, str):
        if (held := held_json(value)) is not None:
            clean = scrub(held, names)
            return value if clean == held else json.dumps(clean, ensure_ascii=False)
        for name in ORDER:
            if name in names:
                value = PATTERNS[name].sub(partial(replaced, name), value)
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        clean = scrub(str(value), names)
        return value if clean == str(value) else clean
    if isinstance(value, dict):
        return {scrub(key, names): scrub(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(scrub(item, names) for item in value)
    return value
