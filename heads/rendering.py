"""A conversation as the target's own chat template writes it, in text and in token ids."""

import json
from collections.abc import Sequence
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.paths import Prompt


def render(facts: TargetFacts, tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a chat prompt up to where the reply begins; exactly what the chat template gives.

    Raises:
        WrongInput: no chat template, a template that cannot render this prompt, ids that the target has no row for, or two
            tokens of the beginning.
    """
    if not tokenizer.chat_template:
        raise WrongInput(
            f"{facts.name}: found a tokenizer without chat template, expected one for chat prompts.\n"
            "Put a chat_template.jinja beside the tokenizer, or choose an instruction-tuned target."
        )
    which = prompt_name(prompt)
    try:
        token_ids = template_ids(tokenizer, prompt.messages, prompt.template_kwargs, prompting=True)
    except Exception as error:
        # A template is a program that came with the model: it refuses roles by raising, and fails in any way it likes.
        raise WrongInput(
            f"{which}: the chat template of {facts.name} cannot render it: {type(error).__name__}: {error}\n"
            "Remove such prompts (or their template_kwargs), or choose a target whose template takes them."
        ) from None
    if not token_ids or max(token_ids) >= facts.vocab_size:
        found = f"token id {max(token_ids)}" if token_ids else "no token"
        raise WrongInput(
            f"{which}: rendered by {facts.name} found {found}, expected ids below {facts.vocab_size}, the rows of its "
            "embedding.\nThe chat template or the tokenizer is not this model's: compare the folder with its source."
        )
    if tokenizer.bos_token_id is not None and token_ids[:2] == [tokenizer.bos_token_id] * 2:
        raise WrongInput(
            f"{which}: rendered by {facts.name} found {tokenizer.bos_token} twice at the beginning, expected it once.\n"
            "The chat template writes it twice: compare the folder with its source."
        )
    return token_ids


def prompt_name(prompt: Prompt) -> str:
    """What messages call a prompt."""
    return f"prompt {prompt.prompt_id[:12]} ({str(prompt.messages[-1].get('content', ''))[:60]!r})"


def template_ids(
    tokenizer: Any, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any], prompting: bool
) -> list[int]:
    """Token ids of a conversation; with `prompting` ready for a reply. Whatever the template raises passes through."""
    rendered = tokenizer.apply_chat_template(
        with_objects(messages), tokenize=True, add_generation_prompt=prompting, return_dict=True, **kwargs
    )
    return [int(token) for token in rendered["input_ids"]]


def template_text(
    tokenizer: Any, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any], prompting: bool = False
) -> str:
    """The same as text."""
    text: str = tokenizer.apply_chat_template(
        with_objects(messages), tokenize=False, add_generation_prompt=prompting, **kwargs
    )
    return text


def with_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose tool calls have their arguments as objects: templates expect these, and logs hold JSON text."""
    return [
        {**turn, "tool_calls": [with_object(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else turn
        for turn in messages
    ]


def with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
