"""The requests of a conversation: one for every assistant turn, each with the history that it is asked with.

    source      user, assistant, user, assistant, user                (a reply at the end is not part of what is asked)
    requests    user | user, reply, user | user, reply, user, reply, user

The target answers them in order, and its own replies are the history of the next: what a server meets whose clients talk to
this target. Only where a tool's result follows does the source's own turn stay, because the result answers its call. Every
request is a row of traffic by itself, so that history, which templates render otherwise than a reply (they drop its
thinking, say), is never a label. A row goes by the id of the source's messages up to its turn, whatever the target said
before: the same at every temperature.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.paths import SPLITS, Prompt
from headstart.heads.rendering import prompt_name
from headstart.heads.target import Target, TargetLoader
from headstart.trainer.generation import Reply, Request
from headstart.trainer.left_out import NUM_NAMED, LeftOut, named
from headstart.trainer.masks import MarkedReply
from headstart.trainer.settings import TrafficSettings


@dataclass(frozen=True)
class Conversation:
    """A prompt, and the requests in it that are answered here."""

    prompt: Prompt
    requests: list[Request]
    """One a turn, rendered with the source's history; of the first the target's is the same."""
    turns: list[int]
    """Messages of the prompt that each request has before its reply."""
    kept: list[bool]
    """Whether its row is recorded; the same request of another conversation may be."""
    most_tokens: list[int]
    """What each rendered request cannot be longer than, with the target's own replies as its history."""
    marked: list[MarkedReply] = field(default_factory=list)
    """The source's replies, where these are kept and nothing is asked."""

    @property
    def kept_tokens(self) -> list[int]:
        """The most prompt tokens of every row that is recorded."""
        return [tokens for tokens, kept in zip(self.most_tokens, self.kept, strict=True) if kept]

    def add(self, request: Request, turn: int, marked: MarkedReply) -> None:
        """Keep the source's reply to a request."""
        self.requests.append(request)
        self.turns.append(turn)
        self.kept.append(True)
        self.most_tokens.append(len(request.token_ids))
        self.marked.append(marked)


@dataclass(frozen=True)
class Answered:
    """A row of traffic: the request as it was asked, with the messages that it was rendered from, and the reply."""

    prompt: Prompt
    request: Request
    reply: Reply
    conversation: str
    """Id of the prompt whose turn this is."""


def plan_conversations(
    load_target: TargetLoader, prompts: Iterable[Prompt], settings: TrafficSettings
) -> tuple[dict[str, Conversation], LeftOut]:
    """The conversations of prompts that the target answers, by prompt id, and the requests that cannot be asked.

    These are too long, or refused by the chat template; a conversation ends before its first one. A request that several
    conversations have is recorded once, in a held-out one rather than in one that is trained on.

    Raises:
        WrongInput: more of them than `traffic.max_left_out`, or no prompt left of a split; the first few are named. Or
            repeated prompts.
    """
    found: dict[str, Conversation] = {}
    seen: set[str] = set()
    left_out, number, longest = LeftOut(), 0, 0
    limit = prompt_limit(load_target, settings)
    ordered = sorted(prompts, key=lambda prompt: -SPLITS.index(prompt.split))
    if repeated := len(ordered) - len({prompt.prompt_id for prompt in ordered}):
        raise WrongInput(f"prompts: found {repeated} repeated prompts, expected each once.")
    for prompt in ordered:
        requests: list[Request] = []
        turns = prompt.turns[-1:] if settings.replies == "last" else prompt.turns
        for turn in turns:
            part, reason, token_ids = prompt.request(turn), "", list[int]()
            try:
                token_ids = load_target.render(part)
            except WrongInput as error:
                reason = str(error).partition("\n")[0].removeprefix(f"{prompt_name(part)}: ")
            longest = max(longest, len(token_ids))
            if len(token_ids) > limit:
                which = "traffic.max_prompt_tokens" if limit == settings.max_prompt_tokens else "the target's context"
                reason = f"longer than {limit} tokens ({which})"
            if reason:
                left_out.add(part.prompt_id, str(part.messages[-1].get("content") or ""), reason)
                break
            requests.append(Request(part.prompt_id, token_ids))
        number += len(turns)
        if requests:
            kept = [request.prompt_id not in seen for request in requests]
            most = [min(limit, len(r.token_ids) + k * settings.max_new_tokens) for k, r in enumerate(requests)]
            seen.update(request.prompt_id for request in requests)
            found[prompt.prompt_id] = Conversation(prompt, requests, turns[: len(requests)], kept, most)
    lost = {prompt.split for prompt in ordered} - {talk.prompt.split for talk in found.values()}
    if lost or len(left_out.rows) > settings.max_left_out * number:
        rows = left_out.rows
        first = [f"{row['reason']}: {named(row)}" for row in rows[:NUM_NAMED]] + [".."] * (len(rows) > NUM_NAMED)
        whole = f" (nothing is left of: {', '.join(sorted(lost))})" if lost else ""
        raise WrongInput(
            f"traffic.max_left_out: found {len(rows):,} of {number:,} requests that cannot be asked{whole}, expected at "
            f"most {settings.max_left_out:.1%}; the longest has {longest:,} tokens: {'; '.join(first)}\n"
            f"Raise traffic.max_prompt_tokens (the target's context is {load_target.facts.max_position}), shorten or "
            "remove them, choose other prompts.routes, or raise traffic.max_left_out to go on without them."
        )
    return found, left_out


