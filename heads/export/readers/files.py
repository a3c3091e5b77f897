"""The two files that an engine loads of a head's folder, and what readers of all layouts refuse about them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.heads.errors import WrongInput
from headstart.heads.store import read_json

FILES = {"config.json", "model.safetensors", "README.md", "headstart.json"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a folder.

    Raises:
        WrongInput: a file is missing, damaged, or one that an engine may load too.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not {"config.json", "model.safetensors"} <= names:
        raise WrongInput(f"{folder}: found {sorted(names)}, expected config.json and model.safetensors.")
    if extra := names - FILES:
        refuse(folder, [f"files that an engine may load too: {sorted(extra)}"])
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        refuse(folder, [f"config.json holds {type(config).__name__}, expected an object"])
    try:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        refuse(folder, [f"model.safetensors is no whole safetensors file ({error})"])
    return config, tensors


def refuse(folder: Path, problems: Iterable[str]) -> NoReturn:
    raise WrongInput(f"{folder} would not be served as it was trained:\n" + "\n".join(f"  - {p}" for p in problems))


def refuse_any(folder: Path, problems: list[str]) -> None:
    if problems:
        refuse(folder, problems)


def key_problems(config: dict[str, Any], keys: set[str], optional: set[str], where: str = "config.json") -> list[str]:
    """Keys that are missing, and keys whose meaning to an engine nobody has looked at."""
    missing, unknown = sorted(keys - config.keys()), sorted(config.keys() - keys - optional)
    return [f"{where} misses {missing} and holds the unknown {unknown}"] if missing or unknown else []


def value_problems(config: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Values that are others, or of another type: 1 is not true."""
    return [
        f"{key} is {config[key]!r}, expected {value!r}"
        for key, value in expected.items()
        if config[key] != value or type(config[key]) is not type(value) and bool in (type(value), type(config[key]))
    ]


def dtype_problems(config: dict[str, Any]) -> list[str]:
    found = config["dtype"]
    if not isinstance(found, str) or found not in DTYPES:
        return [f"dtype is {found!r}, expected one of {', '.join(DTYPES)}"]
    return value_problems(config, {"torch_dtype": found})


def tensor_problems(
    tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype]
) -> list[str]:
    """Tensors that are missing, not read, of another shape or type, or not finite."""
    problems = [f"tensor {name} is missing" for name in shapes.keys() - tensors.keys()]
    problems += [f"tensor {name} is not read, so it should not be there" for name in tensors.keys() - shapes.keys()]
    for name in sorted(shapes.keys() & tensors.keys()):
        found = tensors[name]
        if tuple(found.shape) != shapes[name] or found.dtype != dtypes[name]:
            problems.append(f"tensor {name} is {tuple(found.shape)} {found.dtype}, not {shapes[name]} {dtypes[name]}")
        elif found.is_floating_point() and not found.isfinite().all():
            problems.append(f"tensor {name} holds values that are not finite")
    return sorted(problems)
