"""Seeded faults: wrong decoders that look right, each of which the losslessness battery has to catch.

A fault is the reference decoder of eval/enumeration.py with one part replaced, as small as the bug it stands for, or a
wrong cache under the real decoder. `prove` runs the battery over all of them and over sound decoders. A fault that
nothing catches, or a sound decoder that something catches, is a failure of the battery.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.eval.decode import Reply, add_block, decode
from headstart.eval.drafters import Drafter, Proposal
from headstart.eval.enumeration import Toy, ToyDecoder, TreeDecoder, compare, plain_law
from headstart.eval.identity import Rescorer, identity_check
from headstart.eval.law_tests import LEVEL
from headstart.eval.toy_samples import first_tokens_p, martingale_p
from headstart.eval.verify import Chance, Tree, verify_tokens
from headstart.heads.cache import LENGTH_STEP, PositionCache
from headstart.heads.sampling import Sampling
from headstart.heads.target import States, Target

CACHE_TOKENS = 24  # tokens of a reply in the check of the cache


class PlainRule(ToyDecoder):
    """The token-wise rule in its three parts, one line each: sound, and what the faulty rules below are made from."""

    def acceptance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        return min(1.0, float(p_V[token] / q_V[token]))

    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return (p_V - q_V).clamp_min(0)

    def bonus(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return p_V

    def verify(self, target_TV: Tensor, draft_KV: Tensor | None, drafts: Sequence[int], chance: Chance) -> list[int]:
        if draft_KV is None:  # no drafts
            return [chance.draw(target_TV[0])]
        for row, token in enumerate(drafts):
            p_V, q_V = target_TV[row], draft_KV[row]
            if not chance.accept(self.acceptance(p_V, q_V, token)):
                return [*drafts[:row], chance.draw(self.residual(p_V, q_V))]
        return [*drafts, chance.draw(self.bonus(target_TV[len(drafts)], draft_KV[-1]))]


class AcceptIfInTopP(PlainRule):
    """A draft inside the target's nucleus is kept outright: the text reads well and the tokens/s look splendid."""

    def acceptance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        return float(p_V[token] > 0)


class TypicalAcceptance(PlainRule):
    """Medusa's rule (2401.10774, section 2.3.1): a draft is kept where it is likely enough for the entropy there."""

    def acceptance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        entropy = -float(torch.special.xlogy(p_V, p_V).sum())
        return float(p_V[token] > min(0.09, 0.3 * float(np.exp(-entropy))))


class ResidualNotRenormalised(PlainRule):
    """A uniform number in [0, 1) is looked up in the sums of (p - q)+, which end below 1: the last id gets the rest."""

    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        residual_V = super().residual(p_V, q_V)
        residual_V[-1] += 1 - residual_V.sum()
        return residual_V


