"""What a head accepts on held-out replies: figures of one sampling setting, and of others beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from headstart.eval.acceptance import ReplyAcceptance, count_replies, drafts_acceptance
from headstart.eval.acceptance_rows import accept_len_interval
from headstart.eval.contexts import by_context
from headstart.eval.drafters import SuffixDrafter, lookup_acceptance, ngram_acceptance
from headstart.eval.live import measure_live
from headstart.eval.sampled_live import measure_sampled_live
from headstart.eval.statistics import looks, relative_width
from headstart.eval.subject import Subject
from headstart.eval.target_law import TargetLaw
from headstart.eval.tree_acceptance import tree_rows, trees_of
from headstart.heads.errors import WrongInput
from headstart.heads.features import FeatureReader
from headstart.heads.intervals import interval_text
from headstart.heads.paths import UNKNOWN, Path
from headstart.heads.store import hash_json

PREVIOUS = "previous"  # the head in use so far, as a drafter


@dataclass(frozen=True)
class Heldout:
    """The held-out replies of a run, and what a head is compared with on them."""

    paths: Sequence[Path]
    """Recorded at one sampling setting."""
    dtype: str = "float32"
    """Precision they were recorded in, which the target is measured in too: what rounding made of them must not be held
    against a decoder. Only figures in float32 are proved."""
    max_new_tokens: int = 0
    """Their limit; 0 takes the longest."""
    features: FeatureReader | None = None
    """The target's states on them; where it holds none in `dtype`, the target reads the replies again."""
    routes: Sequence[str] = ()
    """Routes that prompts carry; one without replies is shown as empty."""
    others: Sequence[Sequence[Path]] = ()
    """Replies to the same prompts at other sampling settings, one list a setting: their rows stand beside the own ones,
    and the live part decodes at their settings too. They decide no verdict."""
    vocabularies: Sequence[np.ndarray] = ()
    """Token ids of smaller draft vocabularies that the head is measured with too."""
    previous: FilePath | None = None
    """Checkpoint folder of a head that is measured on the same replies and compared with."""


def check_paths(paths: Sequence[Path]) -> None:
    if not paths:
        raise WrongInput("found no held-out replies, expected at least one.\nGive the recipe prompts.heldout.")
    if recorded := [path for path in paths if path.sampling == UNKNOWN]:
        raise WrongInput(
            f"found {len(recorded)} replies that a source brought (first: prompt {recorded[0].prompt_id[:12]}), expected "
            "the target's own: acceptance is exact only on what it said under a known setting.\n"
            "Let it answer the held-out prompts: headstart train RECIPE"
        )
    settings = {hash_json(path.sampling): path.sampling for path in paths}
    if len(settings) > 1:
        raise WrongInput(
            f"found replies of {len(settings)} sampling settings {list(settings.values())}, expected one: acceptance "
            "is exact only on replies of the setting it is reported for.\nMeasure each setting by itself."
        )


def head_acceptance(subject: Subject) -> dict[str, list[ReplyAcceptance]]:
    """Acceptance of the head's greedy drafts, and sampled ones at a temperature, along every held-out reply, or along as
    many as the stopping rule takes; one pass for every draft length and tree.

    The rule (`eval.stop_at_width`) looks at the interval of accept_len after numbers of prompts that are fixed beforehand,
    and at nothing but its width: the value has no part in when to stop, so the interval keeps its coverage. Prompts are
    taken in the order of their ids, hashes of their content, which no result can bend; `subject.paths` become those
    taken.
    """
    settings, sampling = subject.settings, subject.sampling
    deepest = max([*settings.draft_lengths, *(tree.depth for tree in trees_of(subject))])
    kinds = subject.draft_temperatures

    def measured(paths: Sequence[Path]) -> dict[str, list[ReplyAcceptance]]:
        law = TargetLaw(subject.target, sampling) if sampling.temperature else None
        found = drafts_acceptance(subject.head, subject.batches(paths), deepest, list(kinds.values()), law)
        return dict(zip(kinds, found, strict=True))

    subject.tell(f"acceptance: {len(subject.paths)} held-out replies, draft lengths {settings.draft_lengths}")
    if not settings.stop_at_width:
        return measured(subject.paths)
    order = sorted(subject.paths, key=lambda path: path.prompt_id)
    replies: dict[str, list[ReplyAcceptance]] = {kind: [] for kind in kinds}
    width = float("inf")
    for number in looks(len(order)):
        for kind, more in measured(order[len(replies["greedy"]) : number]).items():
            replies[kind] += more
        counts = count_replies(replies["greedy"], settings.draft_length)
        found = accept_len_interval(counts, settings.replicates, subject.seed, subject.conversations)
        width = relative_width(found)
        subject.tell(f"after {number} prompts: accept_len {interval_text(found)}, {width:.1%} wide")
        if width <= settings.stop_at_width:
            break
    else:
        advice = ""
        if width < float("inf"):  # widths fall with the root of the number of prompts
            advice = f"; about {len(order) * (width / settings.stop_at_width) ** 2:.0f} prompts would do"
        subject.tell(f"no prompts are left, and the interval is wider than {settings.stop_at_width:.1%}{advice}")
    taken = {reply.prompt_id for reply in replies["greedy"]}
    subject.paths = [path for path in subject.paths if path.prompt_id in taken]
    place = {path.prompt_id: i for i, path in enumerate(subject.paths)}
    return {kind: sorted(own, key=lambda reply: place[reply.prompt_id]) for kind, own in replies.items()}


