"""Draft model: a small causal language model that reads the same text as the target and never its states.

Leviathan et al., arXiv 2211.17192; distilled as in DistillSpec, arXiv 2310.08461.

    reads       x_0 .. x_{t+1+j} at rotary positions 0 .. t+1+j: one token ahead of the slots of other kinds
    depth j     of start t is its final state behind x_{t+1+j}; logits = lm_head(state) predict x_{t+2+j}

No state is recycled, so a pair depends on t + j alone: one pass over the paths gives every (t, j), and training at
depth 1 charges every token that deeper depths would charge again. Keys and values of accepted drafts stay in the cache,
for they are those of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.batch import Batch, supervised_pairs
from headstart.heads.contract import Draft, Grow, Head, Rollout, Sampler, greedy
from headstart.heads.decoder import Decoder, TextCache
from headstart.heads.draft_base import check_tokens, open_base, read_base
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.growth import Chain, TreeSlots
from headstart.heads.layers import Projection, Rotary
from headstart.heads.lora import adapt, is_adapter, merge, plain_name
from headstart.heads.own_target import refuse_unchanged, refuse_whole
from headstart.heads.settings import DraftSettings
from headstart.heads.target_facts import LLAMA_LIKE


@dataclass
class DraftTextState:
    """Caches of B texts: tokens 0 .. length_b - 1 are read, `fresh` ones wait for the next block's first step."""

    caches: list[TextCache]
    length_B: Tensor  # int64
    fresh_token_BT: Tensor | None  # tokens length_b .. length_b + num_fresh_b - 1 of the text, right-padded
    num_fresh_B: Tensor
    num_drafts_read: int  # drafts of the last chain whose keys and values lie behind the text's
    last_BH: Tensor  # final state behind each text's last token

    def select(self, rows: Tensor) -> "DraftTextState":
        """The same state for fewer (or reordered) rows."""
        caches = [TextCache(cache.key_BGLD[rows], cache.value_BGLD[rows]) for cache in self.caches]
        fresh_token_BT = None if self.fresh_token_BT is None else self.fresh_token_BT[rows]
        return replace(
            self,
            caches=caches,
            length_B=self.length_B[rows],
            fresh_token_BT=fresh_token_BT,
            num_fresh_B=self.num_fresh_B[rows],
            last_BH=self.last_BH[rows],
        )


