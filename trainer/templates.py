"""The built-in training prompts: written ones, and templates expanded in one fixed order.

A template file of `recipes/prompts/` holds `words` (named lists) and `patterns` of one route. A pattern is the text of
a user turn, or a list of one-key mappings role: text. In braces, inside patterns and inside words:

    {{city}}        an entry of the list `city`; {{city.a}} and {{city.b}} are two different ones; {{^city}} starts it
                    with a capital letter
    {{3..40}}       a whole number; {{n:3..40}} names it, {{n}} repeats it, {{!n:3..40}} names one without a trace
    {{= n * 4 + 1}} arithmetic over named numbers

A name means one value inside one prompt. The r-th expansion of a pattern takes the r-th entry of each list in an order
of the pattern's own, so that every entry is used before one returns.
"""

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from headstart.heads.paths import Prompt
from headstart.trainer.similarity import NearIndex, grams, prompt_text

PER_ROUTE = 1000  # prompts a route yields, written ones included
SIBLING = 0.8  # prompts of one route more similar than this are not both kept

_SLOT = re.compile(r"\{\{([^{}]+)\}\}")
_RANGE = re.compile(r"(?:([a-z_]+)\s*:\s*)?(-?\d+)\.\.(-?\d+)")
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}

Pattern = list[dict[str, str]]


def prompts_folder() -> Path:
    import headstart.recipes

    return Path(headstart.recipes.__file__).parent / "prompts"


def builtin_files() -> list[Path]:
    """What the built-in training prompts are made from."""
    return [prompts_folder() / "train.jsonl", *sorted(prompts_folder().glob("templates_*.yaml"))]


@cache
def builtin_prompts() -> tuple[Prompt, ...]:
    """Built-in training prompts, routes in turn; of each route written and expanded ones in turn."""
    return tuple(in_turn(map(route_prompts, load_templates().values())))


def in_turn(sequences: Any) -> Iterator[Any]:
    """One item of each sequence after the other, until all are empty."""
    iterators = [iter(sequence) for sequence in sequences]
    while iterators:
        alive = []
        for iterator in iterators:
            for item in iterator:
                yield item
                alive.append(iterator)
                break
        iterators = alive


@dataclass
class Templates:
    """Written prompts, patterns and word lists of one route."""

    route: str
    written: list[Pattern] = field(default_factory=list)
    patterns: list[Pattern] = field(default_factory=list)
    words: dict[str, list[str]] = field(default_factory=dict)


def load_templates() -> dict[str, Templates]:
    """Every route with its written prompts and patterns; the words of `templates_words.yaml` are known to all."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = {path.stem.removeprefix("templates_"): yaml.load(path.read_bytes(), loader) for path in builtin_files()[1:]}
    common = files.pop("words", {"words": {}})["words"]
    routes = {}
    for route, content in files.items():
        patterns = [[{"user": p}] if isinstance(p, str) else p for p in content["patterns"]]
        words = {name: [str(entry) for entry in entries] for name, entries in {**common, **content["words"]}.items()}
        routes[route] = Templates(route, patterns=[[flat(turn) for turn in p] for p in patterns], words=words)
    with builtin_files()[0].open(encoding="utf-8") as handle:
        for line in handle:
            row = json.loads(line)
            routes.setdefault(row["route"], Templates(row["route"])).written.append(row["messages"])
    return routes


def flat(turn: dict[str, str]) -> dict[str, str]:
    ((role, content),) = turn.items()
    return {"role": role, "content": content.strip("\n")}


def route_prompts(templates: Templates) -> Iterator[Prompt]:
    """Distinct prompts of one route: a written one and an expanded one in turn, then expanded ones only."""
    index = NearIndex()
    for messages in in_turn([templates.written, expand_all(templates)]):
        prompt = Prompt(templates.route, tuple(messages))
        found = grams(prompt_text(prompt))
        if index.closest(found)[0] > SIBLING:
            continue
        index.add(found)
        yield prompt
        if len(index) == PER_ROUTE:
            return


def expand_all(templates: Templates) -> Iterator[Pattern]:
    """Round after round, every pattern once a round in an order of the round's own; ends when nothing new comes."""
    seen: set[str] = set()
    orders = Orders(templates.words)
    for number in range(10_000):
        before = len(seen)
        for index in shuffled(f"{templates.route} round {number}", len(templates.patterns)):
            pattern = templates.patterns[index]
            messages = Expansion(orders, f"{templates.route} {index}", number).messages(pattern)
            text = json.dumps(messages)
            if text not in seen:
                seen.add(text)
                yield messages
        if len(seen) == before:
            return


def shuffled(key: str, size: int) -> list[int]:
    """A permutation that depends on `key` only."""
    order = list(range(size))
    random.Random(key).shuffle(order)
    return order


@dataclass
class Orders:
    """The order in which a place of a pattern goes through a list: a new permutation for every full cycle."""

    words: dict[str, list[str]]
    known: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def entry(self, name: str, place: str, number: int) -> str:
        entries = self.words[name]
        cycle, position = divmod(number, len(entries))
        key = (f"{place} {name}", cycle)
        if key not in self.known:
            self.known[key] = shuffled(f"{key}", len(entries))
        return entries[self.known[key][position]]


@dataclass
class Expansion:
    """One expansion of one pattern: what each name stands for."""

    orders: Orders
    place: str
    number: int
    texts: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    taken: set[tuple[str, str]] = field(default_factory=set)

    @cached_property
    def random(self) -> random.Random:
        return random.Random(f"{self.place} {self.number}")

    def messages(self, pattern: Pattern) -> Pattern:
        return [{"role": turn["role"], "content": self.fill(turn["content"])} for turn in pattern]

    def fill(self, text: str) -> str:
        return _SLOT.sub(lambda slot: self.value(slot[1].strip()), text)

    def value(self, slot: str) -> str:
        if slot.startswith("^"):
            text = self.value(slot[1:])
            return text[:1].upper() + text[1:]
        if slot.startswith("!"):
            self.value(slot[1:])
            return ""
        if slot.startswith("="):
            return str(calculate(slot[1:], self.numbers))
        if (found := _RANGE.fullmatch(slot)) is not None:
            drawn = self.random.randint(int(found[2]), int(found[3]))
            self.numbers[found[1] or f"unnamed {len(self.numbers)}"] = drawn
            return str(drawn)
        if slot in self.numbers:
            return str(self.numbers[slot])
        if slot not in self.texts:
            self.texts[slot] = self.fill(self.draw(slot.split(".")[0], slot))
        return self.texts[slot]

    def draw(self, name: str, slot: str) -> str:
        """An entry of the list that no other slot has; where all are taken, any."""
        entry = ""
        for shift in range(len(self.orders.words[name])):
            entry = self.orders.entry(name, f"{self.place} {slot}", self.number + shift)
            if (name, entry) not in self.taken:
                break
        self.taken.add((name, entry))
        return entry


def calculate(expression: str, numbers: dict[str, int]) -> int:
    """Whole-number arithmetic over names."""

    def walk(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name):
                return numbers[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -walk(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return _ARITHMETIC[type(op)](walk(left), walk(right))
        raise ValueError(f"no arithmetic: {expression!r}")

    return walk(ast.parse(expression.strip(), mode="eval").body)
