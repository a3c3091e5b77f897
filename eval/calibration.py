"""How far a head's own confidence can be trusted, and what stopping drafts early by it is worth.

The confidence of a draft is the largest probability of the law it is made from (`early_stop.py`). Both questions are
answered from the same rollout as acceptance, with pairs weighted as serving meets them: start t and depth j count v_t
times the probability that the drafts above were accepted. eval/calibration.json (docs/statistics.md has its form) holds

    rows         a draft depth each: confidence beside acceptance, in ten bins of confidence
    thresholds   accept_len, drafts and predicted speed-up if drafting stops below each threshold, at the longest draft
    recommended  the threshold with the largest predicted speed-up, where it surely beats no threshold
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headstart.eval.acceptance import ReplyAcceptance, count_replies, reached
from headstart.eval.acceptance_rows import names_of
from headstart.eval.statistics import conversation_sums, interval, ratio, ratio_interval, resampling_weights

NUM_BINS = 10
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def stopped(reply: ReplyAcceptance, threshold: float) -> ReplyAcceptance:
    """What is accepted if a draft goes on only while the product of its confidences is at least `threshold`.

    Exact, because whether the draft at (t, j) is used depends on nothing behind x_{t+1+j}: where it is not, a step that
    gets there ends there.
    """
    if reply.confidence_TK is None:
        raise ValueError("this drafter has no confidence to stop by")
    going_TK = np.cumprod(reply.confidence_TK, axis=1) >= threshold
    return replace(reply, accept_TK=reply.accept_TK * going_TK, judged_TK=reply.judged_TK & going_TK)


def reliability(
    replies: Sequence[ReplyAcceptance],
    draft_length: int,
    replicates: int,
    seed: int,
    conversations: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Confidence beside acceptance at every depth, over all pairs and by bin, with intervals over prompts.

    `conversations`, by prompt id, are drawn whole.

    `calibration_error` is the mean distance of the two over the bins, by weight (expected calibration error; Naeini et
    al. 2015, AAAI). Chance never lets it be 0: bins of few drafts add to it.
    """
    names = names_of(replies, conversations)
    weight_CKB, confident_CKB, accepted_CKB = (conversation_sums(x, names) for x in bin_sums(replies, draft_length))
    weights_BC = resampling_weights(len(weight_CKB), replicates, seed)
    rows = []
    for k in range(draft_length):
        weight_CB, confident_CB, accepted_CB = weight_CKB[:, k], confident_CKB[:, k], accepted_CKB[:, k]
        weight_C = weight_CB.sum(1)
        distance_CB = accepted_CB - confident_CB
        error = float(ratio(np.abs(distance_CB.sum(0)).sum(), weight_C.sum()))
        samples_B = ratio(np.abs(weights_BC @ distance_CB).sum(1), weights_BC @ weight_C)
        rows.append(
            {
                "depth": k,
                "weight": float(weight_C.sum()),
                "confidence": ratio_interval(confident_CB.sum(1), weight_C, weights_BC),
                "acceptance": ratio_interval(accepted_CB.sum(1), weight_C, weights_BC),
                "calibration_error": interval(error, samples_B, int(np.count_nonzero(weight_C))),
                "bins": [
                    {
                        "low": b / NUM_BINS,
                        "high": (b + 1) / NUM_BINS,
                        "weight": float(weight_CB[:, b].sum()),
                        "confidence": mean_or_none(confident_CB[:, b], weight_CB[:, b]),
                        "acceptance": ratio_interval(accepted_CB[:, b], weight_CB[:, b], weights_BC),
                    }
                    for b in range(NUM_BINS)
                ],
            }
        )
    return rows


