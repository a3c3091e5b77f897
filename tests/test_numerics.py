"""Numbers that every kind keeps: padding costs nothing, short replies stay finite, what is saved is what was trained."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

from headstart.heads.batch import pack
from headstart.heads.errors import WrongInput
from headstart.heads.vocabulary import choose_draft_vocabulary
from headstart.launch.recipe import load_recipe
from headstart.launch.stages import new_head
from headstart.trainer.checkpoint import pointed
from headstart.trainer.data import TrainingRows
from headstart.trainer.feature_loss import feature_loss
from headstart.trainer.loop import Job
from headstart.trainer.losses import pair_loss
from headstart.trainer.metrics import METRICS, read_metrics
from headstart.trainer.settings import LossSettings
from tests.kinds import FORMS
from tests.small_decoding import make_path
from tests.small_training import SETTINGS, SmallTarget, make_head, make_paths, make_rows, run

every_kind = pytest.mark.parametrize("kind", FORMS)


def loss_and_gradients(kind, rows, num_slots, loss, recompute=False):
    """The loss of one packed batch at a fixed normaliser, and the gradient of every trained tensor."""
    head = make_head(kind=kind)
    teacher = Job.open(head, SmallTarget().output, make_rows(), SETTINGS).teacher
    batch = pack(rows, num_slots)
    rollout = head.rollout(batch, 3)
    if recompute:
        rollout.state_SDH = checkpoint(lambda: head.rollout(batch, 3).state_SDH, use_reentrant=False)
    value, _ = pair_loss(rollout, [output.weight for output in head.outputs()], batch, teacher, loss, 20.0)
    if head.settings.predicts_final:
        value = value + feature_loss(rollout, batch, replace(loss, feature_weight=1.0), 20.0)[0]
    value.backward()
    return value.item(), {name: p.grad for name, p in head.trained_tensors().items() if p.grad is not None}


@every_kind
def test_padding_and_masked_neighbours_do_not_dilute_a_conversation(kind):
    """One conversation alone, padded to four times its length, and beside a path without a reply."""
    paths, features = make_paths([(5, 20), (40, 0)])
    row, masked = ((path, *features.get(path.prompt_id)) for path in paths)
    expected, expected_gradients = loss_and_gradients(kind, [row], None, LossSettings())
    assert expected > 0
    for rows, num_slots in (([row], 4 * 24), ([masked, row], None)):
        found, gradients = loss_and_gradients(kind, rows, num_slots, LossSettings())
        assert found == pytest.approx(expected, rel=1e-5)
        for name, gradient in expected_gradients.items():
            assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@every_kind
def test_computing_the_states_again_gives_the_same_gradients(kind):
    """Gradient checkpointing: nothing is changed in place that the backward pass still reads."""
    paths, features = make_paths([(5, 20), (3, 9)])
    rows = [(path, *features.get(path.prompt_id)) for path in paths]
    (value, expected), (again, gradients) = (
        loss_and_gradients(kind, rows, None, LossSettings(), recompute) for recompute in (False, True)
    )
    assert again == value
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9)


@every_kind
def test_short_and_masked_replies_stay_finite_and_what_is_saved_is_what_was_trained(kind, tmp_path, capsys):
    """bfloat16 at rate 1e-3: steps of a reply with one pair, beside replies with none."""
    paths, features = make_paths([(6, 1), (5, 2), (40, 0), (4, 30), (9, 2), (7, 20)])
    settings = replace(SETTINGS, dtype="bfloat16", learning_rate=1e-3, batch_tokens=32, num_steps=5, log_every=1)
    rows = TrainingRows(paths, features, settings.batch_tokens, 0)
    assert rows.num_skipped == 2
    assert min(rows.step_pairs(step, 3).sum() for step in range(1, 6)) <= 2
    before = {name: tensor.detach().clone() for name, tensor in make_head(kind=kind).trained_tensors().items()}
    head, progress = run(tmp_path, settings, rows, make_head(kind=kind), draft_length=3)
    assert progress.num_skipped == 0
    lines = [line for line in read_metrics(tmp_path / METRICS) if line["step"]]
    assert all(np.isfinite(line["train/loss"]) and line["train/loss"] != 0 for line in lines)
    assert any(line["train/out_of_vocab_share"] > 0 for line in lines)
    saved = load_file(pointed(tmp_path / "checkpoints", "last") / "head.safetensors")
    printed = capsys.readouterr().out
    for name, tensor in head.trained_tensors().items():
        assert torch.equal(saved[name], tensor), name
        assert not torch.equal(saved[name], before[name]), name
        assert any(line.split()[:1] == [name] and "trained" in line for line in printed.splitlines()), name
    for name, _ in head.named_buffers():
        assert any(line.split()[:1] == [name] and "frozen" in line for line in printed.splitlines()), name


# The draft vocabulary


def test_a_vocabulary_larger_than_the_traffic_is_filled_up_and_always_holds_the_specials(tiny_target, tmp_path, capsys):
    """50 distinct tokens, end of turn never among them; the map is ascending, without repeats, and of the asked size."""
    last = tiny_target.facts.num_tokens - 1
    facts = replace(tiny_target.facts, special_ids=[0, last], stop_ids=[last])
    path = make_path([5, 6], [*range(100, 150), 100])
    counts = np.bincount(path.token_N[path.generated_N], minlength=facts.vocab_size)
    assert not counts[facts.stop_ids].any()
    for size in (64, 256, facts.num_tokens):
        ids = choose_draft_vocabulary(counts, size, facts)
        assert len(ids) == size
        assert (np.diff(ids) > 0).all()
        assert {*facts.special_ids, *facts.stop_ids, *(range(100, 150) if size > 60 else ())} <= {*ids.tolist()}
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("target: {model: tiny}\nhead: {draft_vocab_size: 64}\n")
    new_head(load_recipe(recipe), tiny_target, [path])
    assert "draft vocabulary: 64 of 500 tokens hold 100.00% of 51 generated" in capsys.readouterr().out


def test_a_map_that_was_left_behind_is_not_taken_up(tmp_path):
    """A training of 70 draft tokens lies in the folder; another is asked for there."""
    settings = replace(SETTINGS, num_steps=2)
    run(tmp_path, settings)
    other = make_head(whole_vocabulary=True)
    with pytest.raises(WrongInput, match="draft_ids"):
        run(tmp_path, settings, head=other)
    assert len(other.draft_ids_V) == 90
