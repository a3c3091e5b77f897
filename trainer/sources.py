"""Rows of prompt files as prompts: every row is read or skipped with a reason that can be counted and listed."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.paths import Prompt
from headstart.heads.store import hash_file, hash_json
from headstart.trainer.hub import fetched, is_hub
from headstart.trainer.recorded_requests import conversation, is_recorded
from headstart.trainer.rows import BadRow, parsed, parsed_or_text
from headstart.trainer.scrub import scrub
from headstart.trainer.verdicts import Record

ROLES = ("system", "user", "assistant", "tool")
# The names ShareGPT files use.
ROLE_NAMES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}

DEFAULT_ROUTE = "chat"
ALL_ROUTES = "all"  # the name of the rows over every route
ENDINGS = (".jsonl", ".json", ".parquet")


ENDS_WITH_REPLY = "the last turn is a reply, which is no part of the prompt"


@dataclass(frozen=True)
class Skip:
    """One row that did not become a prompt, or one prompt that is not used."""

    source: str
    row: int  # counted from 1, blank lines included, so that an editor finds it; 0 for a prompt
    reason: str
    text: str = ""


@dataclass
class Rows:
    """What reading sources gave."""

    prompts: list[Prompt] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)  # changes that kept the row
    records: list[Record] = field(default_factory=list)  # every row


def role_names(pairs: list[str]) -> dict[str, str]:
    """The role map of a recipe (`name=role`) over the usual names.

    Raises:
        WrongInput: a pair is not of that form or names no known role.
    """
    names = dict(ROLE_NAMES)
    for pair in pairs:
        name, _, role = (part.strip() for part in pair.partition("="))
        if not name or role not in ROLES:
            raise WrongInput(
                f"prompts.roles: found {pair!r}, expected NAME=ROLE with a role of {', '.join(ROLES)}.\n"
                "For replies under a model's name write, for example, prompts.roles=[my_model=assistant]"
            )
        names[name] = role
    return names


def template_kwargs(pairs: list[str]) -> dict[str, Any]:
    """The template arguments of a recipe (`name=value`): values as JSON says them, else text.

    Raises:
        WrongInput: a pair is not of that form, or names no variable of a chat template.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name.isidentifier() or not value or name in RENDERING:
            raise WrongInput(
                f"prompts.template_kwargs: found {pair!r}, expected NAME=VALUE with a variable of the chat template, for "
                "example prompts.template_kwargs=[enable_thinking=false]"
            )
        found[name] = parsed_or_text(value)
    return found


def source_path(name: str, base: Path, setting: str) -> Path:
    """The file or folder a source names; relative ones count from `base`, the folder of the recipe."""
    if is_hub(name):
        return fetched(name, ROW_KEYS, setting)
    path = base / Path(name).expanduser()
    if not os.path.exists(path):  # unlike Path.exists, also for a link that points at itself
        raise WrongInput(
            f"{setting}: found no file or folder {path}, expected `builtin`, a .jsonl, .json or .parquet file, a `datasets` "
            f"folder, or hub:ORG/NAME.\nRelative paths count from the recipe's folder, {base}."
        )
    if path.is_file() and path.suffix not in ENDINGS:
        raise WrongInput(
            f"{setting}: found {path}, expected a file that ends in {', '.join(ENDINGS)}.\n"
            'Convert it to JSON lines, one {"messages": [..]} or {"prompt": ".."} a line.'
        )
    return path


def source_hash(path: Path) -> str:
    """Content hash of a file, or of all files below a folder with their names."""
    if path.is_file():
        return hash_file(path)
    files = files_below(path)
    return hash_json([[file.relative_to(path).as_posix(), hash_file(file)] for file in files])


def files_below(folder: Path) -> list[Path]:
    """Files at any depth, in the order they are read.

    Raises:
        WrongInput: a link that leads nowhere, whose rows would be missing.
    """
    found = [path for path in sorted(folder.rglob("*")) if not hidden(path, folder)]
    if lost := [path for path in found if not os.path.exists(path)]:
        raise WrongInput(f"{lost[0]}: found a link that leads nowhere, expected a file.\nMend or remove it.")
    return [path for path in found if path.is_file()]


def hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "cache-")) for part in file.relative_to(folder).parts)


