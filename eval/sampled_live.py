"""The live part of an evaluation at a temperature: held-out prompts decoded with random numbers of their own."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headstart.eval.acceptance import ReplyAcceptance, count_replies
from headstart.eval.agreement import live_agreement, step_variances
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.live import live_counts_in_order, live_rows, told
from headstart.eval.speculation import Speculation
from headstart.eval.subject import Subject
from headstart.eval.timings import balanced
from headstart.heads.paths import Path

DRAFTS: tuple[Literal["greedy", "sampled"], ...] = ("greedy", "sampled")


def measure_sampled_live(
    subject: Subject, offline: Mapping[str, Sequence[ReplyAcceptance]], max_new_tokens: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Decode held-out prompts live at the recorded replies' setting, with greedy and with sampled drafts.

    Args:
        offline: acceptance along the recorded replies, by kind of drafts.
        max_new_tokens: the limit that the recorded replies had.

    Returns:
        Rows by both counting rules, and how far accept_len is from the offline one for each kind of drafts.
    """
    settings, length = subject.settings, subject.settings.draft_length
    paths = balanced(subject.paths, settings.live_prompts or len(subject.paths))
    prompts = [path.prompt_token_ids for path in paths]
    taken = {path.prompt_id for path in paths}
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"num_replies": len(paths), "draft_length": length}
    for draft in DRAFTS:
        live = decode(
            subject.target,
            prompts,
            Speculation(HeadDrafter(subject.head), length, subject.sampling, draft, whole_blocks=True),
            max_new_tokens,
            batch=settings.live_batch,
            seed=subject.seed,
            request_ids=request_names(draft, paths),
            progress=told(subject, f", temperature {subject.sampling.temperature:g}, {draft} drafts"),
        )
        expected = [reply for reply in offline[draft] if reply.prompt_id in taken]
        found[draft] = live_agreement(
            live_counts_in_order(subject, paths, live),
            count_replies(expected, length),
            step_variances(expected, length),
        )
        new = live_rows(subject, paths, live, draft)
        new[0]["agreement"] = found[draft]
        rows += new
    return rows, found


def request_names(draft: str, paths: Sequence[Path]) -> list[str]:
    """Names that live requests draw their random numbers under, with the run's seed.

    No other stage uses them, so live replies are independent of the recorded ones, and of those with other drafts.
    """
    return [f"live/{draft}/{path.prompt_id}" for path in paths]
