"""Offline acceptance is what live decoding accepts: every drafter, temperature and draft length."""

import functools
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.eval.acceptance import count_replies, reply_acceptance
from headstart.eval.agreement import live_agreement
from headstart.eval.calibration import stopped
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter, NgramDrafter, SuffixDrafter, lookup_acceptance
from headstart.eval.proof import noisy_draft
from headstart.eval.replies import live_counts
from headstart.eval.speculation import Speculation
from headstart.eval.target_law import TargetLaw
from headstart.heads.batch import pack
from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling
from headstart.heads.target import Target
from tests.scripted import ScriptedDrafter, scripted_acceptance
from tests.small_decoding import NO_STOP, continuations, fitted_head, make_path, make_prompts

NUM_PROMPTS = 96
NUM_NEW = 20
NUM_TOKENS = 32
LENGTHS = (2, 4, 7)
TEMPERATURES = (0.0, 0.7, 1.0)
STOP_BELOW = 0.3
KINDS = ("eagle3", "eagle3 stops early", "model", "ngram", "suffix", "scripted")
FILTERS = (Sampling(0.9, top_k=12), Sampling(1.0, top_p=0.8), Sampling(1.2, min_p=0.05))


class Bench:
    """Drafters on the tiny target, run live and computed offline on paths recorded for the occasion."""

    def __init__(self, target):
        # Few tokens, so that every drafter is right now and then, lookup too.
        facts = replace(target.facts, num_tokens=NUM_TOKENS)
        self.target = target = Target(target.model, target.tokenizer, facts, target.taps)
        generator = np.random.default_rng(0)
        self.names = [f"p{i}" for i in range(NUM_PROMPTS)]
        self.prompts = make_prompts(target, generator.integers(4, 20, size=NUM_PROMPTS))
        self.head = fitted_head(target, self.record(Sampling(0.7), "fit", 32), steps=60)
        self.model = HeadDrafter(noisy_draft(target))
        self.lookups = {"ngram": NgramDrafter(), "suffix": SuffixDrafter()}
        self.script = ScriptedDrafter(continuations(target, self.prompts, NUM_NEW + 8), 3)

    def decode(self, drafter, draft_length, sampling, seed, number=NUM_PROMPTS, **options):
        way = Speculation(drafter, draft_length, sampling, **options)
        texts, ids = self.prompts[:number], self.names[:number]
        return decode(self.target, texts, way, NUM_NEW, NO_STOP, batch=32, seed=seed, request_ids=ids)

    def record(self, sampling, occasion, number=NUM_PROMPTS):
        """Replies of plain decoding, with random numbers of their own."""
        replies = self.decode(None, 0, sampling, zlib.crc32(occasion.encode()), number)
        rows = zip(self.prompts, replies, self.names, strict=False)
        return [make_path(prompt, reply.token_ids, name, sampling) for prompt, reply, name in rows]

    def drafter(self, kind):
        known = {
            "eagle3": HeadDrafter(self.head),
            "eagle3 stops early": HeadDrafter(self.head, stop_below=STOP_BELOW),
            "model": self.model,
            "scripted": self.script,
        }
        return known.get(kind) or self.lookups[kind]

    def offline(self, kind, paths, draft_length, sampling, draft):
        law = TargetLaw(self.target, sampling)
        temperature = sampling.temperature if draft == "sampled" else 0.0
        if kind == "model" or kind.startswith("eagle3"):
            states = self.target.read([path.token_N for path in paths])
            batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
            head = self.model.head if kind == "model" else self.head
            replies = reply_acceptance(head, [batch], draft_length, temperature, law)
            replies = [stopped(reply, STOP_BELOW) for reply in replies] if "stops" in kind else replies
        elif kind == "scripted":
            replies = scripted_acceptance(self.script, paths, draft_length)
        else:
            replies = lookup_acceptance(paths, draft_length, self.lookups[kind])
        return count_replies(replies, draft_length)

    def live(self, kind, draft_length, sampling, draft, seed):
        replies = self.decode(self.drafter(kind), draft_length, sampling, seed, draft=draft)
        return live_counts(replies, self.names, ["chat"] * NUM_PROMPTS, draft_length)

    @functools.cache  # noqa: B019
    def z(self, kind, draft_length, sampling, draft="sampled"):
        """Paired difference of accept_len, live minus offline, in its standard errors."""
        cell = f"{kind}/{draft_length}/{sampling}/{draft}"
        offline = self.offline(kind, self.record(sampling, cell), draft_length, sampling, draft)
        live = self.live(kind, draft_length, sampling, draft, zlib.crc32(f"live {cell}".encode()))
        assert sum(c.num_steps for c in live) < NUM_PROMPTS * (NUM_NEW - 1)  # there is something to be wrong about
        return live_agreement(live, offline)["z"]


@pytest.fixture(scope="module")
def bench(tiny_target):
    return Bench(tiny_target)


