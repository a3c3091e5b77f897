"""Intervals over prompts: every figure is a function of per-prompt sums, resampled by prompt.

Tokens of one reply are not independent, nor are turns of one conversation: the bootstrap draws whole conversations
(`conversation_sums`), and a prompt that stands alone is one. One matrix of resampling weights serves all figures of a
table, so figures of the same prompts (two heads, speculative and plain) stay paired. Wherever an interval is made below,
a prompt is what is drawn: a conversation.

Intervals are percentiles of the replicates, taken further out the fewer prompts there are (`tail_share`): the plain
percentiles of few prompts are too narrow. `bench/coverage.py` shows what both cover on a run's own prompts.
"""

from collections.abc import Sequence
from math import log1p, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

LEVEL = 0.95
MIN_PROMPTS = 6  # with 5, even the range of all of them holds the truth only 15 times in 16

Interval = dict[str, float | None]


def resampling_weights(num_prompts: int, replicates: int, seed: int) -> np.ndarray:
    """How often each prompt is drawn in each replicate, [replicates, num_prompts]; every row sums to num_prompts."""
    if num_prompts == 0:
        return np.zeros((replicates, 0))
    generator = np.random.default_rng(seed)
    return generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=replicates).astype(np.float64)


def conversation_sums(values_R: Any, conversations: Sequence[str]) -> np.ndarray:
    """Sums [C, ..] over the prompts of each conversation, conversations in the order of their first prompts.

    What is drawn as one has to be summed before it is drawn (the cluster bootstrap: Davison and Hinkley 1997, section
    3.8): replicates of turns one by one would count what turns have in common as often as there are turns.

    Args:
        values_R: numbers of each prompt [R, ..].
        conversations: that of each prompt, by any name.
    """
    values_R = np.asarray(values_R, float)
    places = {name: place for place, name in enumerate(dict.fromkeys(conversations))}
    sums_C = np.zeros((len(places), *values_R.shape[1:]))
    np.add.at(sums_C, np.array([places[name] for name in conversations], dtype=np.int64), values_R)
    return sums_C


def ratio(numerator: Any, denominator: Any) -> Any:
    """numerator / denominator, nan where nothing was counted."""
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    return np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom != 0)


def student_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t from the normal one (Cornish-Fisher: Abramowitz and Stegun, 26.7.5).

    Three digits from 5 degrees of freedom up.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def student_p_value(t: float, freedom: int) -> float:
    """Two-sided p-value of Student's t, by the normal quantile that corresponds to it (Wallace 1959).

    Too large, if anything: near p = 1e-4 by 20 % at 5 degrees of freedom, by 3 % at 15.
    """
    z = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log1p(t * t / freedom))
    return 2 * NormalDist().cdf(-z)


def tail_share(num_prompts: int, level: float = LEVEL) -> float:
    """Share of the replicates that an interval leaves out at either end.

    The replicates' spread lacks a factor sqrt(m / (m - 1)) of the standard error of m prompts, and the normal quantiles
    that the percentiles stand for should be Student's. Both are made good by taking percentiles further out, at
    Phi(-sqrt(m / (m - 1)) t) instead of Phi(-z): the expanded percentile interval (Hesterberg 2015, What Teachers
    Should Know about the Bootstrap). It stays within the range of the figure, and is the same on any scale.
    """
    t = student_quantile((1 + level) / 2, num_prompts - 1)
    return NormalDist().cdf(-sqrt(num_prompts / (num_prompts - 1)) * t)


def endpoints(samples_B: np.ndarray, num_prompts: int, level: float = LEVEL) -> tuple[float, float]:
    """Both ends of the interval that replicates of a figure of `num_prompts` prompts give."""
    share = tail_share(num_prompts, level)
    low, high = np.quantile(samples_B, [share, 1 - share])
    return float(low), float(high)


def interval(value: float, samples_B: np.ndarray, num_prompts: int, level: float = LEVEL) -> Interval:
    """Bootstrap interval around the value of the full set; all null where nothing was counted.

    Args:
        num_prompts: prompts on which something was counted; fewer than MIN_PROMPTS have no ends.
    """
    if not np.isfinite(value):
        return {"value": None, "low": None, "high": None}
    samples_B = samples_B[np.isfinite(samples_B)]
    if len(samples_B) == 0 or num_prompts < MIN_PROMPTS:
        return {"value": float(value), "low": None, "high": None}
    low, high = endpoints(samples_B, num_prompts, level)
    return {"value": float(value), "low": low, "high": high}