class DraftModel(Head):
    """The head. Parameter names are transformers' own."""

    kind = "draft"
    reads = "text"
    exports_frozen = True

    def __init__(self, settings: DraftSettings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        self.taps: list[int] = []
        if settings.model:
            self.base = open_base(settings.model).facts
            self.max_position = self.base.max_position - 1  # the token drafted from lies one position behind its slot
        form = self.base or facts
        check_layers(settings, form)
        self.layer_ids = kept_layers(settings, form)
        self.model = Decoder(replace(form, num_layers=len(self.layer_ids)))
        self.lm_head = Projection(form.hidden_size, len(draft_ids_V))
        self.lm_head.requires_grad_(settings.train_output)
        if settings.lora_rank:
            adapt(self.model, settings.lora_rank)
        # The embedding is borrowed: frozen, never saved, found again through `load_target`.
        self.register_buffer("embedding_VH", torch.empty(0, form.hidden_size), persistent=False)

    @classmethod
    def check(cls, settings: DraftSettings, target: Any) -> None:
        base = open_base(settings.model) if settings.model else None
        form = base.facts if base else target.facts
        check_layers(settings, form)
        if base:
            check_tokens(base, target)
        refuse_whole(settings, kept_layers(settings, form), base.facts if base else None, target.facts)

    def refuse_own_target(self, target: Any) -> None:
        refuse_unchanged(self.settings, dict(self.model.named_parameters()), self.embedding_VH, target)

    # What a checkpoint does not hold

    def source(self, target: Any) -> tuple[Any, str]:
        """What it is made of, with weights, and what to call that: the target, or the model that the settings name."""
        if self.base is None:
            return target, "target"
        base = open_base(self.settings.model)
        check_tokens(base, target)
        return read_base(base, target.device), "model"

    @torch.no_grad()
    def load_target(self, target: Any, initialise: bool) -> None:
        source, whose = self.source(target)
        self.embedding_VH = source.embedding_weight().detach()
        self.first_values["embedding_VH"] = f"{whose}'s embedding"
        initialise = initialise and self.settings.init_from_target
        if initialise or not self.settings.train_output:
            self.lm_head.weight.copy_(source.output_weight()[self.draft_ids_V.to(source.device)])
            self.first_values["lm_head.weight"] = f"{whose}'s output rows"
        if initialise or self.settings.lora_rank:
            self._start_from(source, whose)

    def _start_from(self, source: Any, whose: str) -> None:
        """Copy the chosen layers and the final norm; every tensor of them has to be there under its name and shape."""
        found = {"norm.weight": (source.final_norm_weight(), f"{whose}'s final norm")}
        for i, layer in enumerate(self.layer_ids):
            for name, tensor in source.layer(layer).items():
                found[f"layers.{i}.{name}"] = (tensor, f"{whose}'s layer {layer}")
        names = [name for name, _ in self.model.named_parameters() if not is_adapter(name)]
        own = {plain_name(name): name for name in names}
        if unlike := sorted(own.keys() ^ found.keys()):
            raise AssertionError(f"layers of {source.facts.name!r} have other tensors than its config says: {unlike}")
        for plain, name in own.items():
            tensor, origin = found[plain]
            self.model.get_parameter(name).copy_(tensor)
            self.first_values[f"model.{name}"] = origin

    def pack(self) -> Self:
        if self.settings.lora_rank:
            merge(self.model)
        return super().pack()

    # Shared by both methods

    def embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.embedding_VH).to(self.dtype)

    def outputs(self) -> Sequence[Projection]:
        return [self.lm_head]

    # Training and offline acceptance: all starts at once

    def rollout(self, batch: Batch, depth: int) -> Rollout:
        start_S, valid_SD = supervised_pairs(batch, depth)
        state_TH = self.model.paths(self.embed(batch.token_T), batch.position_T, batch.offsets)
        # Past a reply's end there is no token to read; such pairs are not valid and read any slot.
        slot_SD = start_S[:, None] + 1 + torch.arange(depth, device=start_S.device)
        return Rollout(state_TH[slot_SD.clamp(max=len(state_TH) - 1)], start_S, valid_SD)

    # Serving: one block at a time

    def start(
        self,
        features_BTF: Tensor,
        next_tokens_BT: Tensor,
        lengths_B: Tensor,
        max_length: int,
        first_token_B: Tensor | None = None,
    ) -> DraftTextState:
        if first_token_B is None:
            raise ValueError("a draft model reads the whole text: x_0 of each row needed")
        zeros_B = torch.zeros(len(lengths_B), dtype=torch.int64, device=self.device)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return DraftTextState(
            caches=self.model.new_caches(len(lengths_B), max_length, like),
            length_B=zeros_B,
            fresh_token_BT=torch.cat((first_token_B[:, None], next_tokens_BT), dim=1).to(self.device),
            num_fresh_B=lengths_B.to(self.device) + 1,
            num_drafts_read=0,
            last_BH=like.new_zeros(len(lengths_B), self.model.facts.hidden_size),
        )

    def accept(
        self, state: DraftTextState, features_BTF: Tensor, next_tokens_BT: Tensor, num_accepted_B: Tensor
    ) -> None:
        self._read_fresh(state)  # a block may have been verified without a draft
        num_accepted_B = num_accepted_B.to(self.device)
        read_B = num_accepted_B.clamp(min=0, max=state.num_drafts_read)
        state.length_B = state.length_B + read_B
        index_BT = read_B[:, None] + torch.arange(next_tokens_BT.shape[1], device=self.device)
        state.fresh_token_BT = next_tokens_BT.gather(1, index_BT.clamp(max=next_tokens_BT.shape[1] - 1))
        state.num_fresh_B = num_accepted_B + 1 - read_B
        state.fresh_token_BT = state.fresh_token_BT[:, : max(int(state.num_fresh_B.max()), 1)]
        state.num_drafts_read = 0

    def draft(self, state: DraftTextState, depth: int, sampler: Sampler = greedy) -> Draft:
        self._read_fresh(state)
        state_BH = state.last_BH
        chain = Chain(self.draft_ids_V, state_BH)
        for j in range(depth):
            if j > 0:
                state_BH = self._feed(state, chain.token_B[:, None], state.length_B[:, None] + j - 1)[:, 0]
            state.num_drafts_read = j
            if not chain.extend(self.logits(state_BH), sampler):
                break
        return chain.draft()

    def draft_tree(self, state: DraftTextState, grow: Grow) -> None:
        self._read_fresh(state)
        state.num_drafts_read = 0  # nodes lie side by side: those that are kept are read again
        state_BWH, depth = state.last_BH[:, None], 0
        slots = TreeSlots(state.length_B, state.caches[0].key_BGLD.shape[2])
        while (level := grow(self.logits(state_BWH))) is not None:
            slot_BW, visible_BWL = slots.place(level)
            position_BW = (state.length_B[:, None] + depth).expand_as(slot_BW)
            embedded_BWH = self.embed(self.draft_ids_V[level.index_BW])
            state_BWH = self.model.feed(embedded_BWH, position_BW, slot_BW, visible_BWL, state.caches)
            depth += 1

    def _read_fresh(self, state: DraftTextState) -> None:
        """Read the waiting tokens of the texts, and keep the final state behind each row's last one."""
        if state.fresh_token_BT is None:
            return
        offset_T = torch.arange(state.fresh_token_BT.shape[1], device=self.device)
        position_BT = state.length_B[:, None] + offset_T
        padding_BT = offset_T >= state.num_fresh_B[:, None]
        final_BTH = self._feed(state, state.fresh_token_BT, position_BT, padding_BT)
        row_B, last_B = torch.arange(len(final_BTH), device=self.device), (state.num_fresh_B - 1).clamp(min=0)
        state.last_BH = torch.where((state.num_fresh_B > 0)[:, None], final_BTH[row_B, last_B], state.last_BH)
        state.length_B, state.fresh_token_BT = state.length_B + state.num_fresh_B, None

    def _feed(
        self, state: DraftTextState, token_BT: Tensor, position_BT: Tensor, padding_BT: Tensor | None = None
    ) -> Tensor:
        """Final states of tokens at their positions in the texts, each attending to all positions up to its own."""
        last_slot = state.caches[0].key_BGLD.shape[2] - 1
        used = min(int(position_BT.max()) + 1, last_slot)
        if padding_BT is not None:
            position_BT = position_BT.masked_fill(padding_BT, last_slot)
        visible_BTL = torch.arange(used, device=self.device) <= position_BT[:, :, None]
        return self.model.feed(self.embed(token_BT), position_BT, position_BT, visible_BTL, state.caches)


