"""What `ls` and `env` print: recipes, runs, head kinds, settings, and where this installation stands."""

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.eval.file_reader import read_eval
from headstart.eval.summary import find_rows
from headstart.eval.tables import columns
from headstart.eval.temperatures import split_settings
from headstart.heads.errors import WrongInput
from headstart.heads.intervals import interval_text
from headstart.heads.settings import HEADS
from headstart.heads.store import versions
from headstart.launch.recipe import BAKEOFF, built_in_recipes, load_recipe
from headstart.launch.run import run_folders
from headstart.launch.schema import Found, bare, keys
from headstart.launch.settings import BakeoffSettings, Recipe
from headstart.launch.threads import usable_cores
from headstart.launch.variants import load


def show(what: str, root: Path) -> None:
    """Print one listing."""
    listing = {"recipes": recipes, "heads": heads, "settings": settings, "runs": lambda: runs(root)}[what]
    rows = list(listing())
    if not rows:
        print(f"no {what} in {root}/; start one: headstart train smoke")
    print("".join(f"{line}\n" for line in columns(rows)), end="")


def recipes() -> Iterator[list[str]]:
    for name, path in built_in_recipes().items():
        yield [name, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").partition("  ")[0]]


def heads() -> Iterator[list[str]]:
    for kind, cls in HEADS.items():
        yield [kind, (cls.__doc__ or "").strip().partition("\n")[0]]


def settings() -> Iterator[list[str]]:
    for key in (*keys(Recipe), *keys(BakeoffSettings, f"{BAKEOFF}.")):
        default = '""' if key.default == "" else bare(plain(key.default))
        yield [key.path, default, key.doc.replace("\n", " ")]


def plain(value: Any) -> Found:
    """A default as if a user had written it."""
    return Found([plain(item) for item in value] if isinstance(value, list) else value, "")


def runs(root: Path) -> Iterator[list[str]]:
    for folder in run_folders(root):
        if variants := variants_of(folder):
            measured = sum((root / f"{folder.name}-{name}" / "eval" / "acceptance.json").exists() for name in variants)
            yield [folder.name, f"bake-off, {measured} of {len(variants)} measured", ", ".join(variants)]
            continue
        checkpoints = sorted((folder / "checkpoints").glob("step-*"))
        state = "exported" if any((folder / "export").glob("*/config.json")) else None
        state = state or ("measured" if (folder / "eval" / "acceptance.json").exists() else None)
        state = state or (f"{checkpoints[-1].name}{of_steps(folder)}" if checkpoints else "started")
        yield [folder.name, state, headline(folder)]


def variants_of(folder: Path) -> list[str]:
    """Names of the variants of a bake-off; empty for a run of one head."""
    try:
        return list(load(folder / "recipe.yaml").variants)
    except WrongInput:
        return []


def of_steps(folder: Path) -> str:
    """How many steps the training of a run has, as its recipe says."""
    try:
        return f" of {load_recipe(folder / 'recipe.yaml').train.num_steps}"
    except WrongInput:
        return ""


def headline(folder: Path) -> str:
    """accept_len of the head with its longest draft: offline, over all routes and contexts."""
    path = folder / "eval" / "acceptance.json"
    if not path.exists():
        return ""
    try:
        acceptance = split_settings(read_eval(path))
    except WrongInput:
        return "eval/acceptance.json is damaged"
    whole = {"source": "offline", "route": "all", "context": "all", "draft": "greedy"}
    rows = find_rows(acceptance, drafter=acceptance["checkpoint"]["kind"], **whole)
    if not rows:
        return ""
    row = max(rows, key=lambda row: row["draft_length"])
    return f"accept_len {interval_text(row['accept_len'])} at draft length {row['draft_length']}"


def show_environment() -> None:
    """Print versions, hardware and folders."""
    import torch

    from headstart.eval.speed import cpu_name
    from headstart.heads.made_targets import cache_folder
    from headstart.launch.needs import device_memory

    cores, reason = usable_cores()
    rows = {**versions(), "platform": platform.platform(), "cpu": cpu_name(), "threads": f"{cores} ({reason})"}
    rows["memory"] = f"{(device_memory(torch.device('cpu')) or 0) / 2**30:.1f} GiB"
    rows["accelerator"] = accelerator()
    rows["cache"] = f"{cache_folder()} (HEADSTART_CACHE)"
    rows["disk free here"] = f"{shutil.disk_usage('.').free / 2**30:.1f} GiB"
    for name, value in rows.items():
        print(f"{name.ljust(14)}  {value}")


def accelerator() -> str:
    import torch

    if not torch.accelerator.is_available():
        return "none"
    device = torch.accelerator.current_accelerator()
    name = torch.cuda.get_device_name() if device is not None and device.type == "cuda" else str(device)
    return f"{torch.accelerator.device_count()} x {name}"
