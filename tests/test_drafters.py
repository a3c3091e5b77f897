"""Laws of every drafter, and of lookup."""

import numpy as np
import pytest

from headstart.eval.acceptance import count_replies, reply_acceptance
from headstart.eval.decode import decode
from headstart.eval.drafters import (
    HeadDrafter,
    NgramDrafter,
    NgramIndex,
    SuffixDrafter,
    SuffixIndex,
    lookup_acceptance,
)
from headstart.eval.proof import noisy_draft
from headstart.eval.replies import live_counts
from headstart.eval.speculation import PLAIN, Speculation
from headstart.heads.batch import pack
from headstart.heads.sampling import Sampling
from tests.small_decoding import NO_STOP, make_path, make_prompts, random_draft, untrained_head


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_noise_at_every_draft_length_leaves_greedy_replies_alone(tiny_target, kind):
    """After every rejection cache positions are stale, in the target and in the drafter."""
    if kind == "model":
        drafter = HeadDrafter(random_draft(tiny_target))
    else:
        drafter = HeadDrafter(untrained_head(tiny_target))
    prompts = make_prompts(tiny_target, [1, 2, 50])
    plain = [reply.token_ids for reply in decode(tiny_target, prompts, PLAIN, 20, NO_STOP)]
    for draft_length in range(1, 9):
        replies = decode(tiny_target, prompts, Speculation(drafter, draft_length), 20, NO_STOP, batch=3)
        assert [reply.token_ids for reply in replies] == plain


def test_a_copy_of_the_target_is_always_right(tiny_target):
    """What the session's cache gives after any number of kept drafts is what the model says of the whole text."""
    drafter = HeadDrafter(noisy_draft(tiny_target, noise=0.0))
    prompts = make_prompts(tiny_target, [5, 12, 3])
    replies = decode(tiny_target, prompts, Speculation(drafter, 3), 1 + 4 * 6, NO_STOP, batch=3)
    assert all(step.accepted == 3 for reply in replies for step in reply.steps)


def test_beyond_the_drafters_limit_of_64_nothing_is_drafted_and_offline_knows(tiny_target):
    prompts = make_prompts(tiny_target, [32, 55, 62, 64, 80, 200])
    plain = decode(tiny_target, prompts, PLAIN, 20, NO_STOP)
    names = [f"p{i}" for i in range(len(prompts))]
    paths = [make_path(p, r.token_ids, n) for p, r, n in zip(prompts, plain, names, strict=True)]
    drafter = HeadDrafter(untrained_head(tiny_target), max_position=64)
    states = tiny_target.read([path.token_N for path in paths])
    batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
    offline = reply_acceptance(drafter.head, [batch], 4, max_position=64)
    live = decode(tiny_target, prompts, Speculation(drafter, 4), 20, NO_STOP, batch=6)
    assert [reply.token_ids for reply in live] == [reply.token_ids for reply in plain]
    assert all(step.whole_drafted == 0 for reply in live[4:] for step in reply.steps)
    assert any(step.whole_drafted == 4 for step in live[0].steps)
    assert {step.whole_drafted for step in live[1].steps} >= {0, 4}
    for a, b in zip(count_replies(offline, 4), live_counts(live, names, ["chat"] * 6, 4), strict=True):
        assert a.num_steps == b.num_steps
        assert np.array_equal(a.judged_K, b.judged_K)
        assert np.array_equal(a.histogram, b.histogram)


def test_a_reply_of_one_token_has_no_start(tiny_target):
    path, head = make_path([1, 7, 9], [12]), untrained_head(tiny_target)
    states = tiny_target.read([path.token_N])[0]
    batch = pack([(path, states.taps, states.final)])
    for draft_length in (1, 3):
        replies = [
            *reply_acceptance(head, [batch], draft_length),
            *lookup_acceptance([path], draft_length, SuffixDrafter()),
        ]
        for reply in replies:
            assert reply.accept_TK.shape == (0, draft_length)


def longest_suffix(tokens):
    """What follows the newest earlier occurrence of the longest suffix that has one, by trying everything."""
    for size in range(len(tokens) - 1, 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end:]
    return []


def test_suffix_lookup_follows_the_longest_suffix():
    generator = np.random.default_rng(0)
    for _ in range(60):
        index, tokens = SuffixIndex(), []
        for token in generator.integers(0, 3, size=25).tolist():
            index.extend([token])
            tokens.append(token)
            assert index.propose(30) == longest_suffix(tokens)
            assert index.propose(2) == longest_suffix(tokens)[:2]


def test_a_long_suffix_beats_the_last_three_tokens():
    text = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4]
    suffix, ngram = SuffixIndex(), NgramIndex(3)
    suffix.extend(text)
    ngram.extend(text)
    assert suffix.propose(1) == [50]
    assert ngram.propose(1) == [60]


@pytest.mark.parametrize("drafter", [NgramDrafter(), SuffixDrafter()], ids=lambda drafter: drafter.name)
def test_lookup_drafts_are_judged_as_certain_at_every_temperature(tiny_target, drafter):
    prompts = [prompt * 3 for prompt in make_prompts(tiny_target, [4, 6])]
    for draft in ("greedy", "sampled"):
        replies = decode(
            tiny_target,
            prompts,
            Speculation(drafter, 3, sampling=Sampling(0.7), draft=draft),
            15,
            NO_STOP,
            batch=2,
            seed=4,
        )
        if draft == "greedy":
            expected = [(reply.token_ids, reply.steps) for reply in replies]
    assert [(reply.token_ids, reply.steps) for reply in replies] == expected
