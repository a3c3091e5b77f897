"""What a folder that holds a whole target has of it beside weights: what engines read, and nothing else that lies there."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from headstart.heads.export.card import CARD, TARGET_CARD

# Configs, tokenizers, chat templates, licences, and the modules that a config may name. A target's folder may also hold
# pickled weights, a clone's history, logs or keys, which are none of an export's.
READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md", ".py")
NAMES = ("LICENSE", "NOTICE")
FOLDERS = ("additional_chat_templates",)


def copy_files(source: Path, folder: Path, but: Iterable[str] = ()) -> None:
    """Copy a target's files into a folder that is there, its card under another name; `but` names files to leave out."""
    left_out = set(but)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            if path.name in FOLDERS:
                shutil.copytree(path, folder / path.name)
        elif path.name not in left_out and is_read(path):
            shutil.copyfile(path, folder / (TARGET_CARD if path.name == CARD else path.name))


def is_read(path: Path) -> bool:
    return not path.name.startswith(".") and (path.suffix in READ or path.name in NAMES)
