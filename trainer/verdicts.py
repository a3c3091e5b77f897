"""What became of every row of a source: which split has it, or why none has.

    {"source":"traffic.jsonl","row":17,"id":"9f..","verdict":"dropped","reason":"its response is an error"}

`train`, `validation`, `heldout`: used there. `dropped`: no request that the target can answer. `repeated`, `near`: another
row says the same, or nearly. `unused`: good, and not asked for.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.heads.errors import GateFailed
from headstart.heads.paths import Prompt
from headstart.heads.store import hash_json

NUM_NAMED = 5  # reasons in a message


@dataclass(frozen=True)
class Record:
    """One row as it was read."""

    source: str
    row: int  # counted from 1, blank lines included
    prompt_id: str  # empty where it is no prompt
    route: str
    reason: str  # why it is none
    reply: str = ""  # hash of the reply it ends with: of equal requests with several, one row's is kept


def verdicts(
    records: Iterable[Record], prompts: Iterable[Prompt], near: Mapping[str, str], unwanted: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """A verdict for every row, in the order they were read.

    Args:
        prompts: those that are used, each in its split.
        near: why prompts are left out for another that is nearly the same, by id.
        unwanted: routes of the sources that were not asked for.
    """
    used = {(prompt.prompt_id, prompt.route, hash_json(prompt.reply)): prompt.split for prompt in prompts}
    splits, left_out = {prompt_id: split for (prompt_id, *_), split in used.items()}, set(unwanted)
    for record in records:
        key = (record.prompt_id, record.route, record.reply)
        if not record.prompt_id:
            verdict, reason = "dropped", record.reason
        elif key in used:
            verdict, reason = used.pop(key), ""
        elif record.prompt_id in splits:
            verdict, reason = "repeated", f"the same request is in {splits[record.prompt_id]}"
        elif record.prompt_id in near:
            verdict, reason = "near", near[record.prompt_id]
        elif record.route in left_out:
            verdict, reason = "unused", "a route that prompts.routes leaves out"
        else:
            verdict, reason = "unused", "more than was asked for (prompts.num_train, max_per_route, num_heldout)"
        yield {
            "source": record.source,
            "row": record.row,
            "id": record.prompt_id or None,
            "verdict": verdict,
            "reason": reason or None,
        }


def check_broken(records: Iterable[Record], most: float) -> None:
    """Say by an error that a source is not what it should be; everything else is done by then.

    Raises:
        GateFailed: more than a share `most` of a source's rows were dropped.
    """
    rows, reasons = Counter[str](), dict[str, Counter[str]]()
    for record in records:
        rows[record.source] += 1
        if not record.prompt_id:
            reasons.setdefault(record.source, Counter())[record.reason] += 1
    failed = [source for source, found in reasons.items() if found.total() > most * rows[source]]
    if failed:
        lines = [
            f"{reasons[source].total():,} of {rows[source]:,} rows of {source} are broken, expected at most {most:.1%} "
            f"(prompts.max_broken): {listed(reasons[source])}"
            for source in failed
        ]
        raise GateFailed(
            "\n".join(lines) + "\nMend them, or raise prompts.max_broken; the good rows are used either way."
        )


def listed(reasons: Counter[str]) -> str:
    first = "; ".join(f"{reason} ({number:,})" for reason, number in reasons.most_common(NUM_NAMED))
    return first + ("; .." if len(reasons) > NUM_NAMED else "")
