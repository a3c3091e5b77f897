"""Laws of drafters other than heads: small models and lookup."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.eval.acceptance import count_replies, reply_acceptance
from headstart.eval.decode import decode
from headstart.eval.drafters import (
    DraftSampler,
    HeadDrafter,
    NgramDrafter,
    NgramIndex,
    SuffixDrafter,
    SuffixIndex,
    lookup_acceptance,
)
from headstart.eval.language_model import LanguageModelDrafter, language_model_acceptance
from headstart.eval.proof import noisy_model
from headstart.eval.replies import live_counts
from headstart.heads.batch import pack
from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling
from headstart.heads.target import Target
from tests.small_decoding import NO_STOP, make_path, make_prompts, random_model, untrained_head


@pytest.fixture(scope="module")
def noisy(tiny_target):
    return LanguageModelDrafter(noisy_model(tiny_target), tiny_target.facts)


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_noise_at_every_draft_length_leaves_greedy_replies_alone(tiny_target, kind):
    """After every rejection cache positions are stale, in the target and in the drafter."""
    if kind == "model":
        drafter = LanguageModelDrafter(random_model(tiny_target), tiny_target.facts)
    else:
        drafter = HeadDrafter(untrained_head(tiny_target))
    prompts = make_prompts(tiny_target, [1, 2, 50])
    plain = [reply.token_ids for reply in decode(tiny_target, prompts, None, 0, 20, NO_STOP)]
    for draft_length in range(1, 9):
        replies = decode(tiny_target, prompts, drafter, draft_length, 20, NO_STOP, batch=3)
        assert [reply.token_ids for reply in replies] == plain


def test_a_copy_of_the_target_is_always_right(tiny_target):
    """What the session's cache gives after any number of kept drafts is what the model says of the whole text."""
    drafter = LanguageModelDrafter(noisy_model(tiny_target, noise=0.0), tiny_target.facts)
    prompts = make_prompts(tiny_target, [5, 12, 3])
    replies = decode(tiny_target, prompts, drafter, 3, 1 + 4 * 6, NO_STOP, batch=3)
    assert all(step.accepted == 3 for reply in replies for step in reply.steps)


def test_drafts_from_the_cache_are_those_of_the_whole_text(tiny_target, noisy):
    prompts = make_prompts(tiny_target, [5, 12, 3])
    session = noisy.start(prompts, [7, 8, 9], None, 64)
    texts = [[*prompt, first] for prompt, first in zip(prompts, [7, 8, 9], strict=True)]
    generator = np.random.default_rng(0)
    for step in range(6):
        lengths = [3, 1, 4] if step % 2 else [0, 3, 2]
        proposal = session.propose(lengths)
        for row, length in enumerate(lengths):
            text = list(texts[row])
            for token in proposal.tokens_BK[row, :length].tolist():
                final_H = noisy.model.read([np.array([*text, 0])])[0].final[-1]
                assert token == int(noisy.logits(final_H).argmax())
                text.append(token)
        blocks = []
        for row, length in enumerate(lengths):
            accepted = int(generator.integers(0, length + 1))
            blocks.append([*proposal.tokens_BK[row, :accepted].tolist(), int(generator.integers(5, 500))])
            texts[row] += blocks[-1]
        session.accept(None, blocks)
    session.select([0, 2])
    proposal = session.propose([2, 2])
    for row, text in enumerate([texts[0], texts[2]]):
        final_H = noisy.model.read([np.array([*text, 0])])[0].final[-1]
        assert int(proposal.tokens_BK[row, 0]) == int(noisy.logits(final_H).argmax())


