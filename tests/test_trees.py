"""Laws of trees of drafts: their shape, what a node sees, the replies, the counts, and acceptance computed offline."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from headstart.eval.acceptance import count_replies, reply_acceptance
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter, NgramDrafter
from headstart.eval.replies import live_counts
from headstart.eval.speculation import PLAIN, Speculation
from headstart.eval.subject import read_batches
from headstart.eval.target_law import TargetLaw
from headstart.eval.tree_acceptance import tree_acceptance
from headstart.eval.tree_drafts import DynamicDrafts, DynamicTree, likeliest
from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling
from headstart.heads.target import Target
from headstart.heads.tree import Tree
from tests.small_decoding import NO_STOP, fitted_head, make_path, make_prompts
from tests.test_sampled_decode import assert_law

GREEDY = Sampling()
NUM_PROMPTS = 96
NUM_NEW = 20
NUM_TOKENS = 32
BRANCHING, UNEVEN = Tree.branching(3, 2, 1), Tree((-1, 0, 0, 0, 1, 1, 3, 4, 6))
STATIC = [BRANCHING, UNEVEN, Tree.branching(1, 1, 3)]
DYNAMIC = DynamicTree(4, 3, 8)
SHAPES = [*STATIC, DYNAMIC]
WAYS = [(UNEVEN, "greedy"), (UNEVEN, "sampled"), (DYNAMIC, "greedy")]
SINGLE = [
    (Tree.branching(1, 1, 1, 1), "greedy"),
    (Tree.branching(1, 1, 1, 1), "sampled"),
    (DynamicTree(4, 1, 4), "greedy"),
]
NAMES = [f"p{i}" for i in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def target(tiny_target):
    """With few tokens, so that drafts are right now and then."""
    facts = replace(tiny_target.facts, num_tokens=NUM_TOKENS)
    return Target(tiny_target.model, tiny_target.tokenizer, facts, tiny_target.taps)


@pytest.fixture(scope="module")
def prompts(target):
    return make_prompts(target, np.random.default_rng(0).integers(4, 20, size=NUM_PROMPTS))


@pytest.fixture(scope="module")
def head(target, prompts):
    return fitted_head(target, record(target, prompts[:32], Sampling(0.7), "fit"), steps=60)


def run(target, prompts, drafter, shape, sampling=GREEDY, seed=0, **options):
    way = Speculation(drafter, shape.depth if shape else 0, sampling, tree=shape, **options)
    return decode(target, prompts, way, NUM_NEW, NO_STOP, batch=32, seed=seed, request_ids=NAMES[: len(prompts)])


def record(target, prompts, sampling, occasion):
    """Replies of plain decoding, with random numbers of their own."""
    replies = run(target, prompts, None, None, sampling, zlib.crc32(occasion.encode()))
    return [make_path(*row, sampling) for row in zip(prompts, [r.token_ids for r in replies], NAMES, strict=False)]


def tokens_of(replies):
    return [reply.token_ids for reply in replies]


# Shapes.


def test_a_tree_knows_its_shape():
    assert BRANCHING.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert Tree.branching(1, 1) == Tree((-1, 0, 1))
    assert UNEVEN.depths == (0, 1, 1, 1, 2, 2, 2, 3, 3)
    assert UNEVEN.heights == (3, 2, 0, 2, 1, 0, 1, 0, 0)
    assert UNEVEN.cut(1) == Tree((-1, 0, 0, 0))
    assert UNEVEN.cut(3) is UNEVEN
    assert UNEVEN.cut(0).num_drafts == 0
    assert UNEVEN.sees_NN[7].nonzero()[0].tolist() == [0, 1, 4, 7]
    assert UNEVEN.path([9, 5, 6, 7, 5, 6, 8, 1, 2], [7, 8, 2]) == [0, 3, 6, 8]
    assert [str(tree) for tree in (BRANCHING, UNEVEN)] == ["tree 3-2-1 (15 nodes)", "tree 3 deep (8 nodes)"]


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, 3, 1), (-1, -1), (-1, 0, 1, 0)])
def test_what_is_no_tree_in_order_of_depth_is_refused(parents):
    with pytest.raises(ValueError, match="expected"):
        Tree(parents)


def test_of_equal_logits_the_smaller_index_is_likelier():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randint(0, 4, (3, 2, 9), generator=generator).float()
        expected = logits.sort(dim=-1, descending=True, stable=True).indices
        for number in (1, 3, 9):
            assert torch.equal(likeliest(logits, number), expected[..., :number])


# The target.


def phi_target(target):
    """A target that runs through the modules of transformers."""
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    facts = replace(target.facts, num_layers=2)
    return Target(Phi3ForCausalLM(config).eval(), target.tokenizer, facts, [0, 1, 2])


@pytest.mark.parametrize("kind", ["direct", "modules"])
def test_a_node_has_the_states_of_its_path(tiny_target, kind):
    """Two rows with other trees and lengths; then kept nodes are moved together, and the text goes on from there."""
    target = phi_target(tiny_target) if kind == "modules" else tiny_target
    texts = make_prompts(target, [40, 7])
    trees, generator = [UNEVEN, Tree((-1, 0, 0, 1))], np.random.default_rng(1)
    nodes = [
        [text[-1], *generator.choice(400, tree.num_drafts, replace=False)]
        for text, tree in zip(texts, trees, strict=True)
    ]
    kept = [[0, 3, 6, 8], [0, 2]]
    cache = target.new_cache(2, 80)
    length_B, width = torch.tensor([39, 6]), len(UNEVEN.parents)

    def fed(rows):
        padded = np.zeros((2, max(len(row) for row in rows)), dtype=np.int64)
        for b, row in enumerate(rows):
            padded[b, : len(row)] = row
        return torch.from_numpy(padded)

    target.forward(fed([text[:-1] for text in texts]), torch.zeros(2, dtype=torch.int64), cache, length_B)
    sizes_B = torch.tensor([width, 4])
    found = target.forward(fed(nodes), length_B, cache, sizes_B, trees=trees)
    source_BK = torch.tensor([[39 + 3, 39 + 6, 39 + 8], [6 + 2, 6, 6]])
    cache.move_slots(source_BK, length_B + 1)
    after = target.forward(fed([[11, 12], [13]]), length_B + torch.tensor([4, 2]), cache, torch.tensor([2, 1]))
    for b, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        for node in range(len(tree.parents)):
            path = [nodes[b][n] for n in tree.sees_NN[node].nonzero()[0]]
            expected = target.read([np.array([*text[:-1], *path, 0])])[0]
            torch.testing.assert_close(found.final[b, node], expected.final[-1], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.taps[b, node], expected.taps[-1], rtol=1e-4, atol=1e-4)
        path = [nodes[b][n] for n in kept[b]]
        more = [[11, 12], [13]][b]
        expected = target.read([np.array([*text[:-1], *path, *more, 0])])[0].final
        torch.testing.assert_close(after.final[b, : len(more)], expected[-len(more) :], rtol=1e-4, atol=1e-4)


# Replies.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_replies_are_the_plain_ones(target, prompts, head, shape):
    prompts = prompts[:32]
    plain = run(target, prompts, None, None)
    chain = decode(target, prompts, Speculation(HeadDrafter(head), shape.depth), NUM_NEW, NO_STOP, batch=32)
    for options in ({}, {"whole_blocks": True}, {"sampling": Sampling(0.7, top_k=1)}):
        drafted = run(target, prompts, HeadDrafter(head), shape, **options)
        assert tokens_of(drafted) == tokens_of(plain)
    steps, chain_steps = (sum(len(reply.steps) for reply in replies) for replies in (drafted, chain))
    assert steps < chain_steps if shape == BRANCHING else steps <= chain_steps


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("shape", "draft"), SINGLE, ids=str)
def test_a_tree_of_single_children_is_the_chain(target, prompts, head, sampling, shape, draft):
    """The very replies and steps: same drafts, same random numbers."""
    prompts = prompts[:32]
    options = {"sampling": sampling, "draft": draft, "whole_blocks": True}
    way = Speculation(HeadDrafter(head), 4, **options)
    chain = decode(target, prompts, way, NUM_NEW, NO_STOP, batch=32, request_ids=NAMES)
    tree = run(target, prompts, HeadDrafter(head), shape, **options)
    assert tokens_of(tree) == tokens_of(chain)
    assert [r.steps for r in tree] == [r.steps for r in chain]


@pytest.mark.parametrize(("shape", "draft"), WAYS, ids=str)
def test_batch_and_order_change_no_reply_and_no_count(target, prompts, head, shape, draft):
    stops = list(range(0, NUM_TOKENS, 9))  # rows finish at different times

    def replies(order, batch):
        way = Speculation(HeadDrafter(head), 3, Sampling(1.0), draft, tree=shape)
        texts, ids = [prompts[i] for i in order], [NAMES[i] for i in order]
        found = decode(target, texts, way, 25, stops, batch=batch, seed=3, request_ids=ids)
        return {i: (reply.token_ids, reply.steps) for i, reply in zip(order, found, strict=True)}

    alone = replies([0, 1, 2, 3], 1)
    assert alone == replies([0, 1, 2, 3], 4) == replies([3, 1, 0, 2], 3)
    assert len({len(tokens) for tokens, _ in alone.values()}) > 1


@pytest.mark.parametrize(("shape", "draft"), WAYS, ids=str)
def test_replies_have_the_targets_law(target, prompts, head, shape, draft):
    assert_law(target, HeadDrafter(head), prompts[0], draft=draft, draft_length=3, tree=shape)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_token_and_context_limits_cut_the_tree(target, head, shape, max_new_tokens):
    context = target.facts.max_position
    long = make_prompts(target, [context - max_new_tokens, 9, 30])
    plain = decode(target, long, PLAIN, 12, NO_STOP)
    assert [len(tokens) for tokens in tokens_of(plain)] == [max_new_tokens, 12, 12]
    way = Speculation(HeadDrafter(head), 8, tree=shape)
    drafted = decode(target, long, replace(way, whole_blocks=True), 12, NO_STOP, batch=3)
    assert tokens_of(drafted) == tokens_of(plain)
    short = decode(target, long[1:], way, max_new_tokens, NO_STOP, batch=2)
    assert tokens_of(short) == [tokens[:max_new_tokens] for tokens in tokens_of(plain[1:])]
    assert all(step.whole_drafted <= max_new_tokens - 1 for reply in short for step in reply.steps)


def test_what_cannot_draft_trees_says_so(target, prompts, head):
    with pytest.raises(WrongInput, match="LookupSession"):
        run(target, prompts[:1], NgramDrafter(), BRANCHING)
    with pytest.raises(WrongInput, match="stop_below"):
        run(target, prompts[:1], HeadDrafter(head, stop_below=0.5), BRANCHING)
    with pytest.raises(WrongInput, match="at most 16"):
        run(target, prompts[:1], HeadDrafter(head), Tree.branching(17))
    for options in ({"rule": "blocks"}, {"draft": "sampled"}):
        with pytest.raises(ValueError, match="tree"):
            run(target, prompts[:1], HeadDrafter(head), DynamicTree(2, 2, 3), Sampling(1.0), **options)


def test_the_dynamic_tree_keeps_the_most_confident_nodes():
    """Against EAGLE-2's words, with a table of laws: the best of what grew from the best of every depth."""
    law_VV = torch.randn(6, 6, generator=torch.Generator().manual_seed(2)).double() * 2
    growth, logits = DynamicDrafts(DynamicTree(3, 2, 5), [3, 1]), law_VV[[0, 1]][:, None]
    while (level := growth(logits)) is not None:
        logits = law_VV[level.index_BW]
    found = growth.proposal(torch.arange(6), 6)
    assert found.trees[1].parents == (-1, 0, 0)
    grown, beam = [], [((), 1.0)]
    for _ in range(3):
        level = []
        for path, confidence in beam:
            law_V = law_VV[path[-1] if path else 0].softmax(-1)
            best = law_V.topk(2)
            level += [((*path, int(i)), confidence * float(p)) for p, i in zip(*best, strict=True)]
        beam = sorted(level, key=lambda node: -node[1])[:2]
        grown += level
    expected = {path for path, _ in sorted(grown, key=lambda node: -node[1])[:5]}
    tree, tokens = found.trees[0], [-1, *found.tokens_BK[0].tolist()]
    paths = {tuple(tokens[n] for n in tree.sees_NN[node].nonzero()[0][1:]) for node in range(1, 6)}
    assert paths == expected


