"""The literal command on recipes/smoke.yaml: every file has its form, a second run reuses, a killed run repeats.

HEADSTART_KILLS=5 kills the run five times in each stage instead of once.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headstart.eval.gate import read_evals
from headstart.eval.summary import main_row
from headstart.heads.store import holds, read_json
from headstart.launch import cli
from headstart.trainer.metrics import read_metrics
from tests.schema_rules import acceptance_violations, read_strict, run_violations, stage_violations

ROOT = Path(__file__).resolve().parent.parent
ACCELERATE = [str(Path(sys.executable).parent / "accelerate"), "launch"]
if not Path(ACCELERATE[0]).exists():  # a virtual environment that borrows its packages has no scripts for them
    ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def run_smoke(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """`accelerate launch recipes/smoke.yaml` in a folder that holds nothing but the recipes."""
    shutil.copytree(ROOT / "recipes", folder / "recipes", dirs_exist_ok=True)
    command = [*ACCELERATE, "recipes/smoke.yaml", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run and what it printed."""
    folder = tmp_path_factory.mktemp("smoke")
    done = run_smoke(folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "runs" / "smoke", done.stdout


def test_every_file_of_the_run_has_its_form(smoke: tuple[Path, str]) -> None:
    run, _ = smoke
    assert run_violations(run) == []
    assert not list(run.rglob("*.tmp"))


def test_the_run_says_what_it_measured(smoke: tuple[Path, str]) -> None:
    run, printed = smoke
    taps = "taps [0, 1, 2]: the residual stream of 4 layers: 0 the embedding, 1 after 1 layer, 2 after 2 layers"
    assert taps in printed.partition("\nroute ")[0]  # before anything is computed
    for expected in (
        "threads: 1 (run.threads)",
        "eagle3 reads the taps",
        "accept_len",
        "lossless: lossless",
        "speedup",
        "export/vllm",
    ):
        assert expected in printed
    log = (run / "console.log").read_text()
    assert [line for line in printed.splitlines() if line.startswith("eagle3")] == [
        line for line in log.splitlines() if line.startswith("eagle3")
    ]
    assert "recipes/smoke.yaml" in (run / "command.txt").read_text()
    assert read_json(run / "eval" / "lossless.json")["verdict"] == "lossless"
    assert {path.name for path in (run / "export" / "vllm").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    for plot in ("acceptance.png", "training.png"):
        assert (run / plot).stat().st_size > 1000


def test_a_broken_file_is_noticed(smoke: tuple[Path, str], tmp_path: Path) -> None:
    path = tmp_path / "acceptance.json"

    def violations_after(change: Callable[[dict[str, Any]], object]) -> list[str]:
        content = read_strict(smoke[0] / "eval" / "acceptance.json")
        change(content["rows"][0])
        path.write_text(json.dumps(content))
        return acceptance_violations(path)

    assert violations_after(lambda row: None) == []
    assert violations_after(lambda row: row.pop("tree"))
    assert violations_after(lambda row: row.update(num_tokens=row["num_tokens"] + 1))
    assert violations_after(lambda row: row["survival"].append(row["survival"][0]))
    assert violations_after(lambda row: row.update(num_prompts="16"))


def test_a_second_run_trains_nothing_again(smoke: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = smoke
    before = contents(run)
    monkeypatch.chdir(run.parent.parent)
    other = ("eval.live_prompts=2", "eval.speed_prompts=1", "eval.speed_repeats=1")
    done = run_smoke(run.parent.parent, *other)
    assert done.returncode == 0, done.stderr[-3000:]
    assert contents(run) == before
    assert "tokens/s, " not in done.stdout.partition("acceptance:")[0].partition("draft vocabulary")[0]
    assert "measured already" not in done.stdout  # the settings of eval are others
    measured = {path: path.stat().st_mtime_ns for path in (run / "eval").iterdir()}
    again = run_smoke(run.parent.parent, *other)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "eval: measured already" in again.stdout
    assert f"traffic: reused, {(run / 'traffic').resolve().name}" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in (run / "eval").iterdir()} == measured
    inputs = read_json(run / "eval" / "manifest.json")["inputs"]
    assert holds(run / "eval", inputs)
    assert not holds(run / "eval", {**inputs, "parents": {**inputs["parents"], "checkpoint": "another"}})
    with (run / "eval" / "acceptance.json").open("a") as file:  # what a partial `headstart eval` does, too
        file.write("\n")
    assert not holds(run / "eval", inputs)


def test_another_recipe_is_refused_the_name(
    smoke: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(smoke[0].parent.parent)
    assert cli.run(["train", "recipes/smoke.yaml", "train.num_steps=41"]) == 2
    message = capsys.readouterr().err
    assert "settings.train.num_steps (40 there, 41 here)" in message
    assert "run.name=smoke-2" in message


def test_a_finished_run_is_planned_as_reused_and_listed(
    smoke: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(smoke[0].parent.parent)
    assert cli.run(["check", "recipes/smoke.yaml", "--dry-run"]) == 0
    derived, _, plan = capsys.readouterr().out.partition("\nstages\n")
    assert "[0, 1, 2]  2, N // 2, N - 3, as engines read, made to differ in 4 layers" in derived
    assert "the residual stream of 4 layers: 0 the embedding, 1 after 1 layer, 2 after 2 layers" in derived
    assert [line.split()[-1] for line in plan.splitlines()[:3]] == ["reused"] * 3
    assert "done (40 steps)" in plan
    features = read_json(smoke[0] / "features" / "manifest.json")["outputs"].values()
    assert f"{sum(output['bytes'] for output in features):,} bytes, as the replies that are recorded" in plan
    assert cli.run(["ls", "runs"]) == 0
    assert "smoke  exported  accept_len" in capsys.readouterr().out


def test_a_finished_run_is_measured_exported_and_reported_again(
    smoke: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = smoke
    monkeypatch.chdir(run.parent.parent)
    assert (
        cli.run(["eval", "smoke", "--checkpoint", "last", "--draft-length", "1,2", "--lossless", "run.threads=1"]) == 0
    )
    rows = read_json(run / "eval" / "acceptance.json")["rows"]
    assert {row["draft_length"] for row in rows if row["source"] == "offline"} >= {1, 2}
    assert [len(row["tree"]) for row in rows if row["tree"]] == [11]  # 2-2-1
    before = main_row(read_evals(run / "eval")["acceptance"], "eagle3")
    assert cli.run(["eval", "smoke", "--checkpoint", "last", "--draft-length", "1,2", "--temperature", "0,0.8"]) == 0
    acceptance = read_evals(run / "eval")["acceptance"]
    assert main_row(acceptance, "eagle3") == before
    assert {row["temperature"] for row in acceptance["other_rows"]} == {0.8}
    assert "by temperature, draft length 2" in capsys.readouterr().out
    assert stage_violations(run / "traffic-t0.8") == []
    last = run / "checkpoints" / (run / "checkpoints" / "last").read_text().strip()
    out = run.parent.parent / "elsewhere"
    assert cli.run(["export", str(last), "--engine", "llamacpp", "--out", str(out), "--untested"]) == 0
    assert (out / "config.json").is_file()
    capsys.readouterr()
    assert cli.run(["compare", "smoke", str(last)]) == 0
    assert "16 held-out prompts" in (compared := capsys.readouterr().out)
    assert [line.split()[-1] for line in compared.splitlines() if line.startswith("smoke/") and " all " in line] == [
        "tied"
    ]
    (run / "report.md").unlink()
    assert cli.run(["report", "runs/smoke"]) == 0
    assert (run / "report.md").is_file()
    capsys.readouterr()
    assert cli.run(["eval", "smoke", "train.depth=2"]) == 2
    assert "is trained already" in capsys.readouterr().err
    assert cli.run(["eval", str(run / "checkpoints" / "step-999999")]) == 2
    message = capsys.readouterr().err
    assert "expected one that is kept: " in message
    assert last.name in message


def test_a_recipe_of_sampled_replies_runs_whole(
    smoke: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Temperature 1: measured live, proved lossless, timed and exported with no more said."""
    monkeypatch.chdir(smoke[0].parent.parent)
    overrides = ["run.name=warm", "prompts.routes=[chat]", "prompts.num_train=4", "prompts.num_validation=1"]
    overrides += ["prompts.num_heldout=8", "traffic.temperature=1", "traffic.max_new_tokens=12", "train.num_steps=4"]
    overrides += [
        "eval.speed_prompts=1",
        "eval.speed_repeats=1",
        "eval.speed_draft_lengths=[2]",
        "eval.lossless_samples=64",
        "eval.lossless_tokens=64",
    ]
    assert cli.run(["train", "recipes/smoke.yaml", *overrides]) == 0
    run = smoke[0].parent / "warm"
    assert run_violations(run) == []
    assert read_json(run / "eval" / "lossless.json")["verdict"] == "lossless"
    assert {row["temperature"] for row in read_json(run / "eval" / "speed.json")["rows"]} == {1.0}
    assert read_json(run / "eval" / "acceptance.json")["live_agreement"]["sampled"]["p_value"] > 1e-4
    card = (run / "export" / "vllm" / "README.md").read_text()
    assert "UNTESTED" not in card
    assert "temperature 1)" in card


def test_a_run_killed_at_any_moment_ends_bit_equal(smoke: tuple[Path, str], tmp_path: Path) -> None:
    unbroken, _ = smoke
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    run = tmp_path / "runs" / "smoke"
    draw = random.Random(int(os.environ.get("HEADSTART_SEED", "0")))
    last = run / "checkpoints" / "last"
    for moment in moments(run, int(os.environ.get("HEADSTART_KILLS", "1")), draw):
        kill_at(tmp_path, moment, delay=draw.uniform(0, 0.2))
    kill_at(tmp_path, lambda: last.exists() and last.read_text().strip() == "step-000040", delay=0)
    assert contents(run) == contents(unbroken)


def moments(run: Path, number: int, draw: random.Random) -> Iterator[Callable[[], bool]]:
    """Moments to kill at: `number` while replies are written, then as many while training goes on."""
    parts = sorted(draw.randint(0, 5) for _ in range(number))
    steps = sorted(draw.randrange(0, 36, 5) for _ in range(number))
    for part in parts:
        yield lambda part=part: len(list(run.parent.glob(".stages/traffic-*/part-*.parquet"))) >= part
    for step in steps:
        yield lambda step=step: max((line["step"] for line in read_metrics(run / "metrics.jsonl")), default=-1) >= step


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def kill_at(folder: Path, moment: Callable[[], bool], delay: float) -> None:
    """Start the run, wait for the moment (in this life) and kill it with everything it started."""
    command = [sys.executable, "recipes/smoke.yaml"]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:  # the stages have begun
        if line.startswith("threads:"):
            break
    while process.poll() is None and not moment():
        time.sleep(0.005)
    time.sleep(delay)
    assert process.poll() is None, "the run ended before it was killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def contents(run: Path) -> dict[str, Any]:
    """What must repeat: replies, states, final and best weights, and the curve without its clock."""
    files = [*run.glob("prompts/*.jsonl"), *run.glob("traffic/*.parquet"), *run.glob("features/*.safetensors")]
    files += run.glob("checkpoints/step-000040/head.safetensors")
    found: dict[str, Any] = {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}
    found |= {name: read_text(run / "checkpoints" / name) for name in ("best", "last")}
    clock = ("time", "train/tokens_per_s", "validation/seconds")
    lines = read_metrics(run / "metrics.jsonl")
    found["metrics"] = [{key: value for key, value in line.items() if key not in clock} for line in lines]
    return found
