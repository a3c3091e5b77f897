"""Settings dataclasses as a schema: build them from located values with every problem found; list keys and docs."""

import ast
import difflib
import inspect
import math
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from headstart.heads.rules import Bounds, Choice, Pattern, RecipePath


@dataclass(frozen=True)
class Found:
    """A value as a user wrote it: a scalar, a list of Found or a dict of Found, and where it stands."""

    value: Any
    where: str
    base: Path | None = None
    """Folder that relative paths count from, where it is not the recipe's."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe."""

    where: str
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.message) if part)


@dataclass(frozen=True)
class Key:
    """One setting: dotted path, type in words, default, doc."""

    path: str
    type: str
    default: Any
    doc: str


NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
ABSENT = object()


@cache
def field_docs(cls: type) -> dict[str, str]:
    """The text under each field of a dataclass, inherited ones included."""
    inherited = [field_docs(base) for base in cls.__bases__ if is_dataclass(base)]
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {name: doc for found in inherited for name, doc in found.items()}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_doc:
            docs[statement.target.id] = inspect.cleandoc(str(following.value.value))  # type: ignore[attr-defined]
    return docs


def default_of(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every leaf setting under `cls`, in order of declaration."""
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        if choice := choice_of(hints[field.name]):
            yield from choice_keys(choice, f"{prefix}{field.name}.")
        elif is_dataclass(hints[field.name]):
            yield from keys(hints[field.name], f"{prefix}{field.name}.")
        else:
            doc = field_docs(cls).get(field.name, "")
            yield Key(prefix + field.name, expected(hints[field.name]), default_of(field), doc)


def choice_of(hint: Any) -> Choice | None:
    """The choice that a field's type is annotated with."""
    rules = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((rule for rule in rules if isinstance(rule, Choice)), None)


def choice_keys(choice: Choice, prefix: str) -> Iterator[Key]:
    """The keys of all options: the one that chooses, then each once, with its owners' names where not all have it."""
    owners: dict[tuple[str, str], list[str]] = {}
    found: dict[tuple[str, str], Key] = {}
    for name, option in choice.options.items():
        for key in keys(option, prefix):
            owners.setdefault((key.path, key.doc), []).append(name)
            found.setdefault((key.path, key.doc), key)
    for (path, doc), names in owners.items():
        key = found[path, doc]
        if path == prefix + choice.key:
            yield replace(key, type=expected(Literal[tuple(choice.options)]))
        else:
            yield key if len(names) == len(choice.options) else replace(key, doc=f"({', '.join(names)}) {doc}")


def expected(hint: Any) -> str:
    """A type in words, without its bounds: "a whole number", "a list of numbers", "kl, ce or tv"."""
    if get_origin(hint) is Annotated:
        return expected(get_args(hint)[0])
    if get_origin(hint) is Literal:
        *most, last = (str(choice) for choice in get_args(hint))
        return f"{', '.join(most)} or {last}" if most else str(last)
    if get_origin(hint) is list:
        item = expected(get_args(hint)[0])
        plural = {"a whole number": "whole numbers", "a number": "numbers", "text": "texts"}
        return f"a list of {plural.get(item, item).replace('a list of', 'lists of')}"
    if is_dataclass(hint):
        return "keys with values"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]


def nearest(word: str, known: list[str]) -> str | None:
    """The known key that was probably meant: by its last part's spelling, else as an abbreviation of it."""
    leaf = word.rpartition(".")[2].lower().replace("-", "_")
    scored = [
        (difflib.SequenceMatcher(None, leaf, key.rpartition(".")[2]).ratio(), -rank, key)
        for rank, key in enumerate(known)
    ]
    score, _, key = max(scored, default=(0.0, 0, ""))
    if score >= 0.6:
        return key
    abbreviation = re.compile(".*".join(map(re.escape, leaf))) if len(leaf) > 1 else None
    initials = [k for k in known if abbreviation and abbreviation.match(k.rpartition(".")[2])]
    return initials[0] if initials else None


class Unknown(Exception):
    """A value is asked for that is wrong itself."""


class Known:
    """A section as its `conflicts()` reads it. A value in `wrong` ends the search: of the default that stands in for it,
    nothing follows about the recipe."""

    def __init__(self, settings: Any, path: str, wrong: frozenset[str]) -> None:
        self._settings, self._path, self._wrong = settings, path, wrong

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}{name}"
        if path in self._wrong:
            raise Unknown
        found = getattr(type(self._settings), name, None)
        if isinstance(found, property):
            return found.__get__(self)
        value = getattr(self._settings, name)
        return Known(value, f"{path}.", self._wrong) if is_dataclass(value) else value


