"""`headstart train RECIPE --config-file FILE`: processes as an accelerate config asks for them, started by accelerate."""

import os
import sys
from pathlib import Path
from typing import NoReturn

import headstart.recipes
from headstart.heads.errors import WrongInput


def built_in_configs() -> dict[str, Path]:
    """Accelerate configs that come with headstart, one for each strategy, by its name."""
    folder = Path(headstart.recipes.__path__[0]) / "accelerate"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def launch_command(config: str, recipe: str, arguments: list[str]) -> list[str]:
    """The command that trains a recipe under a config: a file, or one of `built_in_configs`.

    Raises:
        WrongInput: there is neither.
    """
    known = built_in_configs()
    path = Path(config).expanduser()
    if not path.is_file() and config not in known:
        raise WrongInput(
            f"--config-file: found no file {config}, expected one that `accelerate config` writes, or one of "
            f"{', '.join(known)}."
        )
    file = path if path.is_file() else known[config]
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    return [*accelerate, "--module", "headstart.launch", recipe, *arguments]


def launch(config: str, recipe: str, arguments: list[str]) -> NoReturn:
    """Become that command."""
    command = launch_command(config, recipe, arguments)
    os.execv(command[0], command)
