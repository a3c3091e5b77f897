"""The frozen target: token ids in, tap states and final states out.

Tap L is the residual stream after L decoder layers (0 is the embedding, N is before the final norm); `final` is the
input of the output head.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headstart.heads.builtin import resolve_model
from headstart.heads.cache import LENGTH_STEP, PositionCache
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts, default_taps
from headstart.heads.paths import Prompt
from headstart.heads.settings import TargetSettings


@dataclass
class States:
    """What a forward leaves behind: taps concatenated in ascending order along F, and the final state."""

    taps: Tensor  # [.., F]
    final: Tensor  # [.., H]


class Target:
    """A frozen causal language model with a position-addressed cache."""

    def __init__(self, model: Any, tokenizer: Any, facts: TargetFacts, taps: list[int]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.facts = facts
        self.taps = taps
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._body = model.base_model
        self._layers = decoder_layers(self._body, facts.num_layers)
        self._tap_states: dict[int, Tensor] = {}
        for tap in taps:
            self._hook(tap)

    def _hook(self, tap: int) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._tap_states[tap] = args[0] if args else kwargs["hidden_states"]

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._tap_states[tap] = output[0] if isinstance(output, tuple) else output

        if tap < self.facts.num_layers:
            self._layers[tap].register_forward_pre_hook(before, with_kwargs=True)
        else:
            self._layers[-1].register_forward_hook(after)

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, rendered by the target's own chat template, ready for the reply."""
        if not self.tokenizer.chat_template:
            raise WrongInput(
                f"{self.facts.name}: found a tokenizer without chat template, expected one for chat prompts.\n"
                "Put a chat_template.jinja beside the tokenizer, or choose an instruction-tuned target."
            )
        rendered = self.tokenizer.apply_chat_template(
            list(prompt.messages), tokenize=True, add_generation_prompt=True, return_dict=True, **prompt.template_kwargs
        )
        return [int(token) for token in rendered["input_ids"]]

    def new_cache(self, num_rows: int, max_length: int) -> PositionCache:
        """Room for `num_rows` sequences of `max_length` tokens."""
        return PositionCache(self.facts.num_layers, num_rows, max_length)

    @torch.inference_mode()
    def forward(
        self,
        tokens_BT: Tensor,
        start_B: Tensor,
        cache: PositionCache,
        length_B: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> States:
        """Run tokens at positions start_b .. start_b + T - 1 of cache rows (the first B, or `rows`).

        Keys and values are written at these positions; every token attends to 0 .. its own position. Rows with fewer
        than T tokens are right-padded and `length_B` long; states of padding are meaningless. To undo tokens, pass a
        smaller start next time.
        """
        num_tokens = tokens_BT.shape[1]
        if length_B is None:
            end = int(start_B.max()) + num_tokens
        else:
            end = int((start_B + length_B).max())
        if end > cache.max_length:
            raise ValueError(f"position {end} lies beyond the cache of {cache.max_length} positions")
        position_BT = start_B[:, None] + torch.arange(num_tokens, device=start_B.device)
        position_BT = position_BT.clamp(max=cache.max_length)
        live = min(-(-end // LENGTH_STEP) * LENGTH_STEP, cache.max_length)
        cache.plan(position_BT, rows, live)
        visible_BTL = torch.arange(live, device=position_BT.device) <= position_BT[:, :, None]
        output = self._body(
            input_ids=tokens_BT,
            attention_mask=visible_BTL[:, None],
            position_ids=position_BT,
            cache=cache,
            use_cache=True,
        )
        return self._states(output.last_hidden_state)

    def _states(self, final_BTH: Tensor) -> States:
        taps = [self._tap_states[tap] for tap in self.taps]
        self._tap_states.clear()
        return States(torch.cat(taps, dim=-1), final_BTH)

    @torch.inference_mode()
    def logits(self, final: Tensor) -> Tensor:
        """Float32 logits over the embedding table; ids the tokenizer cannot produce get -inf."""
        logits = self.model.get_output_embeddings()(final).float()
        logits[..., self.facts.num_tokens :] = -torch.inf
        return logits

    def embedding_weight(self) -> Tensor:
        """The [V, H] input embedding."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    def output_weight(self) -> Tensor:
        """The [V, H] output head; the embedding itself where the two are tied."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    def final_norm_weight(self) -> Tensor:
        """The [H] gain of the norm before the output head."""
        for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
            norm = getattr(self._body, name, None)
            if norm is not None:
                weight: Tensor = norm.weight
                return weight.detach()
        raise WrongInput(f"{self.facts.name}: found no final norm in {type(self._body).__name__}.")

    def last_layer(self) -> dict[str, Tensor]:
        """Tensors of the last decoder layer, by their names inside the layer."""
        return {name: p.detach() for name, p in self._layers[-1].named_parameters()}

    @torch.inference_mode()
    def read(self, token_ids: list[np.ndarray], batch_tokens: int = 2048) -> list[States]:
        """Teacher-forced states of whole paths: N - 1 slots of a path of N tokens, the last token is not fed."""
        order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
        states: list[States | None] = [None] * len(token_ids)
        while order:
            width = -(-(len(token_ids[order[-1]]) - 1) // LENGTH_STEP) * LENGTH_STEP
            batch = [order.pop() for _ in range(min(len(order), max(1, batch_tokens // max(width, 1))))]
            tokens_BT = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, i in enumerate(batch):
                path = torch.from_numpy(np.asarray(token_ids[i][:-1], dtype=np.int64))
                tokens_BT[row, : len(path)] = path
            # Right padding needs no mask: a causal model's real tokens never see it.
            output = self._body(input_ids=tokens_BT.to(self.device), use_cache=False)
            read = self._states(output.last_hidden_state)
            for row, i in enumerate(batch):
                length = len(token_ids[i]) - 1
                states[i] = States(read.taps[row, :length].clone(), read.final[row, :length].clone())
        return [state for state in states if state is not None]


def decoder_layers(body: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers inside a transformers base model."""
    found = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise WrongInput(
            f"{type(body).__name__}: found no list of {num_layers} decoder layers, expected a decoder-only model.\n"
            "Choose a causal language model as the target."
        )
    return found[0]


def load_target(settings: TargetSettings, taps: list[int] | None = None, dtype: str | None = None) -> Target:
    """Load a target in evaluation mode, frozen.

    Args:
        taps: residual streams to return, ascending; none means the ones serving engines fall back to.
        dtype: overrides `settings.dtype` (`float32` or `bfloat16`).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(settings.model)
    device = choose_device(settings.device)
    attention = {} if settings.attention == "auto" else {"attn_implementation": settings.attention}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=choose_dtype(dtype or settings.dtype), **attention)
    model.to(device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    facts = read_facts(settings.model, model, tokenizer)
    chosen = sorted(set(taps)) if taps else default_taps(facts.num_layers)
    return Target(model, tokenizer, facts, chosen)


def choose_device(name: str) -> torch.device:
    """`auto` is the first accelerator, else the CPU."""
    if name != "auto":
        return torch.device(name)
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return accelerator
    return torch.device("cpu")


def choose_dtype(name: str) -> torch.dtype:
    """`auto` is bfloat16, which halves the memory traffic that bounds decoding."""
    return {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def read_facts(name: str, model: Any, tokenizer: Any) -> TargetFacts:
    """The numbers heads are built from, out of the model's config and tokenizer."""
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    stop_ids = set(_as_list(model.generation_config.eos_token_id)) | set(_as_list(tokenizer.eos_token_id))
    vocab_size = model.get_input_embeddings().weight.shape[0]
    specials = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | stop_ids
    return TargetFacts(
        name=name,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        intermediate_size=config.intermediate_size,
        vocab_size=vocab_size,
        num_tokens=min(len(tokenizer), vocab_size),
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        max_position=config.max_position_embeddings,
        special_ids=sorted(i for i in specials if i < vocab_size),
        stop_ids=sorted(stop_ids),
        fingerprint={"weights": "", "config": "", "tokenizer": "", "chat_template": ""},
    )


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [int(value)]
