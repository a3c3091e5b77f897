"""Slow, obvious heads: one start and one depth at a time, no cache, no batching, everything from scratch.

Written from the definitions in `docs/design.md` and in the papers, sharing no code with `heads/` but the parameters.
"""

import math

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    # Targets compute their rotary tables in float32 whatever the model's precision, so the definition does too.
    angle = position * (1 / theta ** (torch.arange(half, dtype=torch.float32) / half))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def oracle_logits(head, taps_SF: Tensor, final_SH: Tensor, token_N: Tensor, t: int, depth: int) -> Tensor:
    """Draft logits [depth, Vd] of the block that starts at slot t of one path x_0, .., x_{N-1}."""
    if head.reads == "text":
        return draft_logits(head, token_N, t, depth)
    next_tokens_S = token_N[1:]
    feature_SF = taps_SF if head.reads == "taps" else final_SH
    return ORACLES[head.kind](head, feature_SF, next_tokens_S, t, depth)


class Attention:
    """Plain attention of a decoder layer whose weights lie under `prefix`: slots are added one by one."""

    def __init__(self, head, w: dict[str, Tensor], prefix: str) -> None:
        self.facts, self.w, self.prefix = head.facts, w, prefix
        self.theta = head.settings.rope_parameters(head.facts.rope_parameters)["rope_theta"]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def project(self, name: str, x: Tensor, heads: int) -> Tensor:
        return (self.w[f"{self.prefix}.self_attn.{name}.weight"] @ x).view(heads, self.facts.head_dim)

    def add(self, x: Tensor, position: int) -> None:
        self.keys.append(rotate(self.project("k_proj", x, self.facts.num_kv_heads), position, self.theta))
        self.values.append(self.project("v_proj", x, self.facts.num_kv_heads))

    def state(self, x: Tensor, residual: Tensor, position: int) -> Tensor:
        """y of the layer, attending to all slots added so far."""
        facts, w, prefix = self.facts, self.w, self.prefix
        query = rotate(self.project("q_proj", x, facts.num_heads), position, self.theta)
        attended = []
        for h in range(facts.num_heads):
            g = h // (facts.num_heads // facts.num_kv_heads)
            scores = torch.stack([query[h] @ key[g] for key in self.keys]) / math.sqrt(facts.head_dim)
            attended.append(sum(p * v[g] for p, v in zip(scores.softmax(0), self.values, strict=True)))
        r = residual + w[f"{prefix}.self_attn.o_proj.weight"] @ torch.cat(attended)
        inner = rms(r, w[f"{prefix}.post_attention_layernorm.weight"], facts.rms_norm_eps)
        gate, up = w[f"{prefix}.mlp.gate_proj.weight"] @ inner, w[f"{prefix}.mlp.up_proj.weight"] @ inner
        return r + w[f"{prefix}.mlp.down_proj.weight"] @ (silu(gate) * up)


def eagle3_logits(head, taps_SF: Tensor, next_tokens_S: Tensor, t: int, depth: int) -> Tensor:
    w = {k: v.detach() for k, v in head.state_dict().items()}
    settings, eps, width = head.settings, head.facts.rms_norm_eps, head.facts.hidden_size

    def feature(p: int) -> Tensor:
        taps = taps_SF[p].to(w["fc.weight"].dtype)
        if settings.fc_norm:
            parts = taps.split(width)
            taps = torch.cat([rms(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)])
        return w["fc.weight"] @ taps

    def inputs(hidden: Tensor, token: int) -> tuple[Tensor, Tensor]:
        embedded = head.embedding_VH[token].to(hidden.dtype)
        normed = rms(hidden, w["midlayer.hidden_norm.weight"], eps)
        x = torch.cat((rms(embedded, w["midlayer.input_layernorm.weight"], eps), normed))
        return x, normed if settings.norm_before_residual else hidden

    attention = Attention(head, w, "midlayer")
    for p in range(t + 1):
        attention.add(inputs(feature(p), int(next_tokens_S[p]))[0], p)
    hidden, logits = feature(t), []
    for j in range(depth):
        x, residual = inputs(hidden, int(next_tokens_S[t + j]))
        if j > 0:
            attention.add(x, t + j)
        y = attention.state(x, residual, t + j)
        normed = rms(y, w["norm.weight"], eps)
        logits.append(w["lm_head.weight"] @ normed)
        hidden = normed if settings.norm_output else y
    return torch.stack(logits)


