"""Acceptance by prompt length: buckets, the curve over them, and the length from which drafting no longer pays.

A reply belongs to the bucket `a-b` of its prompt's tokens, a <= tokens < b; buckets double from 128. Whole prompts stay
together, as in every interval, and replies are short beside the lengths that matter.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # tables are printed without torch
    from headstart.eval.acceptance import PromptCounts

FIRST_BUCKET = 128


def bucket(num_tokens: int) -> tuple[int, int]:
    """Bounds of the bucket of a prompt length."""
    low, high = 0, FIRST_BUCKET
    while num_tokens >= high:
        low, high = high, 2 * high
    return low, high


def by_context(counts: "Sequence[PromptCounts]", prompt_tokens: Mapping[str, int]) -> "dict[str, list[PromptCounts]]":
    """Prompts by bucket, the shortest first; an empty bucket between two that hold prompts is there, and empty."""
    held_R = [bucket(prompt_tokens[c.prompt_id]) for c in counts]
    found: dict[str, list[PromptCounts]] = {}
    here = min(held_R, default=None)
    while here is not None and here <= max(held_R):
        found[f"{here[0]}-{here[1]}"] = [c for c, held in zip(counts, held_R, strict=True) if held == here]
        here = bucket(here[1])
    return found


def shortest(row: Mapping[str, Any]) -> int:
    """Smallest prompt length of a row's bucket."""
    return int(row["context"].partition("-")[0])


def context_rows(acceptance: dict[str, Any], drafter: str, draft_length: int) -> list[dict[str, Any]]:
    """Offline rows of one drafter's greedy drafts by prompt length, the shortest first."""
    wanted = ("offline", drafter, "greedy", draft_length, "all")
    keys = ("source", "drafter", "draft", "draft_length", "route")
    rows = [row for row in acceptance["rows"] if tuple(row[key] for key in keys) == wanted and row["context"] != "all"]
    return sorted(rows, key=shortest)


def step_cost(acceptance: dict[str, Any], speed: dict[str, Any] | None, draft_length: int) -> float | None:
    """Cost of a target step with the head's drafts / one plain step, as timed for one request; None if it was not.

    accept_len above it is a gain. Figures of another checkpoint than acceptance speaks of do not count.
    """
    if speed is None or speed["checkpoint"]["sha256"] != acceptance["checkpoint"]["sha256"]:
        return None
    wanted = ("reference", acceptance["checkpoint"]["kind"], 1, draft_length)
    for row in speed["rows"]:
        timed = tuple(row[key] for key in ("engine", "drafter", "concurrency", "draft_length")) == wanted
        if timed and row["predicted_speedup"]:
            return float(row["accept_len"] / row["predicted_speedup"])
    return None


def break_even(rows: Sequence[dict[str, Any]], cost: float) -> int | None:
    """Prompt tokens from which on no bucket's accept_len is worth a step with drafts; None where the longest one's is.

    Args:
        rows: of `context_rows`. Buckets in which nothing was counted say nothing.
        cost: of a step with drafts, in plain steps (`step_cost`).
    """
    length = None
    for row in counted(rows):
        if row["accept_len"]["value"] >= cost:
            length = None
        elif length is None:
            length = shortest(row)
    return length


def counted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["accept_len"]["value"] is not None]


def break_even_text(rows: Sequence[dict[str, Any]], cost: float | None) -> str:
    """One sentence on where drafting stops to pay."""
    if cost is None:
        return "break-even: unknown, no step of this draft length was timed (headstart eval RUN --speed)"
    worth = f"a step with drafts costs {cost:.2f} plain steps, which accept_len has to exceed"
    length = break_even(rows, cost)
    if length is None:
        return f"break-even: not reached at these prompt lengths; {worth}"
    if length == shortest(counted(rows)[0]):
        return f"break-even: below the shortest prompts, drafting loses at every length; {worth}"
    return f"break-even: drafting loses for prompts of {length} tokens and more; {worth}"
