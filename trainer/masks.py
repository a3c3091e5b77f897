"""Which tokens of a conversation that was not generated here are the reply: where it begins, and where it ends.

The prompt is what an engine would read: the chat template up to the generation prompt, as its own token ids. The reply is
what the same template writes behind it when the turn is there, up to the end of the turn:

    prompt      <|im_start|>user \n Hello <|im_end|> \n <|im_start|>assistant \n
    with reply  <|im_start|>user \n Hello <|im_end|> \n <|im_start|>assistant \n Good morning . <|im_end|> \n
    reply                                                                       Good morning . <|im_end|>

Ids are those of the template's own text, whole. Where a token of it would straddle the boundary (a tokenizer that merges
": I"), no engine could ever meet that token: the prompt keeps its own ids, and the reply is tokenised from its first
character on. The end of the turn is part of the reply, because the target emits it. What the generation prompt supplies (an
opened or an empty think block) is prompt, whether or not the row's text has it too.

Nothing is guessed: the reply's ids have to decode to what the template wrote, and that has to hold what the row says.
Otherwise the row is refused with its reason.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.paths import Prompt
from headstart.heads.rendering import render, template_ids, template_text, with_objects

MARK = "\u2063reply\u2063"
TAGS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # what transformers builds its assistant mask from
OPENED = re.compile(r"([<\[][^<>\[\]/\s]*think[^<>\[\]/\s]*[>\]])\s*$", re.IGNORECASE)
CLOSED = re.compile(r"[<\[]/[^<>\[\]\s]*think[^<>\[\]\s]*[>\]]", re.IGNORECASE)
EMPTY_BLOCK = re.compile(r"\s*([<\[])([^<>\[\]/\s]*think[^<>\[\]/\s]*[>\]])\s*\1/\2", re.IGNORECASE)
REASONING = ("reasoning_content", "reasoning", "thinking")  # names that engines and data sets use for it


class BadReply(Exception):
    """Why a reply cannot be told apart, or is not one that the target would have given."""


@dataclass(frozen=True)
class MarkedReply:
    """A request and its reply in token ids."""

    prompt_ids: list[int]
    reply_ids: list[int]  # ends in what ends the turn, unless it was cut
    finish_reason: str  # stop | length
    notes: list[str] = field(default_factory=list)  # what the user should know and can be counted

    def cut(self, limit: int) -> "MarkedReply":
        """The same with at most `limit` reply tokens; no end of turn is invented."""
        if len(self.reply_ids) <= limit:
            return self
        return replace(self, reply_ids=self.reply_ids[:limit], finish_reason="length")


def mark_reply(
    facts: TargetFacts, tokenizer: Any, prompt: Prompt, reply: dict[str, Any], max_new_tokens: int
) -> MarkedReply:
    """Tell the tokens of `reply`, the assistant's turn after `prompt.messages`, from those of the prompt.

    Args:
        reply: role, content, and what else the template reads; `finish_reason: length` says that it was cut.
        max_new_tokens: a longer reply is cut there; the tokens before stay, and no end of turn is invented.

    Raises:
        BadReply: the template shows no boundary, changes or drops what the row says, or adds what the target never said.
    """
    try:
        prompt_ids = render(facts, tokenizer, prompt)
        texts = Texts.of(tokenizer, prompt, reply)
    except WrongInput as error:
        raise BadReply(str(error).partition("\n")[0]) from None
    said, notes = said_text(texts, reply)
    whole_ids = template_ids(tokenizer, [*prompt.messages, reply], prompt.template_kwargs, prompting=False)
    rest_ids = whole_ids[len(prompt_ids) :]
    aligned = whole_ids[: len(prompt_ids)] == prompt_ids
    if not aligned or squeezed(tokenizer.decode(rest_ids)) != squeezed(said):
        rest_ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    reply_ids, ended = up_to_end(facts, tokenizer, rest_ids, texts.after)
    if squeezed(tokenizer.decode(reply_ids)) != squeezed(said):
        raise BadReply("the tokenizer does not give the reply's text back")
    if not ended:
        notes.append(f"the chat template of {facts.name} writes no end of turn, so heads do not learn where to stop")
    elif reply_ids[-1] not in facts.stop_ids:
        end = tokenizer.decode(reply_ids[-1:])
        notes.append(f"the chat template ends a reply with {end}, which is none of the target's stop tokens")
    if aligned and TAGS.search(chat_template(tokenizer)):
        notes += tag_notes(tokenizer, prompt, reply, len(prompt_ids), len(reply_ids), ended)
    if ended and reply.get("finish_reason") == "length":  # the template closes a turn that the target never closed
        reply_ids, ended = reply_ids[:-1], False
        if str(reply.get("content") or " ").rstrip() == reply.get("content"):  # nor did it say a blank before its end
            reply_ids = without_blank_end(tokenizer, reply_ids)
    return MarkedReply(prompt_ids, reply_ids, "stop" if ended else "length", notes).cut(max_new_tokens)


@dataclass(frozen=True)
class Texts:
    """A conversation as the template writes it: ready for the reply, with it, and around another text in its place."""

    prompt: str
    whole: str
    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: Any, prompt: Prompt, reply: dict[str, Any]) -> "Texts":
        probe = {"role": reply["role"], "content": MARK}
        try:
            asked = template_text(tokenizer, prompt.messages, prompt.template_kwargs, prompting=True)
            whole, probed = (
                template_text(tokenizer, [*prompt.messages, turn], prompt.template_kwargs) for turn in (reply, probe)
            )
        except Exception as error:  # a template refuses by raising, and fails in any way it likes
            raise BadReply(f"the chat template cannot render the reply: {type(error).__name__}: {error}") from None
        before, mark, after = probed.rpartition(MARK)
        if not mark:
            raise BadReply("the chat template leaves out the assistant's text")
        return cls(asked, whole, before, after)


def said_text(texts: Texts, reply: dict[str, Any]) -> tuple[str, list[str]]:
    """What the target says behind the prompt, its end of turn and what follows included; and notes.

    Raises:
        BadReply: as `mark_reply`.
    """
    content, reasoning = reply_parts(reply)
    opened = OPENED.search(texts.prompt)
    opening = opened[1] if opened else ""
    said = behind_prompt(texts, opening)
    notes: list[str] = []
    supplied = squeezed(opening)
    if CLOSED.search(content) and squeezed(content) not in supplied + squeezed(said):
        # Templates drop the reasoning of replies as history; the engine gave it as it stands in the row.
        said = content.lstrip().removeprefix(opening).lstrip("\n" if opening else "") + texts.after
        notes.append("the chat template drops the think block of a reply: it is kept as the row has it")
    if opening and not CLOSED.search(said):
        raise BadReply(
            f"the generation prompt opens {opening} and the reply as rendered never closes it: it was made with other "
            "template_kwargs, or the chat template drops its reasoning"
        )
    if not reasoning and not CLOSED.search(content) and (block := EMPTY_BLOCK.match(said)):
        raise BadReply(
            f"the chat template puts {squeezed(block[0])} into a reply that has none: it was made with thinking off; "
            "say so (prompts.template_kwargs=[enable_thinking=false])"
        )
    found = supplied + squeezed(said)
    if squeezed(content) not in found:
        raise BadReply("the chat template changes the reply's text")
    if reasoning and squeezed(reasoning[1]) not in found:
        notes.append(f"the chat template ignores {reasoning[0]}, so replies are without it")
    for name in called(reply):
        if squeezed(name) not in found:
            raise BadReply(f"the chat template ignores tool_calls ({name}), which the reply consists of")
    return said, notes


def behind_prompt(texts: Texts, opening: str) -> str:
    """What the template writes behind the prompt when the reply is there."""
    if texts.whole.startswith(texts.prompt):
        return texts.whole[len(texts.prompt) :]
    supplied = texts.prompt.removeprefix(texts.before)
    thinks = bool(opening) or bool(EMPTY_BLOCK.fullmatch(supplied.strip()))
    if texts.prompt.startswith(texts.before) and texts.whole.startswith(texts.before) and thinks:
        said = texts.whole[len(texts.before) :]
        return said.lstrip().removeprefix(opening) if opening and said.lstrip().startswith(opening) else said
    raise BadReply(
        "the chat template writes the conversation otherwise once the reply is there, so nothing tells them apart"
    )


def up_to_end(facts: TargetFacts, tokenizer: Any, rest_ids: Sequence[int], after: str) -> tuple[list[int], bool]:
    """Ids up to what ends the turn, and whether there is such a token.

    That is the first stop token of the target; where the template ends replies with another special token, the last of
    those.

    Raises:
        BadReply: text follows the stop token, so the row's own text holds it.
    """
    ids = list(rest_ids)
    end = next((place for place, token in enumerate(ids) if token in facts.stop_ids), None)
    if end is None and after.strip():
        first = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"][0]
        if first in facts.special_ids and first in ids:
            end = len(ids) - 1 - ids[::-1].index(first)
    if end is None:
        return (without_blank_end(tokenizer, ids) if after and not after.strip() else ids), False
    if tokenizer.decode(ids[end + 1 :]).strip():
        raise BadReply(f"the reply holds {tokenizer.decode(ids[end : end + 1])}, which ends it, before its last word")
    return ids[: end + 1], True


def without_blank_end(tokenizer: Any, ids: list[int]) -> list[int]:
    """Ids without the line break or blank that a template sets behind a reply."""
    while ids and not tokenizer.decode(ids[-1:]).strip():
        ids = ids[:-1]
    return ids


def tag_notes(
    tokenizer: Any, prompt: Prompt, reply: dict[str, Any], num_prompt: int, num_reply: int, ended: bool
) -> list[str]:
    """How the template's own generation tags differ from the reply as it was told apart.

    Raises:
        BadReply: they mark nothing of it.
    """
    tagged = tokenizer.apply_chat_template(
        with_objects([*prompt.messages, reply]),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **prompt.template_kwargs,
    )
    mask = tagged["assistant_masks"]
    own = mask[num_prompt : num_prompt + num_reply]
    if not any(own):
        raise BadReply("the generation tags of the chat template mark no token of the reply")
    notes = []
    if ended and not own[-1]:
        notes.append("the generation tags close before the end of turn, which is trained: the target emits it")
    if not all(own[: num_reply - ended]):
        notes.append("the generation tags leave out a part of the reply, which is trained: the target emits it")
    if num_prompt and mask[num_prompt - 1]:
        notes.append("the generation tags hold a part of the generation prompt, which is not trained")
    return notes


def reply_parts(reply: dict[str, Any]) -> tuple[str, tuple[str, str] | None]:
    """Text of a reply, and the name and text of its reasoning where it is a field of its own.

    Raises:
        BadReply: there is nothing in it.
    """
    content = str(reply.get("content") or "")
    named = ((name, reply[name]) for name in REASONING if isinstance(reply.get(name), str))
    reasoning = next(((name, text) for name, text in named if text.strip()), None)
    if not content.strip() and not reasoning and not reply.get("tool_calls"):
        raise BadReply("an empty reply")
    return content, reasoning


def called(reply: dict[str, Any]) -> list[str]:
    """Names of the functions that a reply calls."""
    calls = [call.get("function", call) for call in reply.get("tool_calls") or [] if isinstance(call, dict)]
    return [str(call["name"]) for call in calls if isinstance(call, dict) and call.get("name")]


def chat_template(tokenizer: Any) -> str:
    """The template's text; of several, all of them."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else "\n".join((template or {}).values())


def squeezed(text: str) -> str:
    """Text without blanks: templates trim replies, and some tokenizers put a blank before the first word."""
    return "".join(text.split())
