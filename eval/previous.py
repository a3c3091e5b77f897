"""The head in use so far, measured on the same replies beside the new one, and the two compared, prompt by prompt."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.eval.acceptance import PromptCounts, ReplyAcceptance, count_replies
from headstart.eval.compare import REPLICATES, compare_route, verdict
from headstart.eval.heldout import head_acceptance
from headstart.eval.prompt_sums import PromptSums
from headstart.eval.subject import Subject
from headstart.heads.checkpoint import checkpoint_identity, load_head


def previous_acceptance(subject: Subject, folder: Path) -> dict[str, list[ReplyAcceptance]]:
    """Acceptance of the head in a checkpoint folder along the subject's replies, as `head_acceptance`.

    It may read other taps than the new head: the target reads the replies again then. Of a draft that is longer than it can
    make, the depths beyond its last have no proposal.

    Raises:
        WrongInput: no head there, or one of another target.
    """
    target = subject.target
    head = load_head(folder, target).to(target.device).eval().pack()
    if head.taps and head.taps != target.taps:
        target = target.with_taps(head.taps)
    longest = max(subject.settings.draft_lengths)
    depth = min(longest, head.settings.max_depth or longest)
    # the very replies of the new head
    settings = replace(subject.settings, stop_at_width=0.0, draft_lengths=[depth], draft_length=depth, trees=[])
    found = head_acceptance(replace(subject, target=target, head=head, settings=settings))
    return {draft: [lengthened(reply, longest) for reply in replies] for draft, replies in found.items()}


def lengthened(reply: ReplyAcceptance, draft_length: int) -> ReplyAcceptance:
    """The same with depths below the last, at which nothing is proposed."""
    missing = ((0, 0), (0, draft_length - reply.accept_TK.shape[1]))
    accept_TK, judged_TK = np.pad(reply.accept_TK, missing), np.pad(reply.judged_TK, missing)
    return replace(reply, accept_TK=accept_TK, judged_TK=judged_TK, confidence_TK=None, rank_TK=None)


def compared(
    subject: Subject, folder: Path, new: Sequence[ReplyAcceptance], old: Sequence[ReplyAcceptance]
) -> dict[str, Any]:
    """The entry `previous` of acceptance.json: greedy drafts of the reported length, the new head against the old one."""
    length = subject.settings.draft_length
    mine, theirs = (prompt_sums(subject, count_replies(replies, length)) for replies in (new, old))
    found = compare_route(mine, theirs, "all", subject.seed, REPLICATES)
    return {
        "checkpoint": checkpoint_identity(folder),
        "folder": str(folder),
        "draft_length": length,
        "accept_len": found.accept_len,
        "previous_accept_len": found.reference_accept_len,
        "ratio": found.ratio,
        "p": found.p,
        "verdict": found.verdict if found.p is None else verdict(found.ratio["value"], found.p),
    }


def prompt_sums(subject: Subject, counts: Sequence[PromptCounts]) -> PromptSums:
    """The sums that `compare_route` reads; it asks for neither names nor identities."""
    tokens_R, steps_R = (np.array([getattr(c, name) for c in counts], float) for name in ("num_tokens", "num_steps"))
    ids, routes = [c.prompt_id for c in counts], [c.route for c in counts]
    return PromptSums("", {}, ids, routes, tokens_R, steps_R, [subject.conversations[i] for i in ids], {})
