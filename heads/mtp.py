"""MTP: decoder layers that combine a final state with the token after it, and share the target's embedding and output head.

DeepSeek-AI, arXiv 2412.19437, section 2.2; zeroed embeddings and recycled states as vLLM serves the published layers.

    feature     the state in front of the target's final norm, but for its length; slots, depths and positions are those
                of `layer_head.py`
    layer       r_0 = eh_proj(cat(enorm(embedding), hnorm(h))); r = r_0 + attention(input_layernorm(r_0));
                y = r + mlp(post_attention_layernorm(r)); logits = target's output head(norm(y))
    recycled    h of the next depth = norm(y), which stands for final_{t+1+j}
    position 0  its token's embedding is zero, in training as in serving

So does one layer for all depths (`MTP`). With one for each depth (`MTPModules`) nothing is recycled; as in the paper,

    module m    has slots of its own: slot p holds (state of module m - 1 at p, x_{p+1+m}) at position p, and attends to
                the slots 0..p of module m; module 0 reads final_p
    depth j     of start t is slot t of module j

Slot p of module m depends on x_{p+1+m}: at start t, slots behind t - m hold tokens of the block itself. They are written
again when those are verified, as engines of such heads do. The layer that a target ships is in `mtp_shipped.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.batch import Batch, supervised_pairs
from headstart.heads.builtin import resolve_model
from headstart.heads.contract import Draft, Grow, Head, Rollout, Sampler, greedy
from headstart.heads.facts import TargetFacts
from headstart.heads.growth import Chain
from headstart.heads.layer_head import LayerHead
from headstart.heads.layers import Rotary, attend_level, attend_paths
from headstart.heads.mtp_layer import MTPHead, MTPLayer, reads_before_norm, refuse_hidden, stored_gain
from headstart.heads.mtp_shipped import MTPShipped
from headstart.heads.settings import MTPSettings
from headstart.heads.shipped import require_shipped


class MTP(MTPHead, LayerHead):
    """The head of one layer."""

    norm_output = True

    @classmethod
    def form(cls, settings: MTPSettings) -> type[Head]:
        if settings.shipped:
            return MTPShipped
        return MTPModules if settings.num_modules > 1 else MTP

    @classmethod
    def check(cls, settings: MTPSettings, target: Any) -> None:
        if settings.shipped:
            require_shipped(target.facts)
        before_norm = reads_before_norm(settings, target.facts)
        gain_H = stored_gain(resolve_model(target.facts.name, weights=False)) if before_norm else None
        if gain_H is not None:
            refuse_hidden(gain_H, target.facts)

    @property
    def layer(self) -> MTPLayer:
        return self.module(0)

    @property
    def norm(self) -> nn.Module:  # type: ignore[override]
        return self.layer.norm

    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.read(embedded, hidden)


@dataclass
class ModulesState:
    """Slots of B requests. Those before length_b are in the caches of all modules; what follows waits.

    Of the waiting slots the last ones, as many as modules, form the window that each block reads anew.
    """

    key_BMGLD: Tensor
    value_BMGLD: Tensor
    length_B: Tensor  # int64
    feature_BTH: Tensor  # of waiting slots, right-padded
    token_BT: Tensor
    num_waiting_B: Tensor  # int64, at least 1

    def select(self, rows: Tensor) -> "ModulesState":
        """The same state for fewer (or reordered) rows."""
        return replace(self, **{k: v[rows] for k, v in vars(self).items()})


@dataclass
class _Nodes:
    """What drafts so far have come to, N of them: for each the window, its tokens, and the row it belongs to."""

    hidden_NTH: Tensor
    token_NU: Tensor  # tokens of the window, then drafted ones
    row_N: Tensor  # int64


class MTPModules(MTPHead):
    """The head of one layer for each depth."""

    def __init__(self, settings: MTPSettings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        self.rotary = Rotary(replace(facts, rope_parameters=settings.rope_parameters(facts.rope_parameters)))

    # Training and offline acceptance: all starts at once

    def rollout(self, batch: Batch, depth: int) -> Rollout:
        self._check(depth)
        start_S, valid_SD = supervised_pairs(batch, depth)
        num_slots = batch.num_tokens
        slot_T = torch.arange(num_slots, device=start_S.device)
        position_T = batch.position_T[:num_slots]
        cos_T, sin_T = (table_L[position_T] for table_L in self.rotary.tables(batch.longest, start_S.device))
        hidden_TH = self.fuse(batch.final_TH[:num_slots])
        states = []
        for module in range(depth):
            layer = self.module(module)
            # Past a path's end there is no token to read; no valid pair depends on such slots.
            token_T = batch.next_token_T[(slot_T + module).clamp(max=num_slots - 1)]
            x_TH, residual_TH = layer.read(self.embed(token_T, position_T), hidden_TH)
            query_THD = self.rotary(layer.self_attn.query(x_TH), cos_T, sin_T)
            key_TGD, value_TGD = layer.self_attn.key_value(x_TH)
            key_TGD = self.rotary(key_TGD, cos_T, sin_T)
            attended = attend_paths(query_THD, key_TGD, value_TGD, [], [], slot_T, batch.offsets, batch.offsets)
            hidden_TH = layer.norm(layer.write(residual_TH, attended))
            states.append(hidden_TH[start_S])
        return Rollout(torch.stack(states, dim=1), start_S, valid_SD)

    # Serving: one block at a time

    def start(
        self,
        features_BTF: Tensor,
        next_tokens_BT: Tensor,
        lengths_B: Tensor,
        max_length: int,
        first_token_B: Tensor | None = None,
    ) -> ModulesState:
        facts, num_rows = self.facts, len(features_BTF)
        shape = (num_rows, len(self.layers), facts.num_kv_heads, max_length, facts.head_dim)
        return ModulesState(
            key_BMGLD=torch.zeros(shape, dtype=self.dtype, device=self.device),
            value_BMGLD=torch.zeros(shape, dtype=self.dtype, device=self.device),
            length_B=torch.zeros(num_rows, dtype=torch.int64, device=self.device),
            feature_BTH=self.fuse(features_BTF),
            token_BT=next_tokens_BT,
            num_waiting_B=lengths_B.to(self.device),
        )

    def accept(self, state: ModulesState, features_BTF: Tensor, next_tokens_BT: Tensor, num_accepted_B: Tensor) -> None:
        self._settle(state)
        offset_T = torch.arange(next_tokens_BT.shape[1], device=self.device)
        row_N, place_N = (offset_T <= num_accepted_B.to(self.device)[:, None]).nonzero(as_tuple=True)
        behind_N = state.num_waiting_B[row_N] + place_N
        state.feature_BTH = functional.pad(state.feature_BTH, (0, 0, 0, len(offset_T)))
        state.token_BT = functional.pad(state.token_BT, (0, len(offset_T)))
        state.feature_BTH[row_N, behind_N] = self.fuse(features_BTF[row_N, place_N])
        state.token_BT[row_N, behind_N] = next_tokens_BT[row_N, place_N]
        state.num_waiting_B = state.num_waiting_B + num_accepted_B.to(self.device) + 1

    def draft(self, state: ModulesState, depth: int, sampler: Sampler = greedy) -> Draft:
        self._check(depth)
        nodes = self._window(state, depth)
        chain = Chain(self.draft_ids_V, nodes.hidden_NTH)
        for module in range(depth):
            if not chain.extend(self._step(state, nodes, module), sampler):
                break
            nodes.token_NU[nodes.row_N, state.num_waiting_B + module] = chain.token_B
        return chain.draft()

    def draft_tree(self, state: ModulesState, grow: Grow) -> None:
        nodes = self._window(state, len(self.layers))
        num_rows = len(nodes.row_N)
        row_B1 = torch.arange(num_rows, device=self.device)[:, None]
        for module in range(len(self.layers)):
            level = grow(self._step(state, nodes, module).unflatten(0, (num_rows, -1)))
            if level is None:
                return
            parent_N = (row_B1 * (len(nodes.row_N) // num_rows) + level.parent_BW).flatten()
            nodes = _Nodes(nodes.hidden_NTH[parent_N], nodes.token_NU[parent_N], nodes.row_N[parent_N])
            drafted_N = self.draft_ids_V[level.index_BW].flatten()
            node_N = torch.arange(len(parent_N), device=self.device)
            nodes.token_NU[node_N, state.num_waiting_B[nodes.row_N] + module] = drafted_N
        self._check(len(self.layers) + 1)

    def _window(self, state: ModulesState, depth: int) -> _Nodes:
        """The root of a draft: the last slots of every row, with room for `depth` drafted tokens."""
        self._settle(state)
        row_B = torch.arange(len(state.length_B), device=self.device)
        return _Nodes(state.feature_BTH, functional.pad(state.token_BT, (0, depth)), row_B)

    def _step(self, state: ModulesState, nodes: _Nodes, module: int) -> Tensor:
        """Run a module over every node's window; logits [N, Vd] behind its last slot."""
        nodes.hidden_NTH, _, _ = self._read(state, nodes, module)
        last_N = state.num_waiting_B[nodes.row_N] - 1
        return self.logits(nodes.hidden_NTH[torch.arange(len(last_N), device=self.device), last_N])

    def _settle(self, state: ModulesState) -> None:
        """Move slots whose tokens are known to every module from waiting to the caches: all but the window."""
        num_modules, num_rows = len(self.layers), len(state.length_B)
        settled_B = (state.num_waiting_B - num_modules).clamp(min=0)
        longest = int(settled_B.max())
        row_B1 = torch.arange(num_rows, device=self.device)[:, None]
        if longest > 0:
            nodes = _Nodes(state.feature_BTH[:, :longest], state.token_BT, row_B1.squeeze(1))
            row_N, place_N = (torch.arange(longest, device=self.device) < settled_B[:, None]).nonzero(as_tuple=True)
            slot_N = state.length_B[row_N] + place_N
            for module in range(num_modules):
                nodes.hidden_NTH, key_BTGD, value_BTGD = self._read(state, nodes, module)
                state.key_BMGLD[row_N, module, :, slot_N] = key_BTGD[row_N, place_N]
                state.value_BMGLD[row_N, module, :, slot_N] = value_BTGD[row_N, place_N]
        # The window of a short text is shorter; what lies behind it is padding.
        place_BT = settled_B[:, None] + torch.arange(num_modules, device=self.device)
        place_BT = place_BT.clamp(max=state.token_BT.shape[1] - 1)
        state.feature_BTH, state.token_BT = state.feature_BTH[row_B1, place_BT], state.token_BT[row_B1, place_BT]
        state.length_B, state.num_waiting_B = state.length_B + settled_B, state.num_waiting_B - settled_B

    def _read(self, state: ModulesState, nodes: _Nodes, module: int) -> tuple[Tensor, Tensor, Tensor]:
        """A module's normed states, keys and values at T slots of every node, behind those in its row's cache."""
        layer, num_slots = self.module(module), nodes.hidden_NTH.shape[1]
        length_N, place_T = state.length_B[nodes.row_N], torch.arange(num_slots, device=self.device)
        position_NT = length_N[:, None] + place_T
        used = int(state.length_B.max())
        cos_L, sin_L = self.rotary.tables(used + num_slots, self.device)
        cos_NTD, sin_NTD = cos_L[position_NT], sin_L[position_NT]
        embedded_NTH = self.embed(nodes.token_NU[:, module : module + num_slots], position_NT)
        x_NTH, residual_NTH = layer.read(embedded_NTH, nodes.hidden_NTH)
        query_NTHD = self.rotary(layer.self_attn.query(x_NTH), cos_NTD, sin_NTD)
        key_NTGD, value_NTGD = layer.self_attn.key_value(x_NTH)
        key_NTGD = self.rotary(key_NTGD, cos_NTD, sin_NTD)
        cached = [cache[:, module, :, :used][nodes.row_N] for cache in (state.key_BMGLD, state.value_BMGLD)]
        keys, values = (
            torch.cat((old_NGLD, new_NTGD.transpose(1, 2)), dim=2)
            for old_NGLD, new_NTGD in zip(cached, (key_NTGD, value_NTGD), strict=True)
        )
        settled_NTL = (torch.arange(used, device=self.device) < length_N[:, None])[:, None].expand(-1, num_slots, -1)
        own_NTT = (place_T <= place_T[:, None]).expand(len(length_N), -1, -1)
        attended = attend_level(query_NTHD, keys, values, torch.cat((settled_NTL, own_NTT), dim=2))
        return layer.norm(layer.write(residual_NTH, attended)), key_NTGD, value_NTGD

    def _check(self, depth: int) -> None:
        if depth > len(self.layers):
            raise ValueError(f"depth {depth}: this {self.kind} head has weights for {len(self.layers)} tokens")
