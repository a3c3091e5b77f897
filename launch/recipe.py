"""A recipe file to a `Recipe`: defaults < recipe < `key=value`, and every problem in one message.

A recipe is YAML that Python can run too, so that `accelerate launch recipes/x.yaml` works: to Python the whole recipe
is one annotation, `_: r\"\"\" .. \"\"\"`; to YAML the first line is a key `_` and the last one a comment.
"""

import dataclasses
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import headstart.recipes
from headstart import __version__
from headstart.heads.errors import WrongInput
from headstart.heads.store import atomic_path
from headstart.launch.schema import Builder, Found, Problem, nearest
from headstart.launch.settings import Recipe
from headstart.launch.start import with_start

FIRST_LINE = '_: r"""   # launch line 1 of 2 (the last line is the other): keep both, they let Python run this file'
LAST_LINE = '# """; from headstart.launch import main; main(__file__, __name__)'
LAUNCH_KEY = "_"
NO_RECIPES = ("prompts", "accelerate")  # folders beside the recipes
VARIANTS, BAKEOFF = "variants", "bakeoff"  # keys of recipes for several heads (`launch/variants.py`)


def built_in_recipes() -> dict[str, Path]:
    """Recipes that come with headstart, by name."""
    folder = Path(headstart.recipes.__path__[0])
    named = {path.relative_to(folder): path for path in sorted(folder.rglob("*.yaml"))}
    return {str(name.with_suffix("")): path for name, path in named.items() if name.parts[0] not in NO_RECIPES}


def find_recipe(text: str) -> Path:
    """The recipe's file: a path, or a built-in recipe by name (`smoke`, `recipes/smoke.yaml`).

    Raises:
        WrongInput: there is neither.
    """
    path = Path(text).expanduser()
    if path.is_file():
        return path.resolve()
    known = built_in_recipes()
    name = text.removeprefix("recipes/").removesuffix(".yaml")
    if name in known:
        return known[name]
    near = nearest(name, list(known))
    found = "is a folder" if path.is_dir() else "does not exist"
    hint = f"Did you mean {near}? " if near else ""
    raise WrongInput(
        f"{text} {found}; expected a recipe file or a built-in recipe.\n{hint}`headstart ls recipes` lists them."
    )


