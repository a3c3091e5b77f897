"""What every supervised pair is charged, fused with the projection to the draft vocabulary.

For the pair (t, j) let p be the target's distribution at position t+1+j over its whole vocabulary and q the head's,
which lives on the draft vocabulary D only:

    kl          sum over d in D of p_d (log p_d - log q_d)
    reverse_kl  m * sum over d in D of q_d (log q_d - log p_d), m = sum of p_d        (arXiv 2306.13649, section 2.1)
    jsd         (KL(p || w) + KL(q || w)) / 2 with w = (p + q) / 2, over the whole vocabulary         (also there)
    ce          -log q_x of the recorded token x
    tv          1 - sum over d in D of min(p_d, q_d)                  = 1 - acceptance of a sampled draft
    lk_hybrid   lambda * kl + (1 - lambda) * tv, lambda = exp(-lk_rate * acceptance), no gradient through lambda
                (arXiv 2602.23881; acceptance of the pair itself, so that splitting a step cannot change it)

Tokens outside D. p is never renormalised over D. Under `kl` a pair therefore weighs its in-vocabulary mass m = sum p_d:
its gradient m q - p pulls q towards p / m with force m, and a pair whose mass lies outside teaches almost nothing
instead of teaching a wrong favourite. (A kl may fall below 0 for m < 1, down to m log m.) KL(q || p) alone would pull
towards p / m with the same force whatever m is, which is why `reverse_kl` carries the factor m; its least value is
-m log m. Under `jsd` the mass outside adds (1 - m) / 2 * log 2, which no q can win, and weakens the pull by itself; under
`tv` it is acceptance that no q can win. Under `ce` a pair whose recorded token lies outside has no loss. Such pairs are
counted (`PairSums.outside_D`) and stay in the normaliser, which so depends on the recorded paths alone.

No full-vocabulary product is needed for p: with z_x = output_weight[x] . final and the recorded log p(x),
log Z = z_x - log p(x) at every position whose next token was generated, and those are all positions that teach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from headstart.heads.batch import Batch
from headstart.heads.contract import Rollout
from headstart.trainer.settings import LossSettings

ROW_MULTIPLE = 16  # chunks have few distinct row counts: every new shape costs oneDNN a new kernel
FAR = 80.0  # exp of it is finite in float32, and log(1 + exp x) = x there


@dataclass
class PairSums:
    """Sums over the supervised pairs of each depth, [D] in float64 where the device has it; divide by `pairs_D` last."""

    pairs_D: Tensor
    loss_D: Tensor  # without the depth weight
    mass_D: Tensor  # the target's probability of the draft vocabulary
    hits_D: Tensor  # no logit lies above the recorded token's: a greedy draft of it (rounded logits tie now and then)
    overlap_D: Tensor  # min(1, q(x) / p(x)): acceptance of a sampled draft where x was sampled at temperature 1
    outside_D: Tensor  # the recorded token lies outside the draft vocabulary

    @classmethod
    def zeros(cls, depth: int, device: torch.device) -> "PairSums":
        return cls(*(torch.zeros(depth, dtype=sum_dtype(device), device=device) for _ in fields(cls)))

    def add(self, other: "PairSums") -> None:
        for field in fields(self):
            getattr(self, field.name).add_(getattr(other, field.name))


class Teacher:
    """The frozen target as the losses see it: its output rows of the draft vocabulary, and log Z."""

    def __init__(self, output_weight_VH: Tensor, draft_ids: Tensor, dtype: torch.dtype):
        """`dtype` is the precision of the products: bfloat16, or that of the head's own weights."""
        self.dtype = dtype
        self.output_weight_VH = output_weight_VH.detach()
        self.draft_weight_VdH = self.output_weight_VH[draft_ids].to(dtype)
        self.draft_index_V = torch.full((output_weight_VH.shape[0],), -1, device=output_weight_VH.device)
        self.draft_index_V[draft_ids] = torch.arange(len(draft_ids), device=output_weight_VH.device)

    def recorded_logit(self, final_UH: Tensor, token_U: Tensor) -> Tensor:
        """z_x of the recorded tokens."""
        high = torch.promote_types(torch.float32, self.dtype)
        return (final_UH.to(high) * self.output_weight_VH[token_U].to(high)).sum(-1)


