"""EAGLE-1: one decoder layer that predicts the target's next final state, and goes on from its own predictions.

Li et al., arXiv 2401.15077. EAGLE-2 (arXiv 2406.16858) is the same head with another tree.

    feature     final_t; slots, depths and positions are those of `layer_head.py`
    layer       x = fc(cat(embedding, h)); r = x + attention(x); y = r + mlp(norm(r)); logits = target's output head(y)
    recycled    h of the next depth = y, which stands for final_{t+1+j}: `train.loss.feature_weight` holds it to that

Neither the attention's input nor the state has a norm: final states are normed already.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.facts import TargetFacts
from headstart.heads.layer_head import Attention, Layer, LayerHead
from headstart.heads.layers import GatedMLP, Projection, RMSNorm
from headstart.heads.settings import Eagle1Settings


class Eagle1Layer(Layer):
    """The one decoder layer, as wide as the target's."""

    def __init__(self, settings: Eagle1Settings, facts: TargetFacts) -> None:
        super().__init__()
        self.self_attn = Attention(facts, facts.hidden_size)
        self.mlp = GatedMLP(facts.hidden_size, settings.intermediate_size or facts.intermediate_size)
        self.post_attention_layernorm = RMSNorm(facts.hidden_size, facts.rms_norm_eps)


class Eagle1(LayerHead):
    """The head. Parameter names are the names engines load."""

    kind = "eagle1"
    reads = "final"

    def __init__(self, settings: Eagle1Settings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        self.taps: list[int] = []
        self.fc = Projection(2 * facts.hidden_size, facts.hidden_size)
        self.layers = nn.ModuleList([Eagle1Layer(settings, facts)])
        self.norm = nn.Identity()
        # The target's own output rows: borrowed and frozen as the embedding is.
        self.lm_head = Projection(facts.hidden_size, len(draft_ids_V)).requires_grad_(False)

    @property
    def layer(self) -> Layer:
        return self.layers[0]  # type: ignore[return-value]

    # What a checkpoint does not hold

    @torch.no_grad()
    def load_target(self, target: Any, initialise: bool) -> None:
        self.borrow(target, self.lm_head)
        if initialise and self.settings.init_from_target:
            self._start_as_the_feature()

    def _start_as_the_feature(self) -> None:
        """Let y start as final_t with the token as a small disturbance: what the layer adds to that starts at zero.

        The target's last layer would be no start: it adds to a residual stream, whose scale is not that of final states.
        """
        width = self.facts.hidden_size
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, width:] += torch.eye(width, device=self.fc.weight.device)
        self.first_values["fc.weight"] = "random + final state"
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            self.layer.get_parameter(name).zero_()
            self.first_values[f"layers.0.{name}"] = "zero"

    # Shared by both methods

    def fuse(self, features: Tensor) -> Tensor:
        return features.to(self.dtype)

    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat((embedded, hidden), dim=-1))
        return x, x

    def outputs(self) -> Sequence[Projection]:
        return [self.lm_head]
