"""The command line: torch-free help; exit codes; recipes that Python runs."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from headstart.heads.settings import HEADS
from headstart.launch import cli
from headstart.launch.recipe import LAST_LINE, load_recipe
from headstart.launch.threads import choose_threads, cpu_quota, usable_cores


def test_help_shows_examples_and_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys, headstart.launch.cli as c\ntry: c.main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "examples:" in done.stdout
    for command in ("check", "train", "eval", "export", "import", "compare", "inspect", "report", "ls", "cp", "env"):
        with pytest.raises(SystemExit, match="0"):
            cli.run([command, "--help"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "nothing.yaml"],
        ["check", "bad.yaml"],
        ["train", "bad.yaml"],
        ["eval", "no-run"],
        ["export", "no-run", "--engine", "vllm"],
        ["compare", "no-run", "no-other-run"],
        ["inspect", "no-run"],
        ["cp", "nothing", "x.yaml"],
        ["cp", "smoke", "bad.yaml"],
    ],
    ids=" ".join,
)
def test_wrong_input_is_code_2_and_one_message(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("train: {num_stepz: 1}\n")
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x.parquet"), "The disk is full"),
        (OSError(errno.EROFS, "Read-only file system", "runs"), "may not be written"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "The disk is full"),
    ],
)
def test_a_disk_that_cannot_be_written_is_one_message(error: Exception, advice: str, monkeypatch, capsys) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "ls_command", fails)
    assert cli.run(["ls"]) == 1
    captured = capsys.readouterr().err
    assert captured.startswith(f"error: {error}\n")
    assert advice in captured
    assert "Traceback" not in captured


def test_overrides_stand_anywhere_and_unknown_options_are_refused() -> None:
    options = cli.parse(["train", "smoke", "run.seed=1", "--dry-run", "train.depth=2"])
    assert options.overrides == ["run.seed=1", "train.depth=2"]
    assert options.dry_run
    wrong = (["train", "smoke", "--dry"], ["train", "smoke", "--nothing"], ["ls", "runs", "more"])
    for arguments in (*wrong, ["eval", "smoke", "--draft-length", "two"], ["eval", "smoke", "--temperature", "1e-9"]):
        with pytest.raises(SystemExit, match="2"):
            cli.parse(arguments)


def test_a_fault_is_code_1_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("headstart.launch.listing.show_environment", broken)
    assert cli.run(["env"]) == 1
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_a_copied_recipe_is_the_users_own_and_runs_as_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["cp", "smoke", "mine.yaml"]) == 0
    assert "accelerate launch mine.yaml" in (tmp_path / "mine.yaml").read_text()
    assert load_recipe(tmp_path / "mine.yaml").run.name == "mine"
    (tmp_path / "plain.yaml").write_text("train: {depth: 2}\n")
    assert cli.run(["cp", "plain.yaml", "folder/own.yaml"]) == 0
    own = tmp_path / "folder" / "own.yaml"
    assert own.read_text().rstrip().endswith(LAST_LINE)
    assert load_recipe(own).train.depth == 2
    compile(own.read_text(), "own.yaml", "exec")


def test_listings_print_recipes_settings_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["ls"]) == 0
    assert "smoke" in capsys.readouterr().out
    assert cli.run(["ls", "settings"]) == 0
    assert "train.num_steps" in capsys.readouterr().out
    assert cli.run(["ls", "heads"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(HEADS)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "recipe.yaml").write_text("train: {depth: 2}\n")
    assert cli.run(["ls", "runs", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == ["first", "started"]


def test_a_pipe_gets_each_line_when_it_is_printed() -> None:
    code = "import time; from headstart.launch import cli; cli.run(['ls', 'heads']); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        began = time.monotonic()
        assert process.stdout.readline().startswith("eagle3")
        process.kill()
    assert time.monotonic() - began < 30


def test_threads_follow_the_cores_and_not_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, _ = usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as accelerate sets it on a machine without accelerator
    assert choose_threads(0, 1).number == cores
    assert choose_threads(3, 1).number == 3
    assert choose_threads(0, 10**6).number == 1
    assert "shared by 2 processes" in choose_threads(0, 2).reason


def test_torch_takes_the_thread_count_set_before_its_import() -> None:
    code = """
from headstart.launch.threads import Threads, apply_threads
apply_threads(Threads(2, ""))
import torch
assert torch.get_num_threads() == 2
apply_threads(Threads(1, ""))
assert torch.get_num_threads() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_a_containers_cpu_quota_is_read(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
