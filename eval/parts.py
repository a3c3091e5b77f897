"""The parts of verification that seeded faults replace, in the reference decoder and on the toy alike."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headstart.eval.drafters import Proposal
from headstart.eval.greedy import VerifyRule, verify_greedy
from headstart.eval.replies import Append, add_block
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
    verify_greedy: VerifyRule = verify_greedy
    """The rule at temperature 0, of chains and trees."""


SOUND = Parts()
