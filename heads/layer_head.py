"""What heads of one decoder layer share: attention over the path so far, and states that are recycled between depths.

    slot p      (feature_p, x_{p+1}) at rotary position p
    depth 0     of start t is slot t itself; it attends the slots 0..t
    depth j     (own state of depth j-1, x_{t+1+j}) at position t+j; it attends slots 0..t and its own depths 1..j

A kind gives the feature (`fuse`), the layer and what it reads (`read`), and what lies between the layer's state and the
output layer (`norm`).
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.batch import Batch, supervised_pairs
from headstart.heads.contract import Rollout
from headstart.heads.facts import TargetFacts
from headstart.heads.layers import GatedMLP, Projection, RMSNorm, Rotary, attend_level, attend_one, attend_paths
from headstart.heads.recycling_head import DraftState, RecyclingHead


class Attention(nn.Module):
    """Projections of the layer; queries, keys and values read inputs of `width`."""

    def __init__(self, facts: TargetFacts, width: int) -> None:
        super().__init__()
        self.q_proj = Projection(width, facts.num_heads * facts.head_dim)
        self.k_proj = Projection(width, facts.num_kv_heads * facts.head_dim)
        self.v_proj = Projection(width, facts.num_kv_heads * facts.head_dim)
        self.o_proj = Projection(facts.num_heads * facts.head_dim, facts.hidden_size)
        self.head_dim = facts.head_dim

    def query(self, x: Tensor) -> Tensor:
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (
            self.k_proj(x).unflatten(-1, (-1, self.head_dim)),
            self.v_proj(x).unflatten(-1, (-1, self.head_dim)),
        )


class Layer(nn.Module):
    """The second half of a decoder layer, from the attention's output on; kinds differ in how the first half reads."""

    self_attn: Attention
    mlp: GatedMLP
    post_attention_layernorm: RMSNorm

    def write(self, residual: Tensor, attended: Tensor) -> Tensor:
        """State y [.., H] from the residual branch and the attention's output [.., heads * head_dim]."""
        r = residual + self.self_attn.o_proj(attended)
        return r + self.mlp(self.post_attention_layernorm(r))