# Offline.


def offline(target, head, paths, tree, sampling):
    replies = reply_acceptance(head, read_batches(target, head, paths), tree.depth, law=TargetLaw(target, sampling))
    return count_replies(tree_acceptance(replies, tree), tree.depth)


def live(target, prompts, head, tree, sampling, seed=0):
    replies = run(target, prompts, HeadDrafter(head), tree, sampling, seed)
    return replies, live_counts(replies, NAMES[: len(prompts)], ["chat"] * len(prompts), tree.depth)


@pytest.mark.parametrize("tree", STATIC, ids=str)
def test_greedy_replies_take_the_very_steps_computed_offline(target, prompts, head, tree):
    prompts = prompts[:32]
    paths = record(target, prompts, Sampling(), "greedy")
    replies, counted = live(target, prompts, head, tree, Sampling())
    assert tokens_of(replies) == [path.token_N[path.num_prompt_tokens :].tolist() for path in paths]
    for a, b in zip(offline(target, head, paths, tree, Sampling()), counted, strict=True):
        assert a.num_tokens == b.num_tokens
        assert a.num_steps == b.num_steps
        assert a.num_short_steps == b.num_short_steps
        assert np.array_equal(a.histogram, b.histogram)
        assert np.array_equal(a.judged_K, b.judged_K)


