"""The MTP layer that a target ships, as a head: the architecture's own decoder layer, run through transformers' module.

    feature     final_t, or the state in front of the final norm (`Layout.before_norm`); slots, depths and positions are
                those of `layer_head.py`
    layer       y = block(eh_proj(cat(enorm(embedding), hnorm(h)))), in the order the family's layout says;
                logits = target's output head(norm(y))
    recycled    h of the next depth = norm(y), as engines run one such layer for every depth

The block is whatever its family has (latent attention, experts), so attention is its own business: a rollout feeds the
slots of all depths one depth after the other, and a mask says which of those before each sees. Masks grow with the square
of a batch's slots, and prompts pass the whole layer.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.batch import Batch, supervised_pairs
from headstart.heads.contract import Rollout
from headstart.heads.facts import TargetFacts
from headstart.heads.layers import Projection
from headstart.heads.mtp_layer import MTPEnds
from headstart.heads.recycling_head import DraftState, RecyclingHead
from headstart.heads.settings import MTPSettings
from headstart.heads.shipped import LAYOUTS, require_shipped


class MTPShipped(MTPEnds, RecyclingHead):
    """The head. Parameter names are `ENDS` and, behind `block`, those of transformers' layer."""

    norm_output = True

    def __init__(self, settings: MTPSettings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        require_shipped(facts)
        super().__init__(settings, facts, draft_ids_V)
        self.layout = LAYOUTS[facts.shipped["layout"]]
        config, layer, norm, rotary = family(facts.shipped["config"])
        width, eps = facts.hidden_size, facts.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (norm(width, eps=eps) for _ in range(3))
        self.eh_proj = Projection(2 * width, width)
        self.block = layer(config, 0)
        self.rotary = _Tables(rotary(config))
        for parameter in self.block.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)  # transformers leaves some without a value

    # What a checkpoint does not hold

    @torch.no_grad()
    def load_target(self, target: Any, initialise: bool) -> None:
        """The target's ends and the layer's buffers; a new head is the shipped layer itself."""
        super().load_target(target, initialise)
        tensors: dict[str, Tensor] = {f"block.{name}": buffer for name, buffer in self.block.named_buffers()}
        if initialise:
            tensors |= self.trained_tensors()
        target.read_shipped(tensors, whole=initialise)
        self.first_values |= dict.fromkeys(tensors, "target's MTP layer")

    # Shared by both methods

    def embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        embedded = super().embed(tokens, position)
        return embedded.masked_fill(position.unsqueeze(-1) == 0, 0) if self.layout.zero_first else embedded

    def _run(
        self, hidden_BTH: Tensor, token_BT: Tensor, position_BT: Tensor, visible_BTL: Tensor, cache: "_Cache"
    ) -> Tensor:
        """States y [B, T, H] of slots that `cache` takes in, each seeing those of its L slots where the mask is true."""
        read = (self.enorm(self.embed(token_BT, position_BT)), self.hnorm(hidden_BTH))
        x_BTH = self.eh_proj(torch.cat(read[::-1] if self.layout.hidden_first else read, dim=-1))
        state_BTH: Tensor = self.block(
            x_BTH,
            attention_mask=visible_BTL[:, None],
            position_ids=position_BT,
            position_embeddings=self.rotary(x_BTH, position_BT),
            cache=cache,
        )
        return state_BTH

    # Training and offline acceptance: all starts at once

    def rollout(self, batch: Batch, depth: int) -> Rollout:
        start_S, valid_SD = supervised_pairs(batch, depth)
        # The family's module takes no empty text; where all slots are filler it reads them, and nothing is charged.
        num_slots, num_starts, device = batch.num_tokens or len(batch.position_T), len(start_S), start_S.device
        slot_T, position_T = torch.arange(num_slots, device=device), batch.position_T[:num_slots]
        row_T = torch.bucketize(slot_T, torch.tensor(batch.offsets[1:], device=device), right=True)
        visible_TL = (row_T[:, None] == row_T) & (slot_T[:, None] >= slot_T)
        hidden_TH, token_T = self.fuse(batch.final_TH[:num_slots]), batch.next_token_T[:num_slots]
        cache = _Growing()
        state_TH = self._run(hidden_TH[None], token_T[None], position_T[None], visible_TL[None], cache)[0]
        hidden_SH = self.norm(state_TH[start_S])
        visible_SL, own_SS = visible_TL[start_S], torch.eye(num_starts, dtype=torch.bool, device=device)
        states = [hidden_SH]
        for j in range(1, depth if num_starts else 1):
            # Past a reply's end there is no token to read; such pairs are not valid and read any slot.
            token_S = token_T[(start_S + j).clamp(max=num_slots - 1)]
            visible_SL = torch.cat((visible_SL, own_SS), dim=1)
            slots = (hidden_SH[None], token_S[None], (position_T[start_S] + j)[None], visible_SL[None])
            hidden_SH = self.norm(self._run(*slots, cache)[0])
            states.append(hidden_SH)
        states += [hidden_SH] * (depth - len(states))
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
        num_rows = len(features_BTF)
        # What lies in a slot is known when the layer has written one; one slot more takes what padding writes.
        shape = (num_rows, 0, max_length + 1, 0)
        return DraftState(
            key_BGLD=torch.zeros(shape, dtype=self.dtype, device=self.device),
            value_BGLD=torch.zeros(shape, dtype=self.dtype, device=self.device),
            length_B=torch.zeros(num_rows, dtype=torch.int64, device=self.device),
            fresh_BTF=features_BTF,
            fresh_token_BT=next_tokens_BT,
            num_fresh_B=lengths_B.to(self.device),
            last_BH=torch.zeros(num_rows, self.facts.hidden_size, dtype=self.dtype, device=self.device),
        )

    def _read_fresh(self, state: DraftState) -> None:
        if state.fresh_BTF is None or state.fresh_token_BT is None or state.num_fresh_B is None:
            return
        num_rows, num_slots = state.fresh_token_BT.shape
        position_BT = state.length_B[:, None] + torch.arange(num_slots, device=self.device)
        state.length_B = state.length_B + state.num_fresh_B
        slot_L = torch.arange(int(state.length_B.max()), device=self.device)
        cache = _Slots(state, position_BT.clamp(max=state.key_BGLD.shape[2] - 1), len(slot_L))
        visible_BTL = slot_L <= position_BT[:, :, None]
        state_BTH = self._run(self.fuse(state.fresh_BTF), state.fresh_token_BT, position_BT, visible_BTL, cache)
        last_B = (state.num_fresh_B - 1).clamp(min=0)
        fresh_BH = state_BTH[torch.arange(num_rows, device=self.device), last_B]
        state.last_BH = torch.where((state.num_fresh_B > 0)[:, None], fresh_BH, state.last_BH)
        state.fresh_BTF = state.fresh_token_BT = state.num_fresh_B = None

    def _step(self, state: DraftState, hidden_BH: Tensor, token_B: Tensor, position_B: Tensor) -> Tensor:
        position_B1 = position_B[:, None]
        slot_L = torch.arange(int(position_B.max()) + 1, device=self.device)
        visible_B1L = slot_L <= position_B1[:, :, None]
        cache = _Slots(state, position_B1, len(slot_L))
        return self._run(hidden_BH[:, None], token_B[:, None], position_B1, visible_B1L, cache)[:, 0]

    def _step_level(
        self,
        state: DraftState,
        hidden_BWH: Tensor,
        token_BW: Tensor,
        position_B1: Tensor,
        slot_BW: Tensor,
        visible_BWL: Tensor,
    ) -> Tensor:
        cache = _Slots(state, slot_BW, visible_BWL.shape[2])
        return self._run(hidden_BWH, token_BW, position_B1.expand_as(token_BW), visible_BWL, cache)