def load_recipe(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read and check a recipe of one head; `overrides` are `key=value` with dotted keys and YAML values.

    Raises:
        WrongInput: with every problem, each with its place, dotted path and the nearest valid key; or a recipe of several
            heads.
    """
    problems: list[Problem] = []
    found = read_yaml(path, problems)
    if isinstance(found.value, dict) and VARIANTS in found.value:
        names = found.value[VARIANTS].value
        raise WrongInput(
            f"{path} is a bake-off ({', '.join(names) if isinstance(names, dict) else 'of no variants'}), expected a "
            "recipe or run of one head.\nEach variant has a run of its own, RUN-VARIANT: `headstart ls runs` lists them."
        )
    for text in overrides:
        found = override(found, text, problems)
    found = with_start(found, path.parent, problems)
    builder = Builder(Recipe, path.parent)
    recipe = builder.section(Recipe, found)
    problems += builder.problems
    if problems:
        problems += missing_files(recipe, path, overrides)
        raise WrongInput(describe(path, problems))
    if not recipe.run.name:
        recipe = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, name=default_name(path)))
    return recipe


def missing_files(recipe: Recipe, path: Path, overrides: list[str] | tuple[str, ...]) -> list[Problem]:
    """Prompt files and a target's folder that are not there, to be told beside keys that are wrong. Nothing is fetched."""
    from headstart.heads.builtin import resolve_model, stays_here
    from headstart.trainer.prompts import BUILTIN
    from headstart.trainer.sources import is_hub, source_path

    named = [("prompts.sources", name) for name in recipe.prompts.sources] + [
        ("prompts.heldout", recipe.prompts.heldout)
    ]
    files = [
        (key, partial(source_path, name, path.parent, key))
        for key, name in named
        if name != BUILTIN and not is_hub(name)
    ]
    folders = [("target.model", partial(resolve_model, name)) for name in [recipe.target.model] if stays_here(name)]
    found = []
    for key, look in [*files, *folders]:
        try:
            look()
        except WrongInput as error:
            found.append(Problem(place_of(path, overrides, key), key, str(error).removeprefix(f"{key}: ")))
    return found


def default_name(path: Path) -> str:
    """A run's name from its recipe's file name, with what a name cannot hold left out."""
    return re.sub(r"[^\w.+-]+", "-", path.stem).strip("-.+") or "run"


def copy_recipe(text: str, destination: Path) -> None:
    """Start a user's recipe: the source as it is, with the launch lines added where they are missing.

    Raises:
        WrongInput: no such recipe, or the destination exists.
    """
    source = find_recipe(text)
    if destination.is_dir():
        destination = destination / source.name
    if destination.exists():
        raise WrongInput(f"{destination} exists already; give another name: headstart cp {text} FILE")
    content = source.read_text(encoding="utf-8")
    if LAST_LINE not in content:
        content = f"{FIRST_LINE}\n{content.rstrip()}\n{LAST_LINE}\n"
    if source.is_relative_to(Path(headstart.recipes.__path__[0])):
        content = content.replace(f"recipes/{source.name}", str(destination))
    load_problems: list[Problem] = []
    parse(content, str(destination), load_problems)
    if load_problems:
        raise WrongInput(describe(source, load_problems))
    destination.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(destination) as temporary:
        temporary.write_text(content, encoding="utf-8")
    print(f"wrote {destination}; next: headstart check {shlex.quote(str(destination))}")


def line_number(problem: Problem) -> int:
    """Sort key: problems in the order of the file, then those of the command line."""
    number = problem.where.rpartition(":")[2]
    return int(number) if number.isdigit() else sys.maxsize


def describe(path: Path, problems: list[Problem]) -> str:
    number = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    lines = "\n".join(f"  {problem}".replace("\n", "\n    ") for problem in sorted(problems, key=line_number))
    return f"{number} in {path}:\n{lines}\n`headstart ls settings` lists every key with its default."


def place_of(path: Path, overrides: list[str] | tuple[str, ...], dotted: str) -> str:
    """Where the setting `dotted` (or the section it is in) was written; "defaults" where nobody wrote it."""
    problems: list[Problem] = []
    found: Found | None = read_yaml(path, problems)
    for text in overrides:
        found = override(found, text, problems) if found else None
    where = "defaults"
    for part in dotted.split("."):
        found = found.value.get(part) if found is not None and isinstance(found.value, dict) else None
        where = found.where if found is not None else where
    return where


def read_yaml(path: Path, problems: list[Problem]) -> Found:
    """The file as located values, without the launch line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"{path} cannot be read as UTF-8 text: {error}") from None
    root = parse(text, path.name, problems)
    if isinstance(root.value, dict):
        root.value.pop(LAUNCH_KEY, None)
    elif root.value is None:
        return Found({}, root.where)
    return root


def parse(text: str, name: str, problems: list[Problem], base: Path | None = None) -> Found:
    """YAML to located values; syntax errors and keys given twice are reported.

    Text of the command line comes with its `base`, the current folder, and has no line numbers.
    """
    line = base is None
    loader = yaml.SafeLoader(text)

    def place(node: yaml.Node) -> str:
        return f"{name}:{node.start_mark.line + 1}" if line else name

    def located(node: yaml.Node) -> Found:
        if isinstance(node, yaml.MappingNode):
            entries: dict[str, Found] = {}
            for key_node, value_node in node.value:
                key = str(loader.construct_object(key_node, deep=True))
                if key in entries:
                    problems.append(Problem(place(key_node), key, f"given twice; first at {entries[key].where}"))
                entries[key] = dataclasses.replace(located(value_node), where=place(key_node))
            return Found(entries, place(node))
        if isinstance(node, yaml.SequenceNode):
            return Found([located(item) for item in node.value], place(node), base)
        return Found(loader.construct_object(node), place(node), base)

    try:
        node = loader.get_single_node()
        return located(node) if node else Found(None, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark and line else name
        problems.append(Problem(where, "", f"not YAML: {error.problem or error.context}"))
    except RecursionError:
        problems.append(Problem(name, "", "nested too deeply, or an alias that holds itself"))
    except (yaml.YAMLError, ValueError) as error:
        problems.append(Problem(name, "", f"not YAML: {error}"))
    finally:
        loader.dispose()
    return Found({}, name)


def override(root: Found, text: str, problems: list[Problem]) -> Found:
    """`root` with one `key=value` of the command line laid over it."""
    place = f"command line `{text}`"
    dotted, equals, value = text.partition("=")
    if not equals or not dotted.strip():
        problems.append(Problem(place, "", "expected key=value, such as train.num_steps=200"))
        return root
    before = len(problems)
    leaf = parse(value, place, problems, base=Path.cwd())
    if len(problems) > before:
        return root

    def laid_over(found: Found | None, parts: list[str]) -> Found:
        if not parts:
            return dataclasses.replace(leaf, where=place)
        entries = dict(found.value) if found is not None and isinstance(found.value, dict) else {}
        entries[parts[0]] = laid_over(entries.get(parts[0]), parts[1:])
        return Found(entries, found.where if found else place)

    return laid_over(root, dotted.strip().split("."))


class RecipeDumper(yaml.SafeDumper):
    """Writes lists on one line, as people write them."""

    def represent_list(self, data: Any) -> yaml.SequenceNode:
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


RecipeDumper.add_representer(list, RecipeDumper.represent_list)


def dump_recipe(recipe: Recipe, comment: str) -> str:
    """The resolved recipe as a file that runs by itself, every setting written out."""
    return dump_values(dataclasses.asdict(recipe), comment)


def dump_values(values: dict[str, Any], comment: str) -> str:
    """Nested settings as a recipe file with its launch lines."""
    body = yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=110)
    comments = "".join(f"# {line}\n" for line in [*comment.splitlines(), f"headstart {__version__}"])
    return f"{comments}{FIRST_LINE}\n{body}{LAST_LINE}\n"
