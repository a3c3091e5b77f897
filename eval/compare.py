"""Paired comparison of heads that were measured on the same held-out prompts. Made from files only, no model is loaded.

For heads A and B the figure is the ratio of their accept_lens, (sum t_B / sum s_B) / (sum t_A / sum s_A) with tokens t and
target steps s of each prompt. Every replicate draws whole prompts (turns of a conversation together), the same for both:
what makes a prompt easy for both cancels, and a difference shows that two separate intervals would hide. (Percentiles of
the ratio are those of its logarithm, exponentiated.) Several comparisons are corrected by Holm's rule: the heads over all
prompts are one family, the routes of all heads another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headstart.eval.prompt_sums import PromptSums
from headstart.eval.statistics import (
    LEVEL,
    Interval,
    conversation_sums,
    holm,
    interval,
    p_value,
    paired_ratio,
    ratio_interval,
    resampling_weights,
)
from headstart.eval.tables import number_text, table
from headstart.heads.errors import WrongInput
from headstart.heads.intervals import interval_text

REPLICATES = 10_000  # p-values of many routes stay resolved after Holm's rule

DEFINITIONS = """\
accept_len  tokens emitted / target steps, all prompts together, the corrected or bonus token included (offline, exact)
ratio       accept_len / that of {reference} on the same prompts, with its 95 % interval (bootstrap over prompts, both heads
            on the same draws)
p           the smallest alpha at which the interval of level 1 - alpha leaves 1, by Holm's rule for {num} comparison(s) over
            all prompts and {num_routes} by route
