"""Learning from what the draft model itself would say, scored by the target (DistillSpec, arXiv 2310.08461).

    own steps   a share of the optimiser steps, chosen by seed and step
    continue    every prompt of the step is continued by the draft at temperature 1, to as many tokens as its reply has
    score       the target reads each text once: its states and log-probabilities stand where recorded ones would

Stop tokens are never drawn. A continuation is then exactly as long as the reply it stands for, so pairs, normaliser and
batch split are those of the recorded step; when to stop is learned from the target's own replies, and from its law at
every position. Random numbers belong to step and path: a resume, or another split of the step, says the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headstart.heads.batch import Batch
from headstart.heads.contract import Head
from headstart.heads.paths import Path
from headstart.heads.target import Target
from headstart.trainer.data import Features, TrainingRows, pack_rows
from headstart.trainer.recorded import score


class OnPolicyRows(TrainingRows):
    """The training rows, where some steps have continuations by `head` in place of the target's replies."""

    def __init__(
        self,
        paths: Sequence[Path],
        features: Features,
        batch_tokens: int,
        seed: int,
        *,
        head: Head,
        target: Target,
        share: float,
    ) -> None:
        """`share` of the steps are the head's own; `head` is the one in training, so that it speaks as it is by then."""
        super().__init__(paths, features, batch_tokens, seed)
        self.head, self.target, self.share = head, target, share

    def reads_head(self, step: int) -> bool:
        """Whether a step learns from the head's own continuations."""
        return bool(np.random.default_rng([self.seed, step, 0]).random() < self.share)

    def packed(self, step: int, rows: Sequence[int]) -> Batch:
        if not self.reads_head(step):
            return super().packed(step, rows)
        recorded = [self.paths[row] for row in rows]
        uniforms = [
            np.random.default_rng([self.seed, step, 1 + row]).random(path.num_reply_tokens)
            for row, path in zip(rows, recorded, strict=True)
        ]
        paths = continued(self.head, recorded, uniforms)
        scored, states = read_and_score(self.target, paths)
        return pack_rows(scored, states)


@torch.no_grad()
def continued(head: Head, paths: Sequence[Path], uniforms: Sequence[np.ndarray]) -> list[Path]:
    """The paths with other replies of the same lengths: the head's own words, drawn with one number in [0, 1) a token."""
    device = head.device
    lengths_B = torch.tensor([path.num_prompt_tokens - 1 for path in paths], device=device)
    num_new = max(path.num_reply_tokens for path in paths)
    prompt_BT = torch.zeros(len(paths), int(lengths_B.max()) + 1, dtype=torch.int64)
    uniform_BK = torch.zeros(len(paths), num_new, dtype=torch.float64)
    for row, (path, uniform) in enumerate(zip(paths, uniforms, strict=True)):
        prompt_BT[row, : path.num_prompt_tokens] = torch.from_numpy(
            path.token_N[: path.num_prompt_tokens].astype(np.int64)
        )
        uniform_BK[row, : len(uniform)] = torch.from_numpy(uniform)
    prompt_BT, uniform_BK = prompt_BT.to(device), uniform_BK.to(device)
    stops_S = torch.isin(head.draft_ids_V, torch.tensor(head.facts.stop_ids, device=device)).nonzero().squeeze(1)
    numbers = iter(uniform_BK.unbind(1))

    def drawn(logits_BV: Tensor) -> Tensor:
        law_BV = logits_BV.double().softmax(-1).index_fill(1, stops_S, 0.0)
        mass_BV = law_BV.cumsum(-1)
        # Rounding may push the number to the very end, where every later token would lie behind it.
        threshold_B = torch.minimum(next(numbers) * mass_BV[:, -1], mass_BV[:, -1] * (1 - 1e-15))
        return torch.searchsorted(mass_BV, threshold_B[:, None], right=True).squeeze(1)

    unread_BTF = torch.empty(len(paths), prompt_BT.shape[1] - 1, 0, device=device)
    state = head.start(unread_BTF, prompt_BT[:, 1:], lengths_B, prompt_BT.shape[1] + num_new, prompt_BT[:, 0])
    token_BK = head.draft(state, num_new, drawn).tokens_BK.cpu().numpy().astype(np.int32)
    replies = [token_K[: path.num_reply_tokens] for path, token_K in zip(paths, token_BK, strict=True)]
    return [
        replace(path, token_N=np.concatenate((path.token_N[: path.num_prompt_tokens], reply)), finish_reason="length")
        for path, reply in zip(paths, replies, strict=True)
    ]


class ReadStates:
    """States of a step's texts by prompt id; a draft model reads no taps, so there are none."""

    def __init__(self) -> None:
        self.final: dict[str, Tensor] = {}

    def of(self, paths: Sequence[Path]) -> list[tuple[Tensor, Tensor]]:
        finals = [self.final[path.prompt_id] for path in paths]
        return [(final_SH[:, :0], final_SH) for final_SH in finals]


@torch.no_grad()
def read_and_score(target: Target, paths: Sequence[Path]) -> tuple[list[Path], ReadStates]:
    """The paths with the target's log-probabilities of their replies, and its final states along them."""
    scored, states = [], ReadStates()
    with target.together():
        found = target.read([path.token_N for path in paths])
    for path, read in zip(paths, found, strict=True):
        first = path.num_prompt_tokens - 1  # slot behind which the reply's first token is said
        logprob_N = np.full(len(path.token_N), np.nan, dtype=np.float32)
        logprob_N[first + 1 :] = score(target, read.final[first:], path.token_N[first + 1 :].tolist())
        scored.append(replace(path, logprob_N=logprob_N))
        states.final[path.prompt_id] = read.final
    return scored, states
