"""What one request got: its tokens, the steps they took, and the sums that acceptance is made from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from headstart.eval.acceptance import PromptCounts


class Step(NamedTuple):
    """One target step of a reply, counted by rule `reply`; `whole_` counts the block as the target judged it."""

    accepted: int  # drafts that became tokens of the reply
    judged: int  # drafts that were compared with a token of the reply
    short: bool  # the reply's last token was an accepted draft: no corrected or bonus token
    whole_accepted: int
    whole_drafted: int


@dataclass
class Reply:
    """What one request got. Seconds are wall-clock, and those of the whole batch where rows ran together."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""  # stop | length
    steps: list[Step] = field(default_factory=list)
    first_token_s: float = 0.0  # prefill, the drafter's reading of the prompt not included
    total_s: float = 0.0
    draft_s: list[float] = field(default_factory=list)  # per step: proposing, and taking the result
    verify_s: list[float] = field(default_factory=list)  # per step: forward and verification


def add_block(reply: Reply, block: list[int], drafted: int, limit: int, stop_ids: set[int]) -> None:
    """Append a block up to the first stop token or the limit, and count the step."""
    accepted = len(block) - 1
    emitted = 0
    for token in block:
        reply.token_ids.append(token)
        emitted += 1
        if token in stop_ids:
            reply.finish_reason = "stop"
        elif len(reply.token_ids) == limit:
            reply.finish_reason = "length"
        if reply.finish_reason:
            break
    short = emitted <= accepted
    kept = emitted if short else accepted
    judged = kept if short else min(drafted, accepted + 1)
    reply.steps.append(Step(kept, judged, short, accepted, drafted))


# Lengthens a reply by a block: (reply, block, drafted, limit, stop ids).
Append = Callable[[Reply, list[int], int, int, set[int]], None]


def live_counts(
    replies: Sequence[Reply],
    prompt_ids: Sequence[str],
    routes: Sequence[str],
    draft_length: int,
    counting: str = "reply",
) -> list[PromptCounts]:
    """Sums of live replies by counting rule `reply`, or `engine` (whole blocks: decode with `whole_blocks`)."""
    counts = []
    for reply, prompt_id, route in zip(replies, prompt_ids, routes, strict=True):
        whole = counting == "engine"
        accepted = np.array([s.whole_accepted if whole else s.accepted for s in reply.steps], dtype=np.int64)
        depth_K = np.arange(draft_length)
        accepted_K = (accepted[:, None] > depth_K).sum(0).astype(float)
        if whole:  # an engine reports accepted at k / number of drafts; conditionals are ratios of those
            judged_K = np.append(float(len(reply.steps)), accepted_K[:-1])[:draft_length]
        else:
            judged = np.array([s.judged for s in reply.steps], dtype=np.int64)
            judged_K = (judged[:, None] > depth_K).sum(0).astype(float)
        num_short = 0 if whole else sum(step.short for step in reply.steps)
        counts.append(
            PromptCounts(
                prompt_id=prompt_id,
                route=route,
                num_tokens=float(len(reply.steps) + accepted.sum() - num_short),
                num_steps=float(len(reply.steps)),
                num_short_steps=float(num_short),
                accepted_K=accepted_K,
                judged_K=judged_K,
                histogram=np.bincount(accepted, minlength=draft_length + 1).astype(float),
            )
        )
    return counts
