"""Prompts and paths: what was asked, and the token ids the target answered with.

A path is the record of one reply. Everything later (features, labels, acceptance) is derived from its token ids; text
is never rendered or tokenised again.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from headstart.heads.store import MANIFEST, MANIFEST_SCHEMA, finished_stage, read_json

SPLITS = ("train", "validation", "heldout")
UNKNOWN: dict[str, Any] = {"recorded": True}  # sampling of replies that the target did not write here


@dataclass(frozen=True)
class Prompt:
    """One request: chat messages with a route tag and a split."""

    route: str
    messages: tuple[dict[str, Any], ...]  # role, content, and what else the chat template reads
    split: str = "train"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    reply: dict[str, Any] | None = None  # the source's own, where it has one; no part of the request

    @property
    def prompt_id(self) -> str:
        """Content hash of messages and template kwargs: the same request has one id in every run."""
        content = json.dumps([list(self.messages), self.template_kwargs], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def turns(self) -> list[int]:
        """Where the assistant speaks: the number of messages before each of its turns, the one to come included."""
        return [i for i, turn in enumerate(self.messages) if turn["role"] == "assistant"] + [len(self.messages)]

    def request(self, turn: int) -> "Prompt":
        """What is asked by the first `turn` messages."""
        return replace(self, messages=self.messages[:turn], reply=None)


@dataclass(frozen=True)
class Path:
    """Token ids x_0..x_{N-1} of one request and its reply, N = P + n (P prompt tokens, then n generated ones).

    `logprob_N` is the log-probability under the raw target (temperature 1, no filter), nan where not generated.
    `finish_reason` is `stop` (the last token is a stop token) or `length` (cut by a limit; no stop token is invented).
    """

    prompt_id: str
    route: str
    split: str
    token_N: np.ndarray  # int32
    generated_N: np.ndarray  # bool
    logprob_N: np.ndarray  # float32
    finish_reason: str
    sampling: dict[str, Any]  # of the target; `UNKNOWN` for a reply that a source brought
    conversation: str = ""  # id of the prompt whose turn it answers; empty: it stands alone

    @property
    def num_prompt_tokens(self) -> int:
        return int(len(self.token_N) - self.generated_N.sum())

    @property
    def prompt_token_ids(self) -> list[int]:
        token_ids: list[int] = self.token_N[: self.num_prompt_tokens].tolist()
        return token_ids

    @property
    def num_reply_tokens(self) -> int:
        return int(self.generated_N.sum())

    @property
    def num_slots(self) -> int:
        """N - 1: every token is fed but the last."""
        return len(self.token_N) - 1


def read_paths(folder: FilePath, split: str | None = None) -> Iterator[Path]:
    """Yield the paths of a finished traffic stage in stored order, optionally of one split only.

    Raises:
        WrongInput: the stage is not finished, or its files are not those that were written.
    """
    for name in sorted(finished_stage(folder).outputs):
        for path in read_part(folder / name):
            if split is None or path.split == split:
                yield path


def conversations(paths: Iterable[Path]) -> dict[str, str]:
    """The conversation of every path, by prompt id: what is drawn as one where a figure has an interval."""
    return {path.prompt_id: path.conversation or path.prompt_id for path in paths}


def trained_on(run: FilePath) -> str:
    """A remark on the training replies of a run, for report and card; empty where they are the target's own."""
    manifest = run / "traffic" / MANIFEST
    settings = read_json(manifest, MANIFEST_SCHEMA)["inputs"]["settings"] if manifest.exists() else {}
    recorded = settings.get("replies") == "recorded" and "splits" not in settings
    return "trained on replies that its sources brought, not on what the target says itself" if recorded else ""


def count_cut(folder: FilePath) -> tuple[int, int]:
    """Training replies of a finished traffic stage that a limit cut, and all of them.

    Raises:
        WrongInput: as `read_paths`.
    """
    import pyarrow.parquet as parquet

    reasons = [
        row["finish_reason"]
        for name in sorted(finished_stage(folder).outputs)
        for row in parquet.read_table(folder / name, columns=["split", "finish_reason"]).to_pylist()
        if row["split"] == "train" and row["finish_reason"] != "error"
    ]
    return reasons.count("length"), len(reasons)


def read_part(file: FilePath) -> Iterator[Path]:
    """Yield the paths of one part file in stored order; requests that failed have none."""
    import pyarrow.parquet as parquet

    for row in parquet.read_table(file).to_pylist():
        if row["finish_reason"] == "error":
            continue
        yield Path(
            prompt_id=row["prompt_id"],
            route=row["route"],
            split=row["split"],
            token_N=np.asarray(row["token_ids"], dtype=np.int32),
            generated_N=np.asarray(row["generated"], dtype=bool),
            logprob_N=np.asarray([np.nan if x is None else x for x in row["logprob"]], dtype=np.float32),
            finish_reason=row["finish_reason"],
            sampling=json.loads(row["sampling"]),
            conversation=row.get("conversation") or opening(row),
        )


def opening(row: dict[str, Any]) -> str:
    """Id of a row's first request: tells turns of one conversation where a part has no column that names it."""
    messages, kwargs = json.loads(row["messages"]), json.loads(row["template_kwargs"])
    first = next((i for i, turn in enumerate(messages) if turn["role"] == "assistant"), len(messages))
    return Prompt(row["route"], tuple(messages[:first]), template_kwargs=kwargs).prompt_id