def prompt_limit(load_target: TargetLoader | Target, settings: TrafficSettings) -> int:
    """Longest request in tokens: the setting's, and room for a reply in the context."""
    return min(settings.max_prompt_tokens, load_target.facts.max_position - 1)


def answer_turns(
    target: Target,
    conversations: Sequence[Conversation],
    settings: TrafficSettings,
    generate: Callable[[list[Request]], list[Reply]],
) -> tuple[list[Answered], Counter[str]]:
    """Answer conversations turn by turn, each turn of all of them together.

    Args:
        generate: replies to requests, in their order.

    Returns:
        The rows that are kept, conversation by conversation, and why conversations ended before their last turn.
    """
    rows: dict[tuple[int, int], Answered] = {}
    ended: Counter[str] = Counter()
    histories = {i: list(talk.prompt.messages[: talk.turns[0]]) for i, talk in enumerate(conversations)}
    for place in range(max(len(talk.turns) for talk in conversations)):
        asked: dict[int, Request] = {}
        for i in [i for i in histories if place < len(conversations[i].turns)]:
            try:
                asked[i] = request_of(target, conversations[i], place, histories[i], prompt_limit(target, settings))
            except WrongInput as error:
                ended[str(error).partition("\n")[0]] += 1
                del histories[i]
        for i, reply in zip(asked, generate(list(asked.values())), strict=True):
            talk, history = conversations[i], histories[i]
            if talk.kept[place]:
                prompt = replace(talk.prompt, messages=tuple(history), reply=None)
                rows[i, place] = Answered(prompt, asked[i], reply, talk.prompt.prompt_id)
            if reply.finish_reason == "error":
                ended["it got no reply"] += place + 1 < len(talk.turns)
                del histories[i]
            elif place + 1 < len(talk.turns):
                history += next_messages(talk, place, reply_turn(target.tokenizer, reply))
    return [rows[key] for key in sorted(rows)], ended


def request_of(target: Target, talk: Conversation, place: int, history: list[dict[str, Any]], limit: int) -> Request:
    """The request of a turn, with the target's own replies as its history.

    Raises:
        WrongInput: the template cannot render that, or it is too long.
    """
    if place == 0:
        return talk.requests[0]
    try:
        token_ids = target.render(replace(talk.prompt, messages=tuple(history), reply=None))
    except WrongInput:
        raise WrongInput("the chat template cannot render the target's own reply as history") from None
    if len(token_ids) > limit:
        raise WrongInput(f"its next request is longer than {limit} tokens")
    return Request(talk.requests[place].prompt_id, token_ids)


def next_messages(talk: Conversation, place: int, reply: dict[str, Any]) -> list[dict[str, Any]]:
    """What a history goes on with: a reply, and the source's turns up to the next one."""
    said, *others = talk.prompt.messages[talk.turns[place] : talk.turns[place + 1]]
    return [said if others and others[0]["role"] == "tool" else reply, *others]


def reply_turn(tokenizer: Any, reply: Reply) -> dict[str, Any]:
    """A reply as a client keeps it: its text without special tokens, and without half a character where it was cut."""
    text = tokenizer.decode(reply.token_ids, skip_special_tokens=True)
    return {"role": "assistant", "content": text.rstrip("\ufffd")}


def longest_request(conversations: Mapping[str, Conversation]) -> int:
    """Room that the longest of all requests takes, in tokens."""
    return max((max(talk.most_tokens) for talk in conversations.values()), default=1)
