"""The files that an engine loads of a head's folder, and what readers of all layouts refuse about them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.heads.errors import WrongInput
from headstart.heads.shipped import INDEX
from headstart.heads.store import read_json

FILES = {"config.json", "README.md", "headstart.json"}
WHOLE, SHARD = "model.safetensors", r"model-\d{5}-of-\d{5}\.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a folder that holds a head alone.

    Raises:
        WrongInput: a file is missing, damaged, or one that an engine may load too.
    """
    weights = weight_files(folder)
    if extra := {path.name for path in folder.iterdir()} - FILES - {path.name for path in weights} - {INDEX}:
        refuse(folder, [f"files that an engine may load too: {sorted(extra)}"])
    return read_config_file(folder), read_weights(folder)


def read_config_file(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        refuse(folder, [f"config.json holds {type(config).__name__}, expected an object"])
    return config


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors or, where an index is there, the shards. Raises WrongInput: neither, or a file of another name."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    found = sorted(name for name in names if name.endswith(".safetensors"))
    whole = INDEX not in names and found == [WHOLE]
    shards = INDEX in names and found and all(re.fullmatch(SHARD, name) for name in found)
    if "config.json" not in names or not (whole or shards):
        raise WrongInput(f"{folder}: found {sorted(names)}, expected config.json and {WHOLE} (or shards and {INDEX}).")
    return [folder / name for name in found]


def weight_places(folder: Path) -> dict[str, Path]:
    """The file of every tensor. Raises WrongInput: a damaged file, or an index that does not say where each tensor is."""
    places: dict[str, Path] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        except SafetensorError as error:
            refuse(folder, [f"{path.name} is no whole safetensors file ({error})"])
    if (folder / INDEX).is_file():
        told, found = read_json(folder / INDEX)["weight_map"], {name: path.name for name, path in places.items()}
        wrong = sorted(name for name in told.keys() | found.keys() if told.get(name) != found.get(name))
        refuse_any(folder, [f"{INDEX} has {name} in {told.get(name)}, it is in {found.get(name)}" for name in wrong])
    return places


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors. Raises as `weight_places`."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(set(weight_places(folder).values())):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return tensors


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


def ascending(ids_V: Tensor, vocab_size: int) -> bool:
    """Whether a vocabulary map, as target ids, is strictly ascending and within the vocabulary."""
    return bool((ids_V.diff() > 0).all()) and bool(ids_V[0] >= 0) and bool(ids_V[-1] < vocab_size)
