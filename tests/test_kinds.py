"""What every kind of head must show as a whole: it learns, it can be stopped, and what it measures it does live."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.eval.acceptance import acceptance_probabilities, count_replies, reply_acceptance
from headstart.eval.calibration import stopped
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.replies import live_counts
from headstart.eval.speculation import PLAIN, Speculation
from headstart.heads.batch import pack
from headstart.trainer.checkpoint import pointed
from headstart.trainer.console import tensor_table
from headstart.trainer.data import TrainingRows
from headstart.trainer.loop import Job, optimizer_step
from headstart.trainer.settings import LossSettings, TrainSettings
from tests.kinds import FORMS, make_settings
from tests.small_decoding import NO_STOP, fitted_head, make_path, make_prompts, untrained_head
from tests.small_training import SETTINGS, RandomFeatures, SmallTarget, make_head, make_paths, run

every_kind = pytest.mark.parametrize("kind", FORMS)


def steps_until(job, most_steps, enough):
    """Train until the loss a pair falls below what `enough` makes of the first step's; the losses of all steps."""
    losses: list[float] = []
    while len(losses) < most_steps and (not losses or losses[-1] > enough(losses[0])):
        sums = optimizer_step(job, len(losses) + 1).sums
        losses.append(float((sums.loss_D / sums.pairs_D).mean()))
    return losses


def fit_eight_paths(kind, most_steps, enough):
    """A job on eight short paths, and the losses of its steps until they fall below `enough` of the first."""
    settings = TrainSettings(
        num_steps=most_steps, batch_tokens=512, learning_rate=5e-3, warmup_steps=5, dtype="float32", depth=3,
        loss=LossSettings(kind="ce"),
    )  # fmt: skip
    paths, features = make_paths([(3, 9)] * 8)
    head = make_head(kind=kind, whole_vocabulary=True)
    job = Job.open(head, SmallTarget().output, TrainingRows(paths, features, settings.batch_tokens, 0), settings)
    return job, steps_until(job, most_steps, lambda first: enough * first)


@every_kind
def test_eight_paths_are_learned_and_only_by_the_heads_own_tensors(kind):
    before = make_head(kind=kind, whole_vocabulary=True)
    job, losses = fit_eight_paths(kind, most_steps=200, enough=0.3)
    assert losses[-1] < 0.3 * losses[0]
    head, target = job.head, SmallTarget()
    trained = head.trained_tensors()
    assert {name for name, *_, state, _ in tensor_table(head) if state == "trained"} == trained.keys()
    for name, tensor in trained.items():
        assert not torch.equal(tensor, before.trained_tensors()[name]), f"{name} was not trained"
    assert torch.equal(job.teacher.output_weight_VH, target.output)
    for name, buffer in head.named_buffers():
        assert torch.equal(buffer, dict(before.named_buffers())[name]), f"{name} is frozen"


@every_kind
def test_every_kind_resumes_as_if_never_stopped(kind, tmp_path):
    settings, length = replace(SETTINGS, num_steps=8, save_every=4), SETTINGS.depth
    unbroken, _ = run(tmp_path / "unbroken", settings, head=make_head(kind=kind), draft_length=length)
    run(tmp_path / "broken", settings, head=make_head(kind=kind), draft_length=length)
    checkpoints = tmp_path / "broken" / "checkpoints"
    (checkpoints / "last").write_text("step-000004\n")  # as if killed before the last checkpoint was pointed at
    resumed, progress = run(tmp_path / "broken", settings, head=make_head(kind=kind, seed=5), draft_length=length)
    assert progress.step == 8
    assert pointed(checkpoints, "last").name == "step-000008"
    for name, tensor in unbroken.trained_tensors().items():
        assert torch.equal(tensor, resumed.trained_tensors()[name]), name


