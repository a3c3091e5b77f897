"""Intervals over prompts: every figure is a function of per-prompt sums, resampled by prompt.

Tokens of one reply are not independent, prompts are: the bootstrap draws whole prompts. One matrix of resampling
weights serves all figures of a table, so figures of the same prompts (two heads, speculative and plain) stay paired.
"""

from typing import Any

import numpy as np

LEVEL = 0.95

Interval = dict[str, float | None]


def resampling_weights(num_prompts: int, replicates: int, seed: int) -> np.ndarray:
    """How often each prompt is drawn in each replicate, [replicates, num_prompts]; every row sums to num_prompts."""
    if num_prompts == 0:
        return np.zeros((replicates, 0))
    generator = np.random.default_rng(seed)
    return generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=replicates).astype(np.float64)


def ratio(numerator: Any, denominator: Any) -> Any:
    """numerator / denominator, nan where nothing was counted."""
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    return np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom != 0)


def interval(value: float, samples_B: np.ndarray, level: float = LEVEL) -> Interval:
    """Percentile interval of bootstrap samples around the value of the full set; all null where nothing was counted."""
    if not np.isfinite(value):
        return {"value": None, "low": None, "high": None}
    samples_B = samples_B[np.isfinite(samples_B)]
    if len(samples_B) == 0:
        return {"value": float(value), "low": None, "high": None}
    low, high = np.quantile(samples_B, [(1 - level) / 2, (1 + level) / 2])
    return {"value": float(value), "low": float(low), "high": float(high)}


def ratio_interval(numerator_R: np.ndarray, denominator_R: np.ndarray, weights_BR: np.ndarray) -> Interval:
    """Interval of sum(numerator) / sum(denominator) over prompts: the micro average, whose weights are the counts."""
    numerator_R, denominator_R = np.asarray(numerator_R, float), np.asarray(denominator_R, float)
    samples_B = ratio(weights_BR @ numerator_R, weights_BR @ denominator_R)
    return interval(float(ratio(numerator_R.sum(), denominator_R.sum())), samples_B)


def mean_interval(value_R: np.ndarray, weights_BR: np.ndarray) -> Interval:
    """Interval of the mean over prompts that have a value (nan: none), each counting once: the macro average."""
    value_R = np.asarray(value_R, float)
    known_R = np.isfinite(value_R)
    return ratio_interval(np.where(known_R, value_R, 0.0), known_R.astype(float), weights_BR)


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

    def speed(tokens_R: np.ndarray, seconds_R: np.ndarray, weights: np.ndarray) -> Any:
        return ratio(weights @ np.asarray(tokens_R, float), weights @ np.asarray(seconds_R, float))

    one_R = np.ones(len(seconds_R))
    value = ratio(speed(tokens_R, seconds_R, one_R), speed(plain_tokens_R, plain_seconds_R, one_R))
    samples_B = ratio(speed(tokens_R, seconds_R, weights_BR), speed(plain_tokens_R, plain_seconds_R, weights_BR))
    return interval(float(value), samples_B)


def geometric_mean_interval(ratio_R: np.ndarray, weights_BR: np.ndarray) -> Interval:
    """Interval of the geometric mean of per-prompt ratios: every prompt weighs the same, however long its reply."""
    log_R = np.log(np.asarray(ratio_R, float))
    logs = mean_interval(log_R, weights_BR)
    return {name: None if x is None else float(np.exp(x)) for name, x in logs.items()}


def quantile(values: list[float], share: float) -> float | None:
    """The `share` quantile, null of nothing."""
    return float(np.quantile(values, share)) if values else None