@pytest.mark.parametrize("tree", STATIC, ids=str)
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7), Sampling(1.2, top_p=0.8)], ids=str)
def test_sampled_replies_take_as_many_steps_as_computed_offline(target, prompts, head, tree, sampling):
    cell = f"{tree}/{sampling}"
    expected = offline(target, head, record(target, prompts, sampling, cell), tree, sampling)
    _, counted = live(target, prompts, head, tree, sampling, zlib.crc32(f"live {cell}".encode()))
    difference = np.array([a.num_steps - b.num_steps for a, b in zip(counted, expected, strict=True)])
    assert abs(difference.mean() / (difference.std(ddof=1) / len(difference) ** 0.5)) < 3.5


def test_a_chain_offline_is_the_tree_of_single_children(target, prompts, head):
    paths = record(target, prompts[:24], Sampling(1.0), "chain")
    chain = count_replies(reply_acceptance(head, read_batches(target, head, paths), 4), 4)
    for a, b in zip(offline(target, head, paths, Tree.branching(1, 1, 1, 1), Sampling(1.0)), chain, strict=True):
        assert a.num_steps == b.num_steps
        assert a.num_out_of_vocab == b.num_out_of_vocab
        assert np.array_equal(a.judged_K, b.judged_K)


def test_paths_of_another_setting_are_refused(target, prompts, head):
    paths = record(target, prompts[:2], Sampling(0.7), "refused")
    with pytest.raises(WrongInput, match=r"0\.7"):
        offline(target, head, paths, BRANCHING, Sampling())
