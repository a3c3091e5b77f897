"""Resolve the name of a target to a folder that transformers can load."""

import difflib
from collections.abc import Callable
from pathlib import Path

from headstart.heads.errors import WrongInput
from headstart.heads.smollm2 import smollm2_folder
from headstart.heads.tiny import tiny_folder

BUILTIN_TARGETS: dict[str, Callable[[], Path]] = {
    "smollm2-135m": smollm2_folder,
    "tiny": lambda: tiny_folder(tied=False),
    "tiny-tied": lambda: tiny_folder(tied=True),
}

WEIGHT_FILES = "*.safetensors"
HUB_FILES = ["*.json", WEIGHT_FILES, "*.jinja", "*.model", "*.txt"]


def resolve_model(name: str, key: str = "target.model", weights: bool = True) -> Path:
    """Folder of the model called `name`: a folder, a built-in name (made on first use) or a hub id.

    Args:
        key: the setting that holds the name, for messages.
        weights: whether they are wanted too where the hub has the model.

    Raises:
        WrongInput: nothing of that name can be found; the message says what was tried.
    """
    if name in BUILTIN_TARGETS:
        return BUILTIN_TARGETS[name]()
    folder = Path(name).expanduser()
    refuse_gguf(folder, key)
    if (folder / "config.json").is_file():
        return folder.resolve()
    if folder.exists():
        raise WrongInput(f"{key}: found {folder} without config.json, expected a folder written by transformers.")
    tried = [f"folder {folder.absolute()}: does not exist"]
    if not stays_here(name):
        try:
            return _download(name, HUB_FILES if weights else [p for p in HUB_FILES if p != WEIGHT_FILES])
        except Exception as error:
            # huggingface_hub raises many unrelated types; every one of them means that the model is not at hand.
            tried.append(f"hub id {name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    nearest = difflib.get_close_matches(name, BUILTIN_TARGETS, n=1, cutoff=0.6)
    meant = f" Did you mean {key}={nearest[0]}?" if nearest else ""
    raise WrongInput(
        f"{key}: found no model called {name!r}. Tried:\n  "
        + "\n  ".join(tried)
        + f"\nBuilt in: {', '.join(sorted(BUILTIN_TARGETS))}.{meant}\n"
        "Otherwise give the folder of a transformers causal LM, or a hub id where the network reaches the hub."
    )


def refuse_gguf(path: Path, key: str) -> None:
    """Refuse a model in llama.cpp's form: a .gguf file, or a folder whose only weights are such.

    Its conversion renames and permutes tensors by rules of each family, may quantise them, and describes the tokenizer by a
    name: what would be read back need not be what the model computes.

    Raises:
        WrongInput: naming the file and what to give instead.
    """
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path] if path.suffix.lower() == ".gguf" else []
    if files and not any(path.glob(WEIGHT_FILES)):
        raise WrongInput(
            f"{key}: found {files[0]}, weights in GGUF, expected a folder with config.json, *.safetensors and the "
            "tokenizer.\nGive the model that the file was converted from, by its folder or hub id; for llama.cpp, "
            "headstart export RUN --engine llamacpp writes its head, and the commands that convert both."
        )


def stays_here(name: str) -> bool:
    """Whether a model of this name can only be a folder: the hub is not asked, and nothing is made."""
    return name not in BUILTIN_TARGETS and (name.startswith((".", "/", "~")) or name.count("/") != 1)


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=patterns))
