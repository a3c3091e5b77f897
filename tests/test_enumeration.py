"""Laws of the verification rules, exact on toy targets: what is emitted is the target's own law."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from headstart.eval.drafters import Proposal
from headstart.eval.enumeration import (
    EXACT,
    SAMPLERS,
    Branch,
    DynamicTreeDecoder,
    Toy,
    ToyDecoder,
    TreeDecoder,
    compare,
    every_run,
    largest_difference,
    plain_law,
    target_law,
)
from headstart.eval.faults import PlainRule
from headstart.eval.law_tests import LEVEL, chi_square, chi_square_p
from headstart.eval.parts import Parts
from headstart.eval.replies import Reply
from headstart.eval.verify import RULES, Uniforms, verify_tokens
from headstart.heads.sampling import Sampling, filtered_probabilities

DRAFTS = ("greedy", "sampled")
KINDS = {
    **{name: (ToyDecoder, rule) for name, rule in RULES.items()},
    "tree": (TreeDecoder, verify_tokens),
    "dynamic_tree": (DynamicTreeDecoder, verify_tokens),
}
TOYS = {"whole": Toy.random(4), "mapped": Toy.random(4, draft_size=3, seed=1), "flat": Toy.random(3, seed=2)}


def toy_of(p, q, draft_ids=None):
    """A toy with one law after every token."""
    ids = torch.arange(len(p)) if draft_ids is None else torch.tensor(draft_ids)
    target, draft = (torch.tensor(x, dtype=torch.float64).log().repeat(len(p), 1) for x in (p, q))
    return Toy(target, draft, ids)


def test_every_way_through_a_procedure_is_taken_once():
    def procedure(chance):
        first = chance.draw(torch.tensor([1.0, 0.0, 3.0]))
        return first, chance.accept(0.3) if first else None

    ways = dict(every_run(procedure))
    assert ways == pytest.approx({(0, None): 0.25, (2, True): 0.225, (2, False): 0.525})


def test_a_coin_or_a_draw_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match="nan"):
        Branch().accept(float("nan"))
    for weights in ([0.0, 0.0], [0.5, -0.1], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="weights"):
            Branch().draw(torch.tensor(weights))


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_the_filters_are_the_plainly_written_ones(sampling):
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 2
    torch.testing.assert_close(
        filtered_probabilities(logits, sampling), plain_law(logits, sampling), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
@pytest.mark.parametrize(
    ("kind", "draft"), [way for way in product(KINDS, DRAFTS) if way != ("dynamic_tree", "sampled")]
)
@pytest.mark.parametrize("toy", TOYS)
def test_the_law_of_what_is_emitted_is_the_targets_own(toy, kind, draft, sampling):
    decoder, rule = KINDS[kind]
    found = compare(decoder(TOYS[toy], rule, sampling, draft, draft_length=2, stop_ids=frozenset([1])))
    assert found.law <= EXACT
    assert found.acceptance <= EXACT
    assert found.num_sequences > 1


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("rule", RULES)
def test_draft_length_3_is_exact_over_three_blocks(rule, draft):
    decoder = ToyDecoder(Toy.random(3, draft_size=2, seed=3), RULES[rule], Sampling(0.8), draft, draft_length=3)
    assert compare(decoder, num_tokens=6).exact


@pytest.mark.parametrize("sampling", SAMPLERS[:5], ids=str)
@pytest.mark.parametrize("draft", ["greedy", "sampled"])
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_stops_by_confidence_is_exact(rule, draft, sampling):
    toy = TOYS["mapped"]
    decoder = ToyDecoder(toy, RULES[rule], sampling, draft, draft_length=3, stop_below=0.45)
    lengths = [{len(block) for block in decoder.step_law(last, 3)} for last in range(4)]
    assert len({max(held) for held in lengths}) > 1  # some drafts go on further than others
    found = compare(decoder, num_tokens=4)
    assert found.law <= EXACT
    assert found.acceptance <= EXACT


@pytest.mark.parametrize("sampling", SAMPLERS, ids=str)
def test_the_rule_in_three_plain_lines_is_the_same_rule(sampling):
    plain, served = (ToyDecoder(TOYS["mapped"], rule, sampling) for rule in (PlainRule(), verify_tokens))
    for last in range(4):
        assert largest_difference(plain.step_law(last, 2), served.step_law(last, 2)) < 1e-14


def test_greedy_drafts_are_judged_as_certain():
    """p = q = (0.51, 0.49), the likeliest token drafted, or both in a tree."""
    toy = toy_of((0.51, 0.49), (0.51, 0.49))
    trees = (kind(toy, draft="greedy") for kind in (TreeDecoder, DynamicTreeDecoder))
    for decoder in (ToyDecoder(toy, draft="greedy", draft_length=1), *trees):
        assert decoder.emitted_law(0, 1) == pytest.approx({(0,): 0.51, (1,): 0.49}, abs=1e-15)
        assert compare(decoder).exact

    def judged_as_sampled(target_TV, draft_KV, drafts, chance):
        return verify_tokens(target_TV, toy.draft_law(1.0)[: len(drafts)], drafts, chance)

    wrong = ToyDecoder(toy, judged_as_sampled, draft="greedy", draft_length=1)
    assert wrong.emitted_law(0, 1) == pytest.approx({(0,): 1.0})


def test_looking_at_the_token_before_choosing_the_draft_length_favours_it():
    """The counter-example of DSpark's appendix A: p = (0.7, 0.3), q = (0.5, 0.5), token 1 is not verified."""

    def stops_before_token_one(proposal, sampling):
        drafts = proposal.tokens_BK[0].tolist()
        return Proposal(proposal.tokens_BK, [(drafts + [1]).index(1)], proposal.law_BKV)

    parts = Parts(told=stops_before_token_one)
    wrong = ToyDecoder(toy_of((0.7, 0.3), (0.5, 0.5)), draft_length=1, parts=parts)
    assert wrong.emitted_law(0, 1) == pytest.approx({(0,): 0.85, (1,): 0.15})


def test_the_target_alone_has_the_law_that_is_compared_with():
    toy = toy_of((0.5, 0.3, 0.2), (0.2, 0.2, 0.6))
    law = target_law(toy, Sampling(1.0), 0, 2, frozenset([2]))
    assert law == pytest.approx(
        {(2,): 0.2, (0, 0): 0.25, (0, 1): 0.15, (0, 2): 0.1, (1, 0): 0.15, (1, 1): 0.09, (1, 2): 0.06}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_follow_the_enumerated_law(kind):
    decoder_kind, rule = KINDS[kind]
    draft = "greedy" if kind == "dynamic_tree" else "sampled"
    decoder = decoder_kind(TOYS["mapped"], rule, draft=draft, draft_length=2, stop_ids=frozenset([1]))
    chance = Uniforms(np.random.default_rng(5))
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(2000):
        reply = Reply()
        while not reply.finish_reason:
            last = reply.token_ids[-1] if reply.token_ids else 0
            decoder.append(reply, decoder.step(last, 2, chance), 2, 3)
        counts[tuple(reply.token_ids)] += 1
    law = target_law(decoder.toy, decoder.sampling, 0, 3, decoder.stop_ids)
    assert set(counts) <= set(law)
    observed, expected = np.array([counts[tokens] for tokens in law]), 2000 * np.array(list(law.values()))
    assert float(chi_square_p(*chi_square(observed, expected))) > LEVEL
