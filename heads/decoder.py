"""A stack of Llama-like decoder layers that can be trained: what a draft that reads the text alone is made of.

    h = h + o(attention(rope(q, k), v))        q, k, v = projections of norm(h), queries and keys normed in some families
    h = h + down(silu(gate(x)) * up(x))        x = norm(h)

Names and arithmetic are those of transformers' Llama, Mistral, Qwen2 and Qwen3.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.facts import TargetFacts
from headstart.heads.layer_head import Attention, Layer
from headstart.heads.layers import GatedMLP, Projection, RMSNorm, Rotary, attend_level


class DecoderAttention(Attention):
    """Attention of a layer whose queries and keys may be normed for each head."""

    def __init__(self, facts: TargetFacts) -> None:
        super().__init__(facts, facts.hidden_size)
        if facts.query_key_norm:
            self.q_norm = RMSNorm(facts.head_dim, facts.rms_norm_eps)
            self.k_norm = RMSNorm(facts.head_dim, facts.rms_norm_eps)
        self.query_key_norm = facts.query_key_norm

    def query(self, x: Tensor) -> Tensor:
        query = super().query(x)
        return self.q_norm(query) if self.query_key_norm else query

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().key_value(x)
        return self.k_norm(key) if self.query_key_norm else key, value


class DecoderLayer(Layer):
    """One decoder layer, of the widths and with the biases that `facts` name."""

    input_layernorm: RMSNorm

    def __init__(self, facts: TargetFacts) -> None:
        super().__init__()
        self.self_attn = DecoderAttention(facts)
        self.mlp = GatedMLP(facts.hidden_size, facts.intermediate_size)
        self.input_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        for name in facts.layer_biases:
            plain = self.get_submodule(name)
            assert isinstance(plain, Projection)
            self.set_submodule(name, Projection(plain.in_features, plain.out_features, bias=True))


@dataclass
class TextCache:
    """Keys and values of one layer for B texts; the last slot is never seen, padding is written there."""

    key_BGLD: Tensor
    value_BGLD: Tensor


class Decoder(nn.Module):
    """`facts.num_layers` layers and the final norm: embedded tokens in, final states out."""

    def __init__(self, facts: TargetFacts) -> None:
        super().__init__()
        self.facts = facts
        self.layers = nn.ModuleList(DecoderLayer(facts) for _ in range(facts.num_layers))
        self.norm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)
        self.rotary = Rotary(facts)

    @property
    def _stack(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def paths(self, hidden_TH: Tensor, position_T: Tensor, offsets: list[int]) -> Tensor:
        """Final states [T, H] of whole texts packed end to end, R + 1 boundaries in `offsets`; differentiable."""
        longest = max((end - begin for begin, end in pairwise(offsets)), default=1)
        cos_L, sin_L = self.rotary.tables(longest, hidden_TH.device)
        cos_TD, sin_TD = cos_L[position_T], sin_L[position_T]
        for layer in self._stack:
            attention, x_TH = layer.self_attn, layer.input_layernorm(hidden_TH)
            key_TGD, value_TGD = attention.key_value(x_TH)
            query_TND = self.rotary(attention.query(x_TH), cos_TD, sin_TD)
            attended_TI = attend_texts(query_TND, self.rotary(key_TGD, cos_TD, sin_TD), value_TGD, offsets)
            hidden_TH = layer.write(hidden_TH, attended_TI)
        normed_TH: Tensor = self.norm(hidden_TH)
        return normed_TH

    def new_caches(self, num_rows: int, max_length: int, like: Tensor) -> list[TextCache]:
        """Empty caches of `max_length` slots and one for padding, in the type and on the device of `like`."""
        shape = (num_rows, self.facts.num_kv_heads, max_length + 1, self.facts.head_dim)
        # Zeros, since a slot that is not seen still takes part in products, where anything but a number would spread.
        return [TextCache(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.layers]

    def feed(
        self,
        hidden_BWH: Tensor,
        position_BW: Tensor,
        slot_BW: Tensor,
        visible_BWL: Tensor,
        caches: list[TextCache],
    ) -> Tensor:
        """Final states [B, W, H] of tokens fed side by side.

        Keys and values are written at slots `slot_BW`; token w of row b attends to the slots where `visible_BWL` is true,
        its own among them. Rotary positions are told apart from slots, for nodes of a tree share them.
        """
        size, used = caches[0].key_BGLD.shape[2], visible_BWL.shape[2]
        cos_L, sin_L = self.rotary.tables(size, hidden_BWH.device)
        cos_BWD, sin_BWD = cos_L[position_BW], sin_L[position_BW]
        row_B1 = torch.arange(len(hidden_BWH), device=hidden_BWH.device)[:, None]
        for layer, cache in zip(self._stack, caches, strict=True):
            attention, x_BWH = layer.self_attn, layer.input_layernorm(hidden_BWH)
            key_BWGD, value_BWGD = attention.key_value(x_BWH)
            cache.key_BGLD[row_B1, :, slot_BW] = self.rotary(key_BWGD, cos_BWD, sin_BWD)
            cache.value_BGLD[row_B1, :, slot_BW] = value_BWGD
            query_BWND = self.rotary(attention.query(x_BWH), cos_BWD, sin_BWD)
            keys_values = (cache.key_BGLD[:, :, :used], cache.value_BGLD[:, :, :used])
            hidden_BWH = layer.write(hidden_BWH, attend_level(query_BWND, *keys_values, visible_BWL))
        normed_BWH: Tensor = self.norm(hidden_BWH)
        return normed_BWH


def attend_texts(query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, offsets: list[int]) -> Tensor:
    """Causal attention inside each text of a packed row, [T, N * D]; slots that belong to no text get zeros.

    A text at a time: no mask, and no score of a token with a neighbour's.
    """
    outputs = []
    for begin, end in pairwise(offsets):
        query_NSD, key_GSD, value_GSD = (x[begin:end].transpose(0, 1) for x in (query_TND, key_TGD, value_TGD))
        out_NSD = functional.scaled_dot_product_attention(
            query_NSD[None], key_GSD[None], value_GSD[None], is_causal=True, enable_gqa=True
        )[0]
        outputs.append(out_NSD.transpose(0, 1).flatten(1))
    outputs.append(query_TND[offsets[-1] :].flatten(1) * 0)
    return torch.cat(outputs)
