"""What the docs say exists: commands parse, links lead somewhere, make targets and settings are real."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from headstart.heads.export.scheme import LAYOUTS
from headstart.launch.cli import build_parser
from headstart.launch.recipe import built_in_recipes, find_recipe
from headstart.launch.schema import keys
from headstart.launch.settings import BakeoffSettings, Recipe
from headstart.launch.variants import load

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def commands(text: str, program: str) -> list[list[str]]:
    """Argument lists of a program's command lines and inline commands in a text."""
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    found = [line.strip() for line in lines] + re.findall(r"`([^`\n]+)`", text)
    real = [
        line for line in found if line.startswith(f"{program} ") and not re.search(r"\.\.|\|", line)
    ]  # not a pattern
    calls = [shlex.split(line, comments=True) for line in real]
    return [call[1:] for call in calls if len(call) > 2 or program == "make"]  # a bare name is a mention


@pytest.mark.parametrize("path", [*DOCS, *built_in_recipes().values()], ids=lambda path: path.name)
def test_documented_commands_parse(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        text = text.replace("# ", "")
    for arguments in commands(text, "headstart"):
        options = build_parser().parse_args(arguments)
        overrides = [item for item in getattr(options, "overrides", []) if "=" in item]
        known = {key.path for key in (*keys(Recipe), *keys(BakeoffSettings, "bakeoff."))}
        named = {re.sub(r"^variants\.[^.]+\.", "", item.partition("=")[0]) for item in overrides}
        assert named <= known, arguments
    for arguments in commands(text, "accelerate"):
        recipe = arguments[-1]
        assert arguments[0] == "launch"
        assert recipe.endswith(".yaml")
        if recipe.startswith("recipes/"):
            load(find_recipe(recipe))


def test_examples_in_help_parse() -> None:
    parser = build_parser()
    choices = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    examples = [parser.epilog, *(command.epilog or "" for command in choices.values())]
    calls = [
        arguments
        for text in examples
        for arguments in commands("\n".join(f"    {x}" for x in text.split("\n")), "headstart")
    ]
    assert len(calls) >= 8
    for arguments in calls:
        parser.parse_args(arguments)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_and_make_targets_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / target).exists(), target
    targets = {f"make {name}" for name in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    mentioned = {" ".join(["make", arguments[0]]) for arguments in commands(text, "make")}
    assert mentioned <= targets


def test_the_engine_table_says_of_every_folder_that_is_written_how_it_was_checked() -> None:
    """What no engine has had is never said to load."""
    section = (
        (ROOT / "docs/engines.md").read_text(encoding="utf-8").split("## What is served where")[1].split("\n## ")[0]
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")]
    assert {(row[0], row[1]) for row in rows[2:]} == {
        (kind, engine) for kind, layout in LAYOUTS.items() for engine in layout.versions
    }
    for row in rows[2:]:
        assert re.match(r"ran \([\d.]+\): |reader only \([\w., ]+\)$", row[3]), row
        assert row[3].startswith("ran") or not re.search(r"\b(load|loads|loaded|served)\b", " ".join(row)), row


def test_make_help_names_every_target() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "engines", "engines-quick", "bench", "gpu", "lint", "clean"):
        assert f"make {target} " in shown