def eagle1_logits(head, final_SH: Tensor, next_tokens_S: Tensor, t: int, depth: int) -> Tensor:
    w = {k: v.detach() for k, v in head.state_dict().items()}
    attention = Attention(head, w, "layers.0")

    def x_of(hidden: Tensor, slot: int) -> Tensor:
        return w["fc.weight"] @ torch.cat((head.embedding_VH[int(next_tokens_S[slot])], hidden))

    for p in range(t + 1):
        attention.add(x_of(final_SH[p], p), p)
    hidden, logits = final_SH[t], []
    for j in range(depth):
        x = x_of(hidden, t + j)
        if j > 0:
            attention.add(x, t + j)
        hidden = attention.state(x, x, t + j)
        logits.append(w["lm_head.weight"] @ hidden)
    return torch.stack(logits)


def mtp_logits(head, final_SH: Tensor, next_tokens_S: Tensor, t: int, depth: int) -> Tensor:
    if head.settings.shipped:
        return shipped_logits(head, final_SH, next_tokens_S, t, depth)
    w, eps = {k: v.detach() for k, v in head.state_dict().items()}, head.facts.rms_norm_eps
    final_SH = final_SH / head.final_gain_H

    def residual_of(module: str, hidden: Tensor, slot: int, position: int) -> Tensor:
        embedded = head.embedding_VH[int(next_tokens_S[slot])].to(hidden.dtype)
        embedded = torch.zeros_like(embedded) if position == 0 else embedded
        parts = rms(embedded, w[f"{module}.enorm.weight"], eps), rms(hidden, w[f"{module}.hnorm.weight"], eps)
        return w[f"{module}.eh_proj.weight"] @ torch.cat(parts)

    def attended_state(module: str, attention: Attention, residual: Tensor, position: int) -> Tensor:
        y = attention.state(rms(residual, w[f"{module}.input_layernorm.weight"], eps), residual, position)
        return rms(y, w[f"{module}.norm.weight"], eps)

    logits, name = [], "layers.0"
    if head.settings.num_modules > 1:  # module j has the states of module j - 1 at all slots
        states = list(final_SH[: t + 1])
        for j in range(depth):
            name, attention, read = f"layers.{j}", Attention(head, w, f"layers.{j}"), states
            states = []
            for p in range(t + 1):
                residual = residual_of(name, read[p], p + j, p)
                attention.add(rms(residual, w[f"{name}.input_layernorm.weight"], eps), p)
                states.append(attended_state(name, attention, residual, p))
            logits.append(w["lm_head.weight"] @ states[t])
        return torch.stack(logits)
    attention = Attention(head, w, name)
    for p in range(t + 1):
        attention.add(rms(residual_of(name, final_SH[p], p, p), w[f"{name}.input_layernorm.weight"], eps), p)
    hidden = final_SH[t]
    for j in range(depth):
        residual = residual_of(name, hidden, t + j, t + j)
        if j > 0:
            attention.add(rms(residual, w[f"{name}.input_layernorm.weight"], eps), t + j)
        hidden = attended_state(name, attention, residual, t + j)
        logits.append(w["lm_head.weight"] @ hidden)
    return torch.stack(logits)


def shipped_logits(head, final_SH: Tensor, next_tokens_S: Tensor, t: int, depth: int) -> Tensor:
    """The whole text from scratch for every depth, as an ordinary causal pass of the layer."""
    w, eps = {k: v.detach() for k, v in head.state_dict().items()}, head.facts.rms_norm_eps
    hidden, logits = list(final_SH[: t + 1]), []
    for j in range(depth):
        embedded = [head.embedding_VH[int(token)].to(final_SH.dtype) for token in next_tokens_S[: t + 1 + j]]
        embedded[0] = torch.zeros_like(embedded[0])
        read = [
            torch.cat((rms(e, w["enorm.weight"], eps), rms(h, w["hnorm.weight"], eps)))
            for e, h in zip(embedded, hidden, strict=True)
        ]
        x_1TH = (torch.stack(read) @ w["eh_proj.weight"].T)[None]
        position_1T = torch.arange(t + 1 + j)[None]
        causal = torch.ones(1, 1, t + 1 + j, t + 1 + j, dtype=torch.bool).tril()
        turned = head.rotary(x_1TH, position_1T)
        y = head.block(x_1TH, attention_mask=causal, position_ids=position_1T, position_embeddings=turned)[0, -1]
        hidden.append(rms(y, w["norm.weight"], eps))
        logits.append(w["lm_head.weight"] @ hidden[-1])
    return torch.stack(logits)


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def project(head, w: dict[str, Tensor], j: int, state_H: Tensor) -> Tensor:
    return w[f"lm_heads.{j if head.settings.own_output else 0}.weight"] @ state_H


