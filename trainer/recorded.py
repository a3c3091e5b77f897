"""Replies that the sources bring, kept as training rows: told apart by `trainer/masks.py`, then read by the target.

The target did not write them under any sampling rule that is known, so the rows say `recorded` and no setting, and exact
acceptance is refused on them. Validation and held-out prompts have no such rows: the target answers them itself, and every
figure speaks of its own replies.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.errors import WrongInput
from headstart.heads.paths import Prompt
from headstart.heads.target import States, Target, TargetLoader
from headstart.trainer.conversations import Answered, Conversation, plan_conversations, prompt_limit
from headstart.trainer.generation import Reply, Request
from headstart.trainer.left_out import LeftOut
from headstart.trainer.masks import BadReply, MarkedReply, mark_reply
from headstart.trainer.prompts import route_table
from headstart.trainer.settings import TrafficSettings

READ_PATHS = 64  # paths that are read together
SCORED_TOKENS = 256  # reply tokens whose logits are in memory at once
NUM_SHOWN = 2  # replies that are printed as marked, for the user's eyes


@dataclass
class Recorded:
    """Turns that are kept, and what became of the others."""

    conversations: list[Conversation] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    left_out: LeftOut = field(default_factory=LeftOut)
    shown: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Counts, the first rows that are left out, and the first replies as they are marked."""
        num_kept = sum(len(talk.requests) for talk in self.conversations)
        lines = [f"replies of the sources: {num_kept:,} kept of {num_kept + len(self.left_out.rows):,}"]
        lines += self.left_out.lines()
        lines += [f"note {number:,}: {note}" for note, number in self.notes.most_common()]
        lines += [f"reply as it is trained: {text}" for text in self.shown]
        return "\n".join(lines)


def keep_replies(
    load_target: TargetLoader, prompts: Iterable[Prompt], settings: TrafficSettings, taken: set[str]
) -> Recorded:
    """Every assistant turn of the sources that can be told apart from its prompt.

    Args:
        taken: ids of requests that are rows already; those kept here are added.

    Raises:
        WrongInput: none can, with the reason of the first.
    """
    found = Recorded()
    for prompt in prompts:
        talk = Conversation(prompt, [], [], [], [], [])
        for turn in prompt.turns:
            request = prompt.request(turn)
            reply = prompt.reply if turn == len(prompt.messages) else prompt.messages[turn]
            if reply is None:
                continue
            try:
                if request.prompt_id in taken:
                    raise BadReply("another row, or a held-out one, has the same request")
                marked = mark_in_limits(load_target, request, reply, settings)
            except BadReply as bad:
                found.left_out.add(request.prompt_id, str(reply.get("content") or ""), str(bad))
                continue
            taken.add(request.prompt_id)
            found.notes.update(marked.notes)
            if len(found.shown) < NUM_SHOWN:
                found.shown.append(repr(load_target.tokenizer.decode(marked.reply_ids)))
            talk.add(Request(request.prompt_id, marked.prompt_ids), turn, marked)
        if talk.requests:
            found.conversations.append(talk)
    if not found.conversations:
        reason = found.left_out.rows[0]["reason"] if found.left_out.rows else "no row ends with one"
        raise WrongInput(
            f"traffic.replies: found no reply in the sources that can be kept for {load_target.facts.name}: {reason}.\n"
            "Let the target answer itself (traffic.replies=all), or bring rows that end with an assistant's turn."
        )
    return found


def mark_in_limits(
    load_target: TargetLoader, request: Prompt, reply: dict[str, Any], settings: TrafficSettings
) -> MarkedReply:
    """The reply in token ids, cut at `traffic.max_new_tokens` or the end of the context.

    Raises:
        BadReply: as `mark_reply`, or the prompt is too long.
    """
    facts, limit = load_target.facts, prompt_limit(load_target, settings)
    marked = mark_reply(facts, load_target.tokenizer, request, reply, settings.max_new_tokens)
    if len(marked.prompt_ids) > limit:
        raise BadReply(f"its prompt is longer than {limit} tokens (traffic.max_prompt_tokens, or the target's context)")
    return marked.cut(facts.max_position - len(marked.prompt_ids))


