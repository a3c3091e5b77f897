"""The parts of speculative sampling that seeded faults replace, in the reference decoder and on the toy alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headstart.eval.decode import Append, add_block
from headstart.eval.drafters import Proposal, Session
from headstart.eval.judge import SampledJudge
from headstart.eval.verify import TreeRule, verify_tree
from headstart.heads.sampling import Sampling, filtered_probabilities


def as_drafted(proposal: Proposal, sampling: Sampling) -> Proposal:
    """Every draft is judged, by the law it was drawn from."""
    return proposal


@dataclass(frozen=True)
class Parts:
    """Beside the rule, which is handed in by itself: what it is told, and what becomes of its block. Sound by default."""

    target_law: Callable[[Tensor, Sampling], Tensor] = filtered_probabilities
    """Law [.., V] that the rule is told the target samples by, from logits."""
    told: Callable[[Proposal, Sampling], Proposal] = as_drafted
    """Which drafts the rule is given, and the law that it is told they were drawn from."""
    append: Append = add_block
    """How an emitted block lengthens a reply."""
    verify_tree: TreeRule = verify_tree
    """The rule of trees."""

    def judge(self, *settings: Any) -> SampledJudge:
        """The reference decoder's judge with these parts."""
        return PartsJudge(self, *settings)


class PartsJudge(SampledJudge):
    """A judge made from parts."""

    def __init__(self, parts: Parts, *settings: Any) -> None:
        super().__init__(*settings)
        self.parts = parts

    def target_law(self, logits: Tensor) -> Tensor:
        return self.parts.target_law(logits, self.sampling).cpu()

    def judge_tree(self, *tree: Any) -> list[int]:
        return self.parts.verify_tree(*tree)

    def propose(self, session: Session, active: list[int], length_B: list[int]) -> Proposal:
        return self.parts.told(super().propose(session, active, length_B), self.sampling)


SOUND = Parts()
