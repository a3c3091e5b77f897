"""One way to decode: who drafts and how far, and by which rules drafts are made and judged."""

from dataclasses import dataclass
from typing import Literal

from headstart.eval.drafters import Drafter
from headstart.eval.parts import SOUND, Parts
from headstart.eval.tree_drafts import Shape, num_slots
from headstart.eval.verify import Rule, verify_tokens
from headstart.heads.sampling import Sampling


@dataclass(frozen=True)
class Speculation:
    """Plain and greedy unless told otherwise.

    Raises:
        ValueError: drafts that are neither greedy nor sampled, or a rule of chains for a tree.
    """

    drafter: Drafter | None = None
    """None: plain decoding."""
    draft_length: int = 0
    """Drafted tokens a step at most, or the depth at which a tree is cut; 0: plain decoding."""
    sampling: Sampling = Sampling()
    """The target's law. Temperature 0 leaves no room for `draft` and `rule`."""
    draft: Literal["greedy", "sampled"] = "greedy"
    """`sampled` draws drafts from the drafter's softmax at the target's temperature, where it has one."""
    rule: str | Rule = "tokens"
    """A rule of `verify.py`, by name or itself."""
    tree: Shape | None = None
    """What is drafted instead of a chain. Its children are judged by rule `tokens`."""
    whole_blocks: bool = False
    """Draft past the token limit as engines do, for counting by their rule; greedy replies are the same."""
    parts: Parts = SOUND
    """What a seeded fault replaces."""

    def __post_init__(self) -> None:
        if self.draft not in ("greedy", "sampled"):
            raise ValueError(f"draft is {self.draft!r}, expected greedy or sampled")
        if self.tree is not None and self.rule not in ("tokens", verify_tokens):
            raise ValueError(f"rule is {self.rule!r}, but trees are judged child by child: expected tokens")

    @property
    def num_slots(self) -> int:
        """Slots behind the last emitted token that drafts may take in a cache."""
        return self.draft_length if self.tree is None else num_slots(self.tree)


PLAIN = Speculation()
