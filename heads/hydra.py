"""Hydra: Medusa's heads made sequentially dependent, so that each draft knows the ones before it.

Ankner et al., arXiv 2402.05109.

    depth j     of start t reads x = cat(final_t, norm(e(x_{t+1})), .., norm(e(x_{t+1+j}))), e the target's embedding
    layer       y = blocks_j(A_j x + silu(B_j x + b_j)); logits = lm_head(y) predict x_{t+2+j}

Embeddings are normed here because targets scale them very differently from their final states.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.facts import TargetFacts
from headstart.heads.layers import Projection, RMSNorm
from headstart.heads.settings import HydraSettings
from headstart.heads.slot_head import ResidualBlocks, SlotHead


class Reader(nn.Module):
    """A x + silu(B x + b): from the final state and the embeddings so far down to one width.

    It starts as the final state alone: A is the identity on it, and zero elsewhere.
    """

    def __init__(self, width: int, num_tokens: int, num_layers: int) -> None:
        super().__init__()
        inputs = (1 + num_tokens) * width
        self.skip = Projection(inputs, width)
        self.linear = Projection(inputs, width, bias=True)
        self.blocks = ResidualBlocks(width, num_layers - 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        with torch.no_grad():
            self.skip.weight[:, :width] = torch.eye(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.skip(x) + functional.silu(self.linear(x)))


class Hydra(SlotHead):
    """The head; no engine loads this kind."""

    kind = "hydra"

    def __init__(self, settings: HydraSettings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V, facts.hidden_size)
        width = facts.hidden_size
        self.embed_norm = RMSNorm(width, facts.rms_norm_eps)
        self.readers = nn.ModuleList(Reader(width, j + 1, settings.num_layers) for j in range(settings.num_heads))
        # The target's embedding is borrowed: frozen, never saved, found again through `load_target`.
        self.register_buffer("embedding_VH", torch.empty(0, width), persistent=False)
        for name, _ in self.readers.named_parameters(prefix="readers"):
            self.first_values[name] = "identity on the final state" if name.endswith("skip.weight") else "zero"
        self.first_values["embed_norm.weight"] = "one"

    def load_target(self, target: Any, initialise: bool) -> None:
        self.embedding_VH = target.embedding_weight().detach()
        if initialise and self.settings.init_from_target:
            self.start_outputs_from(target)

    def begin(self, final: Tensor) -> Tensor:
        return final.to(self.dtype)

    def step(self, depth: int, hidden: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embed_norm(functional.embedding(token, self.embedding_VH).to(hidden.dtype))
        hidden = torch.cat((hidden, embedded), dim=-1)
        return self.readers[depth](hidden), hidden
