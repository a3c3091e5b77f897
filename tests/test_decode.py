"""Laws of the reference decoder, on the tiny target: what is emitted, what is counted, and offline equal to live."""

import numpy as np
import pytest
import torch

from headstart.eval.acceptance import acceptance_probabilities, count_replies, reply_acceptance
from headstart.eval.acceptance_rows import acceptance_row
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter, NgramDrafter, ngram_acceptance
from headstart.eval.replies import live_counts
from headstart.eval.speculation import PLAIN, Speculation
from headstart.heads.batch import pack, supervised_pairs
from headstart.heads.contract import Draft, Head, Rollout, greedy
from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling
from tests.scripted import ScriptedDrafter
from tests.small_decoding import (
    NO_STOP,
    continuations,
    fitted_head,
    make_path,
    make_prompts,
    random_draft,
    untrained_head,
)


class CopyState:
    def __init__(self, texts):
        self.texts = texts

    def select(self, rows):
        return CopyState([self.texts[row] for row in rows.tolist()])


class CopyHead(Head):
    """A head that copies the target: its draft is the target's own next token, at every depth."""

    kind = "copy"
    reads = "taps"

    def __init__(self, target, first_token):
        super().__init__(None, target.facts, torch.arange(target.facts.vocab_size))
        self.target, self.first_token, self.taps = target, first_token, target.taps
        self.anchor = torch.nn.Parameter(torch.zeros(1))

    def rollout(self, batch, depth):
        start_S, valid_SD = supervised_pairs(batch, depth)
        last = len(batch.final_TH) - 1
        slot_SD = (start_S[:, None] + 1 + torch.arange(depth)).clamp(max=last)
        return Rollout(batch.final_TH[slot_SD], start_S, valid_SD)

    def outputs(self):
        return [self.target.logits]

    def start(self, features_BTF, next_tokens_BT, lengths_B, max_length, first_token_B=None):
        rows = zip(next_tokens_BT.tolist(), lengths_B.tolist(), strict=True)
        return CopyState([[self.first_token, *row[:length]] for row, length in rows])

    def draft(self, state, depth, sampler=greedy):
        tokens, logits = [], []
        for text in state.texts:
            text = list(text)
            for _ in range(depth):
                final = self.target.read([np.array([*text, 0])])[0].final[-1]
                logits.append(self.target.logits(final))
                text.append(int(sampler(logits[-1][None])))
            tokens.append(text[-depth:])
        return Draft(torch.tensor(tokens), torch.stack(logits).unflatten(0, (len(tokens), depth)))

    def draft_tree(self, state, grow):
        raise NotImplementedError

    def accept(self, state, features_BTF, next_tokens_BT, num_accepted_B):
        for text, row, accepted in zip(state.texts, next_tokens_BT.tolist(), num_accepted_B.tolist(), strict=True):
            text.extend(row[: accepted + 1])

    def load_target(self, target, initialise):
        pass


def offline_counts(head, target, paths, draft_length):
    states = target.read([path.token_N for path in paths])
    batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
    return count_replies(reply_acceptance(head, [batch], draft_length), draft_length)


@pytest.fixture(scope="module")
def heads(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12])
    plain = decode(tiny_target, prompts, PLAIN, 24)
    paths = [make_path(p, r.token_ids) for p, r in zip(prompts, plain, strict=True)]
    return {
        "untrained": untrained_head(tiny_target),
        "fitted": fitted_head(tiny_target, paths),
        "copying": CopyHead(tiny_target, 1),
    }


@pytest.mark.parametrize("kind", ["untrained", "fitted", "copying"])
@pytest.mark.parametrize("draft_length", [1, 4])
def test_offline_equals_live_step_for_step(tiny_target, heads, kind, draft_length):
    prompts = make_prompts(tiny_target, [7, 12, 20, 33])
    head = heads[kind]
    plain = decode(tiny_target, prompts, PLAIN, 24)
    live = decode(tiny_target, prompts, Speculation(HeadDrafter(head), draft_length), 24, batch=3)
    assert [r.token_ids for r in live] == [r.token_ids for r in plain]

    names = [f"p{i}" for i in range(len(prompts))]
    paths = [make_path(p, r.token_ids, name) for p, r, name in zip(prompts, plain, names, strict=True)]
    for offline, counted in zip(
        offline_counts(head, tiny_target, paths, draft_length),
        live_counts(live, names, ["chat"] * 4, draft_length),
        strict=True,
    ):
        assert offline.num_steps == counted.num_steps
        assert offline.num_short_steps == counted.num_short_steps
        assert np.array_equal(offline.histogram, counted.histogram)
        assert np.array_equal(offline.judged_K, counted.judged_K)
        assert np.array_equal(offline.accepted_K, counted.accepted_K)
    if kind == "fitted":
        lengths = {step.accepted for reply in live for step in reply.steps}
        assert {0, 1} <= lengths  # drafts are accepted, but not always


