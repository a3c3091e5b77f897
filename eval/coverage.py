"""What a smaller draft vocabulary covers, from traffic alone: no head and no pass of the target.

Counted are the tokens that the target generated, each as often as it did; prompts are not. A token outside the draft
vocabulary is a rejected draft wherever it comes, so the share covered bounds acceptance from above.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from headstart.eval.tables import table
from headstart.heads.facts import TargetFacts
from headstart.heads.paths import Path
from headstart.heads.vocabulary import always_drafted, choose_draft_vocabulary, count_tokens, coverage

SHARES = (0.9, 0.95, 0.98, 0.99)
SMALLEST = 256


def default_sizes(facts: TargetFacts, own: int = 0) -> list[int]:
    """Powers of two that are a vocabulary of this tokenizer, and the size of a head at hand."""
    least = max(SMALLEST, len(always_drafted(facts)))
    powers = [2**k for k in range(8, 24) if least <= 2**k < facts.num_tokens]
    return sorted({*powers, *([own] if own else [])})


def unseen_counts(paths: Sequence[Path], facts: TargetFacts) -> dict[str, np.ndarray]:
    """Counts [vocab_size] of generated tokens, of all replies and of each route's."""
    routes = sorted({path.route for path in paths})
    own = {route: count_tokens([path for path in paths if path.route == route], facts) for route in routes}
    return {"all": sum(own.values(), np.zeros(facts.vocab_size, dtype=np.int64)), **own}


def coverage_table(
    counts_V: np.ndarray, unseen: Mapping[str, np.ndarray], sizes: Sequence[int], facts: TargetFacts
) -> str:
    """A line a size: the share of training tokens, from which the vocabulary is chosen, and of unseen ones by route."""
    lines = []
    for size in sizes:
        ids_V = choose_draft_vocabulary(counts_V, size, facts, "--sizes")
        shares = [coverage(counts, ids_V) for counts in (counts_V, *unseen.values())]
        lines.append([f"{size:,}", f"{size / facts.num_tokens:.1%}", *(percent(share) for share in shares)])
    return table(["draft tokens", "of all", "training", *(f"unseen {route}" for route in unseen)], lines)


def smallest_size(counts_V: np.ndarray, unseen_V: np.ndarray, share: float, facts: TargetFacts) -> int | None:
    """The fewest draft tokens that cover a share of unseen tokens; None where not even all of them do."""
    low, high = len(always_drafted(facts)), facts.num_tokens
    if not coverage(unseen_V, choose_draft_vocabulary(counts_V, high, facts)) >= share:
        return None
    while low < high:  # larger vocabularies hold the smaller ones
        middle = (low + high) // 2
        if coverage(unseen_V, choose_draft_vocabulary(counts_V, middle, facts)) >= share:
            high = middle
        else:
            low = middle + 1
    return high


def coverage_text(train: Sequence[Path], others: Sequence[Path], sizes: Sequence[int], facts: TargetFacts) -> str:
    """What `headstart vocab` prints.

    Args:
        train: replies that the vocabulary is chosen from.
        others: validation and held-out replies, which it has not seen.
    """
    counts_V, unseen = count_tokens(train, facts), unseen_counts(others, facts)
    smallest = [(share, smallest_size(counts_V, unseen["all"], share, facts)) for share in SHARES]
    found = ", ".join(f"{share:.0%} by {'none' if size is None else format(size, ',')}" for share, size in smallest)
    different = np.count_nonzero(counts_V)
    return (
        f"draft vocabularies for {facts.name}, whose tokenizer has {facts.num_tokens:,} tokens\n"
        f"chosen from {counts_V.sum():,} generated tokens ({different:,} different) of {len(train):,} training replies; "
        "special and stop tokens are always in\n"
        f"unseen: {unseen['all'].sum():,} generated tokens of {len(others):,} validation and held-out replies\n\n"
        f"{coverage_table(counts_V, unseen, sizes, facts)}\n\n"
        f"of unseen tokens: {found} draft tokens\n"
        "A token outside is a rejected draft, so acceptance stays below these shares. Prompt tokens are not counted."
    )


def percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{share:.2%}"
