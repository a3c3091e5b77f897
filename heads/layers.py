"""Layers that several heads share: RMS norm, rotary positions, grouped attention, the gated MLP."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.packed import FrozenLinear

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, as Llama-family targets and every engine compute it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Projection(nn.Linear):
    """A matrix product that can be laid out once for drafting, where rows are few and weights stay.

    A draft step is a handful of products with one row each, and the library would rearrange every weight anew in each.
    """

    def __init__(self, width: int, out: int, bias: bool = False) -> None:
        super().__init__(width, out, bias=bias)
        self.packed: FrozenLinear | None = None

    def pack(self) -> None:
        """Lay the weight out; from now on it must not change. Training code never calls this."""
        self.packed = FrozenLinear(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return functional.linear(x, self.weight, self.bias)
        return self.packed(x)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Projection(width, inner)
        self.up_proj = Projection(width, inner)
        self.down_proj = Projection(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Rotary:
    """Cosine and sine tables of the target's rotary positions, grown as longer positions are asked for.

    The frequencies come from transformers' own implementation, so that scaling types mean what they mean in the target.

    Raises:
        WrongInput: a rotary type whose frequencies depend on the length of the text.
    """

    def __init__(self, facts: TargetFacts) -> None:
        self.kind = facts.rope_parameters.get("rope_type", "default")
        if self.kind not in ROPE_TYPES:
            raise WrongInput(
                f"target {facts.name!r}: found rotary type {self.kind!r}, expected {', '.join(ROPE_TYPES)} for a head with "
                "attention of its own.\nTrain a kind without (medusa, hydra, mlp), or choose another target."
            )
        self.facts = facts
        self.table: tuple[Tensor, Tensor] | None = None  # cos, sin [L, head_dim], float32

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.table is None or self.table[0].shape[0] < length or self.table[0].device != device:
            from transformers import LlamaConfig
            from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

            config = LlamaConfig(
                hidden_size=self.facts.hidden_size,
                num_attention_heads=self.facts.num_heads,
                head_dim=self.facts.head_dim,
                max_position_embeddings=self.facts.max_position,
                rope_parameters=dict(self.facts.rope_parameters),
            )
            size = max(256, 1 << (length - 1).bit_length())
            positions = torch.arange(size, device=device)[None]
            cos, sin = LlamaRotaryEmbedding(config).to(device)(torch.zeros(1, device=device), positions)
            self.table = cos[0].float(), sin[0].float()
        return self.table

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [.., heads, head_dim] by cos, sin [.., head_dim] of its positions, in x's dtype."""
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos.to(x.dtype).unsqueeze(-2) + turned * sin.to(x.dtype).unsqueeze(-2)


def attend_paths(
    query_SHD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    start_S: Tensor,
    offsets: list[int],
    start_offsets: list[int],
) -> Tensor:
    """Attention at one unroll depth: each start reads its path's depth-0 slots 0..t and its own later slots.

    The prefix part is ordinary causal attention inside one path, so the loop over paths needs no padding and no mask over
    the packed row; the own slots (depths 1..j) add one dot product each. Softmax runs in float32 (at
    least) over both together.

    Args:
        query_SHD: queries of all starts, H query heads.
        key_TGD, value_TGD: depth-0 slots of all paths, G key heads (H is a multiple of G).
        own_keys, own_values: per depth 1..j, [S, G, D] of each start's own slot.
        start_S: slot index of each start, ascending.
        offsets: R + 1 path boundaries among slots; start_offsets: the same among starts.

    Returns:
        [S, H * D] in the query's dtype.
    """
    num_starts, num_heads, width = query_SHD.shape
    groups = key_TGD.shape[1]
    exact = torch.promote_types(query_SHD.dtype, torch.float32)
    query_GSRD = query_SHD.to(exact).view(num_starts, groups, num_heads // groups, width).transpose(0, 1) * width**-0.5
    key_GDT = key_TGD.to(exact).permute(1, 2, 0)
    value_GTD = value_TGD.to(exact).transpose(0, 1)
    if own_keys:
        own_key_GSDJ = torch.stack([k.to(exact) for k in own_keys], dim=-1).transpose(0, 1)
        own_value_GSJD = torch.stack([v.to(exact) for v in own_values], dim=-2).transpose(0, 1)
        own_GSRJ = query_GSRD @ own_key_GSDJ
    outputs = []
    for row in range(len(offsets) - 1):
        first, last = start_offsets[row], start_offsets[row + 1]
        if first == last:
            continue
        begin, end = offsets[row], offsets[row + 1]
        query_GQD = query_GSRD[:, first:last].reshape(groups, -1, width)
        score_GQT = query_GQD @ key_GDT[:, :, begin:end]
        score_GSRT = score_GQT.view(groups, last - first, -1, end - begin)
        future_ST = torch.arange(begin, end, device=start_S.device) > start_S[first:last, None]
        # Adding -inf is ten times faster than a broadcast masked_fill, and has no backward of its own.
        bias_ST = torch.zeros(future_ST.shape, dtype=score_GSRT.dtype, device=start_S.device)
        score_GSRT += bias_ST.masked_fill_(future_ST, float("-inf"))[:, None]
        if own_keys:
            score_GSRT = torch.cat((score_GSRT, own_GSRJ[:, first:last]), dim=-1)
        weight_GSRT = score_GSRT.softmax(-1)
        prefix_GQT = weight_GSRT[..., : end - begin].reshape(groups, -1, end - begin)
        out_GSRD = (prefix_GQT @ value_GTD[:, begin:end]).view(groups, last - first, -1, width)
        if own_keys:
            out_GSRD = out_GSRD + weight_GSRT[..., end - begin :] @ own_value_GSJD[:, first:last]
        outputs.append(out_GSRD)
    if not outputs:
        return query_SHD.reshape(num_starts, num_heads * width)
    out_GSRD = torch.cat(outputs, dim=1)
    return out_GSRD.transpose(0, 1).reshape(num_starts, num_heads * width).to(query_SHD.dtype)


def attend_one(query_BHD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, last_B: Tensor | None) -> Tensor:
    """One query a row over a cache: row b reads slots 0..last_b (all of them where `last_B` is None).

    Returns:
        [B, H * D] in the query's dtype.
    """
    visible_B11L = None
    if last_B is not None:
        visible_B11L = (torch.arange(key_BGLD.shape[2], device=last_B.device) <= last_B[:, None])[:, None, None, :]
    out_BH1D = functional.scaled_dot_product_attention(
        query_BHD[:, :, None], key_BGLD, value_BGLD, visible_B11L, enable_gqa=True
    )
    return out_BH1D.flatten(1)


def attend_level(query_BWHD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, visible_BWL: Tensor) -> Tensor:
    """Several queries a row over a cache: query w of row b reads the slots where `visible_BWL` is true.

    Returns:
        [B, W, H * D] in the query's dtype.
    """
    out_BHWD = functional.scaled_dot_product_attention(
        query_BWHD.transpose(1, 2), key_BGLD, value_BGLD, visible_BWL[:, None], enable_gqa=True
    )
    return out_BHWD.transpose(1, 2).flatten(2)
