"""Laws of offline acceptance: the visit recursion, the counting rules and the intervals."""

import numpy as np
import pytest

from headstart.eval.acceptance import PromptCounts, ReplyAcceptance, count_replies, visits
from headstart.eval.acceptance_rows import accept_len_interval, acceptance_row
from headstart.eval.statistics import ratio_interval, resampling_weights


def reply(accept, name="p0", route="chat"):
    """A reply of len(accept) + 1 tokens; pairs beyond its end are neither accepted nor judged."""
    accept_TK = np.array(accept, float)
    num_starts, depth = accept_TK.shape
    judged_TK = np.add.outer(np.arange(num_starts), np.arange(depth)) < num_starts
    return ReplyAcceptance(name, route, accept_TK * judged_TK, judged_TK, 0)


def random_replies(seed, num=20, depth=3, hard=False):
    generator = np.random.default_rng(seed)
    replies = []
    for i in range(num):
        accept = generator.random((int(generator.integers(0, 30)), depth))
        replies.append(reply(accept.round() if hard else accept, f"p{i}", "chat" if i % 2 else "code"))
    return replies


def test_visits_of_a_five_token_reply_computed_by_hand():
    # Reply of 5 tokens: 4 starts, draft length 2.
    # v0 = 1; from 0: reject d0 (.5) -> 1; accept d0, reject d1 (.5 * .8) -> 2; both (.5 * .2) -> 3.
    # v1 = .5; from 1: (1 - .4) -> 2; .4 * (1 - .5) -> 3; .4 * .5 -> 4 (ends).
    # v2 = .4 + .3 = .7; from 2: (1 - 1) -> 3; 1 * (1 - .25) -> 4; all -> 5.   v3 = .1 + .1 + 0 = .2.
    accept = [[0.5, 0.2], [0.4, 0.5], [1.0, 0.25], [0.3, 0.0]]
    visit_RT = visits(np.array([accept]), np.array([4]))
    assert visit_RT[0] == pytest.approx([1.0, 0.5, 0.7, 0.2])

    counts = count_replies([reply(accept)], draft_length=2)[0]
    assert counts.num_tokens == 4
    assert counts.num_steps == pytest.approx(2.4)
    assert counts.judged_K == pytest.approx([2.4, 0.5 * 1 + 0.4 * 0.5 + 1.0 * 0.7])
    assert counts.accepted_K == pytest.approx([0.5 + 0.2 + 0.7 + 0.06, 0.1 + 0.1 + 0.175])
    # short: from 2 both accepted (.7 * .25) and from 3 the only draft left accepted (.2 * .3)
    assert counts.num_short_steps == pytest.approx(0.7 * 0.25 + 0.2 * 0.3)
    assert counts.histogram == pytest.approx([1.46 * 0 + 2.4 - 1.46, 1.46 - 0.375, 0.375])


def test_histogram_laws_hold_for_every_reply():
    for counts in count_replies(random_replies(0), 3) + count_replies(random_replies(1, hard=True), 2):
        drafted = float(np.arange(len(counts.histogram)) @ counts.histogram)
        assert counts.histogram.sum() == pytest.approx(counts.num_steps)
        assert counts.num_tokens == pytest.approx(counts.num_steps + drafted - counts.num_short_steps)
        assert np.all(counts.accepted_K <= counts.judged_K + 1e-12)


def test_recursion_is_the_mean_of_simulated_runs():
    generator = np.random.default_rng(0)
    one = reply(generator.random((12, 3)))
    expected = count_replies([one], 3)[0]
    steps = []
    for _ in range(20000):
        t, num_steps = 0, 0
        while t < 12:
            coins = generator.random(3) < one.accept_TK[t]
            t += int(np.cumprod(coins).sum()) + 1
            num_steps += 1
        steps.append(num_steps)
    assert np.mean(steps) == pytest.approx(expected.num_steps, abs=4 * np.std(steps) / 20000**0.5)


def test_a_perfect_drafter_gives_draft_length_plus_one():
    counts = count_replies([reply(np.ones((12, 3)))], 3)
    row = acceptance_row(counts, source="offline", drafter="eagle3", draft_length=3)
    assert row["accept_len"]["value"] == 4.0
    assert [x["value"] for x in row["survival"]] == [1.0, 1.0, 1.0]
    assert row["accepted_histogram"] == [0.0, 0.0, 0.0, 3.0]