def kept_layers(settings: DraftSettings, form: TargetFacts) -> list[int]:
    """Decoder layers that a draft keeps of the model it is made of, the target or another."""
    return settings.layers or default_layers(form.num_layers, whole=bool(settings.model))


def default_layers(num_layers: int, whole: bool = False) -> list[int]:
    """All layers, or of a target an eighth, at least two, spread evenly from the first to the last."""
    number = num_layers if whole else min(max(num_layers // 8, 2), num_layers)
    return [round(i * (num_layers - 1) / max(number - 1, 1)) for i in range(number)]


def check_layers(settings: DraftSettings, facts: TargetFacts) -> None:
    """Refuse a model whose layers a draft cannot be made of, and layers that it does not have.

    Raises:
        WrongInput: either of them, or rotary positions that depend on the length of the text.
    """
    if not facts.llama_like:
        raise WrongInput(
            f"head.{'model' if settings.model else 'kind'}: a draft cannot be made of {facts.name!r}: its decoder layers "
            f"are not of Llama's form, as those of {', '.join(LLAMA_LIKE)} are.\n"
            "Name such a model with the target's tokenizer in head.model, or choose another head.kind."
        )
    if wrong := [layer for layer in settings.layers if layer >= facts.num_layers]:
        raise WrongInput(
            f"head.layers: found {wrong}, expected 0 .. {facts.num_layers - 1}, the decoder layers of {facts.name!r}."
        )
    Rotary(facts)
