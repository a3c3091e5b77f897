"""Rows and intervals of acceptance: ratios of the totals of prompts (`PromptCounts`), resampled by conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headstart.eval.acceptance import PromptCounts, ReplyAcceptance
from headstart.eval.statistics import (
    Interval,
    conversation_sums,
    interval,
    mean_interval,
    ratio,
    ratio_interval,
    resampling_weights,
)
from headstart.heads.tree import Tree


def accept_len_interval(
    counts: Sequence[PromptCounts],
    replicates: int = 2000,
    seed: int = 0,
    conversations: Mapping[str, str] | None = None,
) -> Interval:
    """accept_len = emitted tokens / target steps (micro average), with its interval; `conversations` as `acceptance_row`."""
    names = names_of(counts, conversations)
    tokens_C, steps_C = (
        conversation_sums([getattr(c, f"num_{x}") for c in counts], names) for x in ("tokens", "steps")
    )
    return ratio_interval(tokens_C, steps_C, resampling_weights(len(tokens_C), replicates, seed))


def names_of(
    found: Sequence[PromptCounts] | Sequence[ReplyAcceptance], conversations: Mapping[str, str] | None
) -> list[str]:
    """The conversation of each prompt; where none are given, each is one by itself."""
    if conversations is None:
        return [str(i) for i in range(len(found))]
    return [conversations[one.prompt_id] for one in found]


def customary_estimates(counts: Sequence[PromptCounts]) -> tuple[float | None, float | None]:
    """The two usual estimates, which start blocks uniformly along the path and so report too much.

    Returns:
        uniform_start_estimate: 1 + sum over depths of the mean survival over all starts.
        product_of_marginals: 1 + sum over depths of the product of each depth's own mean acceptance.
    """
    if not counts or not all(c.uniform for c in counts):
        return None, None
    total = {name: np.sum([c.uniform[name] for c in counts], axis=0) for name in counts[0].uniform}
    survival_K = ratio(total["survived"], total["pairs"])
    marginal_K = ratio(total["accepted"], total["pairs"])
    return 1 + float(np.nansum(survival_K)), 1 + float(np.nansum(np.cumprod(np.nan_to_num(marginal_K))))


def acceptance_row(
    counts: Sequence[PromptCounts],
    *,
    source: str,
    drafter: str,
    draft_length: int,
    route: str = "all",
    context: str = "all",
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    draft: str = "greedy",
    counting: str = "reply",
    replicates: int = 2000,
    seed: int = 0,
    tree: Tree | None = None,
    conversations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One row of eval/acceptance.json from the sums of the prompts of one route (`all`: every prompt given).

    A tree's draft length is its depth. It has none of the customary estimates, which are of chains.

    Args:
        conversations: by prompt id; turns of one conversation are drawn together for every interval.
    """
    chosen = [c for c in counts if route in ("all", c.route)]
    names = names_of(chosen, conversations)
    tokens_R, steps_R = (np.array([getattr(c, name) for c in chosen], float) for name in ("num_tokens", "num_steps"))
    accepted_RK, judged_RK, histogram_R = (
        np.stack([getattr(c, name) for c in chosen]) if chosen else np.zeros((0, width))
        for name, width in (("accepted_K", draft_length), ("judged_K", draft_length), ("histogram", draft_length + 1))
    )
    tokens_C, steps_C, accepted_CK, judged_CK = (
        conversation_sums(values, names) for values in (tokens_R, steps_R, accepted_RK, judged_RK)
    )
    weights_BC = resampling_weights(len(tokens_C), replicates, seed)
    conditional = [ratio_interval(accepted_CK[:, k], judged_CK[:, k], weights_BC) for k in range(draft_length)]
    uniform, marginals = customary_estimates(chosen) if tree is None else (None, None)
    unknown = [c.num_out_of_vocab for c in chosen]
    share = None if None in unknown else float(ratio(sum(x or 0 for x in unknown), tokens_R.sum()))
    return {
        "source": source,
        "drafter": drafter,
        "route": route,
        "context": context,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "draft": draft,
        "draft_length": draft_length,
        "tree": None if tree is None else list(tree.parents),
        "counting": counting,
        "num_prompts": len(chosen),
        "num_tokens": int(round(tokens_R.sum())),
        "num_steps": float(steps_R.sum()),
        "num_short_steps": float(sum(c.num_short_steps for c in chosen)),
        "accept_len": ratio_interval(tokens_C, steps_C, weights_BC),
        "accept_len_macro": mean_interval(ratio(tokens_R, steps_R), names, weights_BC),
        "conditional": conditional,
        "survival": survival_intervals(accepted_CK, judged_CK, weights_BC),
        "accepted_histogram": histogram_R.sum(0).tolist(),
        "uniform_start_estimate": uniform,
        "product_of_marginals": marginals,
        "out_of_vocab_share": None if share is None or not np.isfinite(share) else share,
        "num_conversations": len(tokens_C),
    }


def survival_intervals(accepted_CK: np.ndarray, judged_CK: np.ndarray, weights_BC: np.ndarray) -> list[Interval]:
    """survival[k] = product of conditional[0..k], by definition, in every bootstrap replicate too."""
    value_K = np.cumprod(ratio(accepted_CK.sum(0), judged_CK.sum(0)))
    samples_BK = np.cumprod(ratio(weights_BC @ accepted_CK, weights_BC @ judged_CK), axis=1)
    num_prompts = int(np.count_nonzero(judged_CK[:, 0]))
    return [interval(float(value_K[k]), samples_BK[:, k], num_prompts) for k in range(len(value_K))]
