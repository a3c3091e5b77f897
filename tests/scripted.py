"""A drafter whose acceptance is known beforehand."""

import torch

from headstart.eval.drafters import Proposal, padded
from headstart.heads.target import States


class ScriptedDrafter:
    """Proposes the target's own greedy tokens `num_right` times, then a wrong one: its acceptance is known.

    `continuations[tuple(prompt)]` is what the target says after a prompt, long enough for every block.
    """

    name = "scripted"

    def __init__(
        self, continuations: dict[tuple[int, ...], list[int]], num_right: int, max_position: int | None = None
    ) -> None:
        self.continuations, self.num_right, self.max_position = continuations, num_right, max_position

    def start(
        self, prompts: list[list[int]], first_tokens: list[int], states: States, max_length: int
    ) -> "ScriptedSession":
        scripts = [self.continuations[tuple(prompt)] for prompt in prompts]
        return ScriptedSession(scripts, self.num_right, states.final.device)


class ScriptedSession:
    """Session of a script."""

    def __init__(self, scripts: list[list[int]], num_right: int, device: torch.device) -> None:
        self.scripts, self.num_right, self.device = scripts, num_right, device
        self.num_emitted = [1] * len(scripts)

    def propose(self, length_B: list[int]) -> Proposal:
        drafts = []
        for script, done, length in zip(self.scripts, self.num_emitted, length_B, strict=True):
            draft = script[done : done + length]
            if len(draft) > self.num_right:
                draft[self.num_right] = 0 if draft[self.num_right] else 1
            drafts.append(draft)
        return Proposal(padded(drafts, self.device), [len(draft) for draft in drafts])

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        self.num_emitted = [done + len(block) for done, block in zip(self.num_emitted, blocks, strict=True)]

    def select(self, rows: list[int]) -> None:
        self.scripts = [self.scripts[row] for row in rows]
        self.num_emitted = [self.num_emitted[row] for row in rows]