def test_a_useless_drafter_gives_one():
    counts = count_replies([reply(np.zeros((9, 3)))] * 6, 3)
    row = acceptance_row(counts, source="offline", drafter="x", draft_length=3)
    assert row["accept_len"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert row["survival"][0]["value"] == 0.0


def test_a_longer_rollout_cut_short_counts_as_the_short_one():
    long = random_replies(2, depth=5)
    short = [ReplyAcceptance(r.prompt_id, r.route, r.accept_TK[:, :2], r.judged_TK[:, :2], 0) for r in long]
    for a, b in zip(count_replies(long, 2), count_replies(short, 2), strict=True):
        assert a.num_steps == b.num_steps
        assert np.array_equal(a.histogram, b.histogram)


def test_replies_counted_together_or_alone_are_equal():
    replies = random_replies(3)
    together = count_replies(replies, 3)
    for one, counts in zip(replies, together, strict=True):
        alone = count_replies([one], 3)[0]
        assert alone.num_steps == pytest.approx(counts.num_steps, rel=1e-12)
        assert alone.histogram == pytest.approx(counts.histogram)


def test_depth_without_a_proposal_ends_the_step_and_is_not_judged():
    one = reply(np.ones((6, 2)))
    one.judged_TK[:, 1] = False
    one.accept_TK[:, 1] = 0
    counts = count_replies([one], 2)[0]
    assert counts.num_steps == 3
    assert counts.judged_K.tolist() == [3, 0]
    row = acceptance_row([counts], source="offline", drafter="ngram", draft_length=2)
    assert row["conditional"][1] == {"value": None, "low": None, "high": None}


def test_routes_and_averages_come_from_the_same_sums():
    counts = count_replies(random_replies(4), 3)
    rows = {
        r: acceptance_row(counts, source="offline", drafter="e", draft_length=3, route=r)
        for r in ("all", "chat", "code")
    }
    assert rows["all"]["num_tokens"] == rows["chat"]["num_tokens"] + rows["code"]["num_tokens"]
    assert rows["all"]["num_steps"] == pytest.approx(rows["chat"]["num_steps"] + rows["code"]["num_steps"])
    known = [c.num_tokens / c.num_steps for c in counts if c.num_steps]
    assert rows["all"]["accept_len_macro"]["value"] == pytest.approx(np.mean(known))
    assert rows["all"]["accept_len"] == accept_len_interval(counts)


def test_empty_route_is_null_and_not_zero():
    row = acceptance_row(
        count_replies(random_replies(5), 3), source="offline", drafter="e", draft_length=3, route="maths"
    )
    assert row["num_prompts"] == 0
    assert row["accept_len"]["value"] is None


def test_uniform_starts_report_too_much_where_failures_cluster():
    # an easy stretch is crossed in few steps, a hard one in many: real steps begin where drafts fail
    row = acceptance_row(
        count_replies([reply(np.repeat([[1.0] * 3, [0.0] * 3], 20, axis=0))], 3),
        source="offline",
        drafter="e",
        draft_length=3,
    )
    assert row["uniform_start_estimate"] > row["accept_len"]["value"] + 0.5


def test_bootstrap_interval_covers_a_known_ratio():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        steps_R = generator.integers(5, 60, size=80)
        tokens_R = steps_R * (1 + generator.beta(4, 4, size=80))  # independent of the length: the ratio is 1.5
        bounds = ratio_interval(tokens_R, steps_R, resampling_weights(80, 400, trial))
        covered += bounds["low"] <= 1.5 <= bounds["high"]
    assert 180 <= covered <= 199


def test_interval_without_counts_is_null():
    empty = PromptCounts("p", "chat", 0.0, 0.0, 0.0, np.zeros(2), np.zeros(2), np.zeros(3), 0)
    assert accept_len_interval([empty]) == {"value": None, "low": None, "high": None}
    assert accept_len_interval([]) == {"value": None, "low": None, "high": None}