@every_kind
def test_replies_that_were_learned_are_drafted_live(kind, target):
    """From first weights out of the target, by the trainer's own steps, through the serving path, at every trained depth."""
    prompts = make_prompts(target, [7, 9, 5, 12, 8, 6, 10, 11])
    names = [f"p{i}" for i in range(len(prompts))]
    plain = decode(target, prompts, PLAIN, 16, NO_STOP)
    paths = [make_path(p, r.token_ids, name) for p, r, name in zip(prompts, plain, names, strict=True)]
    features = RandomFeatures()
    for path, read in zip(paths, target.read([path.token_N for path in paths]), strict=True):
        features.states[path.prompt_id] = read.taps.clone(), read.final.clone()
    settings = TrainSettings(
        num_steps=200, batch_tokens=512, learning_rate=3e-3, warmup_steps=1, final_learning_rate=1.0, dtype="float32",
        depth=3, loss=LossSettings(kind="ce", depth_decay=1.0),
    )  # fmt: skip
    head = untrained_head(target, kind=kind, every=1)
    rows = TrainingRows(paths, features, settings.batch_tokens, 0)
    steps_until(Job.open(head, target.output_weight(), rows, settings), 200, lambda first: 0.02)
    live = decode(target, prompts, Speculation(HeadDrafter(head.pack()), 3), 16, NO_STOP, batch=8)
    counts = live_counts(live, names, ["chat"] * 8, 3)
    accepted_K, judged_K = sum(c.accepted_K for c in counts), sum(c.judged_K for c in counts)
    assert (accepted_K >= np.array([0.95, 0.9, 0.9]) * judged_K).all()
    assert judged_K.min() > 20


@every_kind
def test_live_replies_are_the_targets_own_and_take_the_steps_computed_offline(kind, target):
    prompts = make_prompts(target, [7, 12, 20, 33])
    plain = decode(target, prompts, PLAIN, 24, NO_STOP)
    names = [f"p{i}" for i in range(len(prompts))]
    paths = [make_path(p, r.token_ids, name) for p, r, name in zip(prompts, plain, names, strict=True)]
    head = fitted_head(target, paths[:2], kind=kind)
    states = target.read([path.token_N for path in paths])
    batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
    for draft_length, stop_below in ((1, 0.0), (3, 0.2), (3, 0.0)):
        drafter = HeadDrafter(head.pack(), stop_below=stop_below)
        live = decode(target, prompts, Speculation(drafter, draft_length), 24, NO_STOP, batch=3)
        assert [r.token_ids for r in live] == [r.token_ids for r in plain]
        replies = reply_acceptance(head, [batch], draft_length)
        offline = count_replies([stopped(reply, stop_below) for reply in replies], draft_length)
        counted = live_counts(live, names, ["chat"] * 4, draft_length)
        for a, b in zip(offline, counted, strict=True):
            assert a.num_steps == b.num_steps
            assert np.array_equal(a.histogram, b.histogram)
            assert np.array_equal(a.judged_K, b.judged_K)
    assert {0, 1} <= {step.accepted for reply in live for step in reply.steps}  # accepted, but not always


@every_kind
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_outside_the_draft_vocabulary_are_misses(kind, temperature):
    head = make_head(kind=kind)
    paths, features = make_paths([(4, 30), (2, 25)])
    for path in paths:
        path.sampling["temperature"] = temperature
    batch = pack([(path, *features.get(path.prompt_id)) for path in paths])
    (found,) = acceptance_probabilities(head, batch, 3, (temperature,))
    s_P, j_P = found.valid_SD.nonzero(as_tuple=True)
    outside_P = ~torch.isin(batch.next_token_T[found.start_S[s_P] + 1 + j_P], head.draft_ids_V)
    assert outside_P.any()
    assert not found.accept_SD[s_P, j_P][outside_P].any()
    if temperature:
        assert found.accept_SD[s_P, j_P][~outside_P].all()


def test_a_depth_without_weights_is_refused():
    paths, features = make_paths([(4, 30)])
    batch = pack([(path, *features.get(path.prompt_id)) for path in paths])
    for kind in FORMS:
        head = make_head(kind=kind)
        if (most := make_settings(kind, 3).max_depth) is not None:
            with pytest.raises(ValueError, match=f"{most} tokens"):
                head.rollout(batch, most + 1)
