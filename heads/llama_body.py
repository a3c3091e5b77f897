"""The decoder layers of Llama-like models, run directly on the weights of the transformers model.

The same arithmetic as transformers' modules in fewer, larger operations: query, key and value in one product, gate,
product and residual sums fused into their products, no key/value copies for grouped queries, one mask a pass. What it
returns is checked against the model's own forward at load (`target_probe.py`).

    h = h + o(attention(rope(q, k), v))        q, k, v = qkv(norm(h))
    h = h + down(silu(gate(x)) * up(x))        x = norm(h)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.cache import PositionCache
from headstart.heads.packed import FrozenLinear, min_rows

LAYER_CLASSES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
# Passes of more tokens a row use the fused function, which needs no [T, T] scores in memory.
LONGEST_PRODUCTS = 1024
# Query rows of one key head that are scored together at least: fewer are added up in another order.
MIN_QUERIES = 4


class LlamaBody:
    """Token ids to the residual stream before each tapped layer, and to the final state."""

    def __init__(self, body: Any, taps: list[int]) -> None:
        config = body.config
        self.taps = taps
        self.head_dim: int = body.layers[0].self_attn.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self._embedding: Tensor = body.embed_tokens.weight
        self._rotary = body.rotary_emb
        self._norm = body.norm
        self._layers = [Layer(layer) for layer in body.layers]
        on_cpu = self._embedding.device.type == "cpu"
        self.min_rows = min_rows(self._embedding.device)
        self.min_queries = MIN_QUERIES if on_cpu else 1
        self.longest_products = LONGEST_PRODUCTS if on_cpu else 0

    def __call__(
        self, tokens_BT: Tensor, position_BT: Tensor, cache: PositionCache | None
    ) -> tuple[list[Tensor], Tensor]:
        """States [B, T, H] of the taps and `final`.

        The cache has been told by `plan` where tokens go. Without one, or where every row starts at position 0, tokens
        attend to those before them in the same pass.
        """
        batch, length = tokens_BT.shape
        num_tokens = batch * length
        hidden_NH = functional.embedding(tokens_BT.reshape(-1), self._embedding)
        pad = max(self.min_rows - num_tokens, 0)
        if pad:
            hidden_NH = functional.pad(hidden_NH, (0, 0, 0, pad))
        attention = Attention(self, hidden_NH.dtype, position_BT, cache)
        tapped = {}
        for index, layer in enumerate(self._layers):
            if index in self.taps:
                tapped[index] = hidden_NH
            hidden_NH = layer(hidden_NH, attention, index, num_tokens)
        tapped[len(self._layers)] = hidden_NH
        final_NH = normed(hidden_NH, self._norm)
        shape = (batch, length, -1)
        return [tapped[tap][:num_tokens].view(shape) for tap in self.taps], final_NH[:num_tokens].view(shape)


class Layer:
    """One decoder layer's frozen weights."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm = layer.input_layernorm
        self.mlp_norm = layer.post_attention_layernorm
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        self.qkv = FrozenLinear(*joined([attention.q_proj, attention.k_proj, attention.v_proj]))
        self.o = FrozenLinear(attention.o_proj.weight, attention.o_proj.bias)
        self.gate = FrozenLinear(mlp.gate_proj.weight, mlp.gate_proj.bias)
        self.up = FrozenLinear(mlp.up_proj.weight, mlp.up_proj.bias)
        self.down = FrozenLinear(mlp.down_proj.weight, mlp.down_proj.bias)

    def __call__(self, hidden_NH: Tensor, attention: "Attention", index: int, num_tokens: int) -> Tensor:
        qkv_ND = self.qkv(normed(hidden_NH, self.input_norm))
        mixed_ND = attention(qkv_ND[:num_tokens], index, self.query_norm, self.key_norm)
        if num_tokens < len(hidden_NH):
            mixed_ND = functional.pad(mixed_ND, (0, 0, 0, len(hidden_NH) - num_tokens))
        hidden_NH = self.o.plus(mixed_ND, hidden_NH)
        x_NH = normed(hidden_NH, self.mlp_norm)
        return self.down.plus(self.up.times(x_NH, self.gate.silu(x_NH)), hidden_NH)


