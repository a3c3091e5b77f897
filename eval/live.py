"""The live part of an evaluation: held-out prompts decoded for real, and what that says of the offline figures."""

from collections.abc import Callable, Sequence
from typing import Any

from headstart.eval.acceptance import PromptCounts, ReplyAcceptance
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.identity import Rescorer, first_unequal_step, identity_check, is_draft_tie
from headstart.eval.replies import Reply, live_counts
from headstart.eval.speculation import PLAIN, Speculation
from headstart.eval.subject import Subject
from headstart.eval.timings import balanced, generate
from headstart.heads.paths import Path

IDENTITY_PROMPTS = 16  # prompts also decoded plainly and by transformers.generate


def measure_live(
    subject: Subject, offline: Sequence[ReplyAcceptance], with_generate: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Decode held-out prompts live in float32: rows by both counting rules, identity checks, agreement with offline.

    `with_generate` also holds plain decoding against transformers.generate, which takes as long as all the rest.
    """
    target, head, settings = subject.target, subject.head, subject.settings
    paths = balanced(subject.paths, settings.live_prompts or len(subject.paths))
    prompt_ids = [path.prompt_id for path in paths]
    prompts = [path.prompt_token_ids for path in paths]
    recorded = [path.token_N[path.num_prompt_tokens :].tolist() for path in paths]
    limit = max(path.num_reply_tokens for path in paths)
    length, batch = settings.draft_length, settings.live_batch

    way = Speculation(HeadDrafter(head), length, whole_blocks=True)
    live = decode(target, prompts, way, limit, batch=batch, progress=told(subject))
    rows = live_rows(subject, paths, live)
    rescorer = Rescorer(target)
    few = slice(0, IDENTITY_PROMPTS)
    plain = decode(target, prompts[few], PLAIN, limit, batch=batch)
    replies = {
        ("recorded", length): [reply.token_ids for reply in live],
        ("recorded", 0): [reply.token_ids for reply in plain],
    }
    generated: list[list[int]] = []
    if with_generate:
        replies["generate", 0] = replies["recorded", 0]
        for begin in range(0, len(prompts[few]), batch):
            generated += generate(target, prompts[few][begin : begin + batch], limit)
    checks: list[dict[str, Any]] = []
    for (against, draft_length), tokens in replies.items():
        reference = generated if against == "generate" else recorded
        num = len(tokens)
        checks.append(
            identity_check(
                rescorer,
                prompt_ids[:num],
                prompts[:num],
                reference[:num],
                tokens,
                against=against,
                draft_length=draft_length,
                batch=batch,
            )
        )
        checks[-1]["drafter"] = head.kind if draft_length else "plain"
    by_id = {reply.prompt_id: reply for reply in offline}
    return rows, checks, agreement(subject, paths, [by_id[i] for i in prompt_ids], live)


def told(subject: Subject, what: str = "") -> Callable[[int, int], None]:
    """A decoder's `progress` that tells how far it is."""
    return lambda done, num: subject.tell(f"live{what}: {done} of {num} replies")


def live_counts_in_order(
    subject: Subject, paths: Sequence[Path], live: Sequence[Reply], counting: str = "reply"
) -> list[PromptCounts]:
    """Sums of live replies in the stored order of their prompts, so that the replicates are those of the offline rows."""
    stored = {path.prompt_id: i for i, path in enumerate(subject.paths)}
    prompt_ids, routes = [path.prompt_id for path in paths], [path.route for path in paths]
    counts = live_counts(live, prompt_ids, routes, subject.settings.draft_length, counting)
    return sorted(counts, key=lambda c: stored[c.prompt_id])


def live_rows(
    subject: Subject, paths: Sequence[Path], live: Sequence[Reply], draft: str = "greedy"
) -> list[dict[str, Any]]:
    """Rows of live replies by both counting rules."""
    return [
        subject.row(
            live_counts_in_order(subject, paths, live, counting),
            source="live",
            drafter=subject.head.kind,
            draft=draft,
            draft_length=subject.settings.draft_length,
            counting=counting,
        )
        for counting in ("reply", "engine")
    ]


def agreement(
    subject: Subject, paths: Sequence[Path], offline: Sequence[ReplyAcceptance], live: Sequence[Reply]
) -> dict[str, Any]:
    """Whether live replies took exactly the steps computed offline; where not, whether a tie of draft logits is why."""
    equal, certified, unexplained, parted = 0, 0, [], 0
    for path, expected, reply in zip(paths, offline, live, strict=True):
        if reply.token_ids != path.token_N[path.num_prompt_tokens :].tolist():
            parted += 1  # other tokens, other steps: the identity check judges it
            continue
        differing = first_unequal_step(expected, reply)
        if differing is None:
            equal += 1
        elif is_draft_tie(subject.head, next(subject.batches([path])), *differing):
            certified += 1
        else:
            unexplained.append(path.prompt_id)
    return {
        "num_replies": len(live),
        "num_equal": equal,
        "num_draft_ties": certified,
        "num_other_tokens": parted,
        "unexplained": unexplained,
    }
