"""Replies that the sources bring, kept as training rows: told apart by `trainer/masks.py`, then read by the target.

The target did not write them under any sampling rule that is known, so the rows say `recorded` and no setting, and exact
acceptance is refused on them. Validation and held-out prompts have no such rows: the target answers them itself, and every
figure speaks of its own replies.
"""

import json
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
from headstart.heads.store import atomic_path
from headstart.heads.target import States, Target, TargetLoader
from headstart.trainer.conversations import Answered, Conversation, plan_conversations, prompt_limit
from headstart.trainer.generation import Reply, Request
from headstart.trainer.masks import BadReply, MarkedReply, mark_reply
from headstart.trainer.settings import TrafficSettings

READ_PATHS = 64  # paths that are read together
SCORED_TOKENS = 256  # reply tokens whose logits are in memory at once
NUM_SHOWN = 2  # replies that are printed as marked, for the user's eyes
NUM_NAMED = 5  # rows that are left out and named on the console
LEFT_OUT = "left_out.jsonl"  # all of them, in the folder of the traffic


@dataclass
class Recorded:
    """Turns that are kept, and what became of the others."""

    conversations: list[Conversation] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    left_out: list[dict[str, str]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    @property
    def num_kept(self) -> int:
        return sum(len(talk.requests) for talk in self.conversations)

    def describe(self) -> str:
        """Counts, the first rows that are left out, and the first replies as they are marked."""
        total = self.num_kept + len(self.left_out)
        reasons = Counter(row["reason"] for row in self.left_out)
        lines = [f"replies of the sources: {self.num_kept:,} kept of {total:,}"]
        lines += [f"left out {number:,}: {reason}" for reason, number in reasons.most_common()]
        lines += [f"left out: prompt {row['prompt_id'][:12]} ({row['text']!r})" for row in self.left_out[:NUM_NAMED]]
        lines += [f"each of them is named in the run's traffic/{LEFT_OUT}"] if self.left_out[NUM_NAMED:] else []
        lines += [f"note {number:,}: {note}" for note, number in self.notes.most_common()]
        lines += [f"reply as it is trained: {text}" for text in self.shown]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Name every turn that is left out, with its reason."""
        with atomic_path(folder / LEFT_OUT) as temporary, temporary.open("w", encoding="utf-8") as handle:
            handle.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in self.left_out)


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
            if reply is None or request.prompt_id in taken:
                continue
            try:
                marked = mark_in_limits(load_target, request, reply, settings)
            except BadReply as bad:
                text = str(reply.get("content") or "")[:60]
                found.left_out.append({"prompt_id": request.prompt_id, "text": text, "reason": str(bad)})
                continue
            taken.add(request.prompt_id)
            found.notes.update(marked.notes)
            if len(found.shown) < NUM_SHOWN:
                found.shown.append(repr(load_target.tokenizer.decode(marked.reply_ids)))
            talk.add(Request(request.prompt_id, marked.prompt_ids), turn, marked)
        if talk.requests:
            found.conversations.append(talk)
    if not found.conversations:
        reason = found.left_out[0]["reason"] if found.left_out else "no row ends with one"
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
        (talk.prompt.request(turn), request, marked)
        for talk in conversations
        for turn, request, marked in zip(talk.turns, talk.requests, talk.marked, strict=True)
    ]
    answered: list[Answered] = []
    for begin in range(0, len(rows), READ_PATHS):
        few = rows[begin : begin + READ_PATHS]
        paths = [np.array(marked.prompt_ids + marked.reply_ids) for _, _, marked in few]
        for (prompt, request, marked), states in zip(few, target.read(paths), strict=True):
            logprobs = score(target, states.final[len(marked.prompt_ids) - 1 :], marked.reply_ids)
            kept = None
            if states_dtype is not None:
                kept = States(*(x.to("cpu", states_dtype) for x in (states.taps, states.final)))
            reply = Reply(marked.reply_ids, logprobs, marked.finish_reason, states=kept)
            answered.append(Answered(prompt, request, reply))
        progress(sum(len(marked.reply_ids) for _, _, marked in few), len(few))
    return answered


def score(target: Target, final_RH: Tensor, token_ids: list[int]) -> list[float]:
    """Log-probability of every reply token under the raw target; state r is the one that token r is said from."""
    token_R1 = torch.tensor(token_ids, device=final_RH.device)[:, None]
    parts = []
    for final_CH, token_C1 in zip(final_RH.split(SCORED_TOKENS), token_R1.split(SCORED_TOKENS), strict=True):
        logits_CV = target.logits(final_CH)
        parts.append(logits_CV.gather(1, token_C1).squeeze(1) - logits_CV.logsumexp(-1))
    found: list[float] = torch.cat(parts).tolist()
    return found


def conversations_of(
    load_target: TargetLoader, prompts: Sequence[Prompt], settings: TrafficSettings
) -> tuple[dict[str, Conversation], Recorded | None]:
    """All conversations of a traffic stage by prompt id, and what became of the sources' replies where these are kept.

    Raises:
        WrongInput: as `plan_conversations` and `keep_replies`.
    """
    if settings.replies != "recorded":
        return plan_conversations(load_target, prompts, settings), None
    asked = plan_conversations(load_target, [p for p in prompts if p.split != "train"], settings)
    train = [prompt for prompt in prompts if prompt.split == "train"]
    if not train:
        return asked, None
    taken = {request.prompt_id for talk in asked.values() for request in talk.requests}
    found = keep_replies(load_target, train, settings, taken)
    return asked | {talk.prompt.prompt_id: talk for talk in found.conversations}, found