def measure_acceptance(
    subject: Subject,
    replies: Mapping[str, list[ReplyAcceptance]],
    previous: Mapping[str, list[ReplyAcceptance]] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Offline rows of the head, of the previous one and of lookup, and the rows of prompts.json they are sums of.

    Every draft length has a row over all prompts, one for each route, and one for each bucket of prompt lengths.
    """
    paths, settings = subject.paths, subject.settings
    longest = max(settings.draft_lengths)
    sources = [(subject.head.kind, draft, found) for draft, found in replies.items()]
    sources += [(PREVIOUS, draft, found) for draft, found in (previous or {}).items()]
    if settings.ngram:
        sources.append(("ngram", "greedy", ngram_acceptance(paths, longest)))
        sources.append(("suffix", "greedy", lookup_acceptance(paths, longest, SuffixDrafter())))
    prompt_tokens = {path.prompt_id: path.num_prompt_tokens for path in paths}
    rows: list[dict[str, Any]] = []
    sums: list[dict[str, Any]] = []
    for drafter, draft, accepted in sources:
        for length in settings.draft_lengths:
            counts = count_replies(accepted, length)
            names = {"drafter": drafter, "draft": draft, "draft_length": length}
            rows += [subject.row(counts, source="offline", route=route, **names) for route in ("all", *subject.routes)]
            for context, held in by_context(counts, prompt_tokens).items():
                rows.append(subject.row(held, source="offline", context=context, **names))
            sums.append({**names, "num_steps": [c.num_steps for c in counts]})
    return rows, sums


def measure_setting(
    subject: Subject, recorded: Sequence[Path], live: bool, max_new_tokens: int
) -> list[dict[str, Any]]:
    """Rows of the same head and prompts at another sampling setting, that of the recorded replies.

    A turn that the target was never asked there, because its own replies had grown too long by then, is left out.

    Raises:
        WrongInput: replies of several settings, or none to any prompt that is measured at the run's own.
    """
    own = {path.prompt_id: path for path in recorded}
    paths = [own[path.prompt_id] for path in subject.paths if path.prompt_id in own]
    check_paths(paths)
    other = replace(subject, paths=paths, features=None, settings=replace(subject.settings, stop_at_width=0.0))
    subject.tell(f"temperature {other.sampling.temperature:g}")
    if missing := len(subject.paths) - len(paths):
        subject.tell(
            f"{missing} of {len(subject.paths)} turns are left out there: their conversations ended earlier, where the "
            "target's own replies left no room for the next question"
        )
    replies = head_acceptance(other)
    rows, _ = measure_acceptance(other, replies)
    rows += tree_rows(other, replies["greedy"])
    if live and other.sampling.temperature == 0:
        live_rows, _, agreed = measure_live(other, replies["greedy"])
        live_rows[0]["agreement"] = agreed
        rows += live_rows
    elif live:
        rows += measure_sampled_live(other, replies, max_new_tokens)[0]
    return rows
