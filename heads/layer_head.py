"""What heads of one decoder layer share: attention over the path so far, and states that are recycled between depths.

    slot p      (feature_p, x_{p+1}) at rotary position p
    depth 0     of start t is slot t itself; it attends the slots 0..t
    depth j     (own state of depth j-1, x_{t+1+j}) at position t+j; it attends slots 0..t and its own depths 1..j

A kind gives the feature (`fuse`), the layer and what it reads (`read`), and what lies between the layer's state and the
output layer (`norm`).
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.batch import Batch, supervised_pairs
from headstart.heads.contract import Draft, Grow, Head, Rollout, Sampler, greedy
from headstart.heads.facts import TargetFacts
from headstart.heads.layers import GatedMLP, Projection, RMSNorm, Rotary, attend_level, attend_one, attend_paths


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


@dataclass
class DraftState:
    """Caches of B requests. Slots 0..length_b - 1 are written; `fresh` slots wait for the next block's first step."""

    key_BGLD: Tensor
    value_BGLD: Tensor
    length_B: Tensor  # int64
    fresh_BTF: Tensor | None  # features of slots length_b .. length_b + num_fresh_b - 1, right-padded
    fresh_token_BT: Tensor | None
    num_fresh_B: Tensor | None
    last_BH: Tensor  # state y of each row's last slot

    def select(self, rows: Tensor) -> "DraftState":
        """The same state for fewer (or reordered) rows."""
        return replace(self, **{k: v[rows] for k, v in vars(self).items() if v is not None})


class EmbeddingHead(Head):
    """A head that reads tokens through the target's embedding."""

    embedding_VH: Tensor

    def __init__(self, settings: Any, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        # Borrowed: frozen, never saved, found again through `load_target`.
        self.register_buffer("embedding_VH", torch.empty(0, facts.hidden_size), persistent=False)

    def embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Embeddings [.., H] of tokens that stand at rotary positions [..]; kinds may treat a position apart."""
        return functional.embedding(tokens, self.embedding_VH).to(self.dtype)

    @torch.no_grad()
    def copy(self, name: str, found: Tensor | None, origin: str, columns: slice = slice(None)) -> None:
        """First value of a trained tensor; one that the target has under no such name and shape stays random."""
        part = self.get_parameter(name)[..., columns]
        if found is not None and found.shape == part.shape:
            part.copy_(found)
            self.first_values[name] = origin


class LayerHead(EmbeddingHead):
    """A head of one decoder layer."""

    norm: nn.Module  # from the layer's state to the input of the output layer
    norm_output = False  # whether the normed state is recycled between depths, or the layer's own

    def __init__(self, settings: Any, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        self.rotary = Rotary(replace(facts, rope_parameters=settings.rope_parameters(facts.rope_parameters)))

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """The decoder layer; kinds keep it under the name that engines know it by."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """h of depth 0 [.., H] from the target's features [.., F]."""

    @abstractmethod
    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention [.., I] and residual branch [.., H] from a token's embedding and h, both [.., H]."""

    # Training and offline acceptance: all starts at once

    def rollout(self, batch: Batch, depth: int) -> Rollout:
        start_S, valid_SD = supervised_pairs(batch, depth)
        layer, attention = self.layer, self.layer.self_attn
        feature_TH = self.fuse(self.features(batch.taps_TF, batch.final_TH))
        x_TI, _ = self.read(self.embed(batch.next_token_T, batch.position_T), feature_TH)
        longest = max((end - begin for begin, end in zip(batch.offsets, batch.offsets[1:], strict=False)), default=1)
        cos_L, sin_L = self.rotary.tables(longest + depth, feature_TH.device)
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

    def accept(self, state: DraftState, features_BTF: Tensor, next_tokens_BT: Tensor, num_accepted_B: Tensor) -> None:
        self._read_fresh(state)  # a block may have been verified without a draft
        state.fresh_BTF, state.fresh_token_BT = features_BTF, next_tokens_BT
        state.num_fresh_B = num_accepted_B.to(self.device) + 1

    def draft(self, state: DraftState, depth: int, sampler: Sampler = greedy) -> Draft:
        self._read_fresh(state)
        hidden_BH, position_B = state.last_BH, state.length_B - 1
        num_rows, num_ids = len(hidden_BH), len(self.draft_ids_V)
        tokens = [self.draft_ids_V.new_zeros(num_rows, 0)]
        logits = [hidden_BH.new_zeros(num_rows, 0, num_ids)]
        for j in range(depth):
            if j > 0:
                hidden_BH = self._step(state, hidden_BH, tokens[-1].squeeze(1), position_B + j)
            normed_BH = self.norm(hidden_BH)
            logits_BV = self.logits(normed_BH)
            chosen_B = sampler(logits_BV)
            if chosen_B is None:
                break
            logits.append(logits_BV[:, None])
            tokens.append(self.draft_ids_V[chosen_B][:, None])
            if self.norm_output:
                hidden_BH = normed_BH
        return Draft(torch.cat(tokens, dim=1), torch.cat(logits, dim=1))

    def draft_tree(self, state: DraftState, grow: Grow) -> None:
        self._read_fresh(state)
        hidden_BWH = state.last_BH[:, None]
        num_rows, num_slots = len(hidden_BWH), int(state.length_B.max())
        slot_L = torch.arange(state.key_BGLD.shape[2], device=self.device)
        visible_BWL = (slot_L < state.length_B[:, None])[:, None]
        row_B1 = torch.arange(num_rows, device=self.device)[:, None]
        depth, first_B1 = 0, state.length_B[:, None]  # nodes lie side by side from the first free slot on
        while (level := grow(self.logits(self.norm(hidden_BWH)))) is not None:
            depth += 1
            if self.norm_output:
                hidden_BWH = self.norm(hidden_BWH)
            width = level.index_BW.shape[1]
            slot_BW = first_B1 + torch.arange(width, device=self.device)
            visible_BWL = visible_BWL[row_B1, level.parent_BW].scatter(2, slot_BW[:, :, None], True)
            num_slots, first_B1 = num_slots + width, first_B1 + width
            hidden_BWH = self._step_level(
                state,
                hidden_BWH[row_B1, level.parent_BW],
                self.draft_ids_V[level.index_BW],
                state.length_B[:, None] - 1 + depth,
                slot_BW,
                visible_BWL[:, :, :num_slots],
            )

    def _read_fresh(self, state: DraftState) -> None:
        """Write the waiting slots (target features) to the caches and compute the state of each row's last one."""
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
        """Feed one drafted token a row at `position_B`; its slot is rewritten from target features if it is accepted."""
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
        """The same for all nodes of a level of a tree: slots of their own, one position, and what each of them sees."""
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