def medusa_logits(head, final_SH: Tensor, next_tokens_S: Tensor, t: int, depth: int) -> Tensor:
    w, logits = head.state_dict(), []
    for j in range(depth):
        x = final_SH[t]
        for layer in range(head.settings.num_layers):
            x = x + silu(linear(w, f"blocks.{j}.layers.{layer}", x))
        logits.append(project(head, w, j, x))
    return torch.stack(logits)


def hydra_logits(head, final_SH: Tensor, next_tokens_S: Tensor, t: int, depth: int) -> Tensor:
    w, logits, eps = head.state_dict(), [], head.facts.rms_norm_eps
    for j in range(depth):
        known = [head.embedding_VH[next_tokens_S[t + i]] for i in range(j + 1)]  # x_{t+1} .. x_{t+1+j}
        x = torch.cat([final_SH[t], *(rms(e, w["embed_norm.weight"], eps) for e in known)])
        y = linear(w, f"readers.{j}.skip", x) + silu(linear(w, f"readers.{j}.linear", x))
        for layer in range(head.settings.num_layers - 1):
            y = y + silu(linear(w, f"readers.{j}.blocks.layers.{layer}", y))
        logits.append(project(head, w, j, y))
    return torch.stack(logits)


def mlp_logits(head, final_SH: Tensor, next_tokens_S: Tensor, t: int, depth: int) -> Tensor:
    w, logits, settings = head.state_dict(), [], head.settings
    width = settings.inner_size or final_SH.shape[1]
    state_weight = 2 ** (-1 / (2 * settings.num_heads))
    token_weight = math.sqrt((1 - state_weight**2) * width / 2)
    state = final_SH[t]
    if settings.scale_input:
        state = rms(state, torch.ones_like(state), 1e-6) / math.sqrt(2)
    for j in range(depth):
        mixed = w[f"proj.{j}.weight"] @ state + token_weight / state_weight * w[f"emb.{j}.weight"][next_tokens_S[t + j]]
        normed = rms(mixed, w[f"ln.{j}.weight"], 1e-6) + w[f"ln.{j}.bias"]
        state = normed * 0.5 * (1 + torch.erf(normed / math.sqrt(2)))
        logits.append(project(head, w, j, state))
    return torch.stack(logits)


def draft_logits(head, token_N: Tensor, t: int, depth: int) -> Tensor:
    """The language model once over the whole text up to x_{t+depth}, every layer and position by itself."""
    w, eps, num_layers = head.state_dict(), head.facts.rms_norm_eps, len(head.model.layers)
    for name in [name for name in w if ".base_layer." in name]:
        stem = name.partition(".base_layer.")[0]
        w[f"{stem}.weight"] = w[name] + w[f"{stem}.lora_B.default.weight"] @ w[f"{stem}.lora_A.default.weight"]
    attentions = [Attention(head, w, f"model.layers.{i}") for i in range(num_layers)]
    logits = []
    for position in range(t + 1 + depth):
        state = head.embedding_VH[int(token_N[position])]
        for i, attention in enumerate(attentions):
            x = rms(state, w[f"model.layers.{i}.input_layernorm.weight"], eps)
            attention.add(x, position)
            state = attention.state(x, state, position)
        if position > t:
            logits.append(w["lm_head.weight"] @ rms(state, w["model.norm.weight"], eps))
    return torch.stack(logits)


ORACLES = {
    "eagle3": eagle3_logits,
    "eagle1": eagle1_logits,
    "medusa": medusa_logits,
    "hydra": hydra_logits,
    "mlp": mlp_logits,
    "mtp": mtp_logits,
}