def family(values: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Of a model family: its config for the one layer, and the classes of its decoder layer, norm and rotary tables."""
    from transformers import AutoConfig, AutoModel

    one = {
        "num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0, "mlp_only_layers": [],
    }  # fmt: skip
    values = values | {name: value for name, value in one.items() if name in values}
    config = AutoConfig.for_model(values["model_type"], **{k: v for k, v in values.items() if k != "model_type"})
    with torch.device("meta"):
        # Experts one after the other: grouped products would depend on what else is in the batch.
        model = AutoModel.from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    return model.config, type(model.layers[0]), type(model.norm), type(model.rotary_emb)


class _Tables:
    """A family's rotary tables, which stay in float32 whatever the head's precision: no module of the head."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x_BTH: Tensor, position_BT: Tensor) -> tuple[Tensor, Tensor]:
        cos_BTD, sin_BTD = self.module(x_BTH, position_BT)
        return cos_BTD, sin_BTD


class _Cache:
    """What transformers' attention asks of a cache: keys and values [B, G, T, D] in, those to attend to out.

    Widths of keys and values are the family's affair; with latent attention they are parts of the latent state.
    """

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class _Growing(_Cache):
    """Slots in the order of passes; gradients flow through them."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, Tensor] | None = None

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = (key_BGTD, value_BGTD)
        if self.held is not None:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(self.held, new, strict=True))  # type: ignore[assignment]
        self.held = new
        return new


class _Slots(_Cache):
    """Places in the caches of a draft state: T new slots are written, the first `used` ones are read."""

    def __init__(self, state: DraftState, slot_BT: Tensor, used: int) -> None:
        self.state, self.slot_BT, self.used = state, slot_BT, used

    def update(self, key_BGTD: Tensor, value_BGTD: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        state = self.state
        state.key_BGLD = self._write(state.key_BGLD, key_BGTD)
        state.value_BGLD = self._write(state.value_BGLD, value_BGTD)
        return state.key_BGLD[:, :, : self.used], state.value_BGLD[:, :, : self.used]

    def _write(self, held_BGLD: Tensor, new_BGTD: Tensor) -> Tensor:
        if held_BGLD.shape[1] == 0:
            num_rows, groups, _, width = new_BGTD.shape
            held_BGLD = new_BGTD.new_zeros(num_rows, groups, held_BGLD.shape[2], width)
        row_B1 = torch.arange(len(new_BGTD), device=new_BGTD.device)[:, None]
        held_BGLD[row_B1, :, self.slot_BT] = new_BGTD.transpose(1, 2)
        return held_BGLD
