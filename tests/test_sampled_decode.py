"""Laws of sampled decoding on the tiny target: the target's law, whatever drafts, and each request by itself."""

import itertools

import numpy as np
import pytest
import torch

from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter, NgramDrafter, SuffixDrafter
from headstart.eval.proof import noisy_draft
from headstart.eval.replies import live_counts
from headstart.eval.speculation import Speculation
from headstart.heads.sampling import Sampling, filtered_probabilities
from tests.scripted import ScriptedDrafter
from tests.small_decoding import NO_STOP, continuations, make_prompts, random_draft, untrained_head

RULES = ("tokens", "blocks")
DRAFTS = ("greedy", "sampled")


@pytest.fixture(scope="module")
def drafters(tiny_target):
    return {
        "eagle3": HeadDrafter(untrained_head(tiny_target)),
        "model": HeadDrafter(noisy_draft(tiny_target)),
        "noise": HeadDrafter(random_draft(tiny_target)),
        "ngram": NgramDrafter(),
        "suffix": SuffixDrafter(),
    }


def probabilities(target, prompt, sampling, length):
    """Exact probability of every reply of `length` tokens that the filters leave possible."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, probability in texts.items():
            final = target.read([np.array([*prompt, *text, 0])])[0].final[-1]
            law_V = filtered_probabilities(target.logits(final), sampling)
            for token in law_V.nonzero().flatten().tolist():
                longer[(*text, token)] = probability * float(law_V[token])
        texts = longer
    return texts


def assert_law(target, drafter, prompt, **way):
    """Chi-square of whole replies against their exact probabilities, at level 1e-4 with fixed random numbers."""
    sampling, number = Sampling(1.5, top_k=3), 1500
    replies = decode(
        target,
        [prompt] * number,
        Speculation(drafter, sampling=sampling, **way),
        max_new_tokens=4,
        stop_ids=NO_STOP,
        batch=100,
        seed=5,
    )
    exact = probabilities(target, prompt, sampling, 4)
    counts = dict.fromkeys(exact, 0)
    for reply in replies:
        counts[tuple(reply.token_ids)] += 1  # a reply outside the filters has no entry
    expected, found, rest = [], [], [0.0, 0]
    for text, probability in exact.items():
        if probability * number >= 5:
            expected.append(probability * number)
            found.append(counts[text])
        else:
            rest = [rest[0] + probability * number, rest[1] + counts[text]]
    expected, found = np.array([*expected, max(rest[0], 1e-9)]), np.array([*found, rest[1]])
    statistic = float(((found - expected) ** 2 / expected).sum())
    p_value = torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(statistic / 2))
    assert len(expected) > 15
    assert p_value > 1e-4
    assert any(step.accepted for reply in replies for step in reply.steps)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_replies_have_the_targets_law(tiny_target, drafters, rule, draft):
    prompt = make_prompts(tiny_target, [6], seed=2)[0]
    assert_law(tiny_target, drafters["model"], prompt, draft_length=3, draft=draft, rule=rule)


@pytest.mark.parametrize("kind", ["eagle3", "model", "ngram"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_batch_and_order_change_no_reply_and_no_count(tiny_target, drafters, kind, draft):
    prompts = make_prompts(tiny_target, [5, 40, 18, 7])
    names = ["a", "b", "c", "d"]
    stops = list(range(0, 500, 9))  # rows finish at different times

    def run(order, batch):
        way = Speculation(drafters[kind], 3, Sampling(1.0), draft)
        texts, ids = [prompts[i] for i in order], [names[i] for i in order]
        replies = decode(tiny_target, texts, way, 25, stops, batch=batch, seed=3, request_ids=ids)
        return {
            names[i]: (reply.token_ids, reply.steps, reply.finish_reason)
            for i, reply in zip(order, replies, strict=True)
        }

    alone = run([0, 1, 2, 3], 1)
    assert alone == run([0, 1, 2, 3], 4) == run([3, 1, 0, 2], 3)
    assert len({len(tokens) for tokens, _, _ in alone.values()}) > 1


def test_random_numbers_come_from_seed_and_request(tiny_target):
    prompt = make_prompts(tiny_target, [9])[0]

    def run(seed, *ids):
        way = Speculation(sampling=Sampling(1.0))
        replies = decode(tiny_target, [prompt] * len(ids), way, 12, NO_STOP, seed=seed, request_ids=ids)
        return [reply.token_ids for reply in replies]

    first, second = run(0, "a", "b")
    assert first != second
    assert run(0, "b", "a") == [second, first]
    assert run(1, "a") != [first]


def test_prefill_draws_the_first_token_too(tiny_target):
    prompt = make_prompts(tiny_target, [9])[0]
    replies = decode(tiny_target, [prompt] * 40, Speculation(sampling=Sampling(1.5)), 1, NO_STOP, batch=40)
    assert len({reply.token_ids[0] for reply in replies}) > 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["eagle3", "model", "noise", "ngram", "suffix"])
def test_one_possible_token_is_greedy_decoding(tiny_target, drafters, kind, rule):
    """top_k = 1 leaves one token: every rule and draft must give the greedy reply, and greedy's steps for greedy drafts."""
    prompts = make_prompts(tiny_target, [6, 15, 11])
    greedy = decode(tiny_target, prompts, Speculation(drafters[kind], 4), 24, NO_STOP, batch=3)
    for draft in DRAFTS:
        way = Speculation(drafters[kind], 4, Sampling(0.7, top_k=1), draft, rule)
        one = decode(tiny_target, prompts, way, 24, NO_STOP, batch=3)
        assert [r.token_ids for r in one] == [r.token_ids for r in greedy]
        if draft == "greedy":
            assert [r.steps for r in one] == [r.steps for r in greedy]


