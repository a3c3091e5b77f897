"""Greedy identity: speculative replies are the target's own, token for token, or every difference is explained.

In float32 replies are expected to be equal. Where two runs part, the same prefix is scored once more, teacher-forced and
in float64: if both tokens are within the rounding noise of the best logit there, the difference is a near tie that
another matrix shape may decide either way; otherwise it is a bug.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.eval.acceptance import ReplyAcceptance
from headstart.eval.checks import check_entry
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.replies import Reply
from headstart.eval.speculation import PLAIN, Speculation
from headstart.heads.batch import Batch
from headstart.heads.contract import Head
from headstart.heads.sampling import Sampling
from headstart.heads.target import Target
from headstart.heads.tree import Tree

NOISE_TOKENS = 64  # likeliest tokens over which rounding noise is measured
NOISE_WIDTH = 4.0  # a tie is a gap of at most this many standard deviations of the noise of a difference
DRAFT_TIE = 1e-4  # two draft logits closer than this share of the largest are a tie


@dataclass
class Divergence:
    """Where two replies to one prompt part, and whether rounding explains it."""

    prompt_id: str
    position: int  # index in the reply
    plain: int | None  # None: that reply had ended
    speculative: int | None
    gap: float | None  # best logit minus the smaller of the two tokens' logits, in float64
    verdict: str  # tie | bug
    tolerance: float | None = None


class Rescorer:
    """Scores prefixes once more in float64 on the CPU; the copy of the target is made when first needed."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._exact: Any = None

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [V] after the last token, in float64 where a copy fits into memory, else in the target's dtype."""
        if self._exact is None:
            self._exact = exact_copy(self.target) or False
        if self._exact is False:
            return self.run_logits(tokens)
        with torch.inference_mode():
            output = self._exact(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        logits_V: Tensor = output.logits[0, -1, : self.target.facts.num_tokens]
        return logits_V

    def run_logits(self, tokens: Sequence[int]) -> Tensor:
        """The same from the running target, teacher-forced, in its own dtype."""
        final_SH = self.target.read([np.array([*tokens, 0])])[0].final
        return self.target.logits(final_SH[-1])[: self.target.facts.num_tokens].cpu().double()

    def judge(
        self, prompt_id: str, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
    ) -> Divergence | None:
        """The first difference of two replies, judged; None where they are equal.

        The noise is what the target's dtype does to logits at this very prefix: the standard deviation, over the
        likeliest tokens, of run logits minus exact ones. A difference of two logits has sqrt(2) times that.
        """
        position = first_difference(plain, other)
        if position is None:
            return None
        if position >= min(len(plain), len(other)):
            ended, went_on = (plain[position], None) if position < len(plain) else (None, other[position])
            return Divergence(prompt_id, position, ended, went_on, None, "bug")
        a, b = plain[position], other[position]
        if max(a, b) >= self.target.facts.num_tokens:  # an id that the tokenizer cannot produce
            return Divergence(prompt_id, position, a, b, None, "bug")
        prefix = [*prompt, *plain[:position]]
        exact_V, run_V = self.logits(prefix), self.run_logits(prefix)
        gap = float(exact_V.max() - torch.minimum(exact_V[a], exact_V[b]))
        likely = exact_V.topk(min(NOISE_TOKENS, len(exact_V))).indices
        noise = float((run_V - exact_V)[likely].std())
        floor = float(torch.finfo(torch.float32).eps * exact_V.abs().max())
        tolerance = NOISE_WIDTH * 2**0.5 * noise + floor
        return Divergence(prompt_id, position, a, b, gap, "tie" if gap <= tolerance else "bug", tolerance)


def exact_copy(target: Target) -> Any | None:
    """The target's model in float64 on the CPU, or None where it would not fit into half the free memory."""
    from transformers import AutoModelForCausalLM

    num_bytes = 8 * sum(p.numel() for p in target.model.parameters())
    known = "SC_AVPHYS_PAGES" in os.sysconf_names  # where it is not, assume that a copy fits
    if known and num_bytes > 0.5 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return None
    config = copy.deepcopy(target.model.config)  # what is set on the copy must not reach the running target
    exact = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
    exact.load_state_dict({name: tensor.cpu() for name, tensor in target.model.state_dict().items()})
    exact.tie_weights()
    return exact.eval()


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first difference; the shorter length where one is the beginning of the other; None if equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def identity_check(
    rescorer: Rescorer,
    prompt_ids: Sequence[str],
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    *,
    against: str,
    draft_length: int,
    batch: int,
    shape: str = "chain",
) -> dict[str, Any]:
    """One `greedy_identity` check of eval/lossless.json: `plain` and `other` are replies to the same prompts.

    Args:
        against: which replies `plain` holds: `recorded`, `plain` (the reference decoder at draft length 0), `generate`.
    """
    judged = [rescorer.judge(*row) for row in zip(prompt_ids, prompts, plain, other, strict=True)]
    divergences = [d for d in judged if d is not None]
    num_tokens = sum(len(tokens) if d is None else d.position for tokens, d in zip(plain, judged, strict=True))
    gaps = [d.gap for d in divergences if d.gap is not None]
    return check_entry(
        "greedy_identity",
        target=rescorer.target.facts.name,
        dtype=str(rescorer.target.dtype).removeprefix("torch."),
        sampling=Sampling(),
        draft="greedy",
        shape=shape,
        draft_length=draft_length,
        batch=batch,
        num_samples=len(prompts),
        num_tokens=num_tokens,
        max_difference=max(gaps, default=0.0),
        passed=not any(d.verdict == "bug" for d in divergences),
        divergences=[asdict(d) for d in divergences],
        against=against,
    )


def tree_identity(
    target: Target, head: Head, prompts: Sequence[Sequence[int]], max_new_tokens: int, tree: Tree, batch: int
) -> dict[str, Any]:
    """The check for a tree of greedy drafts, against plain decoding of the same prompts."""
    plain = decode(target, prompts, PLAIN, max_new_tokens, batch=batch)
    drafted = decode(
        target, prompts, Speculation(HeadDrafter(head), tree.depth, tree=tree), max_new_tokens, batch=batch
    )
    check = identity_check(
        Rescorer(target),
        [str(i) for i in range(len(prompts))],
        prompts,
        [reply.token_ids for reply in plain],
        [reply.token_ids for reply in drafted],
        against="plain",
        draft_length=tree.depth,
        batch=batch,
        shape="tree",
    )
    return {**check, "drafter": head.kind, "tree": list(tree.parents)}


def overall_verdict(checks: Sequence[dict[str, Any]]) -> str:
    """`lossy` if any check failed; `lossless` if checks that compared tokens all passed; else `inconclusive`."""
    if any(check["verdict"] == "fail" for check in checks):
        return "lossy"
    return "lossless" if any(check["num_tokens"] > 0 for check in checks) else "inconclusive"


def first_unequal_step(reply: ReplyAcceptance, live: Reply) -> tuple[int, int] | None:
    """The first (start, depth) whose live outcome is not the offline one, for greedy drafts; None if all are equal."""
    start = 0
    for step in live.steps:
        for j in range(step.judged):
            if (j < step.accepted) != bool(reply.accept_TK[start, j]):
                return start, j
        start += step.accepted + 1
    return None


@torch.no_grad()
def is_draft_tie(head: Head, batch: Batch, start: int, depth: int) -> bool:
    """Whether the head's draft at (start, depth) of a one-path batch hangs on logits that are equal but for rounding."""
    rollout = head.rollout(batch, depth + 1)
    logits_V = head.logits(rollout.state_SDH[start, depth], depth).double()
    label = int(batch.next_token_T[int(rollout.start_S[start]) + 1 + depth])
    best = logits_V.topk(2)
    if int(head.draft_ids_V[best.indices[0]]) == label:
        gap = best.values[0] - best.values[1]
    else:
        known = (head.draft_ids_V == label).nonzero().flatten()
        if len(known) == 0:
            return False
        gap = best.values[0] - logits_V[known[0]]
    return bool(gap <= DRAFT_TIE * logits_V.abs().max())
