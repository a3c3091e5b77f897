"""Laws of `kill -9` in the stages that processes share: nothing that was committed is made again, and the end is the same.

`python bench/kills.py` kills at many random moments; here every stage is hit for certain.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from subprocess import PIPE

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.store import MANIFEST, STAGES, Stage, read_json
from headstart.trainer.checkpoint import pointed
from headstart.trainer.metrics import METRICS, read_metrics
from tests.small_stages import NUM_CHUNKS, NUM_STEPS, STORE, TAPS, run_stages
from tests.test_ranks import lines_of


def stages_of(folder):
    """Stages by name, features also by their taps."""
    found = {}
    for manifest in folder.glob(f"{STAGES}/*/{MANIFEST}"):
        stage = Stage(manifest.parent, read_json(manifest))
        name = stage.manifest["stage"]
        found[f"{name} {stage.manifest['inputs']['settings']['taps']}" if name == "features" else name] = stage
    return found


def committed(folder):
    """What no later process may touch: recorded files, and the lines of metrics.jsonl that the last checkpoint holds."""
    files = {
        path: (output["sha256"], path.stat().st_ino, path.stat().st_mtime_ns)
        for stage in stages_of(folder).values()
        for path, output in ((stage.folder / name, output) for name, output in stage.outputs.items())
    }
    last = pointed(folder / "second" / "checkpoints", "last")
    step = int(last.name.removeprefix("step-")) if last else -1
    return files | {x["step"]: x["time"] for x in read_metrics(folder / "second" / METRICS) if x["step"] <= step}


@pytest.fixture
def launcher(tmp_path):
    """Starts two processes under `killed here` for every line written to it."""
    (tmp_path / "killed here").mkdir()
    command = [sys.executable, "-m", "tests.small_stages", str(tmp_path / "killed here")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, bufsize=1, env=environment) as process:
        yield process
        process.stdin.close()


def start(part, launcher):
    """Ids of both processes."""
    launcher.stdin.write(f"{part}\n")
    return json.loads(launcher.stdout.readline())


def ended(launcher):
    """Exit codes of both processes."""
    return json.loads(launcher.stdout.readline())


def assert_told(folder, rank):
    """The process whose peer was killed has ended, saying why."""
    assert "another process of this training has ended, or does not answer" in (folder / f"said-{rank}").read_text()


def killed_in(stage, victim, launcher, folder):
    """Start, and let one rank be killed in a stage."""
    start(f"{stage}-{victim}", launcher)
    codes = ended(launcher)
    assert codes == ([-signal.SIGKILL, 1] if victim == 0 else [1, -signal.SIGKILL])
    assert_told(folder, 1 - victim)
    return committed(folder)


def killed_in_training(launcher, folder):
    """At a moment that the clock decides."""
    pids = start("end", launcher)
    while max((line["step"] for line in read_metrics(folder / "second" / METRICS)), default=0) < NUM_STEPS // 3:
        time.sleep(0.01)
    os.kill(pids[1], signal.SIGKILL)
    assert ended(launcher) == [1, -signal.SIGKILL]
    assert_told(folder, 0)
    return committed(folder)


def test_a_run_killed_in_every_stage_that_processes_share_ends_as_an_unbroken_one(tmp_path, launcher):
    whole, folder = tmp_path / "whole", tmp_path / "killed here"
    run_stages(whole, accumulate=2)
    first, second = (f"features {taps}" for taps in TAPS.values())

    in_traffic = killed_in("traffic", 1, launcher, folder)
    found = stages_of(folder)
    assert found["traffic"].manifest["state"] == found[first].manifest["state"] == "running"
    assert 0 < len(found["traffic"].outputs) < NUM_CHUNKS

    in_features = killed_in("features", 0, launcher, folder)
    found = stages_of(folder)
    assert found["traffic"].complete
    assert found[first].complete
    assert found[second].manifest["state"] == "running"
    assert 0 < len(found[second].outputs) < NUM_CHUNKS

    in_training = killed_in_training(launcher, folder)
    assert pointed(folder / "second" / "checkpoints", "last").name < f"step-{NUM_STEPS:06d}"
    start("end", launcher)
    assert ended(launcher) == [0, 0], (folder / "said-0").read_text()
    at_the_end = committed(folder)
    for before in (in_traffic, in_features, in_training):
        assert before.items() <= at_the_end.items()
    for stage in stages_of(folder).values():  # each process has put its own files there
        there = folder / STORE / stage.folder.name
        assert read_json(there / MANIFEST) == stage.manifest
        assert Stage(there, stage.manifest).damaged() == []
    assert_ends_alike(folder, whole)


def test_a_process_that_hangs_between_two_steps_is_given_up(tmp_path, launcher):
    first, second = start("hang", launcher)
    deadline = time.monotonic() + 120
    while (waits := runs(first)) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(second, signal.SIGKILL)
    assert not waits
    assert ended(launcher) == [1, -signal.SIGKILL]
    assert_told(tmp_path / "killed here", 0)


def runs(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


CHILD = """
import time
from headstart.launch.processes import end_with_launcher
end_with_launcher()
print("watching", flush=True)
time.sleep(90)
"""


def test_processes_end_with_their_launcher(tmp_path):
    """However it ended; what it leaves behind would hold the run's folder."""
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=PIPE, text=True, env=environment)
    assert parent.stdout.readline() == "watching\n"
    parent.kill()
    began = time.monotonic()
    assert parent.stdout.read() == ""  # at the end of whoever could write there
    assert time.monotonic() - began < 60
    parent.wait()


def assert_ends_alike(folder, whole):
    found, expected = stages_of(folder), stages_of(whole)
    assert found.keys() == expected.keys()
    for name, stage in found.items():
        assert stage.outputs == expected[name].outputs
        assert not stage.damaged()
        assert {f.name for f in stage.folder.iterdir()} == {f.name for f in expected[name].folder.iterdir()}
    answered = Counter(
        prompt_id
        for name in found["traffic"].outputs
        for prompt_id in parquet.read_table(found["traffic"].folder / name)["prompt_id"].to_pylist()
    )
    assert set(answered.values()) == {1}
    ours, theirs = (
        load_file(pointed(root / "second/checkpoints", "last") / "head.safetensors") for root in (folder, whole)
    )
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert [line["step"] for line in lines_of(folder / "second")] == list(range(1, NUM_STEPS + 1))
    assert lines_of(folder / "second") == lines_of(whole / "second")
    assert not list(folder.rglob(".*.tmp"))
