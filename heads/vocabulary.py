"""The draft vocabulary: which target tokens the head can propose."""

import hashlib
from collections.abc import Iterable

import numpy as np

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.paths import Path


def count_tokens(paths: Iterable[Path], facts: TargetFacts) -> np.ndarray:
    """How often each id occurs in the generated part of the paths, int64 [vocab_size]."""
    counts_V = np.zeros(facts.vocab_size, dtype=np.int64)
    for path in paths:
        np.add.at(counts_V, path.token_N[path.generated_N], 1)
    return counts_V


def choose_draft_vocabulary(
    counts_V: np.ndarray, size: int, facts: TargetFacts, setting: str = "head.draft_vocab_size"
) -> np.ndarray:
    """Ids of the draft vocabulary, ascending.

    Special and stop tokens are always in (a head that cannot draft the end of a turn pays for it in every reply). Then come
    the tokens that the target's replies use most. What is left is filled with the lowest ids: the merge order of a byte-pair
    tokenizer is a frequency order over far more text than the traffic, so rare traffic is covered too.

    Args:
        counts_V: how often each id occurs in generated training tokens, [vocab_size].
        size: tokens wanted; 0 takes every id the tokenizer can produce.
        setting: what the size was given as, for the errors.

    Raises:
        WrongInput: more tokens asked for than the tokenizer has, or too few for the specials.
    """
    if size == 0:
        return np.arange(facts.num_tokens, dtype=np.int64)
    if size > facts.num_tokens:
        raise WrongInput(
            f"{setting} = {size}, but the tokenizer of {facts.name!r} has {facts.num_tokens} tokens. "
            "Ask for fewer, or 0 for all of them."
        )
    always = always_drafted(facts)
    if size < len(always):
        raise WrongInput(
            f"{setting} = {size} is too small: {len(always)} special and stop tokens are always in. Ask for more, or for 0."
        )
    chosen = np.zeros(facts.num_tokens, dtype=bool)
    chosen[always] = True
    counts = counts_V[: facts.num_tokens].astype(np.int64)
    by_count = np.argsort(-counts, kind="stable")
    for candidates in (by_count[counts[by_count] > 0], np.arange(facts.num_tokens)):
        fresh = candidates[~chosen[candidates]]
        chosen[fresh[: size - int(chosen.sum())]] = True
    return np.flatnonzero(chosen).astype(np.int64)


def always_drafted(facts: TargetFacts) -> list[int]:
    """Special and stop tokens: ids that every draft vocabulary holds."""
    return [i for i in sorted({*facts.special_ids, *facts.stop_ids}) if i < facts.num_tokens]


def coverage(counts_V: np.ndarray, draft_ids_V: np.ndarray) -> float:
    """Share of generated tokens that the draft vocabulary holds: an upper bound on acceptance."""
    total = int(counts_V.sum())
    return float(counts_V[draft_ids_V].sum()) / total if total else float("nan")


def hash_ids(draft_ids_V: np.ndarray) -> str:
    """Content hash of a vocabulary map; the identity a checkpoint records."""
    return hashlib.sha256(np.asarray(draft_ids_V, dtype="<i8").tobytes()).hexdigest()
