"""What an engine is asked and what it answers: token ids in; replies, and what was drafted and accepted, out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Requests:
    """Prompts for a target's folder, to be answered greedily."""

    target: Path
    prompts: list[list[int]]
    max_new_tokens: int
    stop_ids: list[int]


@dataclass(frozen=True)
class Drafts:
    """What an engine is to draft with: the exported folder of a kind of head, and tokens a step."""

    folder: Path
    kind: str
    length: int


@dataclass
class EngineReply:
    """One reply: how many drafts were verified for it, and how many of them reached each position."""

    token_ids: list[int]
    num_drafts: int
    accepted_K: list[int]  # drafts whose position k was accepted


@dataclass
class EngineRun:
    engine: str  # vllm | llamacpp
    version: str
    replies: list[EngineReply]


class Engine(ABC):
    """A serving engine that computes in float32, with its confidence cut-offs off, so that its counts compare with ours."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._plain: list[tuple[Requests, EngineRun]] = []

    def decode(self, requests: Requests, drafts: Drafts | None = None) -> EngineRun:
        """Answer all requests; without drafts plainly, which is done once for the same requests.

        Raises:
            WrongInput: the engine ended with an error; its last lines are in the message.
        """
        if drafts is not None:
            return self.run(requests, drafts)
        if not any(asked == requests for asked, _ in self._plain):
            self._plain.append((requests, self.run(requests, None)))
        return next(run for asked, run in self._plain if asked == requests)

    @abstractmethod
    def run(self, requests: Requests, drafts: Drafts | None) -> EngineRun:
        """Decode, once."""


def accepted_per_position(accepted: Sequence[int], draft_length: int) -> list[int]:
    """Drafts that were accepted beyond position k, from the number accepted at every step."""
    return [sum(count > k for count in accepted) for k in range(draft_length)]


def last_lines(file: Path, count: int = 25) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-count:])
