"""Data sets of the Hugging Face hub by name: `hub:ORG/NAME`, `hub:ORG/NAME@REVISION`, `hub:ORG/NAME:SPLIT`.

Rows are kept as one Parquet file in headstart's cache. With a revision that file is final, and no network is asked again.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from headstart.heads.errors import WrongInput
from headstart.heads.made_targets import cache_folder
from headstart.heads.store import atomic_path, hash_json, remove_leftovers

PREFIX = "hub:"
_NAME = re.compile(r"hub:(?P<name>[^@:]+)(?:@(?P<revision>[^:]+))?(?::(?P<split>.+))?")


def is_hub(name: str) -> bool:
    return name.startswith(PREFIX)


def fetched(source: str, columns: Sequence[str], setting: str) -> Path:
    """The Parquet file of a data set's rows, fetched where it is not here yet.

    Args:
        columns: those that rows of prompts can have; others are not kept.

    Raises:
        WrongInput: the hub cannot be reached, or has no such data set, revision or split.
    """
    match = _NAME.fullmatch(source)
    if match is None:
        raise WrongInput(
            f"{setting}: found {source!r}, expected hub:ORG/NAME, hub:ORG/NAME@REVISION or hub:ORG/NAME:SPLIT"
        )
    name, revision, split = match["name"], match["revision"], match["split"] or "train"
    folder = cache_folder() / "datasets"
    pinned = folder / f"{hash_json([name, revision, split, sorted(columns)])[:16]}.parquet"
    if revision is not None and pinned.is_file():
        return pinned
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split, revision=revision)
    except Exception as error:
        # Loading runs builders, parsers and the network: its errors are of any kind.
        reason = str(error).strip().partition("\n")[0]
        raise WrongInput(
            f"{setting}: found no data set {source} ({type(error).__name__}: {reason}), expected one that can be fetched.\n"
            "Where there is no network, fetch it elsewhere with save_to_disk and name that folder."
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder, locked=False)
    with atomic_path(pinned) as temporary:
        rows.select_columns([column for column in rows.column_names if column in columns]).to_parquet(temporary)
    return pinned
