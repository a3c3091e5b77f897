"""The test that holds sampled live replies against the offline recursion: its variance, its level and its power."""

import numpy as np
import pytest

from headstart.eval.acceptance import ReplyAcceptance, count_replies
from headstart.eval.agreement import live_agreement, step_variances
from headstart.eval.gate import AGREEMENT_LEVEL
from headstart.eval.replies import Reply, add_block, live_counts

DEPTH = 2


def reply(accept_TK, name="p"):
    accept_TK = np.array(accept_TK, float)
    return ReplyAcceptance(name, "chat", accept_TK, accept_TK > 0)


def outcomes(accept_TK, start=0):
    """(probability, steps) of every way a live run can walk over a reply."""
    if start >= len(accept_TK):
        yield 1.0, 0
        return
    reach = 1.0
    for j in range(DEPTH + 1):
        passed = reach * (1 - accept_TK[start][j]) if j < DEPTH else reach
        reach -= passed
        for probability, steps in outcomes(accept_TK, start + j + 1):
            yield passed * probability, 1 + steps


def test_mean_and_variance_of_steps_are_those_of_all_outcomes():
    rows = [[[0.3, 0.9], [0.5, 0.2], [0.0, 0.0], [0.7, 0.0]], [[0.25, 0.0]], [[1.0, 1.0]] * 6]
    replies = [reply(row) for row in rows]
    for row, variance, counts in zip(rows, step_variances(replies, DEPTH), count_replies(replies, DEPTH), strict=True):
        probability, steps = (np.array(x) for x in zip(*outcomes(row), strict=True))
        mean = (probability * steps).sum()
        assert counts.num_steps == pytest.approx(mean)
        assert variance == pytest.approx((probability * (steps - mean) ** 2).sum())


def walk(accept_TK, generator):
    """A live reply whose drafts are kept by coins."""
    live = Reply(token_ids=[0])
    length = len(accept_TK) + 1
    while not live.finish_reason:
        row = accept_TK[len(live.token_ids) - 1]
        kept = next((j for j, r in enumerate(row) if generator.random() >= r), DEPTH)
        add_block(live, [0] * (kept + 1), DEPTH, length, set())
    return live


def p_values(rate, number, prompts=24, shift=0.0):
    """p-values of `number` comparisons; prompts differ in how often drafts are kept, `rate` on average."""
    generator = np.random.default_rng(7)
    names, routes = [str(i) for i in range(prompts)], ["chat"] * prompts
    found = []
    for _ in range(number):
        rate_R = generator.uniform(0, 2 * rate, prompts)
        recorded, other = (rate_R[:, None, None] * generator.uniform(0.5, 1.5, (prompts, 12, DEPTH)) for _ in range(2))
        replies = [reply(row.clip(max=1)) for row in recorded]
        live = live_counts([walk(row * (1 + shift), generator) for row in other], names, routes, DEPTH)
        variance_R = step_variances(replies, DEPTH)
        found.append(live_agreement(live, count_replies(replies, DEPTH), variance_R)["p_value"])
    return np.array(found)


@pytest.mark.parametrize("rate", [0.4, 0.002])
def test_sound_replies_rarely_disagree(rate):
    """A useless head as well: where hardly a draft is kept, a sample may hold none, and still says little."""
    found = p_values(rate, 200)
    assert (found < 0.05).mean() < 0.09
    assert found.min() > AGREEMENT_LEVEL
    if rate > 0.1:
        assert (found < 0.05).mean() > 0.02  # the level is used


def test_other_acceptance_is_seen():
    assert (p_values(0.4, 10, prompts=60, shift=0.5) < AGREEMENT_LEVEL).mean() > 0.9


def test_few_prompts_have_no_verdict():
    counts = count_replies([reply([[0.5, 0.5]])] * 5, DEPTH)
    assert set(live_agreement(counts, counts).values()) == {None}