class LayerHead(RecyclingHead):
    """A head of one decoder layer."""

    def __init__(self, settings: Any, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        self.rotary = Rotary(replace(facts, rope_parameters=settings.rope_parameters(facts.rope_parameters)))

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """The decoder layer; kinds keep it under the name that engines know it by."""

    @abstractmethod
    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention [.., I] and residual branch [.., H] from a token's embedding and h, both [.., H]."""

    # Training and offline acceptance: all starts at once

    def rollout(self, batch: Batch, depth: int) -> Rollout:
        start_S, valid_SD = supervised_pairs(batch, depth)
        layer, attention = self.layer, self.layer.self_attn
        feature_TH = self.fuse(self.features(batch.taps_TF, batch.final_TH))
        x_TI, _ = self.read(self.embed(batch.next_token_T, batch.position_T), feature_TH)
        cos_L, sin_L = self.rotary.tables(batch.longest + depth, feature_TH.device)
        key_TGD, value_TGD = attention.key_value(x_TI)
        key_TGD = self.rotary(key_TGD, cos_L[batch.position_T], sin_L[batch.position_T])
        boundaries = torch.tensor(batch.offsets, device=start_S.device)
        start_offsets = torch.searchsorted(start_S, boundaries).tolist()

        position_S, last_slot = batch.position_T[start_S], batch.next_token_T.shape[0] - 1
        hidden_SH = feature_TH[start_S]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        states = []
        for j in range(depth):
            # Past a reply's end there is no token to read; such pairs are not valid and read any slot.
            token_S = batch.next_token_T[(start_S + j).clamp(max=last_slot)]
            x_SI, residual_SH = self.read(self.embed(token_S, position_S + j), hidden_SH)
            cos_S, sin_S = cos_L[position_S + j], sin_L[position_S + j]
            query_SHD = self.rotary(attention.query(x_SI), cos_S, sin_S)
            if j > 0:
                key_SGD, value_SGD = attention.key_value(x_SI)
                own_keys.append(self.rotary(key_SGD, cos_S, sin_S))
                own_values.append(value_SGD)
            attended = attend_paths(
                query_SHD, key_TGD, value_TGD, own_keys, own_values, start_S, batch.offsets, start_offsets
            )
            state_SH = layer.write(residual_SH, attended)
            normed_SH = self.norm(state_SH)
            states.append(normed_SH)
            hidden_SH = normed_SH if self.norm_output else state_SH
        return Rollout(torch.stack(states, dim=1), start_S, valid_SD)

    # Serving: one block at a time

    def start(
        self,
        features_BTF: Tensor,
        next_tokens_BT: Tensor,
        lengths_B: Tensor,
        max_length: int,
        first_token_B: Tensor | None = None,
    ) -> DraftState:
        num_rows, dtype, device = features_BTF.shape[0], self.dtype, self.device
        shape = (num_rows, self.facts.num_kv_heads, max_length, self.facts.head_dim)
        return DraftState(
            key_BGLD=torch.zeros(shape, dtype=dtype, device=device),
            value_BGLD=torch.zeros(shape, dtype=dtype, device=device),
            length_B=torch.zeros(num_rows, dtype=torch.int64, device=device),
            fresh_BTF=features_BTF,
            fresh_token_BT=next_tokens_BT,
            num_fresh_B=lengths_B.to(device),
            last_BH=torch.zeros(num_rows, self.facts.hidden_size, dtype=dtype, device=device),
        )

    def _read_fresh(self, state: DraftState) -> None:
        if state.fresh_BTF is None or state.fresh_token_BT is None or state.num_fresh_B is None:
            return
        attention = self.layer.self_attn
        num_BT = state.fresh_token_BT.shape
        offset_T = torch.arange(num_BT[1], device=self.device)
        position_BT = state.length_B[:, None] + offset_T
        feature_BTH = self.fuse(state.fresh_BTF)
        x_BTI, residual_BTH = self.read(self.embed(state.fresh_token_BT, position_BT), feature_BTH)
        row_N, slot_N = (offset_T < state.num_fresh_B[:, None]).nonzero(as_tuple=True)
        place_N = position_BT[row_N, slot_N]
        cos_L, sin_L = self.rotary.tables(state.key_BGLD.shape[2], self.device)
        key_NGD, value_NGD = attention.key_value(x_BTI[row_N, slot_N])
        state.key_BGLD[row_N, :, place_N] = self.rotary(key_NGD, cos_L[place_N], sin_L[place_N])
        state.value_BGLD[row_N, :, place_N] = value_NGD
        state.length_B = state.length_B + state.num_fresh_B
        row_B, last_B = torch.arange(num_BT[0], device=self.device), (state.num_fresh_B - 1).clamp(min=0)
        fresh_BH = self._attend(state, x_BTI[row_B, last_B], residual_BTH[row_B, last_B], state.length_B - 1)
        state.last_BH = torch.where((state.num_fresh_B > 0)[:, None], fresh_BH, state.last_BH)
        state.fresh_BTF = state.fresh_token_BT = state.num_fresh_B = None

    def _step(self, state: DraftState, hidden_BH: Tensor, token_B: Tensor, position_B: Tensor) -> Tensor:
        attention = self.layer.self_attn
        x_BI, residual_BH = self.read(self.embed(token_B, position_B), hidden_BH)
        cos_L, sin_L = self.rotary.tables(state.key_BGLD.shape[2], self.device)
        key_BGD, value_BGD = attention.key_value(x_BI)
        row_B = torch.arange(token_B.shape[0], device=self.device)
        state.key_BGLD[row_B, :, position_B] = self.rotary(key_BGD, cos_L[position_B], sin_L[position_B])
        state.value_BGLD[row_B, :, position_B] = value_BGD
        return self._attend(state, x_BI, residual_BH, position_B)

    def _step_level(
        self,
        state: DraftState,
        hidden_BWH: Tensor,
        token_BW: Tensor,
        position_B1: Tensor,
        slot_BW: Tensor,
        visible_BWL: Tensor,
    ) -> Tensor:
        attention = self.layer.self_attn
        x_BWI, residual_BWH = self.read(self.embed(token_BW, position_B1), hidden_BWH)
        cos_L, sin_L = self.rotary.tables(state.key_BGLD.shape[2], self.device)
        cos_B1D, sin_B1D = cos_L[position_B1], sin_L[position_B1]
        key_BWGD, value_BWGD = attention.key_value(x_BWI)
        row_B1, used = torch.arange(len(token_BW), device=self.device)[:, None], visible_BWL.shape[2]
        state.key_BGLD[row_B1, :, slot_BW] = self.rotary(key_BWGD, cos_B1D, sin_B1D)
        state.value_BGLD[row_B1, :, slot_BW] = value_BWGD
        query_BWHD = self.rotary(attention.query(x_BWI), cos_B1D, sin_B1D)
        keys_values = (state.key_BGLD[:, :, :used], state.value_BGLD[:, :, :used])
        return self.layer.write(residual_BWH, attend_level(query_BWHD, *keys_values, visible_BWL))

    def _attend(self, state: DraftState, x_BI: Tensor, residual_BH: Tensor, position_B: Tensor) -> Tensor:
        cos_L, sin_L = self.rotary.tables(state.key_BGLD.shape[2], self.device)
        query_BHD = self.rotary(self.layer.self_attn.query(x_BI), cos_L[position_B], sin_L[position_B])
        used = int(position_B.max()) + 1
        attended = attend_one(
            query_BHD,
            state.key_BGLD[:, :, :used],
            state.value_BGLD[:, :, :used],
            position_B if len(position_B) > 1 else None,
        )
        return self.layer.write(residual_BH, attended)