@pytest.mark.parametrize("kind", ["copying", "fitted"])
def test_sampled_draft_is_kept_with_min_of_one_and_q_over_p(tiny_target, heads, kind):
    prompts = make_prompts(tiny_target, [6, 14])
    replies = make_prompts(tiny_target, [12, 9], seed=1)  # any tokens: the law holds for each
    paths = [make_path(p, r, name, Sampling(1.0)) for p, r, name in zip(prompts, replies, "ab", strict=True)]
    states = tiny_target.read([path.token_N for path in paths])
    for path, state in zip(paths, states, strict=True):
        logp_NV = torch.log_softmax(tiny_target.logits(state.final), -1)
        generated = path.generated_N[1:]
        path.logprob_N[1:][generated] = logp_NV[torch.arange(len(logp_NV)), torch.tensor(path.token_N[1:]).long()][
            generated
        ]
    batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
    (found,) = acceptance_probabilities(heads[kind], batch, 3, (1.0,))
    accept_SD, start_S, valid_SD = found.accept_SD, found.start_S, found.valid_SD
    if kind == "copying":  # q = p
        assert accept_SD[valid_SD].numpy() == pytest.approx(1.0, abs=1e-5)
        return
    rollout = heads[kind].rollout(batch, 3)
    q_SDV = torch.softmax(heads[kind].logits(rollout.state_SDH).detach(), -1)
    for s, j in valid_SD.nonzero().tolist():
        label = int(batch.next_token_T[start_S[s] + 1 + j])
        p = float(batch.next_logprob_T[start_S[s] + 1 + j].exp())
        q = sum(float(q_SDV[s, j, i]) for i, token in enumerate(heads[kind].draft_ids_V.tolist()) if token == label)
        assert float(accept_SD[s, j]) == pytest.approx(min(1.0, q / p), rel=1e-4)


def test_a_head_that_copies_the_target_gives_draft_length_plus_one(tiny_target):
    prompts = make_prompts(tiny_target, [9, 14])
    live = decode(tiny_target, prompts, Speculation(HeadDrafter(CopyHead(tiny_target, 1)), 3), 1 + 8 * 4, NO_STOP)
    row = acceptance_row(live_counts(live, "ab", "ab", 3), source="live", drafter="copy", draft_length=3)
    assert row["accept_len"]["value"] == 4.0
    assert row["num_short_steps"] == 0


@pytest.mark.parametrize(("num_right", "draft_length"), [(0, 3), (1, 4), (2, 2), (2, 5)])
def test_scripted_proposer_gives_its_known_number(tiny_target, num_right, draft_length):
    prompts = make_prompts(tiny_target, [6, 11, 17])
    per_step = min(num_right, draft_length) + 1
    script = ScriptedDrafter(continuations(tiny_target, prompts, 1 + 12 * per_step + draft_length), num_right)
    live = decode(tiny_target, prompts, Speculation(script, draft_length), 1 + 12 * per_step, NO_STOP, batch=2)
    for counts in live_counts(live, "abc", "abc", draft_length):
        assert counts.num_steps == 12
        assert counts.num_tokens / counts.num_steps == per_step
        assert counts.histogram[per_step - 1] == 12
    assert [r.token_ids for r in live] == [script.continuations[tuple(p)][: 1 + 12 * per_step] for p in prompts]


def test_ngram_lookup_offline_equals_live(tiny_target):
    prompts = [p + p[2:] for p in make_prompts(tiny_target, [8, 15, 30])]
    plain = decode(tiny_target, prompts, PLAIN, 40, NO_STOP)
    live = decode(tiny_target, prompts, Speculation(NgramDrafter(), 4), 40, NO_STOP, batch=3)
    assert [r.token_ids for r in live] == [r.token_ids for r in plain]
    paths = [make_path(p, r.token_ids, name) for p, r, name in zip(prompts, plain, "abc", strict=True)]
    offline = count_replies(ngram_acceptance(paths, 4), 4)
    for one, counted in zip(offline, live_counts(live, "abc", "abc", 4), strict=True):
        assert np.array_equal(one.histogram, counted.histogram)
        assert np.array_equal(one.judged_K, counted.judged_K)
        assert one.num_short_steps == counted.num_short_steps


def test_batch_of_unequal_and_shared_prompts_equals_single_runs(tiny_target):
    first, second, third = make_prompts(tiny_target, [5, 40, 18])
    prompts = [first, second, third, first, second]
    script = ScriptedDrafter(continuations(tiny_target, prompts, 40), 2)
    stop = script.continuations[tuple(prompts[1])][9]  # one row finishes early
    together = decode(tiny_target, prompts, Speculation(script, 3), 30, [stop], batch=5)
    alone = [decode(tiny_target, [prompt], Speculation(script, 3), 30, [stop])[0] for prompt in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.steps for r in together] == [r.steps for r in alone]
    assert len({len(r.token_ids) for r in together}) > 1


