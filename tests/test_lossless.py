"""Losslessness as a verdict: the tests see what they should, raise few false alarms, and catch every seeded fault."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.enumeration import Toy, ToyDecoder, plain_law
from headstart.eval.faults import FAULTS, STALE_CACHE, RejectedDrafter, StaleCache
from headstart.eval.gate import failures
from headstart.eval.heldout import Heldout
from headstart.eval.identity import Rescorer, identity_check, overall_verdict
from headstart.eval.law_tests import (
    LEVEL,
    MIN_EXPECTED,
    chi_square,
    chi_square_p,
    martingale,
    pool_cells,
    surprise,
)
from headstart.eval.lossless import (
    REST,
    Decoder,
    count_cells,
    expected_cells,
    first_tokens_check,
    martingale_check,
    num_wrong_ends,
)
from headstart.eval.measure import evaluate
from headstart.eval.proof import false_alarms, prove, replaced_cache
from headstart.eval.settings import EvalSettings
from headstart.eval.speculation import PLAIN, Speculation
from headstart.eval.toy_samples import long_replies
from headstart.heads.checkpoint import save_head
from headstart.heads.sampling import Sampling
from headstart.heads.settings import TargetSettings
from headstart.heads.store import read_json
from headstart.heads.target import Target, load_target
from tests.schema_forms import LOSSLESS
from tests.schema_rules import violations
from tests.small_decoding import NO_STOP, fitted_head, make_path, make_prompts

SETTINGS = EvalSettings(
    draft_lengths=[3], draft_length=3, live_batch=4, ngram=False, replicates=50, min_accept_len=0, lossless_samples=128,
    lossless_tokens=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12, 20, 9])
    replies = decode(tiny_target, prompts, PLAIN, 24, batch=4)
    return [make_path(p, r.token_ids, f"p{i}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]


@pytest.fixture(scope="module")
def head(tiny_target, recorded):
    return fitted_head(tiny_target, recorded)


def decoder(target, head, batch=8, **way):
    settings = {"drafter": HeadDrafter(head), "draft_length": 3, "sampling": Sampling(1.0), **way}
    return Decoder(target, Speculation(**settings), batch)


# The two tests.


def test_chi_square_p_values_are_the_tabulated_ones():
    for statistic, dof, p_value in ((3.841, 1, 0.05), (18.307, 10, 0.05), (15.137, 1, 1e-4), (0.0, 4, 1.0)):
        assert float(chi_square_p(statistic, dof)) == pytest.approx(p_value, rel=2e-3)
    assert float(chi_square_p(7.0, 0)) == 1.0


def test_cells_are_pooled_until_each_expects_enough():
    expected = np.array([0.0, 40.0, 1.0, 3.0, 2.5, 6.0, 0.5])
    pools = pool_cells(expected)
    assert pools.sum(1).tolist() == [1.0] * 7
    assert (expected @ pools >= MIN_EXPECTED).all()
    assert pool_cells(np.array([1.0, 2.0])).shape == (2, 1)  # too little for two pools
    statistic, dof = chi_square(expected, expected)
    assert (statistic, dof) == (0.0, pools.shape[1] - 1)


def draws(tilt, number=4000):
    """Random laws, and tokens drawn from them with their probabilities raised to a power."""
    generator = torch.Generator().manual_seed(3)
    law = torch.randn(number, 30, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return law, torch.multinomial(law**tilt, 1, generator=generator).squeeze(1)


def test_excess_surprise_has_mean_zero_and_the_stated_variance():
    law, _ = draws(1.0, number=5)
    excess, variance = (
        torch.stack(x) for x in zip(*(surprise(law, torch.full((5,), k)) for k in range(30)), strict=True)
    )
    mean = (law.T * excess).sum(0)
    torch.testing.assert_close(mean, torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close((law.T * excess**2).sum(0), variance[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("tilt", "caught"), [(1.0, False), (1.15, True), (0.85, True)])
def test_martingale_test_sees_tokens_that_are_too_likely_or_too_unlikely(tilt, caught):
    excess, variance = surprise(*draws(tilt))
    z, p_value = martingale(float(excess.sum()), float(variance.sum()))
    assert (p_value < LEVEL) == caught
    assert not caught or (z < 0) == (tilt > 1)


def test_an_impossible_token_is_infinitely_surprising_and_certainty_not_at_all():
    law = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    excess, variance = surprise(law, torch.tensor([2, 1]))
    assert excess.tolist() == [float("inf"), 0.0]
    assert variance[1] == 0
    assert martingale(0.0, 0.0)[1] == 1.0


def test_cells_hold_all_the_mass_and_every_reply_falls_into_one():
    toy, num_samples = Toy.random(6, seed=5), 500
    law = plain_law(toy.target_VV, Sampling(1.0))
    cells = expected_cells(lambda seqs: law[[s[-1] if s else 0 for s in seqs]], num_samples, 3, stop_ids=[2])
    assert sum(cells.values()) == pytest.approx(1.0)
    assert any(REST in cell for cell in cells)
    assert len({len(cell) for cell in cells}) > 1  # frequent sequences are told apart further than rare ones
    for cell, mass in cells.items():
        if REST not in cell:
            steps = zip((0, *cell), cell, strict=False)
            assert mass == pytest.approx(float(torch.stack([law[a, b] for a, b in steps]).prod()))
    decoder = ToyDecoder(toy, stop_ids=frozenset([2]))
    replies = [row[1 : (list(row[1:]) + [2]).index(2) + 2] for row in long_replies(decoder, 3, num_samples, 0).tolist()]
    observed = count_cells([reply[:3] for reply in replies], cells)
    assert observed.sum() == num_samples
    expected = num_samples * np.array(list(cells.values()))
    assert float(chi_square_p(*chi_square(observed, expected))) > LEVEL
    assert float(chi_square_p(*chi_square(np.roll(observed, 1), expected))) < LEVEL


# Alarms and faults.


def test_a_thousand_clean_runs_raise_at_most_four_alarms():
    p_values = false_alarms(1000)
    assert sum(int((p < LEVEL).sum()) for p in p_values.values()) <= 4
    for name, p in p_values.items():
        assert len(p) == 1000
        assert 0.45 < p.mean() < 0.55, name  # of p-values that mean what they say, half lie below 0.5
        assert 0.002 <= (p < 0.01).mean() <= 0.02, name


@pytest.fixture(scope="module")
def proof():
    return prove()


def test_every_seeded_fault_is_caught_and_no_sound_decoder_is(proof):
    faults, problems = proof
    assert problems == []
    assert {fault["name"] for fault in faults} == {case.name for case in FAULTS} | {STALE_CACHE}
    on_tiny = {fault["name"] for fault in faults if fault["target"] == "tiny"}
    assert {fault["name"] for fault in faults} - on_tiny == {"draft_law_lost"}  # its output is right
    assert all(fault["stands_for"] for fault in faults)


def test_wrong_laws_are_caught_on_the_toy_too(proof):
    faults = {fault["name"]: fault for fault in proof[0]}
    for name, fault in faults.items():
        caught = {*fault["also_caught_by"], f"{fault['caught_by']} on {fault['target']}"}
        if name == "draft_law_lost":  # the output is right: only the drafts that it wastes give it away
            assert fault["max_difference"] < 1e-12
            assert fault["acceptance_difference"] > 0.05
        elif name != STALE_CACHE:
            assert fault["max_difference"] > 1e-3
            assert fault["p_value"] < LEVEL, name
            assert {"enumeration on toy", "first_tokens on toy"} <= caught, name


def test_the_stale_cache_is_wrong_behind_rejected_drafts_only(tiny_target):
    prompts = [list(range(10 + i, 42 + i)) for i in range(2)]
    plain = decode(tiny_target, prompts, PLAIN, 16, NO_STOP, batch=2)
    with replaced_cache(tiny_target, StaleCache):
        without = decode(tiny_target, prompts, PLAIN, 16, NO_STOP, batch=2)
        drafted = decode(tiny_target, prompts, Speculation(RejectedDrafter(), 2), 16, NO_STOP, batch=2)
    assert [r.token_ids for r in without] == [r.token_ids for r in plain]
    assert [r.token_ids for r in drafted] != [r.token_ids for r in plain]
    sound = decode(tiny_target, prompts, Speculation(RejectedDrafter(), 2), 16, NO_STOP, batch=2)
    assert [r.token_ids for r in sound] == [r.token_ids for r in plain]


# The real decoder.


@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "greedy"},
        {"draft": "sampled", "rule": "blocks"},
        {"draft": "sampled", "sampling": Sampling(0.8, top_k=40, top_p=0.9)},
        {"drafter": None, "draft_length": 0},
    ],
    ids=str,
)
def test_sampled_replies_follow_the_targets_law(tiny_target, head, settings):
    sound = decoder(tiny_target, head, **settings)
    prompts = make_prompts(tiny_target, [6, 9])
    first = first_tokens_check(dataclasses.replace(sound, batch=32), prompts, 600)
    names = [str(i) for i in range(24)]
    long = martingale_check(sound, names, prompts * 12, 40)
    for check in (first, long):
        assert check["verdict"] == "pass"
        assert check["p_value"] >= LEVEL
    assert first["dof"] > 5
    assert long["num_impossible"] == 0
    assert long["num_tokens"] > 300


def keeps_every_draft(target_TV, draft_KV, drafts, chance):
    return [*drafts, chance.draw(target_TV[len(drafts)])]


@pytest.mark.parametrize("draft", ["greedy", "sampled"])
def test_a_rule_that_keeps_every_draft_is_caught_on_the_real_decoder(tiny_target, head, draft):
    wrong = decoder(tiny_target, head, draft=draft, rule=keeps_every_draft)
    prompts = make_prompts(tiny_target, [6, 9])
    checks = [
        first_tokens_check(dataclasses.replace(wrong, batch=32), prompts, 600),
        martingale_check(wrong, [str(i) for i in range(24)], prompts * 12, 40),
    ]
    for check in checks:
        assert check["verdict"] == "fail", check
        assert check["rule"] == "keeps_every_draft"
    assert overall_verdict(checks) == "lossy"


def test_a_token_that_the_filter_removes_is_impossible(tiny_target, head):
    narrow = decoder(tiny_target, head, sampling=Sampling(1.0, top_k=3), rule=keeps_every_draft, draft="sampled")
    check = martingale_check(narrow, ["a", "b"], make_prompts(tiny_target, [6, 9]), 20)
    assert check["num_impossible"] > 0
    assert (check["verdict"], check["p_value"]) == ("fail", 0.0)


def test_the_certificate_of_sampled_replies_is_conclusive(tiny_target, recorded, head, tmp_path):
    sampling = Sampling(0.9, top_p=0.95)
    sampled = [dataclasses.replace(path, sampling=sampling.to_dict()) for path in recorded]
    save_head(tmp_path, head, step=1)
    told: list[str] = []
    evaluate(
        lambda dtype: tiny_target,
        tmp_path,
        Heldout(sampled),
        SETTINGS,
        tmp_path / "eval",
        parts=["lossless"],
        tell=told.append,
    )
    text = (tmp_path / "eval" / "lossless.json").read_text()
    content = json.loads(text)
    assert violations(content, LOSSLESS) == []
    assert content["verdict"] == "lossless"
    statistical = [check for check in content["checks"] if check["name"] in ("first_tokens", "martingale")]
    assert {(check["name"], check["draft"]) for check in statistical} == {
        (name, draft) for name in ("first_tokens", "martingale") for draft in ("greedy", "sampled")
    }
    assert all(check["sampler"] == sampling.to_dict() and check["level"] == LEVEL for check in statistical)
    enumerated = [check for check in content["checks"] if check["name"] == "enumeration"]
    assert {check["shape"] for check in enumerated} == {"chain", "tree"}
    assert all(check["num_tokens"] == 0 for check in enumerated)  # a toy says nothing about this head's replies
    (identity,) = [check for check in content["checks"] if check["name"] == "greedy_identity"]
    assert (identity["shape"], identity["draft_length"], identity["verdict"]) == ("tree", 3, "pass")
    assert identity["num_tokens"] > 20
    assert "seeded faults" not in told[-1]
    assert "enumeration: " in told[-1]
    assert "eagle3, tree 3-2-1 (15 nodes)" in told[-1]


def test_replies_that_do_not_end_at_their_first_stop_token_are_seen(tiny_target, head):
    stops = tuple(tiny_target.facts.stop_ids)
    sound = decoder(tiny_target, head)
    for reply, wrong in (([5, 6, 7, 8], 0), ([5, *stops[:1]], 0), ([5, *stops[:1], 6, 7], 1), ([5, 6], 1)):
        assert num_wrong_ends(sound, [[1, 2]], [reply], 4) == wrong


# Cases.


def test_greedy_replies_to_a_hundred_prompts_are_the_plain_ones(tiny_target, head):
    """In float32: exact."""
    prompts = make_prompts(tiny_target, [5 + i % 30 for i in range(100)], seed=8)
    plain = decode(tiny_target, prompts, PLAIN, 12, batch=8)
    drafted = decode(tiny_target, prompts, Speculation(HeadDrafter(head), 3), 12, batch=8)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]


def test_a_forced_near_tie_is_listed_as_a_tie_and_another_token_as_a_bug():
    """In bfloat16: two tokens with the same output row; taking the other one is a tie, taking a third is none."""
    target = load_target(TargetSettings(model="tiny", dtype="bfloat16", device="cpu"))
    prompt = make_prompts(target, [12], seed=2)[0]
    best = decode(target, [prompt], PLAIN, 1, NO_STOP)[0].token_ids[0]
    twin = best + 1 if best + 1 < target.facts.num_tokens else best - 1
    weight = target.model.get_output_embeddings().weight
    with torch.no_grad():
        weight[twin] = weight[best]
    target = Target(target.model, target.tokenizer, target.facts, target.taps)
    plain = decode(target, [prompt], PLAIN, 4, NO_STOP)[0].token_ids
    assert plain[0] in (best, twin)
    other = best if plain[0] == twin else twin
    third = next(token for token in range(5, 100) if token not in (best, twin))
    verdicts = {}
    for token in (other, third):
        check = identity_check(
            Rescorer(target), ["p"], [prompt], [plain], [[token, *plain[1:]]], against="plain", draft_length=3, batch=1
        )
        (divergence,) = check["divergences"]
        verdicts[token] = divergence["verdict"], check["verdict"]
        assert divergence["position"] == 0
        assert (divergence["gap"] == 0) == (token == other)
    assert verdicts == {other: ("tie", "pass"), third: ("bug", "fail")}


def test_a_ruined_draft_is_lossless_and_below_the_acceptance_floor(tiny_target, recorded, head, tmp_path):
    """Verification repairs everything, so only acceptance shows that the draft's rows were shuffled."""

    def measured(folder):
        folder.mkdir()
        save_head(folder, head, step=1)
        evaluate(
            lambda dtype: tiny_target,
            folder,
            Heldout(recorded),
            SETTINGS,
            folder / "eval",
            parts=["live"],
            tell=lambda line: None,
        )
        evals = {name: read_json(folder / "eval" / f"{name}.json") for name in ("acceptance", "lossless")}
        return {**evals, "speed": None}

    sound = measured(tmp_path / "sound")
    rows = [r for r in sound["acceptance"]["rows"] if r["source"] == "offline" and r["route"] == "all"]
    floor = 1 + 0.5 * (rows[0]["accept_len"]["value"] - 1)
    assert floor > 1.1
    weight = dict(head.named_parameters())["lm_head.weight"]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))])
    ruined = measured(tmp_path / "ruined")
    with torch.no_grad():
        weight.copy_(kept)
    gate = dataclasses.replace(SETTINGS, min_accept_len=floor)
    assert failures(sound, gate) == []
    assert ruined["lossless"]["verdict"] == "lossless"
    assert any("min_accept_len" in problem for problem in failures(ruined, gate))
