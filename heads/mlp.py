"""MLP speculator: a recurrent state that starts as the target's final state and takes in one token a step.

Wertheimer et al., arXiv 2404.19124, section 2; norms as its checkpoints are served.

    step j      of start t: s_j = gelu(norm_j(P_j s_{j-1} + (w_e / w_s) E_j x_{t+1+j})), s_{-1} = final_t
    weights     w_s = 0.5 ** (1 / 2n) for n steps, w_e = sqrt((1 - w_s ** 2) d / 2) for states of width d: after n steps
                half of the state's variance is the target's, and each token has had an equal share of the rest
    input       scaled: s_{-1} = final_t / rms(final_t) / sqrt(2)
    logits      head_j(s_j) predict x_{t+2+j}
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.facts import TargetFacts
from headstart.heads.layers import Projection
from headstart.heads.settings import MLPSettings
from headstart.heads.slot_head import SlotHead

NORM_EPS = 1e-6


class ShiftedNorm(nn.Module):
    """x / rms(x) * weight + bias over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPS) + self.bias.to(x.dtype)


class MLP(SlotHead):
    """The head. Parameter names are the names engines load, but for the output layers (`head` there)."""

    kind = "mlp"

    def __init__(self, settings: MLPSettings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        width = settings.inner_size or facts.hidden_size
        super().__init__(settings, facts, draft_ids_V, width)
        steps, tied = range(settings.num_heads), settings.tie_weights

        def each(make: Any, first: int = 0) -> nn.ModuleList:
            """A module for each step, or one for all steps from `first` on."""
            made = [make(step) for step in steps if not tied or step <= first]
            return nn.ModuleList(made[min(step, len(made) - 1)] for step in steps)

        self.emb = each(lambda step: nn.Embedding(facts.vocab_size, width))
        self.proj = each(lambda step: Projection(width if step else facts.hidden_size, width), first=1)
        self.ln = each(lambda step: ShiftedNorm(width))
        for table_VH in self.emb.parameters():
            nn.init.normal_(table_VH, std=width**-0.5)
        state_weight = 0.5 ** (0.5 / settings.num_heads)
        self.token_scale = math.sqrt((1 - state_weight**2) * width / 2) / state_weight
        for name, _ in self.ln.named_parameters(prefix="ln"):
            self.first_values[name] = "one" if name.endswith("weight") else "zero"

    def load_target(self, target: Any, initialise: bool) -> None:
        if initialise and self.settings.init_from_target:
            self.start_outputs_from(target)
            self._start_tables_from(target)

    @torch.no_grad()
    def _start_tables_from(self, target: Any) -> None:
        """Copy the target's embedding where the widths are equal, scaled to the size that `token_scale` is made for."""
        table_VH = target.embedding_weight().detach().float()
        for name, own_VH in self.emb.named_parameters(prefix="emb"):
            if own_VH.shape == table_VH.shape:
                own_VH.copy_(table_VH * (table_VH.shape[1] ** -0.5 / table_VH.std()))
                self.first_values[name] = "target's embedding, scaled"

    def begin(self, final: Tensor) -> Tensor:
        final = final.to(self.dtype)
        if self.settings.scale_input:
            final = functional.rms_norm(final, final.shape[-1:], None, NORM_EPS) * 0.5**0.5
        return final

    def step(self, depth: int, hidden: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.proj[depth](hidden) + self.token_scale * self.emb[depth](token)
        state = functional.gelu(self.ln[depth](mixed))
        return state, state
