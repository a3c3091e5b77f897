"""A batch of packed paths, in slot space.

Slot p of a path holds (feature_p, x_{p+1}) at rotary position p, so a path of N tokens has N - 1 slots and the last
token, which the target never has to read, needs no feature. Everything the contract speaks of is then an index away:
the label of (t, j) is x_{t+2+j} = `next_token_T[t+1+j]`, its teacher is the target's distribution after slot t+1+j.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headstart.heads.paths import Path


@dataclass
class Batch:
    """Paths packed end to end along T; slots from `offsets[-1]` on are filler that belongs to no path."""

    taps_TF: Tensor  # concatenated tap states, ascending tap order, F = num_taps * hidden size
    final_TH: Tensor  # state after the target's final norm: the input of its output head
    token_T: Tensor  # int64, x_p, which only kinds that read the text itself need
    next_token_T: Tensor  # int64, x_{p+1}
    next_generated_T: Tensor  # bool, whether x_{p+1} is part of the reply
    next_logprob_T: Tensor  # float32, log p(x_{p+1}) under the raw target; nan where not generated
    position_T: Tensor  # int64, rotary position p
    offsets: list[int]  # R + 1 row boundaries
    prompt_ids: list[str]
    routes: list[str]
    samplings: list[dict[str, Any]] = field(default_factory=list)  # setting each path was recorded at

    @property
    def num_tokens(self) -> int:
        """Real slots (no filler), prompts included."""
        return self.offsets[-1]

    @property
    def longest(self) -> int:
        """Slots of the longest path; 1 where there is no path."""
        return max((end - begin for begin, end in pairwise(self.offsets)), default=1)

    def to(self, device: torch.device | str) -> "Batch":
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def supervised_pairs(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """Starts and validity of every pair (t, j) that serving can meet.

    (t, j) counts exactly when x_{t+1} .. x_{t+2+j} all lie in one generated reply of one path.

    Returns:
        start_S: int64 slot indices t with a valid pair at depth 0, ascending.
        valid_SD: bool, `valid_SD[s, j]` for the pair (start_S[s], j).
    """
    generated_T = batch.next_generated_T
    num_slots = generated_T.shape[0]
    slot_T = torch.arange(num_slots, device=generated_T.device)
    row_T = torch.bucketize(slot_T, torch.tensor(batch.offsets[1:], device=slot_T.device), right=True)
    inside_T = slot_T < batch.offsets[-1]
    alive_T = generated_T & inside_T  # x_{t+1} is in the reply
    valid = []
    for j in range(depth):
        shifted = torch.zeros_like(alive_T)
        if num_slots > 1 + j:
            same_row = row_T[: num_slots - 1 - j] == row_T[1 + j :]
            shifted[: num_slots - 1 - j] = generated_T[1 + j :] & inside_T[1 + j :] & same_row
        alive_T = alive_T & shifted  # and x_{t+2+j} too
        valid.append(alive_T)
    valid_TD = torch.stack(valid, dim=1)
    start_S = valid_TD[:, 0].nonzero().squeeze(1)
    return start_S, valid_TD[start_S]


def pack(rows: list[tuple[Path, Tensor, Tensor]], num_slots: int | None = None) -> Batch:
    """Pack whole paths with their features end to end.

    Args:
        rows: (path, taps [S, F], final [S, H]) with S = N - 1 slots each.
        num_slots: total length T; the rest is filler. Default: no filler.

    Raises:
        ValueError: features and tokens disagree in length, or the paths do not fit.
    """
    offsets = [0]
    for path, taps_SF, final_SH in rows:
        if not len(taps_SF) == len(final_SH) == path.num_slots:
            raise ValueError(
                f"prompt {path.prompt_id[:12]}: {len(path.token_N)} tokens but {len(taps_SF)} feature slots"
            )
        offsets.append(offsets[-1] + len(taps_SF))
    filler = (num_slots or offsets[-1]) - offsets[-1]
    if filler < 0:
        raise ValueError(f"{offsets[-1]} slots do not fit into {num_slots}")

    def joined(parts: list[Tensor], fill: float) -> Tensor:
        if filler:
            parts = [*parts, parts[0].new_full((filler, *parts[0].shape[1:]), fill)]
        return torch.cat(parts)

    paths = [path for path, _, _ in rows]
    return Batch(
        taps_TF=joined([taps for _, taps, _ in rows], 0),
        final_TH=joined([final for _, _, final in rows], 0),
        token_T=joined([torch.from_numpy(p.token_N[:-1].astype("int64")) for p in paths], 0),
        next_token_T=joined([torch.from_numpy(p.token_N[1:].astype("int64")) for p in paths], 0),
        next_generated_T=joined([torch.from_numpy(p.generated_N[1:].copy()) for p in paths], 0),
        next_logprob_T=joined([torch.from_numpy(p.logprob_N[1:].copy()) for p in paths], float("nan")),
        position_T=joined([torch.arange(p.num_slots) for p in paths], 0),
        offsets=offsets,
        prompt_ids=[p.prompt_id for p in paths],
        routes=[p.route for p in paths],
        samplings=[p.sampling for p in paths],
    )
