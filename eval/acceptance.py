"""Exact offline acceptance: what a live run would accept, computed on recorded paths with no draft sampling.

Speculative decoding emits the target's own law, so a recorded path is a fair sample of what a live run emits, and only
the points where its steps begin are random. `visits` sums over them. Every table row, per-route figure and interval is
made from the same per-prompt sums (`PromptCounts`), offline and live alike (`acceptance_rows.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from headstart.eval.early_stop import confidence
from headstart.eval.target_law import TargetLaw, emitted_logprobs
from headstart.heads.batch import Batch
from headstart.heads.contract import Head, Rollout

PROJECTION_CHUNK = 512  # pairs projected to the draft vocabulary at a time


@dataclass
class ReplyAcceptance:
    """Acceptance along one recorded reply; start i of T = n - 1 is t = P - 1 + i, in design.md's words."""

    prompt_id: str
    route: str
    accept_TK: np.ndarray  # float64, r_{t,j}; 0 where not judged
    judged_TK: np.ndarray  # bool: a token is proposed at (t, j) and x_{t+2+j} lies in the reply
    num_out_of_vocab: int | None = None  # reply tokens after the first that the drafter cannot draft
    confidence_TK: np.ndarray | None = None  # float64, of the draft at (t, j); None: the drafter has none
    rank_TK: np.ndarray | None = None  # int64, as in `PairAcceptance`; heads have it, and trees are judged by it


@dataclass
class PromptCounts:
    """Sums of one prompt under one counting rule, `reply` or `engine`; a table row is a ratio of their totals.

    Laws: num_tokens = num_steps + sum_k k * histogram[k] - num_short_steps, and histogram sums to num_steps.
    """

    prompt_id: str
    route: str
    num_tokens: float
    num_steps: float
    num_short_steps: float
    accepted_K: np.ndarray  # steps whose draft k was accepted
    judged_K: np.ndarray  # steps whose draft k was judged
    histogram: np.ndarray  # [K + 1], steps by number of accepted drafts
    num_out_of_vocab: float | None = None
    uniform: dict[str, np.ndarray] = field(default_factory=dict)  # sums over uniform starts; offline only


class PairAcceptance(NamedTuple):
    """Every start and depth of a batch; 0 where the pair is not valid."""

    accept_SD: Tensor  # float64, r_{t,j}
    start_S: Tensor  # int64 slots
    valid_SD: Tensor
    confidence_SD: Tensor  # float64, largest probability of the law that the draft is made from
    rank_SD: Tensor  # int64, draft tokens before the recorded one, by logit (of equals the smaller id); Vd outside

    @classmethod
    def empty(cls, rollout: Rollout, num_ids: int) -> Self:
        """Nothing accepted anywhere."""
        zero_SD = torch.zeros(rollout.valid_SD.shape, dtype=torch.float64, device=rollout.valid_SD.device)
        rank_SD = torch.full_like(zero_SD, num_ids, dtype=torch.int64)
        return cls(zero_SD, rollout.start_S, rollout.valid_SD, zero_SD.clone(), rank_SD)


@torch.no_grad()
def acceptance_probabilities(
    head: Head,
    batch: Batch,
    draft_length: int,
    temperatures: Sequence[float] = (0.0,),
    law: TargetLaw | None = None,
    vocabularies: Sequence[Tensor] = (),
) -> list[PairAcceptance]:
    """r_{t,j} = P(draft j of start t is accepted | the recorded token is emitted), for every pair serving can meet.

    By the token-wise rule (`verify_tokens`; block verification may keep more). Given that x is emitted, it came from an
    accepted draft with probability min(1, q(x) / p(x)): x is drafted with q(x) and kept with min(1, p(x) / q(x)), out of
    p(x) in all. p is the law the target samples by, filters applied. A greedy draft is the case of a one-hot q, so r is
    1[x = argmax q], whatever p is: 1 where the token's rank is 0. Tokens outside the draft vocabulary have q = 0 and count
    as misses.

    Args:
        temperatures: of the drafts, all from one rollout; 0 drafts greedily.
        law: what the paths were drawn by; it gives p for a temperature above 0, and refuses paths of another setting at
            any. None takes the recorded log-probabilities, which are p for paths sampled at temperature 1, unfiltered.
        vocabularies: ascending subsets of the head's own draft vocabulary, from the same rollout: q of a head whose output
            layer has been cut to their rows.

    Returns:
        One result for each temperature: of the head's own vocabulary, then of each of `vocabularies`. D = draft_length.

    Raises:
        WrongInput: paths recorded at another sampling setting.
    """
    if law is not None:
        law.check(batch.samplings)
    logp_T = emitted_logprobs(batch, law) if any(temperatures) else torch.zeros_like(batch.next_logprob_T)
    rollout = head.rollout(batch, draft_length)
    start_S, valid_SD = rollout.start_S, rollout.valid_SD
    found = [
        PairAcceptance.empty(rollout, len(ids_W)) for ids_W in (head.draft_ids_V, *vocabularies) for _ in temperatures
    ]
    columns = [None, *(torch.searchsorted(head.draft_ids_V, ids_W) for ids_W in vocabularies)]
    pair_P2 = valid_SD.nonzero()
    for begin in range(0, len(pair_P2), PROJECTION_CHUNK):
        s_C, j_C = pair_P2[begin : begin + PROJECTION_CHUNK].unbind(1)
        label_slot_C = start_S[s_C] + 1 + j_C
        logits_CV = head.logits(rollout.state_SDH[s_C, j_C], j_C).float()
        results = iter(found)
        for column_W in columns:
            ids_W = head.draft_ids_V if column_W is None else head.draft_ids_V[column_W]
            logits_CW = logits_CV if column_W is None else logits_CV[:, column_W]
            rank_C, index_C1 = ranks(logits_CW, ids_W, batch.next_token_T[label_slot_C])
            for temperature in temperatures:
                pairs = next(results)
                pairs.rank_SD[s_C, j_C] = rank_C
                pairs.confidence_SD[s_C, j_C] = confidence(logits_CW, temperature or 1.0).double()
                if temperature == 0:
                    pairs.accept_SD[s_C, j_C] = (rank_C == 0).double()
                else:
                    logq_C = torch.log_softmax(logits_CW / temperature, dim=-1).gather(1, index_C1).squeeze(1)
                    accept_C = (logq_C.double() - logp_T[label_slot_C]).clamp_max(0).exp()
                    pairs.accept_SD[s_C, j_C] = torch.where(rank_C < len(ids_W), accept_C, 0.0)
    return found


