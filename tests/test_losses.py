"""The fused loss is the plain one: same value, same gradients, same sums."""

import math
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch.nn import functional

from headstart.heads.batch import Batch, pack, supervised_pairs
from headstart.heads.contract import Rollout
from headstart.heads.paths import Path
from headstart.trainer.feature_loss import feature_loss
from headstart.trainer.losses import PairSums, Teacher, pair_loss, pairs_by_teacher
from headstart.trainer.settings import LossSettings

VOCAB, WIDTH, DEPTH = 60, 12, 3
DRAFT_IDS = torch.arange(0, VOCAB, 2)


def make_batch(lengths, dtype, seed=0, num_slots=None) -> tuple[Batch, torch.Tensor]:
    """Random paths of (prompt, reply) lengths whose recorded log-probabilities are the target's own."""
    generator = torch.Generator().manual_seed(seed)
    output_weight_VH = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    rows = []
    for i, (prompt, reply) in enumerate(lengths):
        total = prompt + reply
        token_N = torch.randint(0, VOCAB, (total,), generator=generator)
        final_SH = torch.randn(total - 1, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        logprob_SV = functional.log_softmax(final_SH @ output_weight_VH.t(), -1)
        logprob_N = np.full(total, np.nan, np.float32)
        logprob_N[1:] = logprob_SV.gather(1, token_N[1:, None]).squeeze(1)
        generated_N = np.arange(total) >= prompt
        logprob_N[~generated_N] = np.nan
        token_N = token_N.numpy().astype(np.int32)
        path = Path(f"prompt-{i}", "chat", "train", token_N, generated_N, logprob_N, "length", {})
        rows.append((path, torch.zeros(total - 1, 3, dtype=dtype), final_SH))
    return pack(rows, num_slots), output_weight_VH


def random_rollout(batch, dtype, seed=5) -> Rollout:
    start_S, valid_SD = supervised_pairs(batch, DEPTH)
    generator = torch.Generator().manual_seed(seed)
    state = torch.randn(len(start_S), DEPTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return Rollout(state.requires_grad_(), start_S, valid_SD)


def jensen_shannon(p_V, q_V):
    w_V = (p_V + q_V) / 2
    return sum(torch.special.xlogy(law_V, law_V / w_V).sum() for law_V in (p_V, q_V)) / 2


def plain_loss(rollout, weights, batch, output_weight_VH, loss, normaliser):
    """The definitions of trainer/losses.py, pair by pair over the target's whole vocabulary, by autograd."""
    sums = PairSums.zeros(DEPTH, weights[0].device)
    total = torch.zeros((), dtype=weights[0].dtype)
    for s, start in enumerate(rollout.start_S.tolist()):
        for j in range(DEPTH):
            if not rollout.valid_SD[s, j]:
                continue
            log_p_V = functional.log_softmax(output_weight_VH @ batch.final_TH[start + 1 + j], -1)
            log_p = log_p_V[DRAFT_IDS]
            log_q = functional.log_softmax(weights[j % len(weights)] @ rollout.state_SDH[s, j], -1)
            p, q = log_p.exp(), log_q.exp()
            q_V = torch.zeros_like(log_p_V).index_put((DRAFT_IDS,), q)
            x = int(batch.next_token_T[start + 1 + j])
            kl = (p * (log_p - log_q)).sum()
            tv = 1 - torch.minimum(p, q).sum()
            ce = -log_q[x // 2] if x % 2 == 0 else torch.zeros(())
            share = torch.exp(-loss.lk_rate * (1 - tv)).detach()
            value = {
                "kl": kl, "tv": tv, "ce": ce, "lk_hybrid": share * kl + (1 - share) * tv,
                "reverse_kl": p.sum() * (q * (log_q - log_p)).sum(), "jsd": jensen_shannon(log_p_V.exp(), q_V),
            }[loss.kind]  # fmt: skip
            total = total + loss.depth_decay**j * value / normaliser
            found = (1, value, p.sum(), x % 2 == 0 and int(q.argmax()) == x // 2,
                     (log_q[x // 2] - log_p[x // 2]).clamp(max=0).exp() if x % 2 == 0 else 0, x % 2)  # fmt: skip
            for name, amount in zip(vars(sums), found, strict=True):
                getattr(sums, name)[j] += float(torch.as_tensor(amount).detach())
    return total, sums


def head_weight(dtype, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(DRAFT_IDS), WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("kind", get_args(get_type_hints(LossSettings)["kind"]))
@pytest.mark.parametrize(("chunk", "num_weights"), [(7, 1), (10_000, 1), (40, DEPTH)])
def test_fused_loss_is_the_plain_loss(kind, chunk, num_weights):
    """With one output weight for all depths, and with one for each."""
    batch, output_weight = make_batch([(5, 40), (1, 3), (4, 1), (3, 60)], torch.float64, num_slots=128)
    loss = LossSettings(kind=kind, chunk=chunk, depth_decay=0.7)
    teacher = Teacher(output_weight, DRAFT_IDS, torch.float64)
    results = []
    for compute in (
        lambda r, w: pair_loss(r, w, batch, teacher, loss, 123.0),
        lambda r, w: plain_loss(r, w, batch, output_weight, loss, 123.0),
    ):
        rollout = random_rollout(batch, torch.float64)
        weights = [head_weight(torch.float64, seed=9 + i) for i in range(num_weights)]
        value, sums = compute(rollout, weights)
        (3 * value).backward()
        gradients = [rollout.state_SDH.grad, *(weight.grad for weight in weights)]
        results.append((value, *gradients, *vars(sums).values()))
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=2e-6, atol=1e-7)  # the record of log p is float32


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "jsd", "tv"])
def test_a_divergence_is_least_where_the_laws_are_equal(kind):
    """A head that is the target: nothing is charged and no weight is pulled. Far from it the loss is positive, finite."""
    batch, output_weight = make_batch([(5, 40), (1, 3)], torch.float32)
    teacher = Teacher(output_weight, torch.arange(VOCAB), torch.float32)
    start_S, valid_SD = supervised_pairs(batch, DEPTH)
    slot_SD = (start_S[:, None] + 1 + torch.arange(DEPTH)).clamp(max=len(batch.final_TH) - 1)
    for scale in (1.0, -30.0):  # logits of some hundreds: q runs down to 0
        rollout = Rollout((scale * batch.final_TH[slot_SD]).requires_grad_(), start_S, valid_SD)
        value, sums = pair_loss(rollout, [output_weight], batch, teacher, LossSettings(kind=kind), 1.0)
        value.backward()
        loss_D, gradient = sums.loss_D / sums.pairs_D, rollout.state_SDH.grad
        assert gradient.isfinite().all()
        if scale == 1:
            assert loss_D.abs().max() < 1e-6
            assert gradient.abs().max() < 1e-5
        else:
            assert (loss_D > {"kl": 50, "reverse_kl": 5, "jsd": 0.5, "tv": 0.5}[kind]).all()
            assert (loss_D < {"kl": 1e4, "reverse_kl": 1e4, "jsd": math.log(2) + 1e-6, "tv": 1 + 1e-6}[kind]).all()


def test_frozen_output_weights_change_no_other_gradient():
    batch, output_weight = make_batch([(5, 40)], torch.float64)
    teacher, states = Teacher(output_weight, DRAFT_IDS, torch.float64), []
    for frozen in (False, True):
        rollout, weight = random_rollout(batch, torch.float64), head_weight(torch.float64)
        value, _ = pair_loss(rollout, [weight.requires_grad_(not frozen)], batch, teacher, LossSettings(), 9.0)
        value.backward()
        states.append(rollout.state_SDH.grad)
        assert (weight.grad is None) == frozen
    assert torch.equal(*states)


def test_the_feature_loss_compares_with_the_state_behind_the_drafted_token():
    """The state of (t, j) stands for final_{t+1+j}, from which the target predicts what (t, j) drafts."""
    batch, _ = make_batch([(5, 9), (3, 4)], torch.float64, num_slots=32)
    loss, rollout = LossSettings(feature_weight=2.0, depth_decay=0.7), random_rollout(batch, torch.float64)
    share, sums_D = feature_loss(rollout, batch, loss, 10.0)
    expected_D = torch.zeros(DEPTH, dtype=torch.float64)
    for s, j in rollout.valid_SD.nonzero().tolist():
        apart_H = rollout.state_SDH[s, j] - batch.final_TH[rollout.start_S[s] + 1 + j]
        smooth_H = torch.where(apart_H.abs() < 1, apart_H**2 / 2, apart_H.abs() - 0.5)
        expected_D[j] += 2.0 * smooth_H.mean().detach()
    torch.testing.assert_close(sums_D, expected_D)
    assert share.item() == pytest.approx(sum(0.7**j * expected_D[j].item() for j in range(DEPTH)) / 10)
    share.backward()
    assert not rollout.state_SDH.grad[~rollout.valid_SD].any()


@pytest.mark.parametrize("kind", get_args(get_type_hints(LossSettings)["kind"]))
def test_bfloat16_products_stay_close(kind):
    batch, output_weight = make_batch([(5, 40), (3, 60)], torch.float32)
    loss = LossSettings(kind=kind)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        rollout, weight = random_rollout(batch, torch.float32), head_weight(torch.float32)
        value, sums = pair_loss(rollout, [weight], batch, Teacher(output_weight, DRAFT_IDS, dtype), loss, 100.0)
        value.backward()
        gradients.append((value, sums.mass_D / sums.pairs_D, rollout.state_SDH.grad.flatten(), weight.grad.flatten()))
    exact, rounded = gradients
    assert abs(rounded[0] - exact[0]) < 0.01 * abs(exact[0])
    torch.testing.assert_close(rounded[1], exact[1], atol=0.01, rtol=0)
    for a, b in zip(exact[2:], rounded[2:], strict=True):
        # The gradient of tv jumps where q crosses p, so rounding moves single entries by much.
        assert functional.cosine_similarity(a, b, 0) > (0.97 if kind == "tv" else 0.999)


def test_pairs_of_one_teacher_are_those_of_the_contract():
    batch, _ = make_batch([(5, 9), (1, 2), (4, 1), (2, 5)], torch.float32)
    rollout = random_rollout(batch, torch.float32)
    pairs = pairs_by_teacher(rollout)
    found = {
        (int(rollout.start_S[state // DEPTH]), j, int(slot))
        for j in range(DEPTH)
        for slot, state, valid in zip(pairs.slot_U, pairs.state_DU[j], pairs.valid_DU[j], strict=True)
        if valid and state % DEPTH == j
    }
    expected = {
        (int(rollout.start_S[s]), int(j), int(rollout.start_S[s] + 1 + j)) for s, j in rollout.valid_SD.nonzero()
    }
    assert found == expected
    assert int(pairs.valid_DU.sum()) == len(expected)


def test_a_pair_weighs_its_in_vocabulary_mass():
    """Target probability 0.9 on a token outside: the kl gradient is a tenth of what the same pair gives inside."""
    draft_ids, logits = torch.tensor([0, 1]), torch.tensor([0.0, 1.0, 0.0])
    inside = math.log(math.e + 1)
    path = Path("a", "chat", "train", np.array([1, 1, 1], np.int32), np.array([False, True, True]),
                np.array([np.nan, -1, 0], np.float32), "length", {})  # fmt: skip
    gradients = []
    for share in (1.0, 0.1):
        outside = -1e9 if share == 1.0 else inside + math.log((1 - share) / share)
        output_weight = torch.stack([logits[0], logits[1], torch.tensor(outside)])[:, None]
        path.logprob_N[2] = float(logits[1]) - inside + math.log(share)
        batch = pack([(path, torch.zeros(2, 1), torch.ones(2, 1))])
        start_S, valid_SD = supervised_pairs(batch, 1)
        rollout = Rollout(torch.ones(1, 1, 1, requires_grad=True), start_S, valid_SD)
        weight = torch.tensor([[0.3], [-0.4]], requires_grad=True)
        value, sums = pair_loss(
            rollout, [weight], batch, Teacher(output_weight, draft_ids, torch.float32), LossSettings(), 1.0
        )
        value.backward()
        assert sums.mass_D.item() == pytest.approx(share, rel=1e-5)
        gradients.append(weight.grad)
    torch.testing.assert_close(gradients[1], 0.1 * gradients[0])


def test_a_batch_without_pairs_costs_nothing_and_keeps_the_graph():
    batch, output_weight = make_batch([(6, 1), (9, 1)], torch.float32, num_slots=64)
    rollout, weight = random_rollout(batch, torch.float32), head_weight(torch.float32)
    value, sums = pair_loss(
        rollout, [weight], batch, Teacher(output_weight, DRAFT_IDS, torch.float32), LossSettings(), 5.0
    )
    value.backward()
    assert value.item() == 0.0
    assert not weight.grad.any()
    assert not sums.pairs_D.any()


def test_no_tensor_of_pairs_times_vocabulary_is_made():
    """The largest tensor the loss makes is one chunk of logits, however many pairs there are."""
    batch, output_weight = make_batch([(2, 400)], torch.float32)
    rollout, weight = random_rollout(batch, torch.float32), head_weight(torch.float32)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (result if isinstance(result, tuple) else (result,)) if torch.is_tensor(x))
            return result

    with Watch():
        value, _ = pair_loss(
            rollout, [weight], batch, Teacher(output_weight, DRAFT_IDS, torch.float32), LossSettings(chunk=96), 1.0
        )
        value.backward()
    assert max(sizes) <= max(96 * len(DRAFT_IDS), rollout.state_SDH.numel())
