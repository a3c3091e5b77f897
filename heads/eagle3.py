"""EAGLE-3: one decoder layer that reads fused taps of the target and recycles its own states.

Li et al., arXiv 2503.01840; the norm flags are those of EAGLE 3.1, arXiv 2605.09992.

    feature     fc(concat of taps); slots, depths and positions are those of `layer_head.py`
    layer       x = cat(norm(embedding), norm(h)); r = h + attention(x); y = r + mlp(norm(r)); logits = lm_head(norm(y))
    recycled    h of the next depth = y (or norm(y) with `norm_output`)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.facts import TargetFacts, default_taps
from headstart.heads.layer_head import Attention, Layer, LayerHead
from headstart.heads.layers import GatedMLP, Projection, RMSNorm
from headstart.heads.settings import Eagle3Settings
from headstart.heads.target_facts import check_taps


class Eagle3Layer(Layer):
    """The one decoder layer: its attention reads cat(embedding, feature), 2H wide."""

    def __init__(self, settings: Eagle3Settings, facts: TargetFacts) -> None:
        super().__init__()
        width, eps = facts.hidden_size, facts.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(facts, 2 * width)
        self.mlp = GatedMLP(width, settings.intermediate_size or facts.intermediate_size)


class Eagle3(LayerHead):
    """The head. Parameter names are the names engines load (`heads/export/` writes them as they are)."""

    kind = "eagle3"
    reads = "taps"

    def __init__(self, settings: Eagle3Settings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V)
        self.taps = sorted(set(settings.taps)) or default_taps(facts.num_layers)
        check_taps(facts.name, self.taps, facts.num_layers)
        width, eps = facts.hidden_size, facts.rms_norm_eps
        self.fc = Projection(len(self.taps) * width, width)
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in self.taps) if settings.fc_norm else None
        self.midlayer = Eagle3Layer(settings, facts)
        self.norm = RMSNorm(width, eps)
        self.lm_head = Projection(width, len(draft_ids_V))
        self.norm_output = settings.norm_output

    @property
    def layer(self) -> Layer:
        return self.midlayer

    # What a checkpoint does not hold

    def load_target(self, target: Any, initialise: bool) -> None:
        self.embedding_VH = target.embedding_weight().detach()
        if initialise and self.settings.init_from_target:
            self._start_from(target)

    @torch.no_grad()
    def _start_from(self, target: Any) -> None:
        """Copy first weights from the target; what its last layer has under no such name and shape stays random."""
        source, width = target.last_layer(), self.facts.hidden_size
        # The newest tap is closest to what the target's last layer reads, so the fusion starts as its copy.
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device)
        self.first_values["fc.weight"] = "random + newest tap"
        for projection in ("q_proj", "k_proj", "v_proj"):
            name = f"self_attn.{projection}.weight"
            origin = "target's last layer, random embedding half"
            self.copy(f"midlayer.{name}", source.get(name), origin, columns=slice(width, None))
            self.midlayer.get_parameter(name)[:, :width] *= 0.5
        for name, head_name in (
            ("self_attn.o_proj.weight", "self_attn.o_proj.weight"),
            ("input_layernorm.weight", "hidden_norm.weight"),
            ("post_attention_layernorm.weight", "post_attention_layernorm.weight"),
            ("mlp.gate_proj.weight", "mlp.gate_proj.weight"),
            ("mlp.up_proj.weight", "mlp.up_proj.weight"),
            ("mlp.down_proj.weight", "mlp.down_proj.weight"),
        ):
            self.copy(f"midlayer.{head_name}", source.get(name), "target's last layer")
        self.copy("norm.weight", target.final_norm_weight(), "target's final norm")
        rows_VH = target.output_weight()[self.draft_ids_V.to(target.device)]
        self.copy("lm_head.weight", rows_VH, "target's output rows")

    # Shared by both methods

    def fuse(self, features: Tensor) -> Tensor:
        taps = features.to(self.dtype)
        if self.fc_norm is not None:
            chunks = taps.split(self.facts.hidden_size, dim=-1)
            taps = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(taps)

    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.midlayer.hidden_norm(hidden)
        x = torch.cat((self.midlayer.input_layernorm(embedded), normed), dim=-1)
        return x, normed if self.settings.norm_before_residual else hidden

    def outputs(self) -> Sequence[Projection]:
        return [self.lm_head]