def ranks(logits_CW: Tensor, ids_W: Tensor, label_C: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the tokens `ids_W` have larger logits than the label, of equal ones smaller ids, and its column [C, 1].

    Of a label that is not among them the rank is W, and the column any.
    """
    index_C1 = torch.searchsorted(ids_W, label_C).clamp_max(len(ids_W) - 1)[:, None]
    logit_C1 = logits_CW.gather(1, index_C1)
    earlier_CW = torch.arange(len(ids_W), device=ids_W.device) < index_C1
    rank_C = ((logits_CW > logit_C1) | ((logits_CW == logit_C1) & earlier_CW)).sum(-1)
    return torch.where(ids_W[index_C1].squeeze(1) == label_C, rank_C, len(ids_W)), index_C1


def reply_acceptance(
    head: Head,
    batches: Iterable[Batch],
    draft_length: int,
    temperature: float = 0.0,
    law: TargetLaw | None = None,
    max_position: int | None = None,
) -> list[ReplyAcceptance]:
    """`drafts_acceptance` of one draft temperature and the head's own vocabulary."""
    return drafts_acceptance(head, batches, draft_length, (temperature,), law, max_position)[0]


def drafts_acceptance(
    head: Head,
    batches: Iterable[Batch],
    draft_length: int,
    temperatures: Sequence[float],
    law: TargetLaw | None = None,
    max_position: int | None = None,
    vocabularies: Sequence[Tensor] = (),
) -> list[list[ReplyAcceptance]]:
    """Acceptance of every reply of the batches, in order, for each vocabulary and temperature of the drafts.

    A reply of one token has no start and stays in the list.

    Args:
        temperatures, law, vocabularies: as `acceptance_probabilities`, which also has the order of the results.
        max_position: slots the head can draft at, as `Drafter.max_position`; behind them nothing is drafted. Default: the
            head's own limit.
    """
    max_position = head.max_position if max_position is None else max_position
    known = [ids_W.cpu().numpy() for ids_W in (head.draft_ids_V, *vocabularies) for _ in temperatures]
    found: list[list[ReplyAcceptance]] = [[] for _ in known]
    for batch in batches:
        pairs = acceptance_probabilities(head, batch, draft_length, temperatures, law, vocabularies)
        start_S, valid_SD = pairs[0].start_S.cpu().numpy(), pairs[0].valid_SD.cpu().numpy()
        if max_position is not None:
            position_S = batch.position_T.cpu().numpy()[start_S]
            valid_SD = valid_SD & (np.add.outer(position_S, np.arange(draft_length)) < max_position)
        label_S = batch.next_token_T[torch.as_tensor(start_S, device=batch.next_token_T.device) + 1].cpu().numpy()
        row_S = np.searchsorted(np.asarray(batch.offsets[1:]), start_S, side="right")
        for replies, pair, ids_W in zip(found, pairs, known, strict=True):
            accept_SD, confidence_SD = pair.accept_SD.cpu().numpy() * valid_SD, pair.confidence_SD.cpu().numpy()
            rank_SD, unknown_S = pair.rank_SD.cpu().numpy(), ~np.isin(label_S, ids_W)
            for row, (prompt_id, route) in enumerate(zip(batch.prompt_ids, batch.routes, strict=True)):
                here = row_S == row
                replies.append(
                    ReplyAcceptance(
                        prompt_id,
                        route,
                        accept_SD[here],
                        valid_SD[here],
                        num_out_of_vocab=int(unknown_S[here].sum()),
                        confidence_TK=confidence_SD[here],
                        rank_TK=rank_SD[here],
                    )
                )
    return found


def visits(accept_RTK: np.ndarray, num_starts_R: np.ndarray) -> np.ndarray:
    """v_{r,t}: the probability that a live run of reply r begins a step at its t-th start.

    Number the starts of a reply of n tokens 0 .. n-2 (start 0 follows prefill, which gives the first token). A step
    that begins at t drafts up to K tokens. It accepts exactly j < K of them with probability
    prod_{i<j} r_{t,i} * (1 - r_{t,j}), emits those j and a corrected token, and the next step begins at t + j + 1.
    It accepts all K with prod_i r_{t,i}, emits them and a bonus token, and the next step begins at t + K + 1. Hence

        v_0 = 1,   v_{t+j+1} += v_t prod_{i<j} r_{t,i} (1 - r_{t,j}),   v_{t+K+1} += v_t prod_{i<K} r_{t,i}.

    Every path of accept/reject coins is summed with its probability, so the expectation over coins is exact and none
    is drawn; mass that passes the last start has emitted the whole reply and ends. Depths that nothing judges (past
    the reply's end, or no proposal) have r = 0: the step ends there, which is where it ends live. With greedy drafts
    every r is 0 or 1 and v marks the very steps a live run takes.

    Args:
        accept_RTK: r, zero-padded over starts.
        num_starts_R: n - 1 of each reply; 0 for a reply that prefill completes.

    Returns:
        visit_RT, zero beyond each reply's starts; its sum over t is the expected number of steps.
    """
    num_replies, num_starts, depth = accept_RTK.shape
    visit = np.zeros((num_replies, num_starts + depth + 1))
    visit[:, 0] = 1.0
    for t in range(num_starts):
        visit[:, t] *= t < num_starts_R
        reach_R = visit[:, t].copy()
        for j in range(depth):
            visit[:, t + j + 1] += reach_R * (1.0 - accept_RTK[:, t, j])
            reach_R = reach_R * accept_RTK[:, t, j]
        visit[:, t + depth + 1] += reach_R
    return visit[:, :num_starts]


def padded_acceptance(replies: Sequence[ReplyAcceptance], draft_length: int) -> tuple[np.ndarray, np.ndarray]:
    """r of all replies, zero-padded over starts [R, T, K], and the number of starts of each [R]."""
    num_starts_R = np.array([len(reply.accept_TK) for reply in replies], dtype=np.int64)
    accept_RTK = np.zeros((len(replies), int(num_starts_R.max(initial=0)), draft_length))
    for row, reply in enumerate(replies):
        accept_RTK[row, : len(reply.accept_TK)] = reply.accept_TK[:, :draft_length]
    return accept_RTK, num_starts_R


def reached(replies: Sequence[ReplyAcceptance], draft_length: int) -> list[np.ndarray]:
    """[n - 1, K + 1] of each reply: the probability that a step begins at start t and its first j drafts are accepted."""
    accept_RTK, num_starts_R = padded_acceptance(replies, draft_length)
    visit_RT = visits(accept_RTK, num_starts_R)
    survival_RTK = np.cumprod(accept_RTK, axis=2)
    alive = visit_RT[:, :, None] * np.concatenate([np.ones_like(survival_RTK[:, :, :1]), survival_RTK], axis=2)
    return [alive[row, :n] for row, n in enumerate(num_starts_R.tolist())]


def count_replies(replies: Sequence[ReplyAcceptance], draft_length: int) -> list[PromptCounts]:
    """Expected sums of every reply at one draft length, by counting rule `reply`; longer rollouts are cut to it."""
    counts = []
    for reply, alive_T in zip(replies, reached(replies, draft_length), strict=True):
        n = len(alive_T)
        judged_TK = reply.judged_TK[:, :draft_length]
        accepted_TK = reply.accept_TK[:, :draft_length]
        # a step is short when all that is left of the reply are accepted drafts
        last = range(max(n - draft_length, 0), n)
        histogram = alive_T[:, :-1] * (1.0 - accepted_TK)
        counts.append(
            PromptCounts(
                prompt_id=reply.prompt_id,
                route=reply.route,
                num_tokens=float(n),
                num_steps=float(alive_T[:, 0].sum()),
                num_short_steps=float(sum(alive_T[t, n - t] for t in last)),
                accepted_K=alive_T[:, 1:].sum(0),
                judged_K=(alive_T[:, :-1] * judged_TK).sum(0),
                histogram=np.append(histogram.sum(0), alive_T[:, -1].sum()),
                num_out_of_vocab=reply.num_out_of_vocab,
                uniform={
                    "pairs": judged_TK.sum(0).astype(float),
                    "accepted": accepted_TK.sum(0),
                    "survived": np.cumprod(accepted_TK, axis=1).sum(0),
                },
            )
        )
    return counts