@dataclass
class _Pairs:
    """Pairs by teacher: column u holds the pairs (t, j) with t + 1 + j = slot_U[u], which all share one p."""

    slot_U: Tensor  # slot whose features give p; U = number of starts
    state_DU: Tensor  # row of the pair's state in state_SDH.flatten(0, 1)
    valid_DU: Tensor  # bool


def pairs_by_teacher(rollout: Rollout) -> _Pairs:
    """Starts of one reply are neighbours, so the teacher of (start s, depth j) is that of (start s + j, depth 0)."""
    num_starts, depth = rollout.valid_SD.shape
    column_U = torch.arange(num_starts, device=rollout.valid_SD.device)
    depth_D1 = torch.arange(depth, device=column_U.device)[:, None]
    start_DU = column_U - depth_D1
    valid_DU = rollout.valid_SD[start_DU.clamp(min=0), depth_D1] & (start_DU >= 0)
    return _Pairs(rollout.start_S + 1, start_DU.clamp(min=0) * depth + depth_D1, valid_DU)


def pair_loss(
    rollout: Rollout, weights: Sequence[Tensor], batch: Batch, teacher: Teacher, loss: LossSettings, normaliser: float
) -> tuple[Tensor, PairSums]:
    """Charge all pairs of a rollout.

    Args:
        weights: the head's output weights over the draft vocabulary, [V, H]: one for all depths, or one for each.
        normaliser: sum of depth_decay ** j over all pairs of the whole optimiser step, every micro-batch and rank.

    Returns:
        The batch's share of the step's loss, sum of depth_decay ** j * l / normaliser (differentiable in states and
        weights), and the sums per depth.
    """
    depth = rollout.valid_SD.shape[1]
    sums = PairSums.zeros(depth, weights[0].device)
    arguments = (rollout, batch, teacher, loss, normaliser, sums)
    return _FusedPairLoss.apply(arguments, rollout.state_SDH, *weights[:depth]), sums


class _FusedPairLoss(torch.autograd.Function):
    """Chunk by chunk: logits, loss, and both gradients at once, so that no logits outlive their chunk."""

    @staticmethod
    def forward(ctx, arguments, state_SDH, *weights):
        charge = _Charge(state_SDH, weights, ctx.needs_input_grad[2:], *arguments)
        with torch.autocast(state_SDH.device.type, enabled=False):
            for first in range(0, charge.num_columns, charge.rows):
                charge.chunk(first, with_gradient=any(ctx.needs_input_grad))
        ctx.gradients = charge.state_grad_SDH, *charge.weight_grads  # not `save_for_backward`: scaled in place, once
        return charge.total()

    @staticmethod
    def backward(ctx, grad):
        gradients = ctx.gradients
        del ctx.gradients
        return None, *(None if gradient is None else gradient.mul_(grad) for gradient in gradients)


