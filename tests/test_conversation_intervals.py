"""Laws of intervals over conversations: turns of one are drawn together, in every figure that has an interval."""

from dataclasses import replace

import numpy as np
import pytest

from headstart.eval.acceptance import count_replies
from headstart.eval.acceptance_rows import acceptance_row
from headstart.eval.calibration import StepTimes, reliability, threshold_rows
from headstart.eval.compare import compare
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.prompt_sums import PromptSums, read_sums
from headstart.eval.settings import EvalSettings
from headstart.eval.speed import drawn_together
from headstart.eval.statistics import conversation_sums, endpoints, ratio, resampling_weights
from headstart.heads.checkpoint import save_head
from headstart.heads.paths import conversations
from headstart.heads.store import read_json
from tests.small_decoding import make_path, make_prompts, untrained_head
from tests.test_calibration import random_replies

TURNS, NUM, DEPTH = 3, 9, 3
REPLIES = random_replies(NUM, depth=DEPTH)
TALKS = [replace(reply, prompt_id=f"{reply.prompt_id}/{k}") for reply in REPLIES for k in range(TURNS)]
NAMES = {turn.prompt_id: turn.prompt_id.partition("/")[0] for turn in TALKS}


def sums_of(replies, gain=1.0, names=None):
    counts = count_replies(replies, DEPTH)
    ids = [c.prompt_id for c in counts]
    steps_R = np.array(
        [c.num_steps / (gain if i % 2 else 1.0) for i, c in zip(map(number_of, ids), counts, strict=True)]
    )
    tokens_R = np.array([c.num_tokens for c in counts])
    checkpoint = {"kind": "eagle3", "step": 1, "sha256": "s"}
    return PromptSums("a", checkpoint, ids, ["chat"] * len(ids), tokens_R, steps_R, names or ids, {})


def number_of(prompt_id: str) -> int:
    """The number in a prompt's name."""
    return int(prompt_id.partition("/")[0].removeprefix("p"))


def figures(replies, names=None):
    """Everything with an interval that is made of replies."""
    row = acceptance_row(
        count_replies(replies, DEPTH), source="offline", drafter="e", draft_length=DEPTH, conversations=names
    )
    found = [row["accept_len"], row["accept_len_macro"], *row["conditional"], *row["survival"]]
    for one in reliability(replies, DEPTH, 500, 0, names):
        found += [
            one["confidence"],
            one["acceptance"],
            one["calibration_error"],
            *(b["acceptance"] for b in one["bins"]),
        ]
    for one in threshold_rows(replies, DEPTH, StepTimes((0, 3), (1.0, 1.2), 0.3), 500, 0, conversations=names):
        found += [one["accept_len"], one["drafts_per_step"], one["predicted_speedup"], one["gain"]]
    listed = None if names is None else [names[reply.prompt_id] for reply in replies]
    both = [sums_of(replies, names=listed), sums_of(replies, 1.1, listed)]
    found.append(compare(both, replicates=500)[0].ratio)
    return row, found


def test_turns_that_say_the_same_tell_nothing_new():
    """Three equal turns a conversation: each figure has the interval that one turn each gives, not a narrower one."""
    row, alone = figures(REPLIES)
    talked, together = figures(TALKS, NAMES)
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one)
    assert (talked["num_prompts"], talked["num_conversations"]) == (TURNS * NUM, NUM)
    assert row["num_conversations"] == NUM
    _, apart = figures(TALKS)
    widths = [one["high"] - one["low"] for one in (alone[0], apart[0])]
    assert widths[1] < 0.7 * widths[0]  # what drawing turns one by one would claim


def test_intervals_of_talkative_prompts_hold_as_often_as_they_say():
    """Turns of a conversation are alike: drawn one by one they would miss the truth far too often."""
    generator = np.random.default_rng(0)
    accept_W = 1 + generator.gamma(4, 0.2, 400)
    turns_W = generator.integers(1, 9, 400)
    tokens_R = np.full(turns_W.sum(), 100.0)
    names_R = np.repeat(np.arange(400), turns_W)
    steps_R = tokens_R / (np.repeat(accept_W, turns_W) * np.exp(generator.normal(0, 0.05, len(tokens_R))))
    true, num, covered = tokens_R.sum() / steps_R.sum(), 60, {"together": 0, "apart": 0}
    own = resampling_weights(num, 400, 0)
    for _ in range(400):
        places = [np.flatnonzero(names_R == c) for c in generator.integers(0, 400, num)]
        drawn = np.concatenate(places)
        names = np.repeat(np.arange(num), [len(place) for place in places]).astype(str).tolist()
        tokens_C, steps_C = conversation_sums(tokens_R[drawn], names), conversation_sums(steps_R[drawn], names)
        single = resampling_weights(len(drawn), 200, 1)
        for how, samples_B, number in (
            ("together", ratio(own @ tokens_C, own @ steps_C), num),
            ("apart", ratio(single @ tokens_R[drawn], single @ steps_R[drawn]), len(drawn)),
        ):
            low, high = endpoints(samples_B, number)
            covered[how] += low <= true <= high
    assert 0.92 <= covered["together"] / 400 <= 0.975
    assert covered["apart"] / 400 < 0.75


def test_groups_of_requests_that_share_a_conversation_are_drawn_as_one():
    def same(*groups):
        names = drawn_together(groups)
        return [names.index(name) for name in names]

    assert same(["a"], ["b"], ["a"]) == [0, 1, 0]
    assert same(["a", "b"], ["c", "d"], ["e", "f"]) == [0, 1, 2]
    assert same(["a", "b"], ["c", "d"], ["b", "c"]) == [0, 0, 0]  # linked by the third
    assert same() == []


def test_turns_of_one_conversation_have_a_value_and_no_interval_in_every_file(tiny_target, tmp_path):
    save_head(tmp_path, untrained_head(tiny_target), step=1)
    prompts = make_prompts(tiny_target, [7, 12, 9, 11, 8, 6, 10, 5])
    settings = EvalSettings(draft_lengths=[2], draft_length=2, replicates=50)
    folder = tmp_path / "eval"
    for name, ends in (("", True), ("talk", False)):
        paths = [replace(make_path(p, [5, 6, 7, 8, 9], f"p{i}"), conversation=name) for i, p in enumerate(prompts)]
        measured = (lambda _: tiny_target, tmp_path, Heldout(paths), settings, folder)
        evaluate(*measured, parts=("offline",), tell=lambda line: None)
        row = read_json(folder / "acceptance.json")["rows"][0]
        sums = read_sums(tmp_path)
        rows = read_json(folder / "calibration.json")["rows"]
        assert (row["num_prompts"], row["num_conversations"]) == (8, 8 if ends else 1)
        assert sums.conversations == list(conversations(paths).values())
        alone = compare([sums, replace(sums, label="b")], replicates=50)[0]
        for found in (row["accept_len"], alone.ratio, rows[0]["acceptance"]):
            assert found["value"] is not None
            assert (found["low"] is not None) == ends
