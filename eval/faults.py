"""Seeded faults: wrong decoders that look right, each of which the losslessness battery has to catch.

A fault is another rule, another of the decoder's parts (`parts.py`), or a wrong cache, as small as the bug it stands for.
The same object makes the toy decoder of eval/enumeration.py wrong and the reference decoder; `proof.py` runs the battery
over both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headstart.eval.drafters import Proposal
from headstart.eval.parts import SOUND, Parts
from headstart.eval.replies import Reply, add_block
from headstart.eval.verify import Chance, Rule, verify_tokens
from headstart.heads.cache import PositionCache
from headstart.heads.sampling import Sampling, filtered_probabilities
from headstart.heads.target import States
from headstart.heads.tree import Tree

# Rules.


class PlainRule:
    """The token-wise rule in its three parts, one line each: sound, and what the faulty rules below are made from."""

    def acceptance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        return min(1.0, float(p_V[token] / q_V[token]))

    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return (p_V - q_V).clamp_min(0)

    def bonus(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return p_V

    def __call__(self, target_TV: Tensor, draft_KV: Tensor | None, drafts: Sequence[int], chance: Chance) -> list[int]:
        if draft_KV is None or not drafts:
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


def draft_law_lost(target_TV: Tensor, draft_KV: Tensor | None, drafts: Sequence[int], chance: Chance) -> list[int]:
    """The draft's probabilities never reach the rule (vllm-project/vllm#40149): the law is right, drafts are wasted."""
    return verify_tokens(target_TV, None, drafts, chance)


# What the rule is told, and what becomes of its block.


def map_off_by_one(proposal: Proposal, sampling: Sampling) -> Proposal:
    """The draft's probabilities are spread over target ids by a vocabulary map that is shifted by one entry."""
    if proposal.law_BKV is None:
        return proposal
    ids_D = proposal.law_BKV.flatten(0, 1).any(0).nonzero().squeeze(1)
    return replace(proposal, law_BKV=proposal.law_BKV.index_copy(2, ids_D.roll(1), proposal.law_BKV[..., ids_D]))


def temperature_on_one_side(proposal: Proposal, sampling: Sampling) -> Proposal:
    """Drafts are drawn at the request's temperature and judged by their probabilities at temperature 1."""
    if proposal.law_BKV is None:
        return proposal
    law_BKV = proposal.law_BKV**sampling.temperature
    return replace(proposal, law_BKV=law_BKV / law_BKV.sum(-1, keepdim=True))


def looks_at_token(proposal: Proposal, sampling: Sampling) -> Proposal:
    """Drafting stops before a token of low confidence, having seen which token it is (DSpark, appendix A)."""
    if proposal.law_BKV is None:
        return proposal
    own_BK = proposal.law_BKV.gather(2, proposal.tokens_BK[..., None].to(proposal.law_BKV.device)).squeeze(2)
    going_BK = (own_BK >= 0.5 * proposal.law_BKV.amax(-1)).long().cumprod(1)
    lengths = [min(pair) for pair in zip(proposal.length_B, going_BK.sum(1).tolist(), strict=True)]
    return replace(proposal, length_B=lengths)


def top_p_not_renormalised(logits: Tensor, sampling: Sampling) -> Tensor:
    """Tokens outside the nucleus are zeroed and the rest keeps its old probabilities, which sum to less than 1."""
    raw = filtered_probabilities(logits, Sampling(sampling.temperature))
    return raw.where(filtered_probabilities(logits, sampling) > 0, 0.0)


def stop_token_skipped(reply: Reply, block: list[int], drafted: int, limit: int, stop_ids: set[int]) -> None:
    """Only the last token of a block is looked at: a stop token among the accepted drafts does not stop the reply."""
    add_block(reply, block, drafted, limit, stop_ids & {block[-1]})


# Trees and caches.


def siblings_judged_alone(
    target_NV: Tensor, tree: Tree, tokens: Sequence[int], draft_NV: Tensor | None, chance: Chance
) -> list[int]:
    """The second child of a node is judged by p, as if the first had not been refused before it."""
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
    """Keys and values of rejected drafts stay: a slot that was written once is not written again."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is not None and values is not None:
            there = keys[self._row_B1, :, self._slot_BT].transpose(1, 2)
            written = there.abs().sum(-1, keepdim=True) > 0
            key_states = torch.where(written, there, key_states)
            value_states = torch.where(written, values[self._row_B1, :, self._slot_BT].transpose(1, 2), value_states)
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
    """A decoder to be judged, and the request it gets."""

    name: str
    rule: Rule = verify_tokens
    parts: Parts = SOUND
    sampling: Sampling = field(default_factory=lambda: Sampling(1.0))
    draft: Literal["greedy", "sampled"] = "sampled"
    stops: bool = False  # replies may end at a stop token
    stop_below: float = 0.0  # drafts end by confidence
    tree: Tree | None = None  # what is drafted instead of a chain
    stands_for: str = ""

    @property
    def on_toy_only(self) -> bool:
        """Whether no sample can tell it: its law is right, and only enumeration sees what acceptance should be."""
        return self.rule is draft_law_lost


def fault(name: str, wrong: Any, part: str = "rule", **request: Any) -> Case:
    """A case whose `part` (the rule, or a field of Parts) is replaced by something wrong."""
    stands_for = " ".join((wrong.__doc__ or "").split())
    replaced = {part: wrong} if part == "rule" else {"parts": Parts(**{part: wrong})}
    return Case(name, **replaced, **request, stands_for=stands_for)


TREE = Tree.branching(4, 2)  # of the reference decoder; the toy, with few tokens, has one of its own
STALE_CACHE = "stale_cache_after_rejection"
FAULTS = (
    fault("accept_if_in_top_p", AcceptIfInTopP(), sampling=Sampling(1.0, top_p=0.9)),
    fault("typical_acceptance", TypicalAcceptance()),
    fault("residual_not_renormalised", ResidualNotRenormalised()),
    fault("bonus_from_draft", BonusFromDraft()),
    fault("draft_judged_as_greedy", JudgedAsGreedy()),
    fault("draft_law_lost", draft_law_lost),
    fault("vocabulary_map_off_by_one", map_off_by_one, "told"),
    fault("draft_length_looks_at_token", looks_at_token, "told"),
    fault("top_p_not_renormalised", top_p_not_renormalised, "target_law", sampling=Sampling(1.0, top_p=0.6)),
    fault("temperature_on_one_side", temperature_on_one_side, "told", sampling=Sampling(0.5)),
    fault("stop_token_skipped", stop_token_skipped, "append", stops=True),
    fault(
        "tree_siblings_judged_alone",
        siblings_judged_alone,
        "verify_tree",
        sampling=Sampling(0.5),
        draft="greedy",
        tree=TREE,
    ),
)
CONTROLS = (
    Case("sound_rule", stops=True),
    Case("sound_rule_greedy_drafts", sampling=Sampling(0.8, top_p=0.9), draft="greedy"),
    Case("sound_rule_written_plainly", PlainRule(), sampling=Sampling(0.7)),
    Case("sound_early_stop", stop_below=0.5),
    Case("sound_tree", tree=TREE),
)