def read_source(path: Path, roles: Mapping[str, str], split: str, scrubbed: Sequence[str] = ()) -> Rows:
    """Read every row of a file or folder, in stored order; texts lose what the patterns named by `scrubbed` match."""
    rows = Rows()
    for number, row in enumerate_rows(path):
        try:
            if isinstance(row, BadRow):
                raise row
            prompt, changed = read_row(scrub(row, scrubbed) if scrubbed else row, roles, split)
        except (BadRow, RecursionError) as bad:
            reason = str(bad) if isinstance(bad, BadRow) else "nested too deeply"
            reason = reason.encode("utf-8", "replace").decode()  # it may quote half a surrogate pair
            rows.skips.append(Skip(str(path), number, reason))
            rows.records.append(Record(str(path), number, "", "", reason))
            continue
        rows.prompts.append(prompt)
        rows.notes.update(changed)
        rows.records.append(Record(str(path), number, prompt.prompt_id, prompt.route, "", hash_json(prompt.reply)))
    return rows


def enumerate_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 1, raw row or BadRow)."""
    if path.is_dir():
        yield from enumerate(folder_rows(path), start=1)
    elif path.suffix == ".parquet":
        yield from enumerate(parquet_rows(path), start=1)
    elif path.suffix == ".json":
        yield from enumerate(json_rows(path), start=1)
    else:
        yield from jsonl_rows(path)


def jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except UnicodeDecodeError:
                yield number, BadRow("not UTF-8")
            except (ValueError, RecursionError):
                yield number, BadRow("not JSON")


def json_rows(path: Path) -> list[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WrongInput(
            f"{path}: found no JSON ({error}), expected a list of rows, or use .jsonl for lines."
        ) from None
    if not isinstance(rows, list):
        raise WrongInput(
            f"{path}: found a JSON {type(rows).__name__}, expected a list of rows, or use .jsonl for lines."
        )
    return rows


def parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        wanted = [name for name in file.schema_arrow.names if name in ROW_KEYS]
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            yield from map(without_nulls, batch.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise WrongInput(
            f"{path}: found no whole Parquet file ({error}).\nWrite it again, or convert it to .jsonl."
        ) from None


def without_nulls(value: Any) -> Any:
    """Without fields that are null, at any depth: Arrow gives an object the fields of all others in its column.

    The arguments of a call would else be rendered with those of other calls.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def folder_rows(path: Path) -> Iterator[Any]:
    """Rows of a `datasets` folder (`save_to_disk`), or of the prompt files in a plain folder."""
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        import datasets

        try:
            stored = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WrongInput(
                f"{path}: found no `datasets` folder that can be loaded ({error}).\nWrite it again with save_to_disk."
            ) from None
        if isinstance(stored, datasets.DatasetDict):
            if "train" not in stored:
                raise WrongInput(
                    f"{path}: found the splits {', '.join(stored)}, expected one named train.\n"
                    f"Name the split's own folder: {path / next(iter(stored), 'SPLIT')}"
                )
            stored = stored["train"]
        wanted = stored.select_columns([name for name in stored.column_names if name in ROW_KEYS])
        yield from map(without_nulls, wanted)
        return
    # Writers of many parts name a folder like a file: `train.parquet/part-0.parquet`.
    files = [file for file in files_below(path) if file.suffix in ENDINGS]
    if not files:
        raise WrongInput(f"{path}: found no `datasets` folder and no file that ends in {', '.join(ENDINGS)}.")
    for file in files:
        yield from (row for _, row in enumerate_rows(file))


# What `apply_chat_template` takes besides the template's own variables: a row that set these would be rendered by another
# template, cut, or not be answered from where a reply begins.
RENDERING = {
    *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "sanitize_control_tokens",
    *("tokenizer_kwargs", "processor_kwargs"),
}