def ratio_interval(numerator_R: np.ndarray, denominator_R: np.ndarray, weights_BR: np.ndarray) -> Interval:
    """Interval of sum(numerator) / sum(denominator) over prompts: the micro average, whose weights are the counts."""
    numerator_R, denominator_R = np.asarray(numerator_R, float), np.asarray(denominator_R, float)
    samples_B = ratio(weights_BR @ numerator_R, weights_BR @ denominator_R)
    value = float(ratio(numerator_R.sum(), denominator_R.sum()))
    return interval(value, samples_B, int(np.count_nonzero(denominator_R)))


def mean_interval(value_R: np.ndarray, conversations: Sequence[str], weights_BC: np.ndarray) -> Interval:
    """Interval of the mean over prompts that have a value (nan: none), each counting once: the macro average."""
    value_R = np.asarray(value_R, float)
    known_R = np.isfinite(value_R)
    values_C = conversation_sums(np.where(known_R, value_R, 0.0), conversations)
    return ratio_interval(values_C, conversation_sums(known_R, conversations), weights_BC)


def paired_ratio(
    top_R: np.ndarray,
    bottom_R: np.ndarray,
    other_top_R: np.ndarray,
    other_bottom_R: np.ndarray,
    weights_BR: np.ndarray,
) -> tuple[float, np.ndarray]:
    """(sum top / sum bottom) / (sum other_top / sum other_bottom): its value, and its replicates.

    Both sides see the same prompts in every replicate, so what makes a prompt easy or hard for both cancels.
    """

    def of(weights: np.ndarray) -> Any:
        own = ratio(weights @ np.asarray(top_R, float), weights @ np.asarray(bottom_R, float))
        return ratio(own, ratio(weights @ np.asarray(other_top_R, float), weights @ np.asarray(other_bottom_R, float)))

    return float(of(np.ones(len(top_R)))), of(weights_BR)


def speedup_interval(
    seconds_R: np.ndarray,
    tokens_R: np.ndarray,
    plain_seconds_R: np.ndarray,
    plain_tokens_R: np.ndarray,
    weights_BR: np.ndarray,
) -> Interval:
    """Interval of the ratio of totals (tokens per second over plain tokens per second), paired by prompt.

    Total tokens over total seconds is what a user with this mix of prompts sees; long replies weigh more.
    """
    value, samples_B = paired_ratio(tokens_R, seconds_R, plain_tokens_R, plain_seconds_R, weights_BR)
    return interval(value, samples_B, len(seconds_R))


def geometric_mean_interval(ratio_R: np.ndarray, conversations: Sequence[str], weights_BC: np.ndarray) -> Interval:
    """Interval of the geometric mean of per-prompt ratios: every prompt weighs the same, however long its reply."""
    logs = mean_interval(np.log(np.asarray(ratio_R, float)), conversations, weights_BC)
    return {name: None if x is None else float(np.exp(x)) for name, x in logs.items()}


def p_value(samples_B: np.ndarray, num_prompts: int, null: float = 1.0) -> float:
    """The smallest alpha at which the interval of level 1 - alpha leaves `null`: p < 0.05 where the 95 % interval does.

    At least 2 / (replicates + 1), below which replicates cannot tell.
    """
    samples_B = samples_B[np.isfinite(samples_B)]
    inside, outside = 0.0, 1.0  # alpha at which the interval holds null, and at which it need not
    for _ in range(40):
        alpha = (inside + outside) / 2
        low, high = endpoints(samples_B, num_prompts, 1 - alpha)
        inside, outside = (alpha, outside) if low <= null <= high else (inside, alpha)
    return max(outside, 2 / (len(samples_B) + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted so that all of them together raise a false alarm no more often than one alone (Holm 1979)."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def looks(num_prompts: int, first: int = 60, growth: float = 1.5) -> list[int]:
    """Numbers of prompts after which a stopping rule looks at the interval: fixed beforehand, the last is all."""
    numbers = []
    while first < num_prompts:
        numbers.append(first)
        first = int(first * growth)
    return [*numbers, num_prompts]


def relative_width(found: Interval) -> float:
    """Width of an interval as a share of its value; infinite where there is none."""
    if not found["value"] or found["low"] is None or found["high"] is None:
        return float("inf")
    return (found["high"] - found["low"]) / found["value"]


def quantile(values: list[float], share: float) -> float | None:
    """The `share` quantile, null of nothing."""
    return float(np.quantile(values, share)) if values else None
