"""Near-duplicates by word 5-grams: exact Jaccard similarity through an inverted index."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

from headstart.heads.paths import Prompt

GRAM = 5
NEAR = 0.5  # above this, two prompts count as the same question

_WORD = re.compile(r"\w+")

Gram = tuple[str, ...]


def grams(text: str) -> frozenset[Gram]:
    """The set of word n-grams, lower case and without punctuation; a shorter text is one gram."""
    words = _WORD.findall(text.lower())
    return frozenset(zip(*(words[i:] for i in range(GRAM)), strict=False)) or frozenset([tuple(words)])


def jaccard(a: frozenset[Gram], b: frozenset[Gram]) -> float:
    """|a and b| / |a or b|."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


def prompt_text(prompt: Prompt) -> str:
    """What is compared: the turns without the system turn, which whole data sets share."""
    turns = [turn for turn in prompt.messages if turn["role"] != "system"]
    return "\n".join(str(turn.get("content") or "") for turn in turns)


class NearIndex:
    """Sets of grams that can be asked for their most similar member.

    Only members that share a gram with the question are compared, so that a question costs the length of its own
    posting lists and the answer stays exact.
    """

    def __init__(self, members: Iterable[frozenset[Gram]] = ()) -> None:
        self._sizes: list[int] = []
        self._rows: dict[Gram, list[int]] = defaultdict(list)
        for member in members:
            self.add(member)

    @classmethod
    def of(cls, prompts: Iterable[Prompt]) -> "NearIndex":
        return cls(grams(prompt_text(prompt)) for prompt in prompts)

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, member: frozenset[Gram]) -> None:
        for gram in member:
            self._rows[gram].append(len(self._sizes))
        self._sizes.append(len(member))

    def closest(self, question: frozenset[Gram]) -> tuple[float, int]:
        """The highest Jaccard similarity and the row that has it; (0.0, -1) where nothing is shared."""
        lists = [self._rows[gram] for gram in question & self._rows.keys()]
        shared = Counter(chain.from_iterable(lists))
        similarities = ((count / (len(question) + self._sizes[row] - count), row) for row, count in shared.items())
        return max(similarities, default=(0.0, -1))

    def holds_near(self, prompt: Prompt) -> bool:
        """Whether a member is a near-duplicate of `prompt`."""
        return self.closest(grams(prompt_text(prompt)))[0] > NEAR
