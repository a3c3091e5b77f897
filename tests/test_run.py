"""A run name belongs to one training, and one process writes it."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headstart.heads.errors import WrongInput
from headstart.launch.run import RunFolder, Tee, locked


def make_run(tmp_path: Path, name: str = "first") -> RunFolder:
    run = RunFolder(tmp_path / "runs" / name)
    run.folder.mkdir(parents=True)
    return run


def test_a_name_is_claimed_by_one_training(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.claim({"settings": {"train": {"num_steps": 10, "depth": 3}}})
    run.claim({"settings": {"train": {"num_steps": 10, "depth": 3}}, "parents": {"traffic": "abc"}})
    with pytest.raises(WrongInput) as caught:
        run.claim({"settings": {"train": {"num_steps": 20, "depth": 3}}, "parents": {"traffic": "abc"}})
    message = str(caught.value)
    assert "settings.train.num_steps (10 there, 20 here)" in message
    assert "depth" not in message
    assert "run.name=first-2" in message
    assert "--fresh" in message
    with pytest.raises(WrongInput, match="parents.traffic"):
        run.claim({"parents": {"traffic": "def"}})


def test_fresh_moves_the_old_run_aside_with_working_links(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    stage = run.root / ".stages" / "traffic-0123"
    stage.mkdir(parents=True)
    (stage / "part").write_text("kept")
    run.link("traffic", stage)
    run.claim({"seed": 0})
    aside = run.set_aside()
    assert aside == run.root / "first.old-1"
    assert (aside / "traffic" / "part").read_text() == "kept"
    assert not run.folder.exists()
    assert run.set_aside() is None


def test_links_are_relative_and_can_be_replaced(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name in ("traffic-a", "traffic-b"):
        (run.root / ".stages" / name).mkdir(parents=True)
        run.link("traffic", run.root / ".stages" / name)
        assert os.readlink(run.folder / "traffic") == f"../.stages/{name}"
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "first" / "traffic").is_dir()


def test_a_second_process_cannot_write_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    code = f"""
from pathlib import Path
from headstart.launch.run import locked
with locked(Path({str(run.folder)!r})):
    print("held", flush=True)
    input()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(WrongInput, match=f"pid {child.pid}"), locked(run.folder):
        pass
    threading.Timer(0.3, child.kill).start()
    with locked(run.folder, wait_for="it holds the folder"):  # a shared stage is waited for
        assert child.wait() != 0
    assert f"waiting for another process (pid {child.pid}): it holds" in capsys.readouterr().out
    with locked(run.folder):  # the lock dies with its holder
        pass


def test_the_log_keeps_lines_and_the_last_state_of_a_progress_line() -> None:
    console, log = io.StringIO(), io.StringIO()
    tee = Tee(console, log)
    for text in ("hello\n", "\r 1/3", "\r 2/3", "\r 3/3\n", "a\nb\n", "50 %\r", "100 %\r\n"):
        tee.write(text)
    assert log.getvalue() == "hello\n 3/3\na\nb\n100 %\n"
    assert console.getvalue().count("\r") == 5