def bin_sums(replies: Sequence[ReplyAcceptance], draft_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums [R, K, bins] of each reply, depth and bin of confidence: weight, confidence, acceptance."""
    sums = np.zeros((3, len(replies), draft_length, NUM_BINS))
    for r, (reply, alive_T) in enumerate(zip(replies, reached(replies, draft_length), strict=True)):
        if reply.confidence_TK is None:
            raise ValueError("this drafter has no confidence to compare with acceptance")
        weight_TK = alive_T[:, :-1] * reply.judged_TK[:, :draft_length]
        confidence_TK = reply.confidence_TK[:, :draft_length]
        bin_TK = np.minimum((confidence_TK * NUM_BINS).astype(int), NUM_BINS - 1)
        for k in range(draft_length):
            for i, value_TK in enumerate((1.0, confidence_TK, reply.accept_TK[:, :draft_length])):
                sums[i, r, k] = np.bincount(bin_TK[:, k], (weight_TK * value_TK)[:, k], NUM_BINS)
    return sums[0], sums[1], sums[2]


def mean_or_none(sums_C: np.ndarray, weight_C: np.ndarray) -> float | None:
    return float(sums_C.sum() / weight_C.sum()) if weight_C.sum() else None


@dataclass(frozen=True)
class StepTimes:
    """Timed parts of a step with drafts at one request, in plain target steps."""

    lengths: tuple[int, ...]  # numbers of drafts that were verified, ascending from 0
    verify: tuple[float, ...]  # what a pass over so many cost
    draft: float  # what a draft step cost: the cost ratio c

    def cost(self, num_drafts: Any, num_draft_steps: Any) -> Any:
        """Cost of a step by mean numbers of drafts verified and of draft steps taken; passes in between by interpolation."""
        return np.interp(num_drafts, self.lengths, self.verify) + self.draft * num_draft_steps


def step_times(speed_rows: Sequence[dict[str, Any]], kind: str, draft_length: int) -> StepTimes | None:
    """From the rows of eval/speed.json; None where a draft of this length was not timed."""
    mine = [row for row in speed_rows if (row["engine"], row["drafter"], row["concurrency"]) == ("reference", kind, 1)]
    timed = {row["draft_length"]: row for row in mine if row["cost_ratio"] is not None and row["verify_step_ms"]}
    if draft_length not in timed:
        return None
    lengths = sorted(length for length in timed if length <= draft_length)
    verify = [timed[length]["verify_step_ms"] / timed[length]["target_step_ms"] for length in lengths]
    return StepTimes((0, *lengths), (1.0, *verify), timed[draft_length]["cost_ratio"])


def threshold_rows(
    replies: Sequence[ReplyAcceptance],
    draft_length: int,
    times: StepTimes | None,
    replicates: int,
    seed: int,
    thresholds: Sequence[float] = THRESHOLDS,
    conversations: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """What each threshold gives at one draft length; the first of `thresholds` is what the others are compared with.

    The predicted speed-up is accept_len over the cost of a step (as in eval/speed.json). A head has to look one depth
    further than it drafts to find that it stops: `draft_steps_per_step` counts that. `conversations`, by prompt id, are
    drawn whole.
    """
    names = names_of(replies, conversations)
    weights_BC = resampling_weights(len({*names}), replicates, seed)
    rows: list[dict[str, Any]] = []
    first_B: np.ndarray | None = None
    for threshold in thresholds:
        sums_C4 = conversation_sums(step_sums(replies, draft_length, threshold), names)
        tokens_C, steps_C, drafts_C, draft_steps_C = sums_C4.T
        # the speed-up of all prompts, then of every replicate
        speedup_B = predicted(np.vstack([sums_C4.sum(0), weights_BC @ sums_C4]), times)
        first_B = speedup_B if first_B is None else first_B
        gain_B, num_prompts = ratio(speedup_B, first_B), int(np.count_nonzero(steps_C))
        rows.append(
            {
                "stop_below": threshold,
                "accept_len": ratio_interval(tokens_C, steps_C, weights_BC),
                "drafts_per_step": ratio_interval(drafts_C, steps_C, weights_BC),
                "draft_steps_per_step": ratio_interval(draft_steps_C, steps_C, weights_BC),
                "predicted_speedup": interval(float(speedup_B[0]), speedup_B[1:], num_prompts),
                "gain": interval(float(gain_B[0]), gain_B[1:], num_prompts),
            }
        )
    return rows


def step_sums(replies: Sequence[ReplyAcceptance], draft_length: int, threshold: float) -> np.ndarray:
    """[R, 4] of each reply: tokens, target steps, drafts that were verified, and steps of the head."""
    cut = [stopped(reply, threshold) for reply in replies]
    sums = []
    for counts, alive_T, whole, reply in zip(
        count_replies(cut, draft_length), reached(cut, draft_length), replies, cut, strict=True
    ):
        num_drafts_T = reply.judged_TK[:, :draft_length].sum(1)
        num_draft_steps_T = np.minimum(num_drafts_T + 1, whole.judged_TK[:, :draft_length].sum(1))
        visit_T = alive_T[:, 0]
        sums.append([counts.num_tokens, counts.num_steps, visit_T @ num_drafts_T, visit_T @ num_draft_steps_T])
    return np.array(sums, dtype=float).reshape(-1, 4)


def predicted(sums_N4: np.ndarray, times: StepTimes | None) -> np.ndarray:
    """Speed-up [N] over plain decoding from sums of tokens, steps, drafts and draft steps; nan where nothing was timed."""
    if times is None:
        return np.full(len(sums_N4), np.nan)
    tokens_N, steps_N, drafts_N, draft_steps_N = sums_N4.T
    accept_len_N, drafts_N, draft_steps_N = (ratio(x_N, steps_N) for x_N in (tokens_N, drafts_N, draft_steps_N))
    speedup_N: np.ndarray = accept_len_N / times.cost(drafts_N, draft_steps_N)
    return speedup_N


def recommended(rows: Sequence[dict[str, Any]]) -> float | None:
    """The threshold with the largest predicted speed-up; None where no interval of its gain over the first lies above 1."""
    better = [row for row in rows if (row["gain"]["low"] or 0) > 1]
    best = max(better, key=lambda row: row["predicted_speedup"]["value"], default=None)
    return None if best is None else float(best["stop_below"])


def calibration_entries(
    sources: Sequence[tuple[str, Sequence[ReplyAcceptance]]],
    kind: str,
    draft_length: int,
    speed_rows: Sequence[dict[str, Any]],
    replicates: int,
    seed: int,
    conversations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The body of eval/calibration.json.

    Args:
        sources: how drafts were made (`greedy`, `sampled`), and the replies they were computed on.
        speed_rows: of eval/speed.json, of the same head; empty where nothing was timed.
        conversations: by prompt id; turns of one are drawn together for every interval.
    """
    times = step_times(speed_rows, kind, draft_length)
    body: dict[str, Any] = {"rows": [], "thresholds": [], "recommended": []}
    for draft, replies in sources:
        found = reliability(replies, draft_length, replicates, seed, conversations)
        rows = threshold_rows(replies, draft_length, times, replicates, seed, conversations=conversations)
        body["rows"] += [{"draft": draft, **row} for row in found]
        body["thresholds"] += [{"draft": draft, "draft_length": draft_length, **row} for row in rows]
        body["recommended"].append({"draft": draft, "draft_length": draft_length, "stop_below": recommended(rows)})
    return body