# Request fields that constrain what may be said next, as serving logs have them. Replies are made, drafted and judged here
# without any constraint, so what such a request would accept is another matter.
CONSTRAINTS = (
    *("response_format", "json_schema", "grammar", "structured_outputs", "logit_bias", "bad_words"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
)

ROW_KEYS = (
    *("id", "route", "messages", "conversations", "prompt", "template_kwargs", "finish_reason"),
    *("request", "response", "body", "error"),
    *CONSTRAINTS,
)


def read_row(row: Any, roles: Mapping[str, str], split: str) -> tuple[Prompt, list[str]]:
    """One raw row as a prompt, and what was changed on the way.

    Raises:
        BadRow: the row holds no request that the target can answer.
    """
    if not isinstance(row, dict):
        raise BadRow("not an object")
    notes: list[str] = []
    if is_recorded(row):
        row, notes = conversation(row)
    unconstrained: tuple[Any, ...] = (None, {}, [], "", {"type": "text"})
    if constrained := [key for key in CONSTRAINTS if parsed_or_text(row.get(key)) not in unconstrained]:
        raise BadRow(f"{', '.join(constrained)} constrains the reply, which is not supported")
    turns = parsed(row.get("messages"))
    turns = parsed(row.get("conversations")) if turns is None else turns
    if turns is None and isinstance(row.get("prompt"), str):
        turns = [{"role": "user", "content": row["prompt"]}]
    elif turns is None:
        turns = row.get("prompt")  # a list of turns under this name is common too
    if turns is None:
        raise BadRow("no messages and no prompt")
    messages, reply = read_messages(turns, roles)
    changed = [] if reply is None else [ENDS_WITH_REPLY]
    if reply is not None and row.get("finish_reason") is not None:
        reply["finish_reason"] = row["finish_reason"]
    kwargs = parsed(row.get("template_kwargs")) or {}
    if not isinstance(kwargs, dict):
        raise BadRow("template_kwargs is not an object")
    if reserved := sorted(RENDERING & kwargs.keys()):
        raise BadRow(f"template_kwargs sets {', '.join(reserved)}, which is no variable of a chat template")
    prompt = Prompt(read_route(row.get("route")), messages, split, kwargs, reply)
    try:
        _ = prompt.prompt_id, prompt.route.encode(), json.dumps(reply, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRow("holds half a surrogate pair, which is no Unicode text") from None
    return prompt, notes + changed


def read_route(value: Any) -> str:
    """A route tag on one line."""
    if value is not None and not isinstance(value, str):
        raise BadRow("route is not text")
    route = " ".join((value or "").split()) or DEFAULT_ROUTE
    if route == ALL_ROUTES:
        raise BadRow(f"route {ALL_ROUTES}, which results use for all prompts together")
    return route


def read_messages(turns: Any, roles: Mapping[str, str]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any] | None]:
    """Turns as the target's chat template takes them, ending where the target answers; and the source's reply there.

    Raises:
        BadRow: the order of roles is none that a chat can have, or a turn has no text.
    """
    if not isinstance(turns, list):
        raise BadRow("messages are not a list")
    messages = [read_turn(turn, roles) for turn in turns]
    dialogue = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not messages:
        raise BadRow("empty conversation")
    if not dialogue:
        raise BadRow("only a system turn")
    if dialogue[0]["role"] != "user":
        raise BadRow(f"starts with the {dialogue[0]['role']}")
    for before, turn in zip(dialogue, dialogue[1:], strict=False):
        role = turn["role"]
        if role == "system":
            raise BadRow("system turn after the start")
        if role == before["role"] and role != "tool":
            raise BadRow(f"repeated role {role}")
        if role == "tool" and before["role"] == "user":
            raise BadRow("tool turn without a call")
    reply = messages.pop() if dialogue[-1]["role"] == "assistant" else None
    return tuple(messages), reply


def read_turn(turn: Any, roles: Mapping[str, str]) -> dict[str, Any]:
    """One turn with a known role and text; further fields (tool calls, reasoning) stay for the chat template."""
    if not isinstance(turn, dict):
        raise BadRow("a turn is not an object")
    # Clients write what a turn does not have as null, and no calls as an empty list, which templates take for calls.
    fields = {key: value for key, value in turn.items() if value is not None and (key, value) != ("tool_calls", [])}
    given = fields.pop("role", None) or fields.pop("from", None)
    if given is None:
        raise BadRow("a turn without role")
    role = roles.get(str(given))
    if role is None:
        raise BadRow(f"unknown role {given}")
    content = fields.pop("content", None)
    content = fields.pop("value", None) if content is None else content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if role == "assistant" and fields.get("tool_calls") and content is None:
        content = ""
    if not isinstance(content, str):
        raise BadRow("a turn without text" if content is None else "a turn that is not text")
    if role == "user" and not content.strip():
        raise BadRow("an empty user turn")
    return {"role": role, "content": content, **fields}
