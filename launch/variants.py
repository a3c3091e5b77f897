"""Variants of a recipe: several heads from one target pass, each a whole recipe with a run of its own. No torch here.

    variants:
      eagle3:                                             # the recipe as it stands
      medusa: {head: {kind: medusa}, train: {depth: 4}}

A variant's settings are laid over the recipe's, and `key=value` of the command line over both. It sets `head`, `train` and
`export`; everything else is shared, so that all heads learn from the same replies and are measured by the same rule.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from headstart.heads.errors import WrongInput
from headstart.launch.recipe import (
    BAKEOFF,
    VARIANTS,
    default_name,
    describe,
    dump_values,
    load_recipe,
    missing_files,
    override,
    read_yaml,
)
from headstart.launch.schema import Builder, Found, Problem, show
from headstart.launch.settings import BakeoffSettings, Recipe
from headstart.launch.start import with_start

OWN = ("head", "train", "export")  # sections that a variant may set
ON_COMMAND_LINE = f"{VARIANTS}."
OF_ALL = (ON_COMMAND_LINE, f"{BAKEOFF}.")  # overrides that are of no variant's own recipe


@dataclass(frozen=True)
class Loaded:
    """What a recipe file asks for: one head, or several from one target pass."""

    shared: Recipe
    """The recipe. Of a bake-off: the run that all variants share, with the first one's head."""
    variants: dict[str, Recipe] = field(default_factory=dict)
    """Whole recipes by name, each with a run of its own; none where the file asks for one head."""
    bakeoff: BakeoffSettings = field(default_factory=BakeoffSettings)
    """The rule by which variants are trained."""

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipes of all heads, by variant; the only one has no name."""
        return self.variants or {"": self.shared}


def load(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> Loaded:
    """Read and check a recipe with all its variants; the arguments are those of `load_recipe`.

    Raises:
        WrongInput: with every problem of every variant, each with its place and dotted path.
    """
    problems: list[Problem] = []
    root = read_yaml(path, problems)
    for text in overrides:
        root = override(root, text, problems) if text.startswith(OF_ALL) else root
    if not isinstance(root.value, dict) or VARIANTS not in root.value:
        return Loaded(load_recipe(path, overrides))
    base = Found({key: value for key, value in root.value.items() if key not in (VARIANTS, BAKEOFF)}, root.where)
    rule = Builder(BakeoffSettings, path.parent)
    settings = rule.section(BakeoffSettings, root.value.get(BAKEOFF), BAKEOFF)
    problems += rule.problems
    found: dict[Problem, list[str]] = {}
    recipes: dict[str, Recipe] = {}
    named = dict(read_variants(root.value[VARIANTS], problems))
    for name, own in named.items():
        recipes[name], own_problems = build(base, own, path, overrides)
        for problem in own_problems:
            found.setdefault(located(problem, name, own, base), []).append(name)
    problems += [told(problem, names, len(named)) for problem, names in found.items()]
    if not problems:
        problems += incomparable(named, recipes, settings)
    if problems:
        problems += [] if not recipes else missing_files(next(iter(recipes.values())), path, overrides)
        raise WrongInput(describe(path, problems))
    first = next(iter(recipes.values()))
    run_name = first.run.name or default_name(path)
    variants = {name: renamed(recipe, f"{run_name}-{name}") for name, recipe in recipes.items()}
    return Loaded(renamed(first, run_name), variants, settings)


def renamed(recipe: Recipe, run_name: str) -> Recipe:
    return dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, name=run_name))


def read_variants(found: Found, problems: list[Problem]) -> Iterator[tuple[str, Found]]:
    """Each variant's own settings; sections that all variants share are reported and left out."""
    if not isinstance(found.value, dict) or not found.value:
        problems.append(Problem(found.where, VARIANTS, f"found {show(found)}, expected names with settings below them"))
        return
    sections = {f.name for f in fields(Recipe)}
    for name, own in found.value.items():
        path = f"{VARIANTS}.{name}"
        if not re.fullmatch(r"\w[\w.+-]*", name):
            problems.append(Problem(own.where, path, "expected a name of letters, digits and _ . + - only"))
        given = {} if own.value is None else own.value
        if not isinstance(given, dict):
            problems.append(Problem(own.where, path, f"found {show(own)}, expected keys with values below it"))
            given = {}
        for section in [section for section in given if section in sections - {*OWN}]:
            text = "is shared by all variants (one target pass, one measure), expected it outside; a variant sets "
            problems.append(Problem(given[section].where, f"{path}.{section}", text + ", ".join(OWN)))
        kept = {section: value for section, value in given.items() if section not in sections - {*OWN}}
        yield name, Found(kept, own.where)