class Attention:
    """What the layers of one pass share: rotary angles, where keys go, and who may see what."""

    def __init__(self, body: LlamaBody, dtype: torch.dtype, position_BT: Tensor, cache: PositionCache | None) -> None:
        self.body = body
        self.cache = cache
        self.shape = position_BT.shape
        self.group = body.num_heads // body.num_kv_heads
        sample = torch.empty(0, dtype=dtype, device=position_BT.device)
        cos_BTD, sin_BTD = body._rotary(sample, position_BT)
        half = body.head_dim // 2
        self.cos_BT1D = cos_BTD.unsqueeze(2)
        # Rotating by halves is rolling by half the width and negating the first half, which the sine can carry.
        self.sin_BT1D = torch.cat((-sin_BTD[..., :half], sin_BTD[..., half:]), dim=-1).unsqueeze(2)
        self.fresh = cache is None or cache.fresh
        self.products = position_BT.shape[1] <= body.longest_products
        self.pad = max(body.min_queries - self.group * position_BT.shape[1], 0) if self.products else 0
        if self.products or not self.fresh:
            if cache is None or self.fresh:
                bias_BTL = causal_bias(position_BT.shape[1], dtype, position_BT.device)
            else:
                bias_BTL = cache.bias(dtype)
            self.bias_B1QL = functional.pad(bias_BTL.repeat(1, self.group, 1), (0, 0, 0, self.pad))[:, None]

    def __call__(self, qkv_ND: Tensor, layer: int, query_norm: Any, key_norm: Any) -> Tensor:
        """Attention of [N, (heads + 2 * kv_heads) * head_dim], N = B * T, giving [N, heads * head_dim]."""
        body = self.body
        batch, length = self.shape
        heads, kv_heads, width = body.num_heads, body.num_kv_heads, body.head_dim
        split_BTHD = qkv_ND.view(batch, length, heads + 2 * kv_heads, width)
        rotated_BTHD = split_BTHD[:, :, : heads + kv_heads]
        if query_norm is not None:
            query_BTHD = normed(rotated_BTHD[:, :, :heads], query_norm)
            rotated_BTHD = torch.cat((query_BTHD, normed(rotated_BTHD[:, :, heads:], key_norm)), dim=2)
        turned_BTHD = torch.roll(rotated_BTHD, width // 2, -1)
        rotated_BTHD = torch.addcmul(rotated_BTHD * self.cos_BT1D, turned_BTHD, self.sin_BT1D)
        query_BTHD = rotated_BTHD[:, :, :heads]
        key_BGLD = rotated_BTHD[:, :, heads:].transpose(1, 2)
        value_BGLD = split_BTHD[:, :, heads + kv_heads :].transpose(1, 2)
        if self.cache is not None:
            key_BGLD, value_BGLD = self.cache.update(key_BGLD, value_BGLD, layer)
        if self.fresh and not self.products:
            return self._causal(query_BTHD, key_BGLD, value_BGLD)
        # Queries of one key head side by side: row (g, t) is query head g of the group at token t.
        query_BGQD = query_BTHD.reshape(batch, length, kv_heads, self.group, width).permute(0, 2, 3, 1, 4)
        query_BGQD = query_BGQD.reshape(batch, kv_heads, self.group * length, width)
        if self.products:
            mixed_BGQD = self._products(query_BGQD, key_BGLD, value_BGLD)
        else:
            mixed_BGQD = functional.scaled_dot_product_attention(
                query_BGQD, key_BGLD, value_BGLD, attn_mask=self.bias_B1QL
            )
        mixed = mixed_BGQD.reshape(batch, kv_heads, self.group, length, width).permute(0, 3, 1, 2, 4)
        return mixed.reshape(batch * length, heads * width)

    def _causal(self, query_BTHD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor) -> Tensor:
        mixed_BHTD = functional.scaled_dot_product_attention(
            query_BTHD.transpose(1, 2), key_BGLD, value_BGLD, is_causal=True, enable_gqa=self.group > 1
        )
        return mixed_BHTD.transpose(1, 2).reshape(len(query_BTHD) * query_BTHD.shape[1], -1)

    def _products(self, query_BGQD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor) -> Tensor:
        """Attention as two batched products.

        On the CPU a step is about twice as fast as with the fused function in bfloat16, and from `MIN_QUERIES` rows on
        a row's result does not depend on their number: reading a prompt, a draft or a single token gives the same states
        bit by bit.
        """
        if self.pad:
            query_BGQD = functional.pad(query_BGQD, (0, 0, 0, self.pad))
        batch, kv_heads, num_queries, width = query_BGQD.shape
        length = key_BGLD.shape[2]
        query_KQD = query_BGQD.reshape(batch * kv_heads, num_queries, width)
        scores_KQL = torch.bmm(query_KQD, key_BGLD.reshape(batch * kv_heads, length, width).transpose(1, 2))
        scores_BGQL = scores_KQL.view(batch, kv_heads, num_queries, length)
        weights_BGQL = torch.add(self.bias_B1QL, scores_BGQL, alpha=width**-0.5).softmax(-1)
        weights_KQL = weights_BGQL.view(batch * kv_heads, num_queries, length)
        mixed_KQD = torch.bmm(weights_KQL, value_BGLD.reshape(batch * kv_heads, length, width))
        return mixed_KQD.view(query_BGQD.shape)[:, :, : num_queries - self.pad]


def causal_bias(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What to add to the scores of tokens that attend within one pass from position 0 on: [1, T, T]."""
    return torch.full((length, length), -torch.inf, dtype=dtype, device=device).triu(1)[None]


def normed(x: Tensor, norm: Any) -> Tensor:
    """Root mean square norm with a module's gain."""
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def joined(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight for several products of the same input; the modules' own parameters become views of it."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    sizes = [linear.out_features for linear in linears]
    for linear, view in zip(linears, weight.split(sizes), strict=True):
        linear.weight.data = view
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias.detach() for linear in linears])


def is_llama_like(body: Any) -> bool:
    """Whether every layer is of a class whose arithmetic this file repeats."""
    layers = getattr(body, "layers", None)
    if layers is None or any(type(layer).__name__ not in LAYER_CLASSES for layer in layers):
        return False
    needed = ("embed_tokens", "rotary_emb", "norm")
    return body.config.hidden_act == "silu" and all(hasattr(body, name) for name in needed)