def test_blocks_keep_more_drafts_than_tokens_one_by_one(tiny_target, drafters):
    prompts = make_prompts(tiny_target, [6] * 64)
    means = {}
    for rule in RULES:
        way = Speculation(drafters["model"], 6, Sampling(1.0), "sampled", rule)
        replies = decode(tiny_target, prompts, way, 25, NO_STOP, batch=64)
        counts = live_counts(replies, [""] * 64, [""] * 64, 6)
        means[rule] = sum(c.num_tokens for c in counts) / sum(c.num_steps for c in counts)
    assert means["blocks"] > means["tokens"] + 0.05


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_token_limit_below_the_draft_length(tiny_target, drafters, max_new_tokens, draft):
    prompts = make_prompts(tiny_target, [10, 13])
    for drafter in drafters.values():
        for whole in (False, True):
            way = Speculation(drafter, 8, Sampling(1.0), draft, whole_blocks=whole)
            replies = decode(tiny_target, prompts, way, max_new_tokens, NO_STOP, batch=2)
            for reply in replies:
                assert len(reply.token_ids) == max_new_tokens
                assert whole or all(step.whole_drafted <= max_new_tokens - 1 for step in reply.steps)


@pytest.mark.parametrize("draft", DRAFTS)
def test_prompt_that_leaves_one_token_of_the_context(tiny_target, drafters, draft):
    limit = tiny_target.facts.max_position
    prompts = make_prompts(tiny_target, [limit - 1, limit - 3, 9])
    for kind in ("eagle3", "model"):
        way = Speculation(drafters[kind], 8, Sampling(1.0), draft)
        replies = decode(tiny_target, prompts, way, 20, NO_STOP, batch=3)
        assert [len(reply.token_ids) for reply in replies] == [1, 3, 20]


def test_nothing_follows_a_stop_token_inside_a_block(tiny_target):
    prompts = make_prompts(tiny_target, [8] * 12)
    text = continuations(tiny_target, prompts, 40)
    stops = list(range(0, 500, 7))
    way = Speculation(ScriptedDrafter(text, 9), 5, Sampling(0.3))
    replies = decode(tiny_target, prompts, way, 30, stops, batch=12)
    stopped = [reply for reply in replies if reply.finish_reason == "stop"]
    for reply in stopped:
        assert reply.token_ids[-1] in stops
        assert not set(reply.token_ids[:-1]) & set(stops)
    assert any(reply.steps and reply.steps[-1].short for reply in stopped)


def test_ids_outside_the_tokenizer_are_never_emitted(tiny_target, drafters):
    """Also where the drafter's law is flat: at a high temperature every id that has mass is drawn sooner or later."""
    prompts = make_prompts(tiny_target, [8] * 16)
    way = Speculation(drafters["noise"], 4, Sampling(50.0), "sampled")
    replies = decode(tiny_target, prompts, way, 40, NO_STOP, batch=16)
    tokens = set(itertools.chain.from_iterable(reply.token_ids for reply in replies))
    assert max(tokens) < tiny_target.facts.num_tokens
    assert len(tokens) > 250


def test_an_unknown_kind_of_draft_or_rule_is_refused(tiny_target, drafters):
    for options in ({"draft": "Sampled"}, {"rule": "typical"}):
        with pytest.raises((ValueError, KeyError)):
            decode(tiny_target, [[1, 5]], Speculation(drafters["eagle3"], 2, Sampling(1.0), **options), 4)