@torch.inference_mode()
def read_recorded(
    target: Target,
    conversations: Sequence[Conversation],
    states_dtype: torch.dtype | None,
    progress: Callable[[int, int], None],
) -> list[Answered]:
    """Rows of kept replies, with the target's states and log-probabilities along them."""
    rows = [
        (talk.prompt, talk.prompt.request(turn), request, marked)
        for talk in conversations
        for turn, request, marked in zip(talk.turns, talk.requests, talk.marked, strict=True)
    ]
    answered: list[Answered] = []
    for begin in range(0, len(rows), READ_PATHS):
        few = rows[begin : begin + READ_PATHS]
        paths = [np.array(marked.prompt_ids + marked.reply_ids) for *_, marked in few]
        for (whole, prompt, request, marked), states in zip(few, target.read(paths), strict=True):
            logprobs = score(target, states.final[len(marked.prompt_ids) - 1 :], marked.reply_ids)
            kept = None
            if states_dtype is not None:
                kept = States(*(x.to("cpu", states_dtype) for x in (states.taps, states.final)))
            reply = Reply(marked.reply_ids, logprobs, marked.finish_reason, states=kept)
            answered.append(Answered(prompt, request, reply, whole.prompt_id))
        progress(sum(len(marked.reply_ids) for *_, marked in few), len(few))
    return answered


def score(target: Target, final_RH: Tensor, token_ids: list[int]) -> list[float]:
    """Log-probability of every reply token under the raw target; state r is the one that token r is said from."""
    return score_with_gaps(target, final_RH, token_ids)[0]


def score_with_gaps(target: Target, final_RH: Tensor, token_ids: list[int]) -> tuple[list[float], list[float]]:
    """As `score`, and by how much the likeliest token's log-probability is larger than that of each token."""
    token_R1 = torch.tensor(token_ids, device=final_RH.device)[:, None]
    logprobs: list[float] = []
    gaps: list[float] = []
    for final_CH, token_C1 in zip(final_RH.split(SCORED_TOKENS), token_R1.split(SCORED_TOKENS), strict=True):
        logits_CV = target.logits(final_CH)
        said_C = logits_CV.gather(1, token_C1).squeeze(1)
        logprobs += (said_C - logits_CV.logsumexp(-1)).tolist()
        gaps += (logits_CV.amax(-1) - said_C).tolist()
    return logprobs, gaps


@dataclass(frozen=True)
class Planned:
    """What a traffic stage is going to hold."""

    conversations: dict[str, Conversation]
    """By prompt id."""
    left_out: LeftOut
    recorded: Recorded | None = None
    """What became of the sources' replies, where these are kept."""
    num_lost: int = 0
    """Prompts that no row comes of."""

    def rows(self) -> list[tuple[str, int]]:
        """Split, and the most prompt tokens, of every row of traffic."""
        talks = self.conversations.values()
        return [(talk.prompt.split, tokens) for talk in talks for tokens in talk.kept_tokens]

    def describe(self, table: bool = True) -> list[str]:
        """Lines for the console; none where every request is asked. Where prompts are lost, `table` counts the others."""
        lines = self.left_out.lines()
        lines += [] if self.recorded is None else self.recorded.describe().splitlines()
        if not (table and self.num_lost):
            return lines
        kept = [talk.prompt for talk in self.conversations.values()]
        return [*lines, f"{len(kept):,} of {len(kept) + self.num_lost:,} prompts are left:", *route_table(kept)]

    def write(self, folder: Path) -> None:
        """Name what is left out in a file."""
        kept = [] if self.recorded is None else self.recorded.left_out.rows
        LeftOut([*self.left_out.rows, *kept]).write(folder)


def plan_traffic(load_target: TargetLoader, prompts: Sequence[Prompt], settings: TrafficSettings) -> Planned:
    """All conversations of a traffic stage, and what is left out.

    Raises:
        WrongInput: as `plan_conversations` and `keep_replies`.
    """
    recorded, train = None, [prompt for prompt in prompts if prompt.split == "train"]
    if settings.replies == "recorded" and train:
        talks, left_out = plan_conversations(load_target, [p for p in prompts if p.split != "train"], settings)
        taken = {request.prompt_id for talk in talks.values() for request in talk.requests}
        recorded = keep_replies(load_target, train, settings, taken)
        talks |= {talk.prompt.prompt_id: talk for talk in recorded.conversations}
    else:
        talks, left_out = plan_conversations(load_target, prompts, settings)
    return Planned(talks, left_out, recorded, len(prompts) - len(talks))
