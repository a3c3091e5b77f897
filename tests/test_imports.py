"""Imports point one way: launch -> trainer -> eval -> heads; nothing happens on import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["launch", "trainer", "eval", "heads"]


def imported_rooms(path: Path) -> set[str]:
    """Rooms of headstart that a module imports, wherever in the file."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("headstart.")}
    return rooms & set(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_from_those_below_it(room: str) -> None:
    above = set(ORDER[: ORDER.index(room)])
    offenders = {str(path.relative_to(ROOT)): imported_rooms(path) & above for path in (ROOT / room).rglob("*.py")}
    assert {path: rooms for path, rooms in offenders.items() if rooms} == {}


def test_the_room_of_heads_says_where_each_of_its_files_belongs() -> None:
    folder = ROOT / "heads"
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = re.findall(r"\w+", " ".join(line[20:] for line in text.splitlines()[2:]))
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert sorted(files) == sorted(name for name in named if (folder / f"{name}.py").exists())


def test_settings_import_no_torch() -> None:
    code = """
import sys
import headstart.launch.recipe, headstart.launch.cli, headstart.launch.commands, headstart.launch.listing
heavy = {"torch", "transformers", "numpy", "datasets", "wandb", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_a_room_sets_nothing() -> None:
    code = """
import os, torch
before = (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype())
import headstart.launch.commands, headstart.heads.target, headstart.heads.eagle3, headstart.eval.acceptance
assert (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype()) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
