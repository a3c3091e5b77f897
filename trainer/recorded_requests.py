"""Recorded traffic: a request with its response, in OpenAI's form, as a conversation that other rows have too.

    {"request": {"messages": [..], "tools": [..]}, "response": {"choices": [{"message": {..}}]}, "route": "chat"}

Taken as well: the lines of a batch file (`{"custom_id", "method", "url", "body"}`), a response inside its HTTP result
(`{"status_code", "body"}`), and a request whose response was not kept.
"""

from collections.abc import Mapping
from typing import Any

from headstart.trainer.rows import BadRow, parsed, parsed_or_text

FINISHED = ("stop", "length", "tool_calls", None)
RENDERED = ("documents", "reasoning_effort", "tools")  # fields of a request that servers hand to the chat template
CARRIED = ("model", "messages", "chat_template_kwargs", *RENDERED)  # what a request says in the row it becomes


def is_recorded(row: Mapping[str, Any]) -> bool:
    """Whether a row is a request of a log; columns that a Parquet file has for other rows are null."""
    return row.get("request") is not None or row.get("body") is not None


def conversation(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The row of messages, template kwargs and route that a recorded request stands for, and what it leaves out.

    The recorded reply is its last turn. What constrains the reply stays a key of the row, for its reader to refuse.

    Raises:
        BadRow: it is no chat request, or its response is an error or has no reply.
    """
    request = opened(row, "request") if row.get("request") is not None else {"body": row["body"]}
    if "messages" not in request and request.get("body") is not None:
        request = opened(request, "body")
    if "messages" not in request:
        raise BadRow("a text completion, which has no turns" if "prompt" in request else "a request without messages")
    if request.get("functions"):
        raise BadRow("functions, the older form of tools, are not supported")
    if request.get("tool_choice") not in (None, "auto", "none"):
        raise BadRow("tool_choice constrains the reply, which is not supported")
    if request.get("chat_template"):
        raise BadRow("chat_template: it was rendered by a template of its own, which is not supported")
    if request.get("continue_final_message") or request.get("add_generation_prompt") is False:
        raise BadRow("it asks to continue a turn, which is not supported")
    messages = parsed(request["messages"])
    reply, finish_reason = read_response(row)
    if reply is not None and isinstance(messages, list):
        messages = [*messages, reply]
    kwargs = opened(request, "chat_template_kwargs") if request.get("chat_template_kwargs") is not None else {}
    told = {name: (parsed_or_text if name == "reasoning_effort" else parsed)(request.get(name)) for name in RENDERED}
    kwargs = {**kwargs, **{name: value for name, value in told.items() if value}}
    metadata = request.get("metadata")
    route = row.get("route") or (metadata.get("route") if isinstance(metadata, dict) else None)
    constraints = {key: value for key, value in request.items() if key not in CARRIED}
    notes = ["stop strings of a request left out: the target ends its own replies"] if request.get("stop") else []
    turns = {"messages": messages, "finish_reason": finish_reason}
    return {**constraints, **turns, "route": route, "template_kwargs": kwargs}, notes


def read_response(row: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """The turn that was answered and how it ended; None where no response was kept."""
    if row.get("error"):
        raise BadRow("its response is an error")
    if row.get("response") is None:
        return None, None
    response = opened(row, "response")
    if response.get("status_code", 200) != 200 or response.get("error"):
        raise BadRow("its response is an error")
    if "choices" not in response and response.get("body") is not None:
        response = opened(response, "body")
        if response.get("error"):
            raise BadRow("its response is an error")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadRow("its response has no choices")
    if choices[0].get("finish_reason") not in FINISHED:
        raise BadRow(f"its reply ended by {choices[0]['finish_reason']}")
    message = choices[0].get("message")
    if not isinstance(message, dict) or not (message.get("content") or message.get("tool_calls")):
        raise BadRow("its response has no reply")
    return {"role": "assistant", **message}, choices[0].get("finish_reason")


def opened(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = parsed(row[key])
    if not isinstance(value, dict):
        raise BadRow(f"{key} is not an object")
    return value
