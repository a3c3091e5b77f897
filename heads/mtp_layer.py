"""What the forms of an MTP head share: the decoder layer, and what they borrow from the target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.layer_head import Attention, Layer
from headstart.heads.layers import GatedMLP, Projection, RMSNorm
from headstart.heads.recycling_head import EmbeddingHead
from headstart.heads.settings import MTPSettings
from headstart.heads.shipped import LAYOUTS, tensor_files

FINAL_NORM = "model.norm.weight"


class MTPLayer(Layer):
    """One prediction module: a decoder layer as wide as the target's, with what it reads and its own last norm."""

    def __init__(self, settings: MTPSettings, facts: TargetFacts) -> None:
        super().__init__()
        width, eps = facts.hidden_size, facts.rms_norm_eps
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.eh_proj = Projection(2 * width, width)
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(facts, width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, settings.intermediate_size or facts.intermediate_size)
        self.norm = RMSNorm(width, eps)

    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Input of the attention and residual branch from a token's embedding and h, all [.., H]."""
        residual = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.input_layernorm(residual), residual


class MTPEnds(EmbeddingHead):
    """What an MTP head of any form has of the target: states, embeddings and output rows."""

    kind = "mtp"
    reads = "final"
    final_gain_H: Tensor

    def __init__(self, settings: MTPSettings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        self.taps: list[int] = []
        self.before_norm = reads_before_norm(settings, facts)
        # The target's own output rows and the gain of its final norm: borrowed and frozen as the embedding is.
        self.lm_head = Projection(facts.hidden_size, len(draft_ids_V)).requires_grad_(False)
        self.register_buffer("final_gain_H", torch.ones(facts.hidden_size), persistent=False)

    def load_target(self, target: Any, initialise: bool) -> None:
        """Raises WrongInput: a final norm that hides channels of the state which the layer is to read."""
        self.borrow(target, self.lm_head)
        if not self.before_norm:
            return
        self.final_gain_H = target.final_norm_weight().to(self.dtype)
        refuse_hidden(self.final_gain_H, self.facts)

    def fuse(self, features: Tensor) -> Tensor:
        """h of depth 0. In front of the norm a state is that of behind it without the gain; `hnorm` makes its length one."""
        return features.to(self.dtype) / self.final_gain_H

    def outputs(self) -> Sequence[Projection]:
        return [self.lm_head]


def reads_before_norm(settings: MTPSettings, facts: TargetFacts) -> bool:
    """Whether engines hand the layer the state in front of the target's final norm; one of our own is served as a MiMo's."""
    return LAYOUTS[facts.shipped["layout"]].before_norm if settings.shipped else facts.llama_like


def stored_gain(folder: Path) -> Tensor | None:
    """The gain of a Llama-like target's final norm in its files; None where it has another name or no file is there yet."""
    file = tensor_files(folder).get(FINAL_NORM)
    if file is None or not file.is_file():
        return None
    with safe_open(file, framework="pt") as opened:
        gain_H: Tensor = opened.get_tensor(FINAL_NORM)
    return gain_H


def refuse_hidden(gain_H: Tensor, facts: TargetFacts) -> None:
    """Raises WrongInput: a gain that hides channels of the state in front of the final norm."""
    if hidden := int((gain_H == 0).sum()):
        raise WrongInput(
            f"head.kind: the final norm of {facts.name} has a gain of zero at {hidden} of {facts.hidden_size} channels, so "
            "an MTP layer, which reads the state in front of it, cannot be trained on the states that are stored. Choose "
            "another kind: headstart ls heads"
        )


class MTPHead(MTPEnds):
    """Decoder layers between the target's embedding and output head.

    Parameter names are those of the published layers, but for `norm`, which is `shared_head.norm` there.
    """

    def __init__(self, settings: MTPSettings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        self.layers = nn.ModuleList(MTPLayer(settings, facts) for _ in range(settings.num_modules))

    def module(self, index: int) -> MTPLayer:
        return self.layers[index]  # type: ignore[return-value]

    @torch.no_grad()
    def load_target(self, target: Any, initialise: bool) -> None:
        super().load_target(target, initialise)
        if initialise and self.settings.init_from_target:
            for index in range(len(self.layers)):
                self._start_from(target, index)

    def _start_from(self, target: Any, index: int) -> None:
        """Let y start as the final state with the token as a small disturbance: what the layer adds to that starts at zero.

        The rest is the target's last layer. As a whole it would be no start: what it adds is of the size of the residual
        stream, and loses against this one by half in the first steps.
        """
        width, name, layer = self.facts.hidden_size, f"layers.{index}", self.module(index)
        source = target.last_layer()
        for part, _ in layer.named_parameters():
            self.copy(f"{name}.{part}", source.get(part), "target's last layer")
        self.copy(f"{name}.norm.weight", target.final_norm_weight(), "target's final norm")
        layer.eh_proj.weight.mul_(0.1)
        layer.eh_proj.weight[:, width:] += torch.eye(width, device=layer.eh_proj.weight.device)
        self.first_values[f"{name}.eh_proj.weight"] = "random + final state"
        for part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            layer.get_parameter(part).zero_()
            self.first_values[f"{name}.{part}"] = "zero"

    def embed(self, tokens: Tensor, position: Tensor) -> Tensor:
        return super().embed(tokens, position).masked_fill(position.unsqueeze(-1) == 0, 0)