tied        p is 0.05 or more: where nothing is corrected, the interval holds 1"""


@dataclass
class Comparison:
    """One head against the reference, over one route (`all`: every prompt)."""

    label: str
    route: str
    num_prompts: int
    accept_len: float | None
    reference_accept_len: float | None
    ratio: Interval
    p: float | None  # Holm-adjusted; None where too few prompts were counted for an interval
    verdict: str  # better | worse | tied | too few prompts


def check_comparable(heads: Sequence[PromptSums]) -> None:
    """Refuse heads whose figures do not speak of the same thing, with every differing field named.

    Raises:
        WrongInput: prompts, target, sampling setting, drafts or draft length differ.
    """
    reference = heads[0]
    for head in heads[1:]:
        problems = []
        shared = len({*head.prompt_ids} & {*reference.prompt_ids})
        if not shared == len(head.prompt_ids) == len(reference.prompt_ids):
            problems.append(
                f"prompts ({len(reference.prompt_ids)} there, {len(head.prompt_ids)} here, {shared} in both)"
            )
        for name in {**reference.conditions, **head.conditions}:
            there, here = reference.conditions.get(name), head.conditions.get(name)
            if there != here:
                problems.append(f"{name} ({there!r} there, {here!r} here)")
        if problems:
            raise WrongInput(
                f"{head.label} cannot be compared with {reference.label}. It differs in:\n  "
                + "\n  ".join(problems)
                + "\nMeasure both on the same prompts at the same settings (headstart eval RUN), or name a draft length "
                "that both have (--draft-length N)."
            )


def compare(heads: Sequence[PromptSums], seed: int = 0, replicates: int = REPLICATES) -> list[Comparison]:
    """Every head against the first, over all prompts and then by route.

    Raises:
        WrongInput: they were not measured on the same prompts at the same settings.
    """
    check_comparable(heads)
    reference = heads[0]
    others = [head.ordered(reference.prompt_ids) for head in heads[1:]]
    routes = sorted({*reference.routes}) if len({*reference.routes}) > 1 else []
    families = (
        [compare_route(head, reference, "all", seed, replicates) for head in others],
        [compare_route(head, reference, route, seed, replicates) for head in others for route in routes],
    )
    return [*adjust(families[0]), *adjust(families[1])]


def compare_whole(heads: Sequence[PromptSums], seed: int = 0, replicates: int = REPLICATES) -> list[Comparison]:
    """Every head against the first over all prompts, as one family. Raises as `compare`."""
    check_comparable(heads)
    ids = heads[0].prompt_ids
    return adjust([compare_route(head.ordered(ids), heads[0], "all", seed, replicates) for head in heads[1:]])


def adjust(family: list[Comparison]) -> list[Comparison]:
    """The comparisons of one family, their p-values adjusted for all of them and their verdicts by those."""
    known = [(one, one.p) for one in family if one.p is not None]
    for (one, _), adjusted in zip(known, holm([p for _, p in known]), strict=True):
        one.p, one.verdict = adjusted, verdict(one.ratio["value"], adjusted)
    return family


def compare_route(head: PromptSums, reference: PromptSums, route: str, seed: int, replicates: int) -> Comparison:
    """One comparison; its p-value is not adjusted yet."""
    here = [i for i, name in enumerate(reference.routes) if route in ("all", name)]
    names = [reference.conversations[i] for i in here]
    tokens_C, steps_C, reference_tokens_C, reference_steps_C = (
        conversation_sums(values_R[here], names)
        for values_R in (head.tokens_R, head.steps_R, reference.tokens_R, reference.steps_R)
    )
    weights_BC = resampling_weights(len(tokens_C), replicates, seed)
    value, samples_B = paired_ratio(tokens_C, steps_C, reference_tokens_C, reference_steps_C, weights_BC)
    num_counted = int(np.count_nonzero(steps_C))
    found = interval(value, samples_B, num_counted)
    known = found["low"] is not None  # else too few prompts
    return Comparison(
        label=head.label,
        route=route,
        num_prompts=len(here),
        accept_len=accept_len(tokens_C, steps_C),
        reference_accept_len=accept_len(reference_tokens_C, reference_steps_C),
        ratio=found,
        p=p_value(samples_B, num_counted) if known else None,
        verdict="tied" if known else "too few prompts",
    )


def accept_len(tokens_R: np.ndarray, steps_R: np.ndarray) -> float | None:
    return float(tokens_R.sum() / steps_R.sum()) if steps_R.sum() else None


def verdict(value: float | None, p: float) -> str:
    """`better` or `worse`; `tied` where the adjusted p-value does not tell the heads apart."""
    if value is None or p >= 1 - LEVEL:
        return "tied"
    return "better" if value > 1 else "worse"


def comparison_text(heads: Sequence[PromptSums], found: Sequence[Comparison], seed: int = 0) -> str:
    """What `headstart compare` prints: each head by itself, every comparison with the first, and what the words mean."""
    reference = heads[0]
    conditions = ", ".join(f"{name} {value}" for name, value in reference.conditions.items() if "." not in name)
    sampling = ", ".join(
        f"{name.partition('.')[2]} {value:g}"
        for name, value in reference.conditions.items()
        if name.startswith("sampling.")
    )
    weights_BC = resampling_weights(len({*reference.conversations}), REPLICATES, seed)
    alone = []
    for head in (reference, *(head.ordered(reference.prompt_ids) for head in heads[1:])):
        tokens_C, steps_C = (conversation_sums(x_R, reference.conversations) for x_R in (head.tokens_R, head.steps_R))
        found_alone = interval_text(ratio_interval(tokens_C, steps_C, weights_BC))
        alone.append([head.label, str(head.checkpoint["step"]), found_alone])
    lines = [
        [
            one.label,
            one.route,
            str(one.num_prompts),
            number_text(one.accept_len, 2),
            number_text(one.reference_accept_len, 2),
            interval_text(one.ratio, 3),
            "-" if one.p is None else f"{one.p:.4f}",
            one.verdict,
        ]
        for one in found
    ]
    num = sum(one.route == "all" for one in found)
    return "\n".join(
        [
            f"{len(reference.prompt_ids)} held-out prompts, {conditions}, replies at {sampling}",
            table(["head", "step", "accept_len [95 %]"], alone),
            "",
            f"against {reference.label}",
            table(["head", "route", "prompts", "accept_len", "reference", "ratio [95 %]", "p", "verdict"], lines),
            "",
            DEFINITIONS.format(reference=reference.label, num=num, num_routes=len(found) - num),
        ]
    )
