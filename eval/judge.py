"""What the sampling setting decides in a step: the first token, how drafts are made, and which of them stand."""

from typing import Protocol

import numpy as np
from torch import Tensor

from headstart.eval.drafters import DraftSampler, Growth, Proposal, SamplingSession, Session, TreeSession
from headstart.eval.speculation import Speculation
from headstart.eval.tree_drafts import new_growth
from headstart.eval.verify import RULES, Uniforms
from headstart.heads.errors import WrongInput


def propose_tree(session: Session, growth: Growth) -> Proposal:
    """Trees of a session. Raises WrongInput: one that drafts chains only."""
    if not isinstance(session, TreeSession):
        raise WrongInput(
            f"found a drafter of chains ({type(session).__name__}), expected one that drafts trees.\nDecode without a tree."
        )
    return session.propose_tree(growth)


class Judge(Protocol):
    """What depends on the sampling setting; `active` are the requests of the batch rows."""

    def first_tokens(self, logits_BV: Tensor) -> list[int]:
        """The first token of every request, from prefill's logits."""

    def propose(self, session: Session, active: list[int], length_B: list[int]) -> Proposal:
        """Drafts of the rows, as long as told at most."""

    def blocks(self, active: list[int], logits_BTV: Tensor, proposal: Proposal) -> list[list[int]]:
        """The emitted block of every row."""


class GreedyJudge:
    """Temperature 0: the largest logit, over the whole batch at once."""

    def __init__(self, way: Speculation) -> None:
        self.tree, self.parts = way.tree, way.parts

    def first_tokens(self, logits_BV: Tensor) -> list[int]:
        return logits_BV.argmax(-1).tolist()

    def propose(self, session: Session, active: list[int], length_B: list[int]) -> Proposal:
        if self.tree is not None:
            return propose_tree(session, new_growth(self.tree, length_B))
        return session.propose(length_B)

    def blocks(self, active: list[int], logits_BTV: Tensor, proposal: Proposal) -> list[list[int]]:
        return self.parts.verify_greedy(logits_BTV, proposal)


class SampledJudge:
    """Temperature above 0: every request has its own random numbers, used up in an order that depends on it alone."""

    def __init__(self, way: Speculation, chances: list[Uniforms]) -> None:
        self.sampling, self.draft_length, self.tree, self.parts = way.sampling, way.draft_length, way.tree, way.parts
        self.sampled_drafts, self.chances = way.draft == "sampled", chances
        self.rule = RULES[way.rule] if isinstance(way.rule, str) else way.rule

    def target_law(self, logits: Tensor) -> Tensor:
        """What the target samples by [.., V], on the CPU."""
        return self.parts.target_law(logits, self.sampling).cpu()

    def first_tokens(self, logits_BV: Tensor) -> list[int]:
        law_BV = self.target_law(logits_BV)
        return [chance.draw(law_V) for chance, law_V in zip(self.chances, law_BV, strict=True)]

    def propose(self, session: Session, active: list[int], length_B: list[int]) -> Proposal:
        return self.parts.told(self._drafted(session, active, length_B), self.sampling)

    def _drafted(self, session: Session, active: list[int], length_B: list[int]) -> Proposal:
        if self.tree is not None:
            chances = [self.chances[i] for i in active] if self.sampled_drafts else None
            return propose_tree(session, new_growth(self.tree, length_B, chances, self.sampling.temperature))
        if not (self.sampled_drafts and isinstance(session, SamplingSession)):
            return session.propose(length_B)
        # Always the same number for a row that drafts, though its neighbours decide how many are looked at.
        unused_K = np.zeros(self.draft_length)
        rows = [
            self.chances[i].numbers(self.draft_length) if length else unused_K
            for i, length in zip(active, length_B, strict=True)
        ]
        return session.sample(length_B, DraftSampler(self.sampling.temperature, np.stack(rows)))

    def blocks(self, active: list[int], logits_BTV: Tensor, proposal: Proposal) -> list[list[int]]:
        target_BTV = self.target_law(logits_BTV)
        draft_BKV = None if proposal.law_BKV is None else proposal.law_BKV.cpu()
        tokens = proposal.tokens_BK.tolist()
        if proposal.trees is not None:
            return [
                self.parts.verify_tree(
                    target_BTV[row],
                    tree,
                    [-1, *tokens[row]],  # the root's own token is judged no more
                    None if draft_BKV is None else draft_BKV[row],
                    self.chances[i],
                )
                for row, (i, tree) in enumerate(zip(active, proposal.trees, strict=True))
            ]
        return [
            self.rule(
                target_BTV[row, : length + 1],
                None if draft_BKV is None else draft_BKV[row, :length],
                tokens[row][:length],
                self.chances[i],
            )
            for row, (i, length) in enumerate(zip(active, proposal.length_B, strict=True))
        ]


def new_judge(way: Speculation, chances: list[Uniforms]) -> Judge:
    """The judge of one batch; `chances` are those of its requests."""
    return GreedyJudge(way) if way.sampling.temperature == 0 else SampledJudge(way, chances)
