"""A head's confidence: its figures, and drafts that stop by it, offline as live, and as lossless as any."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch

from headstart.eval.acceptance import ReplyAcceptance, count_replies, reply_acceptance
from headstart.eval.calibration import (
    NUM_BINS,
    StepTimes,
    bin_sums,
    recommended,
    reliability,
    step_sums,
    step_times,
    stopped,
    threshold_rows,
)
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.early_stop import EarlyStop, confidence
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.report import write_report
from headstart.eval.settings import EvalSettings
from headstart.eval.speculation import PLAIN, Speculation
from headstart.eval.subject import read_batches
from headstart.heads.checkpoint import save_head
from headstart.heads.contract import greedy
from headstart.heads.store import read_json
from tests.schema_forms import CALIBRATION, SPEED, Length
from tests.schema_rules import violations
from tests.small_decoding import NO_STOP, fitted_head, make_path, make_prompts


def random_reply(generator, number=12, depth=3, name="p", calibrated=True):
    """A reply whose drafts are kept with the probability that they are sure of."""
    confidence_TK = generator.uniform(0, 1, (number, depth))
    judged_TK = np.add.outer(np.arange(number), np.arange(depth)) < number
    accept_TK = (confidence_TK if calibrated else generator.uniform(0, 1, (number, depth))) * judged_TK
    return ReplyAcceptance(name, "chat", accept_TK, judged_TK, 0, confidence_TK * judged_TK)


def random_replies(number=8, **form):
    generator = np.random.default_rng(1)
    return [random_reply(generator, name=f"p{i}", **form) for i in range(number)]


def test_weights_are_the_pairs_that_serving_meets():
    replies = random_replies()
    weight_RKB, confident_RKB, accepted_RKB = bin_sums(replies, 3)
    for r, counts in enumerate(count_replies(replies, 3)):
        np.testing.assert_allclose(weight_RKB[r].sum(-1), counts.judged_K)
        np.testing.assert_allclose(accepted_RKB[r].sum(-1), counts.accepted_K)
    edges = np.arange(NUM_BINS + 1) / NUM_BINS
    mean_RKB = np.divide(confident_RKB, weight_RKB, out=np.full_like(weight_RKB, np.nan), where=weight_RKB > 0)
    assert np.nanmin(mean_RKB - edges[:-1]) >= 0
    assert np.nanmax(mean_RKB - edges[1:]) <= 1e-12


def test_the_error_is_nothing_for_a_head_that_knows_itself_and_large_for_one_that_does_not():
    for calibrated, low, high in ((True, 0.0, 1e-12), (False, 0.15, 0.5)):
        for row in reliability(random_replies(calibrated=calibrated), 3, 200, seed=0):
            assert low <= row["calibration_error"]["value"] <= high
            assert len(row["bins"]) == NUM_BINS
            assert sum(held["weight"] for held in row["bins"]) == pytest.approx(row["weight"])


def test_a_threshold_is_a_cut_and_zero_is_none():
    reply = random_replies(1)[0]
    for name in ("accept_TK", "judged_TK"):
        np.testing.assert_array_equal(getattr(stopped(reply, 0.0), name), getattr(reply, name))
    cut = stopped(reply, 0.4)
    product_TK = np.cumprod(reply.confidence_TK, axis=1)
    np.testing.assert_array_equal(cut.judged_TK, reply.judged_TK & (product_TK >= 0.4))
    assert not cut.accept_TK[~cut.judged_TK].any()
    with pytest.raises(ValueError, match="confidence"):
        stopped(dataclasses.replace(reply, confidence_TK=None), 0.4)


def test_a_higher_threshold_drafts_less_and_accepts_less():
    rows = threshold_rows(random_replies(), 3, StepTimes((0, 3), (1.0, 1.2), 0.3), 200, seed=0)
    for name in ("accept_len", "drafts_per_step", "draft_steps_per_step"):
        values = [row[name]["value"] for row in rows]
        assert values == sorted(values, reverse=True)
        assert values[-1] < values[0]
    assert rows[0]["gain"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    first = rows[0]
    cost = 1.0 + 0.2 * first["drafts_per_step"]["value"] / 3 + 0.3 * first["draft_steps_per_step"]["value"]
    assert first["predicted_speedup"]["value"] == pytest.approx(first["accept_len"]["value"] / cost)


def test_the_recommended_threshold_is_the_best_of_those_that_surely_gain():
    def row(threshold, speedup, low):
        return {"stop_below": threshold, "predicted_speedup": {"value": speedup}, "gain": {"low": low}}

    assert recommended([row(0.0, 1.2, 1.0), row(0.2, 1.3, 1.05), row(0.3, 1.25, 1.01), row(0.5, 1.4, 0.9)]) == 0.2
    assert recommended([row(0.0, 1.2, 1.0), row(0.2, 1.3, None)]) is None


def test_dear_drafts_are_worth_stopping_and_free_ones_are_not():
    """Drafts that are kept when they are sure, and else never."""
    generator = np.random.default_rng(0)
    replies = []
    for i in range(12):
        reply = random_reply(generator, number=40, name=f"p{i}")
        accept_TK = reply.judged_TK * np.where(reply.confidence_TK > 0.5, 0.9, 0.02)
        replies.append(dataclasses.replace(reply, accept_TK=accept_TK))
    dear, free = (StepTimes((0, 3), (1.0, verify), c) for verify, c in ((2.0, 0.2), (1.0, 0.0)))
    assert recommended(threshold_rows(replies, 3, dear, 200, seed=0)) is not None
    assert recommended(threshold_rows(replies, 3, free, 200, seed=0)) is None
    assert recommended(threshold_rows(replies, 3, None, 200, seed=0)) is None  # nothing was timed


def test_step_times_are_those_of_the_longest_draft():
    def row(length, verify, c, drafter="eagle3"):
        times = {"target_step_ms": 10.0, "verify_step_ms": verify, "cost_ratio": c}
        return {"engine": "reference", "drafter": drafter, "concurrency": 1, "draft_length": length, **times}

    rows = [row(4, 15.0, 0.07), row(2, 12.0, 0.1), row(4, 11.0, 0.0, "ngram")]
    assert step_times(rows, "eagle3", 4) == StepTimes((0, 2, 4), (1.0, 1.2, 1.5), 0.07)
    assert step_times(rows, "eagle3", 3) is None
    assert step_times([], "eagle3", 4) is None


def test_a_row_stops_by_what_precedes_the_token_and_a_block_when_all_rows_have():
    logits = torch.log(torch.tensor([[0.6, 0.4], [0.9, 0.1]]))
    assert confidence(logits).tolist() == pytest.approx([0.6, 0.9])
    assert confidence(logits, 0.5)[0] == pytest.approx(0.36 / 0.52)
    seen = []

    def second(logits_BV):
        seen.append(len(logits_BV))
        return torch.ones(2, dtype=torch.int64)  # the less likely token, which changes nothing

    stop = EarlyStop(second, [5, 2], 0.5)
    assert stop(logits).tolist() == [1, 1]
    assert stop.length_B == [1, 1]
    assert stop(logits).tolist() == [1, 1]  # 0.36 < 0.5, 0.81 >= 0.5
    assert stop.length_B == [1, 2]
    assert stop(logits) is None  # the second row has what it asked for
    assert len(seen) == 2
    free = EarlyStop(greedy, [5, 2], 0.0)
    assert free(logits).tolist() == [0, 0]
    assert free.length_B == [5, 2]


@pytest.fixture(scope="module")
def recorded(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12, 20, 9, 6, 15])
    replies = decode(tiny_target, prompts, PLAIN, 24, NO_STOP, batch=6)
    return [make_path(p, r.token_ids, f"p{i}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]


@pytest.fixture(scope="module")
def head(tiny_target, recorded):
    return fitted_head(tiny_target, recorded[:2])


def test_a_head_drafts_no_further_than_its_longest_row_needs(tiny_target, recorded, head):
    """And offline counts the steps it takes; that both accept the same is a law of tests/test_offline_live.py.

    Behind a draft that will be refused a head goes on from its own token, offline from the recorded one: where confidence
    ends a block, drafts are counted nearly.
    """
    offline = reply_acceptance(head, read_batches(tiny_target, head, recorded), 4)
    taken = defaultdict(int)
    project = head.logits

    def counted(state):
        taken["steps"] += 1
        return project(state)

    for threshold in (0.0, 0.3, 2.0):
        taken.clear()
        head.logits = counted
        try:
            prompts = [path.prompt_token_ids for path in recorded]
            drafter = HeadDrafter(head, stop_below=threshold)
            live = decode(tiny_target, prompts, Speculation(drafter, 4), 24, NO_STOP)
        finally:
            del head.logits
        tokens, steps, drafts, draft_steps = step_sums(offline, 4, threshold).sum(0)
        assert sum(len(reply.steps) for reply in live) == steps
        near = 0.05 if threshold == 0.3 else 0
        assert sum(step.whole_drafted for reply in live for step in reply.steps) == pytest.approx(drafts, rel=near)
        assert taken["steps"] == pytest.approx(draft_steps, rel=near)
    assert drafts == 0  # a threshold that no confidence reaches
    assert steps == tokens


def test_calibration_is_written_and_reported(tiny_target, recorded, head, tmp_path):
    save_head(tmp_path, head, step=1)
    settings = EvalSettings(
        draft_lengths=[1, 3], draft_length=3, speed_draft_lengths=[3], speed_prompts=2, speed_new_tokens=8,
        speed_repeats=1, replicates=50, ngram=False, speed_dtype="float32", stop_below=0.3,
    )  # fmt: skip
    told: list[str] = []
    for parts, timed in ((["offline"], False), (["speed"], True)):
        evaluate(
            lambda dtype: tiny_target,
            tmp_path,
            Heldout(recorded),
            settings,
            tmp_path / "eval",
            parts=parts,
            tell=told.append,
        )
        found = read_json(tmp_path / "eval" / "calibration.json")
        assert violations(found, CALIBRATION) == []
        assert all(violations(row["bins"], Length(dict, NUM_BINS)) == [] for row in found["rows"])
        assert [row["depth"] for row in found["rows"]] == [0, 1, 2]
        acceptance = read_json(tmp_path / "eval" / "acceptance.json")["rows"]
        whole = next(row for row in acceptance if (row["draft_length"], row["route"]) == (3, "all"))
        assert [row["acceptance"] for row in found["rows"]] == whole["conditional"]
        assert found["thresholds"][0]["accept_len"] == whole["accept_len"]
        assert all((row["gain"]["value"] is not None) == timed for row in found["thresholds"])
    speed = read_json(tmp_path / "eval" / "speed.json")
    assert violations(speed, SPEED) == []
    rows = {row["drafter"]: row for row in speed["rows"]}
    assert {name: row["stop_below"] for name, row in rows.items()} == {"eagle3": 0.0, "eagle3 stops early": 0.3}
    assert rows["eagle3 stops early"]["num_divergences"] == 0
    assert rows["eagle3 stops early"]["accept_len"] <= rows["eagle3"]["accept_len"]
    assert any("drafts of length 3, ended below" in text for text in told)
    text = write_report(tmp_path).read_text()
    assert "## Confidence" in text
    assert "reliability.png" in text
