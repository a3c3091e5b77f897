"""Laws of verification, by exact enumeration: whatever was drafted, the output has the target's law."""

import itertools

import numpy as np
import pytest
import torch

from headstart.eval.enumeration import every_run
from headstart.eval.verify import RULES, Uniforms, invert, verify_blocks, verify_tokens, verify_tree
from headstart.heads.tree import Tree

SIZE = 3  # tokens of the toy vocabulary
CHAIN = 3


class Language:
    """A random law of the next token for every text over a toy vocabulary."""

    def __init__(self, seed, sharpness=1.5, longest=CHAIN + 1):
        generator = np.random.default_rng(seed)
        self.laws = {}
        for length in range(longest + 1):
            for text in itertools.product(range(SIZE), repeat=length):
                law = np.exp(sharpness * generator.standard_normal(SIZE))
                self.laws[text] = torch.tensor(law / law.sum())

    def law(self, text):
        return self.laws[tuple(text)]

    def probability(self, text, start=0):
        """Of a text, given its first `start` tokens."""
        return float(np.prod([float(self.law(text[:i])[text[i]]) for i in range(start, len(text))]))


def emitted_law(target, blocks, length):
    """Law of the first `length` tokens when the text goes on from each block by the target's own law."""
    law = dict.fromkeys(itertools.product(range(SIZE), repeat=length), 0.0)
    for probability, block in blocks:
        for text in law:
            if text[: len(block)] == tuple(block[:length]):
                law[text] += probability * target.probability(text, min(len(block), length))
    return law


