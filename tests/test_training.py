"""Laws of the training loop, on a small head with seeded random paths."""

import gc
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch

from headstart.heads.batch import pack, supervised_pairs
from headstart.heads.errors import TrainingFailed, WrongInput
from headstart.trainer.data import TrainingRows, count_pairs, padded
from headstart.trainer.feature_noise import noisy
from headstart.trainer.loop import Job, accumulate_gradients, optimizer_step
from headstart.trainer.losses import pair_loss
from headstart.trainer.metrics import METRICS, read_metrics
from headstart.trainer.optim import learning_rate
from headstart.trainer.ranks import Ranks
from headstart.trainer.settings import TrainSettings
from tests.kinds import FORMS
from tests.small_training import (
    SETTINGS,
    RandomFeatures,
    SmallTarget,
    make_head,
    make_paths,
    make_rows,
    open_job,
    run,
)


def gradients(head):
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


# Normalisation


def test_splitting_a_step_changes_nothing():
    """1, 2 or 4 micro-batches and 1 or 2 ranks, empty shares included, give the same loss and gradient."""
    whole = open_job()
    expected_sums = accumulate_gradients(whole, 2)
    expected = gradients(whole.head)
    for accumulate, world in ((2, 1), (4, 1), (1, 2), (2, 2), (16, 1)):
        job = open_job(replace(SETTINGS, accumulate=accumulate), ranks=Ranks(world=world))
        sums = [accumulate_gradients(replace(job, ranks=Ranks(rank, world)), 2) for rank in range(world)]
        for name, values in vars(expected_sums).items():
            torch.testing.assert_close(sum(getattr(s, name) for s in sums), values, rtol=1e-5, atol=1e-8)
        for name, gradient in gradients(job.head).items():
            assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


