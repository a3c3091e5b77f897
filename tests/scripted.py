"""A drafter whose acceptance is known beforehand."""

import numpy as np
import torch

from headstart.eval.acceptance import ReplyAcceptance
from headstart.eval.drafters import Proposal, padded
from headstart.heads.paths import Path
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
        drafts = [
            scripted_draft(script, done, length, self.num_right)
            for script, done, length in zip(self.scripts, self.num_emitted, length_B, strict=True)
        ]
        return Proposal(padded(drafts, self.device), [len(draft) for draft in drafts])

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        self.num_emitted = [done + len(block) for done, block in zip(self.num_emitted, blocks, strict=True)]

    def select(self, rows: list[int]) -> None:
        self.scripts = [self.scripts[row] for row in rows]
        self.num_emitted = [self.num_emitted[row] for row in rows]


def scripted_draft(script: list[int], done: int, length: int, num_right: int) -> list[int]:
    """What follows `done` tokens of a script, wrong after `num_right` tokens."""
    draft = script[done : done + length]
    if len(draft) > num_right:
        draft[num_right] = 0 if draft[num_right] else 1
    return draft


def scripted_acceptance(drafter: ScriptedDrafter, paths: list[Path], draft_length: int) -> list[ReplyAcceptance]:
    """Exact offline acceptance of a script: it depends on nothing but how much was emitted."""
    replies = []
    for path in paths:
        prompt, reply = np.split(path.token_N, [path.num_prompt_tokens])
        script = drafter.continuations[tuple(prompt.tolist())]
        accept_TK = np.zeros((len(reply) - 1, draft_length))
        judged_TK = np.zeros(accept_TK.shape, dtype=bool)
        for start in range(len(reply) - 1):
            drafts = scripted_draft(script, start + 1, draft_length, drafter.num_right)
            for j, (draft, token) in enumerate(zip(drafts, reply[start + 1 :], strict=False)):
                judged_TK[start, j] = True
                accept_TK[start, j] = draft == token
        replies.append(ReplyAcceptance(path.prompt_id, path.route, accept_TK, judged_TK, 0))
    return replies