def chain_blocks(rule, target, draft, sampled, num_drafts=CHAIN):
    """Every block one step can emit, over all drafts and all random decisions, with its probability."""
    for drafts in itertools.product(range(SIZE), repeat=num_drafts):
        places = [drafts[:k] for k in range(num_drafts + 1)]
        if sampled:
            chance_of_drafts = draft.probability(drafts)
            draft_KV = torch.stack([draft.law(place) for place in places[:-1]]) if num_drafts else None
        else:
            chosen = all(int(draft.law(place).argmax()) == token for place, token in zip(places, drafts, strict=False))
            chance_of_drafts, draft_KV = float(chosen), None
        if chance_of_drafts == 0:
            continue
        target_TV = torch.stack([target.law(place) for place in places])
        for block, probability in every_run(lambda c: rule(target_TV, draft_KV, list(drafts), c)):  # noqa: B023
            yield chance_of_drafts * probability, block


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_a_chain_step_emits_the_targets_law(name, sampled, seed):
    target, draft = Language(seed), Language(seed + 100)
    blocks = list(chain_blocks(RULES[name], target, draft, sampled))
    assert sum(probability for probability, _ in blocks) == pytest.approx(1, abs=1e-12)
    for text, probability in emitted_law(target, blocks, CHAIN + 1).items():
        assert probability == pytest.approx(target.probability(text), abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_filters_and_certainty_of_the_target_are_kept(name):
    target, draft = Language(1), Language(2)
    for law in target.laws.values():
        law[int(law.argmin())] = 0  # as top-k does
        law /= law.sum()
    target.laws[(0,)] = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    blocks = list(chain_blocks(RULES[name], target, draft, sampled=True))
    for text, probability in emitted_law(target, blocks, CHAIN + 1).items():
        assert probability == pytest.approx(target.probability(text), abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_a_draft_of_the_targets_own_law_is_kept_whole(name):
    target = Language(5)
    for probability, block in chain_blocks(RULES[name], target, target, sampled=True):
        assert len(block) == CHAIN + 1 or probability < 1e-12


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_blocks_keep_at_least_as_many_drafts_as_tokens_one_by_one(sampled):
    gains = []
    for seed in range(8):
        target, draft = Language(seed), Language(seed + 50)
        by_token, by_block = (
            sum(p * (len(block) - 1) for p, block in chain_blocks(rule, target, draft, sampled))
            for rule in (verify_tokens, verify_blocks)
        )
        gains.append(by_block - by_token)
    assert min(gains) > -1e-12
    if sampled:
        assert max(gains) > 0.01
    else:  # a one-hot law leaves nothing to trade between places
        assert max(gains) < 1e-12


def test_one_draft_is_judged_alike_by_both_rules():
    target, draft = Language(3), Language(4)
    laws = [
        emitted_law(target, list(chain_blocks(rule, target, draft, True, num_drafts=1)), 2)
        for rule in (verify_tokens, verify_blocks)
    ]
    assert laws[0] == pytest.approx(laws[1], abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_without_drafts_the_target_speaks(name):
    target_TV = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    found = {block[0]: p for block, p in every_run(lambda c: RULES[name](target_TV, None, [], c))}
    assert found == pytest.approx({0: 0.2, 1: 0.5, 2: 0.3})


@pytest.mark.parametrize("num_children", [1, 2])
def test_top_tokens_as_drafts_do_not_favour_themselves(num_children):
    """p = q = (0.51, 0.49): judging the top token by q, from which it was not drawn, would always keep it."""
    law_V = torch.tensor([0.51, 0.49], dtype=torch.float64)
    tree = Tree((-1, *[0] * num_children))
    tokens = [0, 0, 1][: num_children + 1]
    target_NV = law_V.expand(len(tokens), 2)
    share = {0: 0.0, 1: 0.0}
    for block, probability in every_run(lambda c: verify_tree(target_NV, tree, tokens, None, c)):
        share[block[0]] += probability
    assert share == pytest.approx({0: 0.51, 1: 0.49}, abs=1e-12)


TREES = [Tree((-1, 0, 0)), Tree((-1, 0, 0, 1, 1, 2)), Tree((-1, 0, 1, 2)), Tree((-1, 0, 0, 0, 2, 4)), Tree((-1,))]


def tree_drafts(tree, draft, sampled, known=(0,)):
    """Every way to draft a tree with its probability: token of each node, siblings without replacement."""
    node = len(known)
    if node == len(tree.parents):
        yield 1.0, list(known)
        return
    parent = tree.parents[node]
    law_V = draft.law(path_text(tree, known, parent)).clone()
    law_V[[known[i] for i in range(1, node) if tree.parents[i] == parent]] = 0
    law_V = law_V / law_V.sum()
    for token in range(SIZE):
        chance = float(law_V[token]) if sampled else float(int(law_V.argmax()) == token)
        if chance:
            for probability, tokens in tree_drafts(tree, draft, sampled, (*known, token)):
                yield chance * probability, tokens


def path_text(tree, tokens, node):
    """Tokens on the way from the root to a node, the root's own left out."""
    return () if node == 0 else (*path_text(tree, tokens, tree.parents[node]), tokens[node])


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.parents))
def test_a_tree_step_emits_the_targets_law(tree, sampled):
    target, draft = Language(7), Language(8)
    blocks = []
    for chance, tokens in tree_drafts(tree, draft, sampled):
        texts = [path_text(tree, tokens, node) for node in range(len(tokens))]
        target_NV = torch.stack([target.law(text) for text in texts])
        draft_NV = torch.stack([draft.law(text) for text in texts]) if sampled else None
        for block, probability in every_run(lambda c: verify_tree(target_NV, tree, tokens, draft_NV, c)):  # noqa: B023
            blocks.append((chance * probability, block))
    assert sum(probability for probability, _ in blocks) == pytest.approx(1, abs=1e-12)
    for text, probability in emitted_law(target, blocks, CHAIN + 1).items():
        assert probability == pytest.approx(target.probability(text), abs=1e-12)


def test_a_chain_is_a_tree():
    target, draft = Language(9), Language(10)
    tree = Tree((-1, 0, 1, 2))
    for drafts in itertools.product(range(SIZE), repeat=CHAIN):
        target_TV = torch.stack([target.law(drafts[:k]) for k in range(CHAIN + 1)])
        draft_TV = torch.stack([draft.law(drafts[:k]) for k in range(CHAIN + 1)])
        found = []
        for run in (
            lambda c: verify_tree(target_TV, tree, [0, *drafts], draft_TV, c),  # noqa: B023
            lambda c: verify_tokens(target_TV, draft_TV[:-1], list(drafts), c),  # noqa: B023
        ):
            law = {}
            for block, probability in every_run(run):
                law[tuple(block)] = law.get(tuple(block), 0.0) + probability
            found.append(law)
        assert found[0] == pytest.approx(found[1], abs=1e-12)


def test_numbers_fall_on_tokens_in_proportion_to_their_weight():
    weights_V = torch.tensor([0.0, 2.0, 0.0, 1.0, 5.0, 0.0], dtype=torch.float64)
    drawn = [invert(weights_V, (i + 0.5) / 8000) for i in range(8000)]
    assert np.bincount(drawn, minlength=6).tolist() == [0, 2000, 0, 1000, 5000, 0]
    assert invert(weights_V, 0.0) == 1
    assert invert(weights_V, 1 - 2**-53) == 4


def test_chance_from_uniform_numbers():
    chance = Uniforms(np.random.default_rng(0))
    assert all(chance.accept(1.0) for _ in range(100))
    assert not any(chance.accept(0.0) for _ in range(100))
    assert np.mean([chance.accept(0.3) for _ in range(20000)]) == pytest.approx(0.3, abs=0.015)
