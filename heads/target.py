"""The frozen target: token ids in, tap states and final states out.

Tap L is the residual stream after L decoder layers (0 is the embedding, N is before the final norm); `final` is the
input of the output head.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.builtin import resolve_model
from headstart.heads.cache import LENGTH_STEP, PositionCache
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts, default_taps
from headstart.heads.llama_body import LlamaBody, is_llama_like
from headstart.heads.model_files import decoder_layers, read_config, read_model
from headstart.heads.packed import FrozenLinear, min_rows
from headstart.heads.paths import Prompt
from headstart.heads.precision import DTYPES, choose_precision
from headstart.heads.rendering import render
from headstart.heads.settings import TargetSettings
from headstart.heads.shipped import LAYOUTS, load_pieces
from headstart.heads.target_facts import check_supported, check_taps, read_facts
from headstart.heads.target_probe import check_probe
from headstart.heads.tree import Tree, stacked

# A pass of fewer tokens takes longer a token, so that padding is worth it; otherwise a path may be so much padding.
FULL_PASS = 256
PADDING = 0.25


@dataclass
class States:
    """What a forward leaves behind: taps concatenated in ascending order along F, and the final state."""

    taps: Tensor  # [.., F]
    final: Tensor  # [.., H]


class Target:
    """A frozen causal language model with a position-addressed cache."""

    sharded = False  # whether its layers are spread over several processes
    pass_tokens = 2048  # tokens, padding included, that `read` passes at once

    def __init__(self, model: Any, tokenizer: Any, facts: TargetFacts, taps: list[int], direct: bool = True) -> None:
        """`direct` runs the layers of Llama-like models ourselves instead of through transformers' modules."""
        self.model = model
        self.tokenizer = tokenizer
        self.facts = facts
        self.taps = taps
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._body = model.base_model
        self._layers = decoder_layers(self._body, facts.num_layers)
        self._output = FrozenLinear(self.output_weight(), getattr(model.get_output_embeddings(), "bias", None))
        self._min_rows = min_rows(self.device)
        self._direct = LlamaBody(self._body, taps) if direct and is_llama_like(self._body) else None
        self._tap_states: dict[int, Tensor] = {}
        if self._direct is None:
            for tap in taps:
                self._hook(tap)

    @property
    def concurrent(self) -> bool:
        """Whether several threads may run it at once: on a CPU, with nothing that a pass leaves behind."""
        static = self.facts.rope_parameters.get("rope_type", "default") not in ("dynamic", "longrope")
        return self._direct is not None and self.device.type == "cpu" and static

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around work of which each process has its own amount; a sharded target makes the others' passes with them."""
        yield

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
        return render(self.facts, self.tokenizer, prompt)

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
        trees: Sequence[Tree] | None = None,
    ) -> States:
        """Run tokens at positions start_b .. start_b + T - 1 of cache rows (the first B, or `rows`).

        Keys and values are written at slots of the same numbers; every token attends to 0 .. its own. Rows with fewer
        than T tokens are right-padded and `length_B` long; states of padding are meaningless. To undo tokens, pass a
        smaller start next time. With `trees`, the tokens of row b are the nodes of a tree: their slots are the same, but
        positions go by depth, and a node sees its own branch only (`heads/tree.py`).
        """
        num_tokens = tokens_BT.shape[1]
        end = int((start_B + (num_tokens if length_B is None else length_B)).max())
        if end > cache.max_length:
            raise ValueError(f"position {end} lies beyond the cache of {cache.max_length} positions")
        slot_BT = start_B[:, None] + torch.arange(num_tokens, device=start_B.device)
        fresh = self._direct is not None and num_tokens > 1 and not bool(start_B.any())
        if trees is None:
            position_BT = cache.plan(slot_BT, rows, end, fresh)
        else:
            depth_BT, sees_BTT = stacked(trees, num_tokens, start_B.device)
            position_BT = start_B[:, None] + depth_BT
            cache.plan(slot_BT, rows, end, False, sees_BTT)
        if self._direct is not None:
            taps, final_BTH = self._direct(tokens_BT, position_BT, cache)
            return States(torch.cat(taps, dim=-1), final_BTH)
        output = self._body(
            input_ids=tokens_BT,
            attention_mask=cache.bias(self.dtype)[:, None],
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
        rows_NH = final.reshape(-1, final.shape[-1])
        pad = max(self._min_rows - len(rows_NH), 0)
        logits_NV = self._output(functional.pad(rows_NH, (0, 0, 0, pad)) if pad else rows_NH)[: len(rows_NH)].float()
        logits_NV[:, self.facts.num_tokens :] = -torch.inf
        return logits_NV.view(*final.shape[:-1], -1)

    def with_taps(self, taps: list[int]) -> "Target":
        """The same model and weights, returning other taps."""
        other = copy.copy(self)
        other.taps, other._tap_states = taps, {}
        if self._direct is not None:
            other._direct = copy.copy(self._direct)
            other._direct.taps = taps
        else:
            for tap in taps:
                other._hook(tap)
        return other

    def embedding_weight(self) -> Tensor:
        """The [V, H] input embedding."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    def output_weight(self) -> Tensor:
        """The [V, H] output head; the embedding itself where the two are tied."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    def final_norm_weight(self) -> Tensor | None:
        """The [H] gain of the norm before the output head, where it goes by one of the usual names."""
        for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
            norm = getattr(self._body, name, None)
            if norm is not None:
                weight: Tensor = norm.weight
                return weight.detach()
        return None

    def layer(self, index: int) -> dict[str, Tensor]:
        """Tensors of a decoder layer, by their names inside the layer (`self_attn.q_proj.weight`, ..)."""
        return {name: p.detach() for name, p in self._layers[index].named_parameters()}

    def last_layer(self) -> dict[str, Tensor]:
        """Tensors of the last decoder layer."""
        return self.layer(-1)

    def read_shipped(self, tensors: dict[str, Tensor], whole: bool) -> None:
        """Fill tensors of a head with the MTP layer in the target's files (`heads/shipped.py`)."""
        layout = LAYOUTS[self.facts.shipped["layout"]]
        load_pieces(resolve_model(self.facts.name), layout, self.facts.num_layers, tensors, whole)

    @torch.inference_mode()
    def read(self, token_ids: list[np.ndarray], batch_tokens: int = 0) -> list[States]:
        """Teacher-forced states of whole paths: N - 1 slots of a path of N tokens, the last token is not fed.

        Paths of like length are read together: padding costs as much as tokens do.

        Args:
            batch_tokens: of a pass, padding included; 0 means `pass_tokens`.
        """
        batch_tokens = batch_tokens or self.pass_tokens
        order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
        states: list[States | None] = [None] * len(token_ids)
        while order:
            width = -(-(len(token_ids[order[-1]]) - 1) // LENGTH_STEP) * LENGTH_STEP
            batch = [order.pop()]
            while order and (len(batch) + 1) * width <= batch_tokens:
                if len(batch) * width >= FULL_PASS and len(token_ids[order[-1]]) - 1 < (1 - PADDING) * width:
                    break
                batch.append(order.pop())
            tokens_BT = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, i in enumerate(batch):
                path = torch.from_numpy(np.asarray(token_ids[i][:-1], dtype=np.int64))
                tokens_BT[row, : len(path)] = path
            # Right padding needs no mask: a causal model's real tokens never see it.
            read = self._read_batch(tokens_BT.to(self.device))
            for row, i in enumerate(batch):
                length = len(token_ids[i]) - 1
                states[i] = States(read.taps[row, :length].clone(), read.final[row, :length].clone())
        return [state for state in states if state is not None]

    def _read_batch(self, tokens_BT: Tensor) -> States:
        if self._direct is None:
            return self._states(self._body(input_ids=tokens_BT, use_cache=False).last_hidden_state)
        position_BT = torch.arange(tokens_BT.shape[1], device=self.device).expand(tokens_BT.shape)
        taps, final_BTH = self._direct(tokens_BT, position_BT, None)
        return States(torch.cat(taps, dim=-1), final_BTH)


class TargetLoader:
    """A target that is known by its files; weights are loaded when a precision of it is asked for.

    Stages ask it for fingerprint, facts and taps to find out whether they have anything to do.
    """

    def __init__(
        self,
        settings: TargetSettings,
        taps: list[int] | None = None,
        key: str = "target.model",
        need_weights: bool = True,
    ) -> None:
        """`key` is the setting that names the model, for messages. A plan can be made before the weights are there.

        Raises:
            WrongInput: no such model, files that cannot be read, a cache that cannot roll back, or no such taps.
        """
        from transformers import AutoTokenizer

        self.settings = settings
        self.folder = resolve_model(settings.model, key, need_weights)
        try:
            config = read_config(self.folder)
            check_supported(settings.model, config)
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, config=config, trust_remote_code=False)
            self.facts = read_facts(settings.model, self.folder, config, self.tokenizer)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise WrongInput(
                f"{settings.model} holds no decoder-only language model that transformers reads without remote code: "
                f"{reason}"
            ) from None
        if need_weights and not self.has_weights:
            raise WrongInput(
                f"{self.folder}: found no *.safetensors, expected the weights in that form (pickled weights can run code).\n"
                "Load the model once with transformers and write it with save_pretrained."
            )
        self.taps = sorted(set(taps)) if taps else default_taps(self.facts.num_layers)
        check_taps(settings.model, self.taps, self.facts.num_layers)
        self._load: Callable[[TargetLoader, str], Target] = load_whole
        self._loaded: dict[str, Target] = {}

    @property
    def has_weights(self) -> bool:
        return bool(self.facts.fingerprint["weights"])

    @cached_property
    def dtype(self) -> str:
        """Name of the precision that the settings ask for, `auto` resolved for their device."""
        return choose_precision(self.settings.dtype, choose_device(self.settings.device)).name

    def __call__(self, dtype: str | None = None) -> "Target":
        """The target in `dtype` (default: the settings'), loaded and checked on a probe where it is not the last one given.

        Only the last one is held: two precisions of a large target may not fit beside each other.
        """
        name = dtype or self.dtype
        if name not in self._loaded:
            self._loaded.clear()
            self._loaded[name] = self._load(self, name)
        return self._loaded[name]

    def load_by(self, load: "Callable[[TargetLoader, str], Target]") -> None:
        """Load by another function from here on: what lies here is forgotten."""
        self._load = load
        self._loaded.clear()

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, without weights."""
        return render(self.facts, self.tokenizer, prompt)


def load_whole(loader: TargetLoader, dtype: str) -> Target:
    """A target with all of its layers on one device, checked on a probe."""
    settings = loader.settings
    attention = {} if settings.attention == "auto" else {"attn_implementation": settings.attention}
    model = read_model(settings.model, loader.folder, dtype=DTYPES[dtype], **attention)
    model.to(choose_device(settings.device)).eval().requires_grad_(False)
    target = Target(model, loader.tokenizer, loader.facts, loader.taps, direct=settings.attention == "auto")
    check_probe(target)
    return target


def load_target(settings: TargetSettings, taps: list[int] | None = None, dtype: str | None = None) -> Target:
    """Load a target in evaluation mode, frozen, and check on a probe that it computes what its model computes.

    Args:
        taps: residual streams to return; none means the ones serving engines fall back to.
        dtype: overrides `settings.dtype` (`float32` or `bfloat16`).

    Raises:
        WrongInput: no such model, a cache that cannot roll back, taps that do not exist, or a failed probe.
    """
    return TargetLoader(settings, taps)(dtype)


def choose_device(name: str) -> torch.device:
    """`auto` is the first accelerator, else the CPU."""
    if name != "auto":
        return torch.device(name)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")