class _Charge:
    """Buffers and running sums of one call. R rows a chunk, V = draft vocabulary, D depths stacked for one product."""

    def __init__(
        self,
        state_SDH: Tensor,
        weights: Sequence[Tensor],
        trained: Sequence[bool],
        rollout: Rollout,
        batch: Batch,
        teacher: Teacher,
        loss: LossSettings,
        normaliser: float,
        sums: PairSums,
    ) -> None:
        self.loss, self.teacher, self.batch, self.sums = loss, teacher, batch, sums
        self.pairs = pairs_by_teacher(rollout)
        self.num_columns = len(self.pairs.slot_U)
        depth = rollout.valid_SD.shape[1]
        # Equal chunks of at most loss.chunk pairs: padding the last one up would waste products.
        num_chunks = -(-self.num_columns * depth // loss.chunk) or 1
        self.rows = _round_up(max(1, -(-self.num_columns // num_chunks)), ROW_MULTIPLE)
        vocab, hidden = weights[0].shape
        device = weights[0].device
        self.state_PH = state_SDH.flatten(0, 1)
        self.weights = [weight_VH.to(teacher.dtype) for weight_VH in weights]
        self.state_grad_SDH = torch.zeros_like(state_SDH)
        self.weight_grads = [
            torch.zeros_like(weight_VH) if learns else None for weight_VH, learns in zip(weights, trained, strict=True)
        ]
        self.decay_D = loss.depth_decay ** torch.arange(depth, dtype=sum_dtype(device), device=device)
        self.normaliser = normaliser
        # Products are narrow (perhaps bfloat16), softmax and sums wide (at least float32).
        self.wide = torch.promote_types(torch.float32, teacher.dtype)
        narrow_empty = partial(torch.empty, dtype=teacher.dtype, device=device)
        self.logits_XV = narrow_empty(depth * self.rows, vocab)  # X = D * R; turned into gradients in place
        self.teacher_logits_RV = narrow_empty(self.rows, vocab)
        self.weight_part_VH = narrow_empty(vocab, hidden)
        # Kept: adding the narrow part makes a new one each time.
        self.weight_wide_VH = torch.empty_like(weights[0])
        self.p_RV, self.q_RV, self.z_RV = self.teacher_logits_RV.new_empty(
            3, self.rows, vocab, dtype=self.wide
        ).unbind()

    def total(self) -> Tensor:
        return (self.sums.loss_D @ self.decay_D / self.normaliser).to(self.weight_wide_VH.dtype)

    def by_weight(self, rows_XY: Tensor) -> tuple[Tensor, ...]:
        """The rows of each output weight: depths lie one after another, so a weight's rows are neighbours."""
        return rows_XY.chunk(len(self.weights))

    def chunk(self, first: int, with_gradient: bool) -> None:
        column_R = torch.arange(first, first + self.rows, device=self.batch.final_TH.device)
        inside_R = column_R < self.num_columns
        column_R = column_R.clamp(max=self.num_columns - 1)
        self.read_teacher(column_R)
        valid_DR = self.pairs.valid_DU[:, column_R] & inside_R
        state_X = self.pairs.state_DU[:, column_R].flatten()
        state_XH = self.state_PH[state_X].to(self.teacher.dtype)
        for rows_YH, weight_VH, logits_YV in zip(
            self.by_weight(state_XH), self.weights, self.by_weight(self.logits_XV), strict=True
        ):
            torch.mm(rows_YH, weight_VH.t(), out=logits_YV)
        for j, logits_RV in enumerate(self.logits_XV.split(self.rows)):
            self.z_RV.copy_(logits_RV)
            self.charge_depth(j, valid_DR[j].to(self.wide))
            if with_gradient:
                logits_RV.copy_(self.q_RV)
        if with_gradient:
            self.add_gradients(state_X, state_XH, valid_DR)

    def read_teacher(self, column_R: Tensor) -> None:
        """Fill p_RV and, per row: mass m, sum p log p, log p - z, the recorded token's draft index (-1 outside), log p."""
        slot_R = self.pairs.slot_U[column_R]
        token_R = self.batch.next_token_T[slot_R]
        final_RH = self.batch.final_TH[slot_R]
        self.token_R = self.teacher.draft_index_V[token_R]
        self.inside_R = self.token_R >= 0
        self.logprob_R = self.batch.next_logprob_T[slot_R].to(self.wide)
        torch.mm(final_RH.to(self.teacher.dtype), self.teacher.draft_weight_VdH.t(), out=self.teacher_logits_RV)
        self.z_RV.copy_(self.teacher_logits_RV)
        # Inside the vocabulary z_x comes from the same rounded product as its neighbours, so that p(x) is the record.
        own_R = self.z_RV.gather(1, self.token_R.clamp(min=0)[:, None]).squeeze(1)
        recorded_R = torch.where(self.inside_R, own_R, self.teacher.recorded_logit(final_RH, token_R))
        log_z_R = recorded_R - self.logprob_R
        torch.softmax(self.z_RV, -1, out=self.p_RV)
        _, log_sum_R = _top_and_log_sum(self.z_RV, self.p_RV)
        log_mass_R = (log_sum_R - log_z_R).clamp(-60.0, 0.0)  # a part never exceeds the whole, whatever the rounding
        self.mass_R = log_mass_R.exp()
        self.p_RV.mul_(self.mass_R[:, None])
        self.p_shift_R = log_mass_R - log_sum_R
        self.p_log_p_R = torch.linalg.vecdot(self.p_RV, self.z_RV) + self.mass_R * self.p_shift_R

    def charge_depth(self, depth: int, valid_R: Tensor) -> None:
        """Charge the logits in z_RV; leave the gradient of each row's loss in q_RV, without the row's weight."""
        z_RV, q_RV = self.z_RV, self.q_RV
        torch.softmax(z_RV, -1, out=q_RV)
        top_R, log_sum_R = _top_and_log_sum(z_RV, q_RV)
        own_R = z_RV.gather(1, self.token_R.clamp(min=0)[:, None]).squeeze(1)
        log_q_R = own_R - log_sum_R
        loss_R = getattr(self, self.loss.kind)(log_q_R, log_sum_R)
        hit_R = self.inside_R & (own_R >= top_R)
        overlap_R = torch.where(self.inside_R, (log_q_R - self.logprob_R).clamp(max=0).exp(), 0.0)
        row_sums = (torch.ones_like(valid_R), loss_R, self.mass_R, hit_R, overlap_R, ~self.inside_R)
        for field, value_R in zip(fields(self.sums), row_sums, strict=True):
            getattr(self.sums, field.name)[depth] += (value_R * valid_R).sum(dtype=self.decay_D.dtype)

    # The losses, each by its name in the settings: they return the loss of every row and turn q_RV into its gradient by
    # the logits in z_RV, which they may overwrite.

    def ce(self, log_q_R: Tensor, _: Tensor) -> Tensor:
        self.q_RV.scatter_add_(1, self.token_R.clamp(min=0)[:, None], torch.full_like(log_q_R, -1.0)[:, None])
        self.q_RV.mul_(self.inside_R.to(self.q_RV.dtype)[:, None])
        return torch.where(self.inside_R, -log_q_R, 0.0)

    def kl(self, _: Tensor, log_sum_R: Tensor) -> Tensor:
        self.q_RV.mul_(self.mass_R[:, None]).sub_(self.p_RV)
        return self.kl_of(log_sum_R)

    def reverse_kl(self, _: Tensor, log_sum_R: Tensor) -> Tensor:
        x_RV = self.log_p_less_log_q(log_sum_R)
        divergence_R = -torch.linalg.vecdot(self.q_RV, x_RV)
        self.q_RV.mul_(x_RV.add_(divergence_R[:, None])).mul_(-self.mass_R[:, None])
        return self.mass_R * divergence_R

    def jsd(self, _: Tensor, log_sum_R: Tensor) -> Tensor:
        # With x = log p - log q and f = log(1 + exp x): log(q / w) = log 2 - f and log(p / w) = log 2 - f + x. Over the
        # whole vocabulary, where p / w = 2 outside D, jsd = log 2 - (p.f - p.x + q.f) / 2 and d jsd / dz = q (q.f - f) / 2.
        x_RV = self.log_p_less_log_q(log_sum_R).clamp_(max=FAR)
        p_x_R = torch.linalg.vecdot(self.p_RV, x_RV)
        f_RV = x_RV.exp_().log1p_()
        p_f_R, q_f_R = torch.linalg.vecdot(self.p_RV, f_RV), torch.linalg.vecdot(self.q_RV, f_RV)
        self.q_RV.mul_(f_RV.sub_(q_f_R[:, None])).mul_(-0.5)
        return math.log(2) - (p_f_R - p_x_R + q_f_R) / 2

    def tv(self, _: Tensor, log_sum_R: Tensor) -> Tensor:
        return self.between(log_sum_R, kl_rate=math.inf)

    def lk_hybrid(self, _: Tensor, log_sum_R: Tensor) -> Tensor:
        return self.between(log_sum_R, kl_rate=self.loss.lk_rate)

    def between(self, log_sum_R: Tensor, kl_rate: float) -> Tensor:
        """lambda * kl + (1 - lambda) * tv with lambda = exp(-kl_rate * acceptance); tv alone at an infinite rate."""
        z_RV, q_RV, p_RV = self.z_RV, self.q_RV, self.p_RV
        kl_R = self.kl_of(log_sum_R)
        accept_R = torch.minimum(p_RV, q_RV, out=z_RV).sum(-1)
        share_R = torch.zeros_like(accept_R) if math.isinf(kl_rate) else torch.exp(-kl_rate * accept_R)
        # d tv / dz = q (q.b - b) with b = 1 where q < p; d kl / dz = m q - p.
        torch.lt(q_RV, p_RV, out=z_RV)
        z_RV.mul_(q_RV)
        scale_R = share_R * self.mass_R + (1 - share_R) * z_RV.sum(-1)
        z_RV.mul_(1 - share_R[:, None]).addcmul_(p_RV, share_R[:, None])
        q_RV.mul_(scale_R[:, None]).sub_(z_RV)
        return share_R * kl_R + (1 - share_R) * (1 - accept_R)

    def kl_of(self, log_sum_R: Tensor) -> Tensor:
        return self.p_log_p_R - torch.linalg.vecdot(self.p_RV, self.z_RV) + self.mass_R * log_sum_R

    def log_p_less_log_q(self, log_sum_R: Tensor) -> Tensor:
        """From logits, where p and q may have run down to 0; in place of the head's."""
        return self.z_RV.neg_().add_(self.teacher_logits_RV).add_((self.p_shift_R + log_sum_R)[:, None])

    def add_gradients(self, state_X: Tensor, state_XH: Tensor, valid_DR: Tensor) -> None:
        """The weight of a row enters with the narrow factors, never with the [X, V] one."""
        weight_X1 = (self.decay_D[:, None] / self.normaliser * valid_DR).flatten()[:, None].to(self.wide)
        weighted_XH = (state_XH * weight_X1).to(self.teacher.dtype)
        parts = []
        for gradient_YV, weighted_YH, weight_VH, weight_grad_VH in zip(
            self.by_weight(self.logits_XV), self.by_weight(weighted_XH), self.weights, self.weight_grads, strict=True
        ):
            parts.append(torch.mm(gradient_YV, weight_VH))
            if weight_grad_VH is None:
                continue
            if weight_grad_VH.dtype == self.teacher.dtype:
                weight_grad_VH.addmm_(gradient_YV.t(), weighted_YH)
            else:
                torch.mm(gradient_YV.t(), weighted_YH, out=self.weight_part_VH)
                weight_grad_VH.add_(self.weight_wide_VH.copy_(self.weight_part_VH))
        part_XH = torch.cat(parts) * weight_X1
        self.state_grad_SDH.flatten(0, 1).index_add_(0, state_X, part_XH.to(self.state_grad_SDH.dtype))


def _top_and_log_sum(z_RV: Tensor, softmax_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit, and log sum exp z read off the softmax at hand: z - log softmax where both are largest."""
    top_R = z_RV.amax(-1)
    return top_R, top_R - softmax_RV.amax(-1).log()


def sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