class Builder:
    """Builds settings from located values and collects every problem on the way."""

    def __init__(self, root: type, base: Path) -> None:
        self.base = base
        self.all_keys = [key.path for key in keys(root)]
        self.problems: list[Problem] = []
        self.wrong: set[str] = set()  # paths of the values with a problem

    def section(
        self, cls: type, found: Found | None, path: str = "", owners: dict[str, list[str]] | None = None
    ) -> Any:
        """An instance of `cls`; fields with a problem get their defaults, so that the rest can still be checked.

        `owners` names the options that have a key, where `cls` is one of several.
        """
        given = self._mapping(found, path)
        hints = get_type_hints(cls, include_extras=True)
        prefix = f"{path}." if path else ""
        for name, item in given.items():
            if name not in hints:
                self._unknown(name, item, prefix, list(hints), (owners or {}).get(name, []))
        values = {}
        for name, hint in hints.items():
            if choice := choice_of(hint):
                values[name] = self._chosen(choice, given.get(name), prefix + name)
            elif isinstance(hint, type) and is_dataclass(hint):
                values[name] = self.section(hint, given.get(name), prefix + name)
            elif name in given:
                value = self._value(hint, given[name], prefix + name)
                if value is not ABSENT:
                    values[name] = value
        settings = cls(**values)
        if hasattr(cls, "conflicts"):
            with suppress(Unknown):
                for name, message in cls.conflicts(Known(settings, prefix, frozenset(self.wrong))):
                    self._report(self._place(given, name, found), prefix + name, message)
        return settings

    def _chosen(self, choice: Choice, found: Found | None, path: str) -> Any:
        """The section as the option that its own key names; nothing of it is checked where that is none."""
        given = found.value if found is not None and isinstance(found.value, dict) else {}
        named, name = given.get(choice.key), next(iter(choice.options))
        if named is not None:
            name = self._value(Literal[tuple(choice.options)], named, f"{path}.{choice.key}")
            if name is ABSENT:
                self.wrong.add(path)
                return next(iter(choice.options.values()))()
        owners: dict[str, list[str]] = {}
        for other, option in choice.options.items():
            for field in fields(option):
                owners.setdefault(field.name, []).append(other)
        return self.section(choice.options[name], found, path, owners)

    def _mapping(self, found: Found | None, path: str) -> dict[str, Found]:
        if found is None or found.value is None:
            return {}
        if isinstance(found.value, dict):
            return found.value
        self._report(found.where, path, f"found {show(found)}, expected keys with values below it")
        return {}

    def _place(self, given: dict[str, Found], name: str, section: Found | None) -> str:
        """Where the field a conflict speaks of was written; its section or the defaults if nowhere."""
        found: Found | None = None
        for part in name.split("."):
            found = given.get(part)
            if found is None or not isinstance(found.value, dict):
                break
            given = found.value
        return found.where if found else section.where if section else "defaults"

    def _unknown(self, name: str, item: Found, prefix: str, siblings: list[str], owners: list[str]) -> None:
        # A key may be misspelt, or right but in the wrong section: siblings first, then every key there is.
        near = nearest(name, [prefix + sibling for sibling in siblings])
        near = near or (None if owners else nearest(name, self.all_keys))
        self.wrong.add(near or "")  # its value is not known either
        hint = f"did you mean {near}?" if near else f"expected one of {', '.join(siblings)}"
        wrong = f"a key of {', '.join(owners)} only" if owners else "unknown key"
        self._report(item.where, prefix + name, f"{wrong}; {hint}")

    def _value(self, hint: Any, found: Found, path: str) -> Any:
        """The checked value, or ABSENT after reporting a problem."""
        if get_origin(hint) is Annotated:
            base, *rules = get_args(hint)
            value = self._value(base, found, path)
            for rule in rules if value is not ABSENT else ():
                value = self._ruled(rule, value, found, path)
            return value
        if get_origin(hint) is Literal:
            if found.value in get_args(hint) and not isinstance(found.value, bool):
                return found.value
            near = nearest(str(found.value), [str(choice) for choice in get_args(hint)])
            suggestion = f"; did you mean {near}?" if near else ""
            return self._report(found.where, path, f"found {show(found)}, expected {expected(hint)}{suggestion}")
        if get_origin(hint) is list:
            if not isinstance(found.value, list):
                return self._report(
                    found.where, path, f"found {show(found)}, expected {expected(hint)}, such as [{bare(found)}]"
                )
            items = [self._value(get_args(hint)[0], item, f"{path}[{i}]") for i, item in enumerate(found.value)]
            return ABSENT if ABSENT in items else items
        value = convert(hint, found.value)
        if value is ABSENT:
            quote = " in quotes" if hint is str and isinstance(found.value, int | float) else ""
            return self._report(found.where, path, f"found {show(found)}, expected {expected(hint)}{quote}")
        return value

    def _ruled(self, rule: Any, value: Any, found: Found, path: str) -> Any:
        if isinstance(rule, RecipePath):
            return rule.resolve(value, found.base or self.base)
        if isinstance(rule, Bounds) and not rule.admits(value):
            return self._report(found.where, path, f"found {show(found)}, expected {rule.expected()}")
        if isinstance(rule, Pattern) and not re.fullmatch(rule.expression, value):
            return self._report(found.where, path, f"found {show(found)}, expected {rule.expected}")
        return value

    def _report(self, where: str, path: str, message: str) -> Any:
        self.problems.append(Problem(where, path, message))
        self.wrong.add(path.partition("[")[0])
        return ABSENT


def convert(hint: Any, value: Any) -> Any:
    """`value` as a bool, int, float or str, or ABSENT. YAML 1.1 reads 1e-3 as text: it is a number here."""
    if hint is bool or hint is str:
        return value if type(value) is hint else ABSENT
    if isinstance(value, str) and hint is float and NUMBER.fullmatch(value):
        value = float(value.replace("_", ""))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ABSENT
    if hint is float:
        return float(value) if math.isfinite(value) else ABSENT
    return value if isinstance(value, int) else ABSENT


def bare(found: Found) -> str:
    """A user's value on one line."""
    if isinstance(found.value, dict):
        return "a section"
    if isinstance(found.value, list):
        return "[" + ", ".join(bare(item) for item in found.value) + "]"
    if isinstance(found.value, bool):
        return "true" if found.value else "false"
    return "nothing" if found.value is None else str(found.value)


def show(found: Found) -> str:
    return repr(found.value) if isinstance(found.value, str) else bare(found)
