"""Laws of stopping and going on: checkpoints, resume, and the record of metrics."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.checkpoint import build_head, load_head
from headstart.heads.errors import WrongInput
from headstart.heads.vocabulary import choose_draft_vocabulary
from headstart.trainer.checkpoint import pointed, try_saving
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.loop import Job, train
from headstart.trainer.metrics import METRICS, MetricsFile, read_metrics
from headstart.trainer.streamed import StreamedStates
from tests.kinds import make_settings
from tests.small_decoding import make_path, make_prompts
from tests.small_training import SETTINGS, make_head, make_lengths, make_paths, make_rows, open_job, run


def assert_same_weights(head, other):
    for (name, a), b in zip(head.trained_tensors().items(), other.trained_tensors().values(), strict=True):
        assert torch.equal(a, b), name


class StopsAt(TrainingRows):
    """Rows during whose step k the user presses Ctrl-C."""

    def batch(self, step, *share):
        if step == self.stop_step:
            os.kill(os.getpid(), signal.SIGINT)
        return super().batch(step, *share)


def comparable(folder):
    """Lines of metrics.jsonl without what a clock decides."""
    return [
        {k: v for k, v in line.items() if k not in ("time", "train/tokens_per_s", "validation/seconds")}
        for line in read_metrics(folder / METRICS)
    ]


def test_resume_equals_never_stopped(tmp_path):
    unbroken, progress = run(tmp_path / "unbroken")
    paths, features = make_paths(make_lengths(14))
    for stop_step in (4, 9, 16):
        rows = StopsAt(paths, features, SETTINGS.batch_tokens, 0)
        rows.stop_step = stop_step
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "broken", rows=rows)
        last = pointed(tmp_path / "broken" / "checkpoints", "last")
        assert last.name == f"step-{stop_step:06d}"
    head, again = run(tmp_path / "broken", head=make_head(seed=5))
    assert_same_weights(head, unbroken)
    assert comparable(tmp_path / "broken") == comparable(tmp_path / "unbroken")
    assert asdict(again) == asdict(progress)
    a, b = (
        load_file(tmp_path / name / "checkpoints/step-000024/trainer/optimizer.safetensors")
        for name in ("broken", "unbroken")
    )
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_killed_training_ends_bit_equal(tmp_path):
    """`kill -9` of a real process at two moments; the rerun continues from `last`."""
    folder, steps = tmp_path / "killed", 60
    command = [sys.executable, "-m", "tests.small_training", str(folder), str(steps)]
    for kill_after in (1, 38):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while (
            process.poll() is None and max((x["step"] for x in read_metrics(folder / METRICS)), default=0) < kill_after
        ):
            time.sleep(0.01)
        process.kill()
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    settings = replace(SETTINGS, num_steps=steps, log_every=1)
    unbroken, _ = run(tmp_path / "unbroken", settings)
    final = load_file(folder / "checkpoints/step-000060/head.safetensors")
    assert all(torch.equal(final[name], tensor) for name, tensor in unbroken.trained_tensors().items())
    assert comparable(folder) == comparable(tmp_path / "unbroken")
    assert not list((folder / "checkpoints").glob(".*.tmp"))


def test_resume_with_other_settings_names_the_field(tmp_path):
    run(tmp_path, replace(SETTINGS, num_steps=6))
    with pytest.raises(WrongInput, match=r"train\.learning_rate: 0\.004 in the checkpoint, 0\.001 now"):
        run(tmp_path, replace(SETTINGS, num_steps=6, learning_rate=1e-3))
    with pytest.raises(WrongInput, match=r"head\.norm_output"):
        run(tmp_path, replace(SETTINGS, num_steps=6), head=make_head(norm_output=True))
    with pytest.raises(WrongInput, match=r"train\.accumulate: 1 in the checkpoint, 3 now"):
        run(tmp_path, replace(SETTINGS, num_steps=6, accumulate=3))
    with pytest.raises(WrongInput, match="paths"):
        run(tmp_path, replace(SETTINGS, num_steps=6), rows=make_rows(num=9))
    run(tmp_path, replace(SETTINGS, num_steps=6, log_every=1, save_every=2))  # free to change


def test_a_lost_checkpoint_is_an_error_and_not_a_new_start(tmp_path):
    run(tmp_path, replace(SETTINGS, num_steps=6))
    (tmp_path / "checkpoints/last").write_text("step-000004\n")
    with pytest.raises(WrongInput, match="step-000004"):
        run(tmp_path, replace(SETTINGS, num_steps=6))


def test_finished_training_is_left_as_it_is(tmp_path):
    run(tmp_path)
    before = (tmp_path / METRICS).read_bytes()
    head, progress = run(tmp_path, head=make_head(seed=3))
    assert progress.step == SETTINGS.num_steps
    assert (tmp_path / METRICS).read_bytes() == before
    saved = load_file(tmp_path / "checkpoints/step-000024/head.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in head.trained_tensors().items())


def test_metrics_go_up_and_a_resume_cuts_what_its_checkpoint_does_not_hold(tmp_path):
    metrics = MetricsFile(tmp_path / METRICS)
    for step in (0, 10, 20, 30):
        metrics.write(step, 100 * step, {"train/loss": float("nan")})
    with pytest.raises(ValueError, match="step 30 after step 30"):
        metrics.write(30, 0, {})
    with metrics.path.open("a") as handle:
        handle.write('{"step": 40, "half a li')
    again = MetricsFile(tmp_path / METRICS)
    assert [line["step"] for line in again.cut(20)] == [0, 10, 20]
    again.write(25, 2500, {"train/loss": 1.0})
    lines = [json.loads(text) for text in metrics.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 10, 20, 25]
    assert list(lines[0]) == ["step", "time", "stage", "tokens", "train/loss"]
    assert lines[0]["train/loss"] is None


# Checkpoints


def test_a_checkpoint_is_these_files_and_holds_no_other_tensors(tmp_path):
    head, _ = run(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    names = {path.name for path in checkpoints.rglob("*") if path.is_file()}
    assert names == {"head.safetensors", "head.json", "state.json", "optimizer.safetensors", "last", "best"}
    last = pointed(checkpoints, "last")
    saved = load_file(last / "head.safetensors")
    assert saved.keys() == {*head.trained_tensors(), "draft_ids"}


def test_last_best_and_the_newest_are_kept(tmp_path):
    _, progress = run(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    kept = sorted(path.name for path in checkpoints.glob("step-*"))
    best, last = pointed(checkpoints, "best"), pointed(checkpoints, "last")
    measured = {line["step"]: line["accept_len"] for line in read_metrics(tmp_path / METRICS) if "accept_len" in line}
    assert last.name == "step-000024"
    assert best.name == f"step-{progress.best_step:06d}"
    assert measured[progress.best_step] == max(v for step, v in measured.items() if step)
    assert set(kept) <= {"step-000020", "step-000024", best.name, last.name}


@pytest.mark.parametrize("name", ["head.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_trained(tmp_path, name):
    stop = replace(SETTINGS, num_steps=5)
    run(tmp_path, stop)
    file = pointed(tmp_path / "checkpoints", "last") / name
    whole = file.read_bytes()
    for damage in (lambda: file.write_bytes(whole[: len(whole) // 2]), file.unlink):
        damage()
        with pytest.raises(WrongInput, match=name):
            run(tmp_path, stop)
    file.write_bytes(whole)
    for text in ("", "..", "step-999999", "\xff\n"):
        (tmp_path / "checkpoints" / "last").write_text(text)
        with pytest.raises(WrongInput, match="which is not there"):
            run(tmp_path, stop)


@pytest.mark.parametrize(("kind", "flags"), [("eagle3", {}), ("draft", {"train_output": True})])
def test_output_rows_of_their_own_are_resumed_beside_a_tied_target(kind, flags, tiny_tied_target, tmp_path):
    """The target has one table for embedding and output; the head's output has fewer rows, learns, and is saved apart."""
    target, settings = tiny_tied_target, replace(SETTINGS, num_steps=6, save_every=3, depth=1)
    paths = [make_path(prompt, prompt, f"p{i}") for i, prompt in enumerate(make_prompts(target, [9, 12, 7, 15]))]
    states = StreamedStates(target)
    draft_ids = torch.from_numpy(choose_draft_vocabulary(np.zeros(target.facts.vocab_size), 128, target.facts))

    def train_in(folder, seed=0):
        torch.manual_seed(seed)
        head = build_head(make_settings(kind, 1, **flags), target.facts, draft_ids)
        head.load_target(target, initialise=True)
        rows = TrainingRows(paths, states, settings.batch_tokens, 0)
        job = Job.open(head, target.output_weight(), rows, settings, draft_length=1)
        train(job, EvaluationRows(paths, states, 256), folder)
        return head

    unbroken = train_in(tmp_path / "unbroken")
    train_in(tmp_path / "broken")
    (tmp_path / "broken" / "checkpoints" / "last").write_text("step-000003\n")
    resumed = train_in(tmp_path / "broken", seed=5)
    assert_same_weights(resumed, unbroken)
    saved = load_head(pointed(tmp_path / "broken" / "checkpoints", "last"), target)
    for head in (resumed, saved):
        assert head.lm_head.weight.shape == (128, target.facts.hidden_size)
        assert not torch.equal(head.lm_head.weight, target.output_weight()[draft_ids])
        assert torch.equal(head.lm_head.weight, unbroken.lm_head.weight)
        assert torch.equal(head.embedding_VH, target.embedding_weight())


def test_a_trial_of_saving_leaves_no_trace(tmp_path):
    job = open_job()
    before = {name: p.clone() for name, p in job.head.trained_tensors().items()}
    assert try_saving(tmp_path, job.strategy, job.identity) > 0
    assert all(torch.equal(before[name], p) for name, p in job.head.trained_tensors().items())
    assert not job.strategy.state()
    assert not list(tmp_path.iterdir())