def test_padding_packing_and_order_change_nothing():
    paths, features = make_paths([(5, 20), (1, 33), (9, 2), (3, 1), (12, 17)])
    rows = [(path, *features.get(path.prompt_id)) for path in paths]
    layouts = [
        [pack(rows)],
        [pack(rows, 320)],
        [pack(rows[::-1], 192)],
        [pack([row], 64) for row in rows],
        [pack([rows[3]]), pack([rows[4], rows[0]], 128), pack([rows[2], rows[1]])],
    ]
    found = []
    for batches in layouts:
        job = open_job()
        total = 0.0
        for batch in batches:
            rollout = job.head.rollout(batch, 3)
            weights = [output.weight for output in job.head.outputs()]
            loss, _ = pair_loss(rollout, weights, batch, job.teacher, SETTINGS.loss, 150.0)
            loss.backward()
            total += loss.item()
        found.append((total, gradients(job.head)))
    for total, gradient in found[1:]:
        assert total == pytest.approx(found[0][0], rel=1e-5)
        for name, expected in found[0][1].items():
            assert (gradient[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_reported_loss_is_the_weighted_mean_of_its_depths(tmp_path):
    run(tmp_path)
    lines = [line for line in read_metrics(tmp_path / METRICS) if line["step"] > 0]
    rows = make_rows()
    begin = 1
    for line in lines:
        steps = range(begin, line["step"] + 1)
        pairs_D = sum(rows.step_pairs(step, 3) for step in steps)
        weight_D = pairs_D * 0.8 ** np.arange(3)
        per_depth = [line[f"train/loss/position_{j}"] for j in range(3)]
        assert line["train/loss"] == pytest.approx(float(weight_D @ per_depth / weight_D.sum()), rel=1e-9)
        assert line["train/num_supervised"] == rows.step_pairs(line["step"], 3).sum()
        begin = line["step"] + 1


def test_noise_is_a_function_of_seed_step_and_prompt_and_never_reaches_the_teacher():
    """Splits and ranks draw the same noise, another step another one; what is charged against stays clean."""
    settings = replace(SETTINGS, feature_noise=0.1)
    for kind in ("eagle1", "eagle3"):
        jobs = {
            shape: Job.open(
                make_head(kind=kind), SmallTarget().output, make_rows(), replace(settings, accumulate=shape[0])
            )
            for shape in ((1, 1), (3, 1), (2, 2))
        }
        sums, found = {}, {}
        for shape, job in jobs.items():
            ranks = [replace(job, ranks=Ranks(rank, shape[1])) for rank in range(shape[1])]
            sums[shape] = sum(accumulate_gradients(own, 2).loss_D for own in ranks)
            found[shape] = gradients(job.head)
        for shape in ((3, 1), (2, 2)):
            torch.testing.assert_close(sums[shape], sums[1, 1], rtol=1e-5, atol=1e-8)
            for name, gradient in found[shape].items():
                assert (gradient - found[1, 1][name]).abs().max() <= 1e-5 * found[1, 1][name].abs().max(), name
        clean = Job.open(make_head(kind=kind), SmallTarget().output, make_rows(), SETTINGS)
        quiet, noisy_sums = accumulate_gradients(clean, 2), accumulate_gradients(jobs[1, 1], 2)
        torch.testing.assert_close(quiet.mass_D, noisy_sums.mass_D, rtol=1e-12, atol=0)
        assert (quiet.loss_D - noisy_sums.loss_D).abs().min() > 1e-3
    batch = make_rows().batch(1)
    drawn = [noisy(batch, "final", 0.1, 0, step).final_TH - batch.final_TH for step in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False):
        most = 0.1 * 512 / (end - begin)
        assert 0.9 * most < drawn[0][begin:end].abs().max() < 1.02 * most
        assert drawn[0][begin:end].float().mean().abs() < 0.2 * most
    assert not drawn[0][batch.num_tokens :].any()


def test_training_with_noise_resumes_as_if_never_stopped(tmp_path):
    settings = replace(SETTINGS, num_steps=6, save_every=3, feature_noise=0.1)
    unbroken, _ = run(tmp_path / "unbroken", settings, head=make_head(kind="eagle1"))
    run(tmp_path / "clean", replace(settings, num_steps=1, feature_noise=0.0), head=make_head(kind="eagle1"))
    measured = [read_metrics(tmp_path / name / METRICS)[0] for name in ("unbroken", "clean")]  # evaluation has none
    assert len({line["acceptance/position_0"] for line in measured}) == 1
    run(tmp_path / "broken", settings, head=make_head(kind="eagle1"))
    (tmp_path / "broken" / "checkpoints" / "last").write_text("step-000003\n")
    resumed, _ = run(tmp_path / "broken", settings, head=make_head(kind="eagle1", seed=5))
    for name, tensor in unbroken.trained_tensors().items():
        assert torch.equal(tensor, resumed.trained_tensors()[name]), name


# Data


def test_pairs_counted_from_the_path_are_the_pairs_of_the_contract():
    paths, features = make_paths([(5, 4), (3, 2), (2, 1), (1, 30), (7, 3)])
    for path in paths:
        _, valid_SD = supervised_pairs(pack([(path, *features.get(path.prompt_id))]), 4)
        assert count_pairs(path, 4).tolist() == valid_SD.sum(0).tolist()
    assert count_pairs(paths[0], 3).tolist() == [3, 2, 1]


def test_every_epoch_reads_every_path_once_and_no_step_depends_on_the_past():
    rows = make_rows(num=30)
    stream = [row for step in range(1, 40) for row in rows.rows(step)]
    num = len(rows.paths)
    for epoch in range(len(stream) // num):
        assert sorted(stream[epoch * num : (epoch + 1) * num]) == list(range(num))
    assert stream[:num] != stream[num : 2 * num]
    assert make_rows(num=30).rows(25) == rows.rows(25)
    assert make_rows(num=30, seed=1).rows(1) != rows.rows(1)
    assert all(rows.step_tokens(step) <= SETTINGS.batch_tokens for step in range(1, 40))


def test_shares_of_a_step_are_disjoint_and_complete():
    rows = make_rows(num=30)
    for step in range(1, 6):
        prompt_ids = [
            p for rank in range(2) for micro in range(2) for p in rows.batch(step, micro, 2, rank, 2).prompt_ids
        ]
        assert sorted(prompt_ids) == sorted(rows.paths[row].prompt_id for row in rows.rows(step))


def test_packed_rows_have_few_shapes():
    lengths = {padded(slots) for slots in range(1, 8193)}
    assert all(sum(low < length <= 2 * low for length in lengths) <= 32 for low in (64, 256, 1024, 4096))
    rows = make_rows(num=30)
    assert {rows.batch(step).next_token_T.shape[0] for step in range(1, 30)} <= lengths


def test_paths_without_a_pair_are_left_out_and_nothing_to_learn_is_refused():
    paths, features = make_paths([(5, 1), (4, 9), (3, 0)])
    rows = TrainingRows(paths, features, 64, seed=0)
    assert (len(rows.paths), rows.num_skipped) == (1, 2)
    with pytest.raises(WrongInput, match="none with two reply tokens"):
        TrainingRows(paths[:1], features, 64, seed=0)


# Schedule


def test_learning_rate_is_counted_in_optimiser_steps(tmp_path):
    rates = {}
    for accumulate in (1, 4):
        run(tmp_path / str(accumulate), replace(SETTINGS, accumulate=accumulate))
        lines = read_metrics(tmp_path / str(accumulate) / METRICS)
        rates[accumulate] = {line["step"]: line["train/lr"] for line in lines if line["step"]}
    assert rates[1] == rates[4]
    assert rates[1][3] == pytest.approx(SETTINGS.learning_rate * 3 / 4)


def test_warm_up_then_cosine_to_the_final_rate():
    settings = TrainSettings(num_steps=100, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(step, settings) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(54, settings) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * 44 / 90)))
    assert learning_rate(1, replace(settings, num_steps=1)) > 0  # a run shorter than its warm-up still learns


def test_only_matrices_decay():
    job = open_job(replace(SETTINGS, weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in job.strategy.optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in job.head.named_parameters()} == {
        name: 0.1 if p.dim() == 2 else 0.0 for name, p in job.head.named_parameters()
    }


# Numerics


def poisoned_rows(which):
    """Rows some of whose features overflowed when they were recorded."""
    rows, poisoned = make_rows(), RandomFeatures()
    for i, path in enumerate(rows.paths):
        taps, final = rows.features.get(path.prompt_id)
        poisoned.states[path.prompt_id] = (taps * torch.inf if which(i) else taps), final
    return TrainingRows(rows.paths, poisoned, SETTINGS.batch_tokens, 0)


def test_a_step_that_is_not_finite_is_skipped_counted_and_named(tmp_path, capsys):
    rows = poisoned_rows(lambda i: i == 3)
    hit = [step for step in range(1, 25) if 3 in rows.rows(step)]
    head, progress = run(tmp_path, rows=rows)
    assert 0 < progress.num_skipped == len(hit) < 24
    assert f"step {hit[0]}: loss and gradient not finite, step skipped" in capsys.readouterr().out
    assert all(p.isfinite().all() for p in head.parameters())
    lines = read_metrics(tmp_path / METRICS)
    assert lines[-1]["train/num_skipped_steps"] == len(hit)
    assert lines[-1]["train/loss"] is not None


def test_repeated_non_finite_steps_stop_the_run(tmp_path):
    with pytest.raises(TrainingFailed, match="5 steps in a row"):
        run(tmp_path, rows=poisoned_rows(lambda i: True))


@pytest.mark.parametrize("kind", FORMS)
def test_bfloat16_products_learn_too(kind, tmp_path):
    losses = {}
    for dtype in ("float32", "bfloat16"):
        settings = replace(SETTINGS, dtype=dtype, num_steps=12)
        run(tmp_path / dtype, settings, head=make_head(kind=kind), draft_length=SETTINGS.depth)
        losses[dtype] = [line["train/loss"] for line in read_metrics(tmp_path / dtype / METRICS) if line["step"]]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)


def test_golden_losses(tmp_path):
    """A refactor leaves these numbers alone; a change of algorithm pins new ones and says why."""
    run(tmp_path)
    lines = read_metrics(tmp_path / METRICS)
    losses = [line["train/loss"] for line in lines if line["step"]]
    np.testing.assert_allclose(losses, GOLDEN_LOSSES, rtol=2e-4)


GOLDEN_LOSSES = [1.806973, 1.760534, 1.579985, 1.694755, 1.446931, 1.453700, 1.386558, 1.490046, 1.465953, 1.394535]


STATM = FilePath("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="reads resident memory as Linux tells it")
def test_memory_is_flat_after_warm_up():
    job = open_job()
    counts, resident = [], []
    gc.collect()
    others = sum(x.grad_fn is not None for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
    for step in range(1, 61):
        optimizer_step(job, step)
        if step in (20, 40, 60):
            gc.collect()
            live = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            counts.append((len(live), sum(x.grad_fn is not None for x in live)))
            pages = int(STATM.read_text().split()[1])
            resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][1] <= others  # what other tests keep
    assert resident[2] - resident[1] < 8
