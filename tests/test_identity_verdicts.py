"""What a difference between two replies, or between a live step and the offline one, is called: a near tie or a bug."""

import pytest
import torch

from headstart.eval.acceptance import reply_acceptance
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter, Proposal
from headstart.eval.greedy import verify_greedy
from headstart.eval.identity import (
    Rescorer,
    first_difference,
    first_unequal_step,
    identity_check,
    is_draft_tie,
    overall_verdict,
)
from headstart.eval.parts import Parts
from headstart.eval.speculation import PLAIN, Speculation
from headstart.eval.subject import read_batches
from headstart.heads.settings import TargetSettings
from headstart.heads.target import load_target
from tests.scripted import ScriptedDrafter
from tests.small_decoding import NO_STOP, continuations, fitted_head, make_path, make_prompts


def test_a_wrong_token_is_called_a_bug_with_its_place(tiny_target):
    prompts = make_prompts(tiny_target, [10])
    plain = decode(tiny_target, prompts, PLAIN, 12, NO_STOP)[0].token_ids
    wrong = [*plain[:5], (plain[5] + 1) % 400, *plain[6:]]
    check = identity_check(
        Rescorer(tiny_target), ["p0"], prompts, [plain], [wrong], against="plain", draft_length=2, batch=1
    )
    (divergence,) = check["divergences"]
    assert check["verdict"] == "fail"
    assert overall_verdict([check]) == "lossy"
    assert (divergence["position"], divergence["plain"], divergence["speculative"]) == (5, plain[5], wrong[5])
    assert divergence["verdict"] == "bug"
    assert divergence["gap"] > divergence["tolerance"]


def test_a_reply_that_goes_on_after_its_end_is_a_bug(tiny_target):
    prompts = make_prompts(tiny_target, [10])
    divergence = Rescorer(tiny_target).judge("p0", prompts[0], [5, 6], [5, 6, 7])
    assert (divergence.position, divergence.plain, divergence.speculative, divergence.verdict) == (2, None, 7, "bug")


def test_tokens_within_rounding_noise_are_a_tie():
    target = load_target(TargetSettings(model="tiny", dtype="bfloat16", device="cpu"))
    rescorer = Rescorer(target)
    generator = torch.Generator().manual_seed(0)
    verdicts = {"tie": [], "bug": []}
    for _ in range(12):
        prefix = torch.randint(5, 500, (15,), generator=generator).tolist()
        best = rescorer.logits(prefix).topk(3)
        for rank in (1, 2):
            judged = rescorer.judge("p", prefix, [int(best.indices[0])], [int(best.indices[rank])])
            assert judged.gap == pytest.approx(float(best.values[0] - best.values[rank]))
            verdicts[judged.verdict].append(judged.gap)
    assert verdicts["bug"]  # noise is far smaller than the usual gap
    assert all(gap < 0.6 for gap in verdicts["tie"])  # of logits that spread over 10


def test_a_verify_rule_that_accepts_everything_is_caught(tiny_target):
    def accept_all(logits_BTV, proposal: Proposal):
        blocks = verify_greedy(logits_BTV, proposal)
        drafts = proposal.tokens_BK.tolist()
        return [
            [*row[:length], block[-1]] for row, length, block in zip(drafts, proposal.length_B, blocks, strict=True)
        ]

    prompts = make_prompts(tiny_target, [8, 15])
    script = ScriptedDrafter(continuations(tiny_target, prompts, 30), 1)
    plain = [script.continuations[tuple(p)][:20] for p in prompts]
    faulty = decode(tiny_target, prompts, Speculation(script, 3, parts=Parts(verify_greedy=accept_all)), 20, NO_STOP)
    check = identity_check(
        Rescorer(tiny_target),
        ["a", "b"],
        prompts,
        plain,
        [r.token_ids for r in faulty],
        against="plain",
        draft_length=3,
        batch=1,
    )
    assert check["verdict"] == "fail"


def test_verdict_needs_tokens():
    assert overall_verdict([]) == "inconclusive"
    assert overall_verdict([{"verdict": "pass", "num_tokens": 0}]) == "inconclusive"
    assert overall_verdict([{"verdict": "pass", "num_tokens": 5}]) == "lossless"


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_an_unequal_step_is_found_and_is_no_tie(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12])
    paths = [make_path(p, r.token_ids) for p, r in zip(prompts, decode(tiny_target, prompts, PLAIN, 20), strict=True)]
    head = fitted_head(tiny_target, paths)
    path = paths[0]
    offline = reply_acceptance(head, read_batches(tiny_target, head, [path]), 3)[0]
    prompt = path.prompt_token_ids
    live = decode(tiny_target, [prompt], Speculation(HeadDrafter(head), 3), path.num_reply_tokens)[0]
    assert first_unequal_step(offline, live) is None
    offline.accept_TK[0, 0] = 1 - offline.accept_TK[0, 0]
    assert first_unequal_step(offline, live) == (0, 0)
    assert not is_draft_tie(head, next(read_batches(tiny_target, head, [path])), 0, 0)
