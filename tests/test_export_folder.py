"""Laws of an export's folder: whatever ends the command, what has the name is whole, and the earlier one if not the new."""

import errno
import os
from pathlib import Path

import pytest

from headstart.heads.errors import WrongInput
from headstart.heads.export.card import RECORD, RECORD_SCHEMA
from headstart.heads.export.folder import fresh_folder
from headstart.heads.store import read_json, remove_leftovers, write_json

RENAME = Path.rename


def export(out, text):
    with fresh_folder(out) as folder:
        write_json(folder / RECORD, {"schema": RECORD_SCHEMA, "text": text})


def found(out):
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return read_json(out / RECORD, RECORD_SCHEMA)["text"]


def takes_the_name(path):
    return path.name == "vllm"


def test_a_disk_that_is_full_at_the_last_moment_leaves_the_earlier_export(tmp_path, monkeypatch):
    out = tmp_path / "vllm"
    export(out, "first")

    def rename(path, place):
        if takes_the_name(place) and not (path / RECORD).read_text().count("first"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return RENAME(path, place)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="No space"):
        export(out, "second")
    assert found(out) == "first"


def test_what_a_killed_export_left_is_gone_with_the_next_and_nothing_of_others(tmp_path):
    out, gone = tmp_path / "mine", 2**22 + 1  # above the largest id of a process
    left = [tmp_path / f".{name}.{gone}.tmp" for name in ("mine", "mine.old", "minus", "theirs")]
    for folder in left:
        folder.mkdir()
    export(out, "next")
    assert sorted(tmp_path.iterdir()) == sorted([out, *left[2:]])


def test_of_two_exports_at_once_one_is_there_and_the_other_says_so(tmp_path, monkeypatch):
    out = tmp_path / "vllm"
    export(out, "first")

    def rename(path, place):
        moved = RENAME(path, place)
        if takes_the_name(path):  # the earlier one has just gone when another command's export takes the name
            monkeypatch.undo()
            if (child := os.fork()) == 0:
                export(out, "theirs")
                os._exit(0)
            os.waitpid(child, 0)
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(WrongInput, match="another command exported there just now"):
        export(out, "ours")
    assert found(out) == "theirs"


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_what_a_killed_export_leaves_is_known_as_left_over(moves, tmp_path):
    """Killed before, between and behind the two renames."""
    out = tmp_path / "vllm"
    export(out, "first")
    if (child := os.fork()) == 0:
        renames = []

        def rename(path, place):
            if len(renames) == moves:
                os._exit(9)
            renames.append(place)
            moved = RENAME(path, place)
            if len(renames) == moves == 2:
                os._exit(9)
            return moved

        Path.rename = rename
        export(out, "second")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path, locked=True)
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"] * (moves != 1)
    export(out, "third")
    assert found(out) == "third"