@pytest.mark.parametrize("draft_length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_replies_take_the_very_steps_computed_offline(bench, kind, draft_length):
    paths = bench.record(Sampling(), "greedy", 12)
    live = bench.decode(bench.drafter(kind), draft_length, Sampling(), 0, 12)
    assert [path.token_N[path.num_prompt_tokens :].tolist() for path in paths] == [r.token_ids for r in live]
    counted = live_counts(live, bench.names[:12], ["chat"] * 12, draft_length)
    for a, b in zip(bench.offline(kind, paths, draft_length, Sampling(), "greedy"), counted, strict=True):
        assert a.num_steps == b.num_steps
        assert a.num_short_steps == b.num_short_steps
        assert np.array_equal(a.histogram, b.histogram)
        assert np.array_equal(a.judged_K, b.judged_K)


SAMPLED = [(kind, length, Sampling(t)) for kind in KINDS for length in LENGTHS for t in TEMPERATURES if t > 0]


@pytest.mark.parametrize(("kind", "draft_length", "sampling"), SAMPLED, ids=str)
def test_sampled_replies_take_as_many_steps_as_computed_offline(bench, kind, draft_length, sampling):
    assert abs(bench.z(kind, draft_length, sampling)) < 3.5


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["eagle3", "model"])
@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_filters_of_the_target_are_part_of_the_law(bench, kind, sampling, draft):
    assert abs(bench.z(kind, 4, sampling, draft)) < 3.5


def test_all_cells_together_differ_by_chance_only(bench):
    cells = [bench.z(*cell) for cell in SAMPLED]
    statistic, freedom = float(np.square(cells).sum()), float(len(cells))
    assert torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)) > 0.01


def test_the_wrong_law_is_seen(bench):
    """Taking the raw law for the filtered one makes drafts look better than they are: the comparison has power."""
    sampling = Sampling(1.5, top_p=0.5)
    paths = bench.record(sampling, "wrong law")
    live = bench.live("model", 4, sampling, "sampled", seed=1)
    raw = [make_path(p.token_N[: p.num_prompt_tokens], p.token_N[p.num_prompt_tokens :]) for p in paths]
    for path in raw:
        path.sampling.update(Sampling(1.0).to_dict())
    offline = bench.offline("model", raw, 4, Sampling(1.0), "sampled")
    assert abs(live_agreement(live, offline)["z"]) > 4


def test_paths_of_another_sampling_setting_are_refused(bench):
    paths = bench.record(Sampling(0.7), "refused", 2)
    for kind in ("eagle3", "model"):
        for draft in ("greedy", "sampled"):
            with pytest.raises(WrongInput, match=r"0\.7.*\n?.*expected.*1\.0"):
                bench.offline(kind, paths, 2, Sampling(1.0), draft)
            with pytest.raises(WrongInput, match="expected"):
                bench.offline(kind, paths, 2, Sampling(0.7, min_p=0.1), draft)
    states = bench.target.read([path.token_N for path in paths])
    batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
    with pytest.raises(WrongInput, match="sampling"):  # recorded log-probabilities are those of temperature 1
        reply_acceptance(bench.head, [batch], 2, temperature=0.7)


def test_acceptance_on_recorded_logprobs_is_that_of_the_law(bench):
    paths = bench.record(Sampling(1.0), "recorded", 4)
    states = bench.target.read([path.token_N for path in paths])
    for path, state in zip(paths, states, strict=True):
        logp_NV = torch.log_softmax(bench.target.logits(state.final), -1)
        logp_N = logp_NV.gather(1, torch.from_numpy(path.token_N[1:]).long()[:, None]).squeeze(1)
        path.logprob_N[1:] = np.where(path.generated_N[1:], logp_N, np.nan)
    batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
    recorded = reply_acceptance(bench.head, [batch], 3, 1.0)
    computed = reply_acceptance(bench.head, [batch], 3, 1.0, TargetLaw(bench.target, Sampling(1.0)))
    for a, b in zip(recorded, computed, strict=True):
        np.testing.assert_allclose(a.accept_TK, b.accept_TK, rtol=1e-5)


def test_sampled_drafts_for_a_greedy_target_are_kept_with_their_own_probability(bench):
    paths, head = bench.record(Sampling(), "certain", 3), bench.model.head
    states = bench.target.read([path.token_N for path in paths])
    batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
    found = reply_acceptance(head, [batch], 2, temperature=0.8, law=TargetLaw(bench.target, Sampling()))
    for path, reply in zip(paths, found, strict=True):
        token_T = torch.from_numpy(path.token_N[:-1]).long()
        with torch.no_grad():
            final_TH = head.model.paths(head.embed(token_T), torch.arange(len(token_T)), [0, len(token_T)])
            q_TV = (head.logits(final_TH).double() / 0.8).softmax(-1)
        first = path.num_prompt_tokens
        for start in range(len(reply.accept_TK)):
            label = int(path.token_N[first + 1 + start])
            assert reply.accept_TK[start, 0] == pytest.approx(float(q_TV[first + start, label]), rel=1e-5)
