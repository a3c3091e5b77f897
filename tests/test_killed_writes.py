"""Laws of `kill -9` in the midst of a commit: what is recorded is whole, at whichever touch of the disk it fell.

Kills that the clock or a pass of the target decides (tests/test_killed_ranks.py) hardly ever fall between two writes.
"""

import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import torch

from headstart.trainer.checkpoint import TrainingProgress, pointed
from headstart.trainer.loop import keep, optimizer_step, resume
from tests.small_training import open_job

TOUCHES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def killed(work, folder, number):
    """Do `work` in a process that gets a `kill -9` just before its touch `number` of a folder; whether it came so far."""
    if (child := os.fork()) == 0:
        left = iter(range(number - 1, -1, -1))

        def touched(event, arguments):
            if event in TOUCHES and str(folder) in str(arguments[0]) and next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(touched)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_a_checkpoint_is_kept_whole_or_the_one_before_it_is(tmp_path):
    """In a process of its own, which has no threads when it forks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_killed_writes", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def keep_killed_everywhere(tmp_path):
    job, progress, weights = open_job(), TrainingProgress(), {}
    for step in (1, 2):
        optimizer_step(job, step)
        progress.advance(100, skipped=False)
        progress.note_best(1.0 + step)
        weights[step] = {name: tensor.clone() for name, tensor in job.head.trained_tensors().items()}
        if step == 1:
            keep(job, tmp_path / "first", progress, improved=True)
    found = set()
    for number in count(1):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", folder)
        if not killed(lambda folder=folder: keep(job, folder, progress, improved=True), folder, number):
            break
        again = open_job()
        went_on = resume(again, folder)
        found.add(went_on.step)
        assert all(torch.equal(weights[went_on.step][name], p) for name, p in again.head.trained_tensors().items())
        best = pointed(folder, "best")
        assert (best / "head.safetensors").is_file()
        assert went_on.step == 1 or best.name == "step-000002"  # nobody would come here again to move it
        assert not list(folder.glob(".step-*"))
    assert found == {1, 2}
    assert number > 20


if __name__ == "__main__":
    keep_killed_everywhere(Path(sys.argv[1]))
