"""Near-duplicates by word 5-grams: exact Jaccard similarity through an inverted index."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from headstart.heads.paths import Prompt

GRAM = 5
NEAR = 0.5  # above this, two prompts count as the same question

_WORD = re.compile(r"\w+")

Gram = tuple[str, ...]


def grams(text: str, size: int = GRAM) -> frozenset[Gram]:
    """The set of word n-grams, lower case and without punctuation; a shorter text is one gram."""
    words = _WORD.findall(text.lower())
    return frozenset(tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1)))


def jaccard(a: frozenset[Gram], b: frozenset[Gram]) -> float:
    """|a and b| / |a or b|."""
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


def prompt_text(prompt: Prompt) -> str:
    """What is compared: the turns without the system turn, which whole data sets share."""
    turns = [turn for turn in prompt.messages if turn["role"] != "system"]
    return "\n".join(str(turn.get("content") or "") for turn in turns)


class NearIndex:
    """Texts that can be asked for their most similar member.

    Only texts that share a gram with the question are compared, so that a question costs the length of its own posting
    lists and the answer stays exact.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._num_grams: list[int] = []
        self._rows: dict[Gram, list[int]] = defaultdict(list)
        for text in texts:
            self.add(text)

    def __len__(self) -> int:
        return len(self._num_grams)

    def add(self, text: str) -> None:
        found = grams(text)
        for gram in found:
            self._rows[gram].append(len(self._num_grams))
        self._num_grams.append(len(found))

    def closest(self, text: str) -> tuple[float, int]:
        """The highest Jaccard similarity and the row that has it; (0.0, -1) where nothing is shared."""
        found = grams(text)
        shared = Counter(row for gram in found if gram in self._rows for row in self._rows[gram])
        best = (0.0, -1)
        for row, count in shared.items():
            best = max(best, (count / (len(found) + self._num_grams[row] - count), row))
        return best


def drop_near(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> tuple[list[Prompt], list[tuple[Prompt, float]]]:
    """Split `prompts` into those that stay and those that are near-duplicates of one of `others`."""
    index = NearIndex(prompt_text(other) for other in others)
    kept: list[Prompt] = []
    dropped: list[tuple[Prompt, float]] = []
    for prompt in prompts:
        similarity, _ = index.closest(prompt_text(prompt))
        if similarity > NEAR:
            dropped.append((prompt, similarity))
        else:
            kept.append(prompt)
    return kept, dropped
