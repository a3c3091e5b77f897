"""Laws of `kill -9` in the midst of a commit: what is recorded is whole, at whichever touch of the disk it fell.

Kills that the clock or a pass of the target decides (tests/test_killed_ranks.py) hardly ever fall between two writes.
"""

import os
import shutil
import signal
import sys
from contextlib import closing
from itertools import count

import pyarrow.parquet  # noqa: F401  what every process would import after it was forked
import torch

from headstart.heads.paths import SPLITS
from headstart.heads.store import MANIFEST, Stage, read_json, remove_leftovers
from headstart.heads.target import TargetLoader
from headstart.trainer.checkpoint import TrainingProgress, pointed
from headstart.trainer.loop import keep, optimizer_step, resume
from headstart.trainer.progress import Progress
from headstart.trainer.prompts import read_prompts
from headstart.trainer.ranks import Ranks
from headstart.trainer.recorded import plan_traffic
from headstart.trainer.traffic import answer_chunks, commit, open_stages, plan_chunks, shares
from tests.small_training import open_job
from tests.test_traffic import SETTINGS, TINY, prompts_stage, some_prompts

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


def test_replies_are_recorded_whole_and_never_without_their_states(tmp_path):
    prompts = prompts_stage(tmp_path, some_prompts(8))
    targets, asked = TargetLoader(TINY), read_prompts(prompts.folder)
    talks = plan_traffic(targets, asked, SETTINGS).conversations

    begun = tmp_path / "begun"
    stages = open_stages(targets, prompts, SETTINGS, begun, 0, SPLITS, mend=False)
    chunks = plan_chunks(asked, SETTINGS)
    own = shares(chunks, stages[0], "float32", SETTINGS)
    progress = Progress("traffic", len(asked))
    with closing(answer_chunks(targets, stages[0], own, talks, SETTINGS, 0, progress)) as answers:
        answer = next(answers)
    seen = set()
    for number in count(1):
        root = tmp_path / str(number)
        shutil.copytree(begun, root)

        def read(root=root):
            folders = [root / stage.folder.relative_to(begun) for stage in stages]
            return [Stage(folder, read_json(folder / MANIFEST)) for folder in folders]

        if not killed(lambda read=read: commit(answer, *read(), targets.taps, SETTINGS, Ranks()), root, number):
            break
        traffic, features = read()
        assert not traffic.damaged()
        assert not features.damaged()
        assert len(traffic.outputs) <= len(features.outputs)
        seen.add((len(traffic.outputs), len(features.outputs)))
        for stage in (traffic, features):
            remove_leftovers(stage.folder, locked=True)
            assert not list(stage.folder.glob(".*"))
    assert seen == {(0, 0), (0, 1), (1, 1)}
