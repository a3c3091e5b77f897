"""Greedy replies with drafts of every kind and shape are the plain ones: exact in float32, explained in bfloat16."""

import copy

import pytest
import torch

from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter, NgramDrafter
from headstart.eval.greedy import verify_greedy
from headstart.eval.identity import Rescorer, identity_check
from headstart.eval.parts import Parts
from headstart.eval.proof import noisy_draft
from headstart.eval.speculation import PLAIN, Speculation
from headstart.eval.tree_drafts import DynamicTree
from headstart.heads.settings import TargetSettings
from headstart.heads.target import Target, load_target
from headstart.heads.tree import Tree
from tests.scripted import ScriptedDrafter
from tests.small_decoding import NO_STOP, fitted_head, make_path, make_prompts, random_draft

DRAFT_LENGTH = 4
TREES = (Tree.branching(3, 2, 1, 1), DynamicTree(DRAFT_LENGTH, 3, 8))
REPLIES = {1: (1, 120), 3: (3, 150), 8: (8, 320)}  # requests and tokens of each, by batch size


@pytest.fixture(scope="module")
def ways(tiny_target):
    """Name, drafter and shape of every way to draft; a script needs the replies themselves."""
    prompts = {
        batch: make_prompts(tiny_target, [5 + 7 * i for i in range(n)], seed=batch) for batch, (n, _) in REPLIES.items()
    }
    plain, script = {}, {}
    for batch, texts in prompts.items():
        replies = decode(tiny_target, texts, PLAIN, REPLIES[batch][1] + DRAFT_LENGTH + 1, NO_STOP, batch=batch)
        plain[batch] = [reply.token_ids[: REPLIES[batch][1]] for reply in replies]
        script |= {tuple(text): reply.token_ids for text, reply in zip(texts, replies, strict=True)}
    paths = [make_path(text, reply[:80]) for text, reply in zip(prompts[8], plain[8], strict=True)]
    head = HeadDrafter(fitted_head(tiny_target, paths))
    drafters = {
        "eagle3": (head, None),
        **{str(tree): (head, tree) for tree in TREES},
        "model": (HeadDrafter(random_draft(tiny_target)), None),
        "model tree": (HeadDrafter(noisy_draft(tiny_target)), TREES[0]),
        "ngram": (NgramDrafter(), None),
        "scripted": (ScriptedDrafter(script, 2), None),
    }
    return drafters, prompts, plain


def test_float32_replies_are_the_plain_ones_over_20000_tokens(tiny_target, ways):
    """All kinds x batch sizes 1, 3 and 8, chains and trees."""
    drafters, prompts, plain = ways
    num_tokens, accepted = 0, dict.fromkeys(drafters, 0)
    for name, (drafter, tree) in drafters.items():
        for batch, (_, limit) in REPLIES.items():
            way = Speculation(drafter, DRAFT_LENGTH, tree=tree)
            replies = decode(tiny_target, prompts[batch], way, limit, NO_STOP, batch=batch)
            assert [reply.token_ids for reply in replies] == plain[batch], (name, batch)
            num_tokens += sum(len(reply.token_ids) for reply in replies)
            accepted[name] += sum(step.accepted for reply in replies for step in reply.steps)
    assert num_tokens >= 20_000
    assert all(number > 0 for name, number in accepted.items() if name != "model"), accepted


@pytest.fixture(scope="module")
def close_targets():
    """In bfloat16, run directly and through transformers' modules, whose rounding differs.

    An eighth of the tokens are all but equal to another eighth, so that rounding often decides.
    """
    targets = []
    for direct in (True, False):
        target = load_target(TargetSettings(model="tiny", dtype="bfloat16", device="cpu"))
        weight = target.model.get_output_embeddings().weight
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            noise = torch.randn(weight[::8].shape, generator=generator) * weight.float().std() * 0.01
            weight[1::8] = weight[::8] + noise.to(weight.dtype)
        targets.append(Target(target.model, target.tokenizer, target.facts, target.taps, direct))
    return targets


@pytest.mark.parametrize("tree", [None, *TREES], ids=str)
def test_bfloat16_replies_part_at_ties_only(close_targets, ways, tree):
    check = close_check(*close_targets, ways, tree)
    assert check["divergences"]
    assert {divergence["verdict"] for divergence in check["divergences"]} == {"tie"}
    assert check["verdict"] == "pass"


def test_a_shifted_logit_is_no_tie(close_targets, ways):
    def shifted(logits_BTV, proposal):
        logits_BTV[..., 7] += 3.0
        return verify_greedy(logits_BTV, proposal)

    check = close_check(*close_targets, ways, TREES[0], parts=Parts(verify_greedy=shifted))
    assert "bug" in {divergence["verdict"] for divergence in check["divergences"]}
    assert check["verdict"] == "fail"


def close_check(target, modules, ways, tree, **options):
    """Replies with drafts against the plain ones of the same weights in other operations."""
    prompts, head = ways[1][8], HeadDrafter(copy.deepcopy(ways[0]["eagle3"][0].head).to(torch.bfloat16))
    plain = decode(modules, prompts, PLAIN, 60, NO_STOP, batch=8)
    drafted = decode(target, prompts, Speculation(head, DRAFT_LENGTH, tree=tree, **options), 60, NO_STOP, batch=8)
    assert any(step.accepted for reply in drafted for step in reply.steps)
    tokens = [[reply.token_ids for reply in replies] for replies in (plain, drafted)]
    return identity_check(
        Rescorer(target), [str(i) for i in range(8)], prompts, *tokens, against="plain", draft_length=DRAFT_LENGTH,
        batch=8, shape="chain" if tree is None else "tree",
    )  # fmt: skip