@pytest.mark.parametrize(("table", "num_tokens"), [(504, 500), (512, 510), (600, 600), (512, 470)])
def test_ids_that_either_tokenizer_lacks_are_never_proposed(tiny_target, table, num_tokens):
    """Tokenizer of 500 entries, target table 512, draft table of another size: the pair works."""
    drafter = LanguageModelDrafter(
        random_model(tiny_target, vocab_size=table, num_tokens=num_tokens), tiny_target.facts
    )
    known = min(num_tokens, tiny_target.facts.num_tokens)
    prompts = make_prompts(tiny_target, [6] * 8)
    prompts = [[token % known for token in prompt] for prompt in prompts]
    session = drafter.start(prompts, [5] * 8, None, 32)
    assert int(session.propose([4] * 8).tokens_BK.max()) < known
    session = drafter.start(prompts, [5] * 8, None, 32)
    uniform_BK = np.random.default_rng(0).random((8, 4))
    proposal = session.sample([4] * 8, DraftSampler(30.0, uniform_BK))
    assert proposal.law_BKV.shape == (8, 4, tiny_target.facts.vocab_size)
    assert float(proposal.law_BKV[..., known:].sum()) == 0
    torch.testing.assert_close(proposal.law_BKV.sum(-1), torch.ones(8, 4, dtype=torch.float64))
    assert int(proposal.tokens_BK.max()) < known
    plain = decode(tiny_target, prompts, None, 0, 12, NO_STOP)
    replies = decode(tiny_target, prompts, drafter, 3, 12, NO_STOP, batch=8)
    assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in plain]


def test_a_draft_model_that_cannot_read_every_token_is_refused(tiny_target):
    with pytest.raises(WrongInput, match=r"480.*\n?.*500"):
        LanguageModelDrafter(random_model(tiny_target, vocab_size=480, num_tokens=480), tiny_target.facts)


def short_context(model, limit):
    """The same model, said to have a context of `limit` positions."""
    return Target(model.model, model.tokenizer, replace(model.facts, max_position=limit), model.taps)


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_beyond_the_drafters_limit_of_64_nothing_is_drafted_and_offline_knows(tiny_target, kind):
    prompts = make_prompts(tiny_target, [32, 55, 62, 64, 80, 200])
    plain = decode(tiny_target, prompts, None, 0, 20, NO_STOP)
    names = [f"p{i}" for i in range(len(prompts))]
    paths = [make_path(p, r.token_ids, n) for p, r, n in zip(prompts, plain, names, strict=True)]
    if kind == "model":
        drafter = LanguageModelDrafter(short_context(noisy_model(tiny_target), 64), tiny_target.facts)
        offline = language_model_acceptance(drafter, paths, 4)
    else:
        drafter = HeadDrafter(untrained_head(tiny_target), max_position=64)
        states = tiny_target.read([path.token_N for path in paths])
        batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
        offline = reply_acceptance(drafter.head, [batch], 4, max_position=64)
    live = decode(tiny_target, prompts, drafter, 4, 20, NO_STOP, batch=6)
    assert [reply.token_ids for reply in live] == [reply.token_ids for reply in plain]
    assert all(step.whole_drafted == 0 for reply in live[4:] for step in reply.steps)
    assert any(step.whole_drafted == 4 for step in live[0].steps)
    assert {step.whole_drafted for step in live[1].steps} >= {0, 4}
    for a, b in zip(count_replies(offline, 4), live_counts(live, names, ["chat"] * 6, 4), strict=True):
        assert a.num_steps == b.num_steps
        assert np.array_equal(a.judged_K, b.judged_K)
        assert np.array_equal(a.histogram, b.histogram)


def test_a_reply_of_one_token_has_no_start(tiny_target, noisy):
    path = make_path([1, 7, 9], [12])
    for draft_length in (1, 3):
        replies = [
            *language_model_acceptance(noisy, [path], draft_length),
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
            tiny_target, prompts, drafter, 3, 15, NO_STOP, batch=2, sampling=Sampling(0.7), draft=draft, seed=4
        )
        if draft == "greedy":
            expected = [(reply.token_ids, reply.steps) for reply in replies]
    assert [(reply.token_ids, reply.steps) for reply in replies] == expected