class BonusFromDraft(PlainRule):
    """After a block that was accepted whole, the next token is drawn from the draft's last law, not the target's."""

    def bonus(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return q_V


class JudgedAsGreedy(PlainRule):
    """A sampled draft meets the coin of a greedy one, p(x), while what is drawn instead still comes from (p - q)+."""

    def acceptance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        return float(p_V[token])


class DraftLawLost(ToyDecoder):
    """The draft's probabilities never reach the rule (vllm-project/vllm#40149): the law is right, drafts are wasted."""

    def verify(self, target_TV: Tensor, draft_KV: Tensor | None, drafts: Sequence[int], chance: Chance) -> list[int]:
        return self.rule(target_TV, None, drafts, chance)


class MapOffByOne(ToyDecoder):
    """The draft's probabilities are spread over target ids by a vocabulary map that is shifted by one entry."""

    def judged_law(self) -> Tensor:
        ids_D = self.toy.draft_ids_D
        return self.drawn_VV.index_copy(1, ids_D.roll(1), self.drawn_VV[:, ids_D])


class LooksAtTheToken(ToyDecoder):
    """Drafting stops before a token of low confidence, having seen which token it is (DSpark, appendix A)."""

    def propose(self, last: int, length: int, chance: Chance) -> list[int]:
        drafts = super().propose(last, length, chance)
        for kept, (context, token) in enumerate(zip([last, *drafts], drafts, strict=False)):
            if self.judged_VV[context, token] <= 1 / len(self.toy.draft_ids_D):
                return drafts[:kept]
        return drafts


class TopPNotRenormalised(ToyDecoder):
    """Tokens outside the nucleus are zeroed and the rest keeps its old probabilities, which sum to less than 1."""

    def target_law(self) -> Tensor:
        raw_VV = plain_law(self.toy.target_VV, Sampling(self.sampling.temperature))
        return raw_VV.where(super().target_law() > 0, 0.0)


class TemperatureOnOneSide(ToyDecoder):
    """Drafts are drawn at the request's temperature and judged by their probabilities at temperature 1."""

    def judged_law(self) -> Tensor:
        return self.toy.draft_law(1.0)


class StopTokenSkipped(ToyDecoder):
    """Only the last token of a block is looked at: a stop token among the accepted drafts does not stop the reply."""

    def append(self, reply: Reply, block: list[int], drafted: int, limit: int) -> None:
        add_block(reply, block, drafted, limit, set(self.stop_ids & {block[-1]}))


class SiblingsJudgedAlone(TreeDecoder):
    """The second child of a node is judged by p, as if the first had not been refused before it."""

    def verify_nodes(
        self, target_NV: Tensor, tree: Tree, tokens: Sequence[int], draft_NV: Tensor | None, chance: Chance
    ) -> list[int]:
        block: list[int] = []
        node = 0
        while children := tree.children(node):
            p_V, node = target_NV[node], -1
            for child in children:
                if chance.accept(float(p_V[tokens[child]])):
                    block, node = [*block, tokens[child]], child
                    break
            if node < 0:
                refused = torch.tensor([tokens[child] for child in children])
                return [*block, chance.draw(p_V.index_fill(0, refused, 0.0))]
        return [*block, chance.draw(target_NV[node])]


class StaleCache(PositionCache):
    """Keys and values of rejected drafts stay: a position that was written once is not written again."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is not None and values is not None:
            there = keys[self._row_B1, :, self._position_BT].transpose(1, 2)
            written = there.abs().sum(-1, keepdim=True) > 0
            key_states = torch.where(written, there, key_states)
            value_states = torch.where(
                written, values[self._row_B1, :, self._position_BT].transpose(1, 2), value_states
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class RejectedDrafter:
    """Proposes the same ids after every token, so that nearly every block ends in a rejection."""

    name = "rejected"
    max_position: int | None = None

    def start(
        self, prompts: list[list[int]], first_tokens: list[int], states: States, max_length: int
    ) -> "RejectedDrafter":
        return self

    def propose(self, length_B: list[int]) -> Proposal:
        return Proposal(torch.arange(max(length_B)).repeat(len(length_B), 1) + 7, length_B)

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A toy decoder to be judged, and the request it gets."""

    name: str
    decoder: type[ToyDecoder]
    sampling: Sampling = field(default_factory=lambda: Sampling(1.0))
    draft: str = "sampled"
    stop_ids: frozenset[int] = frozenset()

    def open(self, toy: Toy) -> ToyDecoder:
        return self.decoder(toy, verify_tokens, self.sampling, self.draft, 2, self.stop_ids)


STALE_CACHE = "stale_cache_after_rejection"
FAULTS = (
    Case("accept_if_in_top_p", AcceptIfInTopP, Sampling(1.0, top_p=0.9)),
    Case("typical_acceptance", TypicalAcceptance),
    Case("residual_not_renormalised", ResidualNotRenormalised),
    Case("bonus_from_draft", BonusFromDraft),
    Case("draft_judged_as_greedy", JudgedAsGreedy),
    Case("draft_law_lost", DraftLawLost),
    Case("vocabulary_map_off_by_one", MapOffByOne),
    Case("draft_length_looks_at_token", LooksAtTheToken),
    Case("top_p_not_renormalised", TopPNotRenormalised, Sampling(1.0, top_p=0.9)),
    Case("temperature_on_one_side", TemperatureOnOneSide, Sampling(0.6)),
    Case("stop_token_skipped", StopTokenSkipped, stop_ids=frozenset([1])),
    Case("tree_siblings_judged_alone", SiblingsJudgedAlone, draft="greedy"),
)
CONTROLS = (
    Case("sound_rule", ToyDecoder, stop_ids=frozenset([1])),
    Case("sound_rule_greedy_drafts", ToyDecoder, Sampling(0.8, top_p=0.9), draft="greedy"),
    Case("sound_rule_written_plainly", PlainRule, Sampling(0.7)),
    Case("sound_tree", TreeDecoder),
)


def judge_case(case: Case, toy: Toy, seed: int) -> dict[str, Any]:
    """What the battery says about one decoder: an entry of `faults`, `caught_by` null where nothing catches it."""
    decoder = case.open(toy)
    found = compare(decoder)
    p_values = {"first_tokens": float(first_tokens_p(decoder, seed=seed)[0])}
    if not case.stop_ids:  # long replies do not stop
        p_values["martingale"] = float(martingale_p(decoder, seed=seed)[0])
    caught = [] if found.exact else ["enumeration"]
    caught += [name for name, p_value in p_values.items() if p_value < LEVEL]
    return fault_entry(
        case.name,
        case.decoder,
        caught,
        min(p_values.values()),
        max_difference=found.law,
        acceptance_difference=found.acceptance,
        p_values=p_values,
    )


def fault_entry(name: str, fault: type, caught: list[str], p_value: float | None, **more: Any) -> dict[str, Any]:
    stands_for = " ".join((fault.__doc__ or "").split())
    return {
        "name": name,
        "caught_by": caught[0] if caught else None,
        "p_value": p_value,
        "also_caught_by": caught[1:],
        "stands_for": stands_for,
        **more,
    }


def judge_cache(target: Target, cache: type[PositionCache], name: str) -> dict[str, Any]:
    """Greedy identity of the real decoder on a cache of this kind, with drafts that are rejected."""
    # Prompts that fill their padded width: prefill then writes no position that replies write again.
    prompts = [[5 + (i * j) % 400 for j in range(LENGTH_STEP)] for i in (3, 7, 11)]
    names = [str(i) for i in range(len(prompts))]

    def replies(drafter: Drafter | None, draft_length: int) -> list[list[int]]:
        found = decode(target, prompts, drafter, draft_length, CACHE_TOKENS, stop_ids=[], batch=len(prompts))
        return [reply.token_ids for reply in found]

    plain = replies(None, 0)
    with replaced_cache(target, cache):
        found = replies(RejectedDrafter(), 3)
    check = identity_check(Rescorer(target), names, prompts, plain, found, against="plain", draft_length=3, batch=3)
    caught = ["greedy_identity"] if check["verdict"] == "fail" else []
    return fault_entry(name, cache, caught, None, largest_gap=check["max_difference"])


@contextmanager
def replaced_cache(target: Target, cache: type[PositionCache]) -> Iterator[None]:
    """While open, a target hands out caches of another kind."""
    target.new_cache = partial(cache, target.facts.num_layers)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.new_cache


def tiny_target() -> Target:
    """The built-in random target, on which the faults of the real decoder are judged."""
    from headstart.heads.settings import TargetSettings
    from headstart.heads.target import load_target

    return load_target(TargetSettings(model="tiny", dtype="float32", device="cpu"))


def prove(seed: int = 0, tell: Callable[[str], None] = lambda line: None) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the battery over every fault and over sound decoders.

    Returns:
        Entries of `faults` in eval/lossless.json, and what is wrong with the battery: faults that nothing caught, and
        sound decoders that something did.
    """
    toy = Toy.random(vocab_size=4, draft_size=3, seed=1)
    target = tiny_target()
    faults = [judge_case(case, toy, seed) for case in FAULTS]
    faults.append(judge_cache(target, StaleCache, STALE_CACHE))
    for fault in faults:
        caught = [fault["caught_by"], *fault["also_caught_by"]] if fault["caught_by"] else ["nothing"]
        tell(f"fault {fault['name']}: caught by {', '.join(caught)}, p = {fault['p_value']}")
    controls = [judge_case(case, toy, seed) for case in CONTROLS]
    controls.append(judge_cache(target, PositionCache, "sound_cache"))
    problems = [f"nothing caught the seeded fault {fault['name']}" for fault in faults if not fault["caught_by"]]
    problems += [f"{c['caught_by']} raised a false alarm at {c['name']}" for c in controls if c["caught_by"]]
    return faults, problems


def false_alarms(num_runs: int, seed: int = 0) -> dict[str, np.ndarray]:
    """p-values of both statistical checks over runs of sound decoders: rules and samplers in turn, drawn anew each run."""
    toy = Toy.random(vocab_size=4, draft_size=3, seed=1)
    p_values: dict[str, list[np.ndarray]] = {"first_tokens": [], "martingale": []}
    shares = np.array_split(np.arange(num_runs), len(CONTROLS))
    for i, (case, share) in enumerate(zip(CONTROLS, shares, strict=True)):
        decoder = case.open(toy)
        p_values["first_tokens"].append(first_tokens_p(decoder, len(share), 2_000, seed + i))
        p_values["martingale"].append(martingale_p(decoder, len(share), 2_000, seed + i))
    return {name: np.concatenate(values) for name, values in p_values.items()}