@pytest.mark.parametrize("position", [1, 2, 3, 4, 5])
def test_stop_token_anywhere_in_a_block_ends_the_reply(tiny_target, position):
    prompts = make_prompts(tiny_target, [10], seed=3)
    text = continuations(tiny_target, prompts, 40)
    reply = text[tuple(prompts[0])]
    stop = reply[position]
    expected = reply[: reply.index(stop) + 1]
    got = decode(tiny_target, prompts, Speculation(ScriptedDrafter(text, 9), 4), 30, [stop])[0]
    assert got.token_ids == expected
    assert got.finish_reason == "stop"
    counts = live_counts([got], "a", "a", 4)[0]
    assert counts.num_tokens == len(expected) - 1
    assert counts.num_short_steps == (1 if (len(expected) - 1) % 5 else 0)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_token_limit_below_the_draft_length_caps_the_draft(tiny_target, max_new_tokens):
    prompts = make_prompts(tiny_target, [10, 13])
    text = continuations(tiny_target, prompts, 20)
    drafters = [
        ScriptedDrafter(text, 9),
        ScriptedDrafter(text, 1),
        HeadDrafter(untrained_head(tiny_target)),
        HeadDrafter(random_draft(tiny_target)),
        None,
    ]
    for drafter in drafters:
        for whole in (False, True):
            got = decode(
                tiny_target, prompts, Speculation(drafter, 8, whole_blocks=whole), max_new_tokens, NO_STOP, batch=2
            )
            for prompt, reply in zip(prompts, got, strict=True):
                assert reply.token_ids == text[tuple(prompt)][:max_new_tokens]
                assert reply.finish_reason == "length"
                if not whole:
                    assert all(step.whole_drafted <= max_new_tokens - 1 for step in reply.steps)


@pytest.mark.parametrize("left", [1, 2, 5])
def test_prompt_near_the_context_limit(tiny_target, left):
    prompts = make_prompts(tiny_target, [tiny_target.facts.max_position - left, 9])
    plain = decode(tiny_target, prompts, PLAIN, 20, NO_STOP)
    text = {tuple(p): r.token_ids for p, r in zip(prompts, plain, strict=True)}
    assert [len(r.token_ids) for r in plain] == [left, 20]
    model = HeadDrafter(random_draft(tiny_target))
    for drafter in (ScriptedDrafter(text, 9), HeadDrafter(untrained_head(tiny_target)), model):
        got = decode(tiny_target, prompts, Speculation(drafter, 8, whole_blocks=True), 20, NO_STOP, batch=2)
        assert [r.token_ids for r in got] == [r.token_ids for r in plain]
        assert all(step.whole_drafted < left for step in got[0].steps)  # no position behind the context is fed


def test_beyond_the_drafters_context_decoding_goes_on_without_drafts(tiny_target):
    prompts = make_prompts(tiny_target, [12, 30])
    text = continuations(tiny_target, prompts, 30)
    got = decode(tiny_target, prompts, Speculation(ScriptedDrafter(text, 9, max_position=20), 3), 20, NO_STOP, batch=2)
    assert [r.token_ids for r in got] == [text[tuple(p)][:20] for p in prompts]
    assert all(step.whole_drafted == 0 for step in got[1].steps)
    assert any(step.whole_drafted for step in got[0].steps)
    assert got[0].steps[-1].whole_drafted == 0


def test_prompt_that_fills_the_context_is_refused(tiny_target):
    for prompt in ([], [1] * tiny_target.facts.max_position):
        with pytest.raises(WrongInput, match="context"):
            decode(tiny_target, [prompt], PLAIN, 4)


def test_whole_blocks_give_the_same_reply_counts(tiny_target):
    prompts = make_prompts(tiny_target, [8, 21])
    drafter = HeadDrafter(untrained_head(tiny_target))
    capped = decode(tiny_target, prompts, Speculation(drafter, 4), 15, NO_STOP, batch=2)
    whole = decode(tiny_target, prompts, Speculation(drafter, 4, whole_blocks=True), 15, NO_STOP, batch=2)
    for a, b in zip(live_counts(capped, "ab", "ab", 4), live_counts(whole, "ab", "ab", 4), strict=True):
        assert np.array_equal(a.histogram, b.histogram)
        assert np.array_equal(a.judged_K, b.judged_K)
    for counts in live_counts(whole, "ab", "ab", 4, counting="engine"):
        assert counts.judged_K[0] == counts.num_steps
