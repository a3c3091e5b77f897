"""Whether sampled live replies agree with the offline recursion: a paired test, prompt by prompt.

A live reply at a temperature is another reply than the recorded one, so steps cannot be equal one by one. What must be
equal is accept_len in expectation, and the prompts that make both large or small are the same.
"""

from collections.abc import Sequence

import numpy as np

from headstart.eval.acceptance import PromptCounts, ReplyAcceptance, padded_acceptance
from headstart.eval.statistics import MIN_PROMPTS, student_p_value

ROUNDING = 1e-12  # squared steps: a spread below it is arithmetic

Agreement = dict[str, float | None]


def live_agreement(
    live: Sequence[PromptCounts], offline: Sequence[PromptCounts], variance_R: np.ndarray | None = None
) -> Agreement:
    """accept_len live minus offline, with its paired standard error.

    With tokens t and steps s of each prompt and A = sum t / sum s over both runs, d = (t - A s) live - (t - A s) offline
    has mean 0 where the two accept_lens are the same, and its mean is their difference times a constant: the score test
    of a ratio. Few accepted drafts make a sample of d look narrower than it is (none at all, and every prompt lacks the
    same fraction of a step), so its variance is at least what the coins of acceptance alone give.

    Args:
        live, offline: the same prompts in the same order.
        variance_R: of each prompt's live steps for a given reply (`step_variances`).

    Returns:
        difference, standard_error, z, and the two-sided p_value by Student's t; null where fewer than 6 prompts were
        counted.
    """
    tokens_DR = np.array([[c.num_tokens for c in counts] for counts in (live, offline)])
    steps_DR = np.array([[c.num_steps for c in counts] for counts in (live, offline)])
    counted_R = steps_DR.sum(0) > 0
    tokens_DR, steps_DR = tokens_DR[:, counted_R], steps_DR[:, counted_R]
    number = int(counted_R.sum())
    if number < MIN_PROMPTS:
        return dict.fromkeys(("difference", "standard_error", "z", "p_value"))
    pooled = tokens_DR.sum() / steps_DR.sum()
    excess_DR = tokens_DR - pooled * steps_DR
    d_R = excess_DR[0] - excess_DR[1]
    coins = 0.0 if variance_R is None else pooled**2 * float(variance_R[counted_R].mean())
    z = float(d_R.mean() / np.sqrt(max(d_R.var(ddof=1), coins, ROUNDING) / number))
    live_value, offline_value = tokens_DR.sum(1) / steps_DR.sum(1)
    difference = float(live_value - offline_value)
    return {
        "difference": difference,
        "standard_error": difference / z if z else None,
        "z": z,
        "p_value": student_p_value(z, number - 1),
    }


def step_variances(replies: Sequence[ReplyAcceptance], draft_length: int) -> np.ndarray:
    """Variance [R] of the steps that a live run takes over each reply: the reply is given, acceptance is by coins.

    From start t a step passes to t + j + 1 with probability p_j (`visits`). The moments m_t and w_t of the number of steps
    from t on and of its square follow backwards: m_t = 1 + sum_j p_j m_{t+j+1}, w_t = 1 + sum_j p_j (2 m + w)_{t+j+1}.
    """
    accept_RTK, num_starts_R = padded_acceptance(replies, draft_length)
    num_replies, num_starts, depth = accept_RTK.shape
    mean_RT = np.zeros((num_replies, num_starts + depth + 1))
    square_RT = np.zeros_like(mean_RT)
    for t in reversed(range(num_starts)):
        mean_R, square_R, reach_R = np.ones(num_replies), np.ones(num_replies), np.ones(num_replies)
        for j in range(depth + 1):
            passed_R = reach_R * (1.0 - accept_RTK[:, t, j]) if j < depth else reach_R
            mean_R += passed_R * mean_RT[:, t + j + 1]
            square_R += passed_R * (2 * mean_RT[:, t + j + 1] + square_RT[:, t + j + 1])
            reach_R = reach_R - passed_R
        inside_R = t < num_starts_R
        mean_RT[:, t], square_RT[:, t] = inside_R * mean_R, inside_R * square_R
    return np.maximum(square_RT[:, 0] - mean_RT[:, 0] ** 2, 0.0)