def build(base: Found, own: Found, path: Path, overrides: Iterable[str]) -> tuple[Recipe, list[Problem]]:
    """A variant's recipe, with everything that is wrong with it."""
    problems: list[Problem] = []
    merged = laid_over(base, own)
    for text in overrides:
        merged = merged if text.startswith(OF_ALL) else override(merged, text, problems)
    merged = with_start(merged, path.parent, problems)
    builder = Builder(Recipe, path.parent)
    return builder.section(Recipe, merged), problems + builder.problems


def laid_over(base: Found | None, own: Found) -> Found:
    """Keys of `own` over those of `base`, section by section."""
    if base is None or not isinstance(base.value, dict) or not isinstance(own.value, dict):
        return own
    entries = {key: laid_over(base.value.get(key), value) for key, value in own.value.items()}
    return Found({**base.value, **entries}, own.where)


def located(problem: Problem, name: str, own: Found, base: Found) -> Problem:
    """The problem with the path of what was written: a variant's key, or the recipe's that it was laid over."""
    on_command_line = problem.where.startswith("command line")
    if on_command_line and ON_COMMAND_LINE not in problem.where:
        return problem
    parts = re.sub(r"\[\d+\]", "", problem.path).split(".")
    if not on_command_line and depth(own, parts) < max(depth(base, parts), 1):
        return problem
    return dataclasses.replace(problem, path=f"{VARIANTS}.{name}.{problem.path}")


def depth(found: Found | None, parts: list[str]) -> int:
    """How many of these keys, one below the other, were written."""
    for number, part in enumerate(parts):
        found = found.value.get(part) if found is not None and isinstance(found.value, dict) else None
        if found is None:
            return number
    return len(parts)


def told(problem: Problem, names: list[str], num_variants: int) -> Problem:
    """A problem of shared settings says which variants have it, unless all do."""
    if len(names) == num_variants or problem.path.startswith(ON_COMMAND_LINE):
        return problem
    return dataclasses.replace(problem, message=f"{problem.message} (variant {', '.join(names)})")


def incomparable(named: dict[str, Found], recipes: dict[str, Recipe], settings: BakeoffSettings) -> Iterator[Problem]:
    """What would make the one table unfair: heads are trained by one rule, and compared on the same prompts."""
    first, *others = recipes
    expected = recipes[first].train
    for name in others:
        train = recipes[name].train
        if num_tokens(recipes[name]) != num_tokens(recipes[first]):
            text = (
                f"found {train.num_steps:,} steps of {train.batch_tokens:,} = {num_tokens(recipes[name]):,} tokens, "
                f"expected {num_tokens(recipes[first]):,} as for {first} ({expected.num_steps:,} steps of "
                f"{expected.batch_tokens:,}): "
            )
            text += {
                "equal_tokens": "heads are compared at equal tokens",
                "equal_time": "what fits into equal time is found by a rehearsal",
            }[settings.rule]
            own = named[name].value.get("train", named[name])
            yield Problem(own.where, f"{VARIANTS}.{name}.train.num_steps", text)
    if width := recipes[first].eval.stop_at_width:
        text = f"found {width:g}, expected 0: heads that stop at other numbers of prompts cannot be compared"
        yield Problem(next(iter(named.values())).where, "eval.stop_at_width", text)


def num_tokens(recipe: Recipe) -> int:
    """Tokens that a head is trained on."""
    return recipe.train.num_steps * recipe.train.batch_tokens


def stored_taps(recipes: Iterable[Recipe], default: list[int]) -> list[int]:
    """Taps that features have to hold so that one pass of the target serves all these heads."""
    return sorted({tap for recipe in recipes for tap in recipe.head.asked_taps or default})


def dump(loaded: Loaded, comment: str) -> str:
    """The resolved recipe as a file that runs by itself, every setting of every variant written out."""
    values = dataclasses.asdict(loaded.shared)
    if loaded.variants:
        values = {name: value for name, value in values.items() if name not in OWN}
        own = {name: dataclasses.asdict(recipe) for name, recipe in loaded.variants.items()}
        if loaded.bakeoff.rule == "equal_time":
            # The budget: what was rehearsed is in the recipes of the variants' runs.
            for every in own.values():
                every["train"]["num_steps"] = loaded.shared.train.num_steps
        values[BAKEOFF] = dataclasses.asdict(loaded.bakeoff)
        values[VARIANTS] = {name: {section: every[section] for section in OWN} for name, every in own.items()}
    return dump_values(values, comment)
