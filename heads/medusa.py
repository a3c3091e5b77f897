"""Medusa: residual blocks on the target's final state, one stack for each drafted token, which read no token at all.

Cai et al., arXiv 2401.10774 (Medusa-1: the target stays frozen).

    depth j     of start t is blocks_j(final_t); logits = lm_head(blocks_j(final_t)) predict x_{t+2+j}

A draft does not depend on x_{t+1}, which is known, nor on the drafts before it: cheap, and the weakest kind.
"""

from typing import Any

from torch import Tensor, nn

from headstart.heads.facts import TargetFacts
from headstart.heads.settings import MedusaSettings
from headstart.heads.slot_head import ResidualBlocks, SlotHead


class Medusa(SlotHead):
    """The head. Parameter names are the names engines load."""

    kind = "medusa"

    def __init__(self, settings: MedusaSettings, facts: TargetFacts, draft_ids_V: Tensor) -> None:
        super().__init__(settings, facts, draft_ids_V, facts.hidden_size)
        blocks = (ResidualBlocks(facts.hidden_size, settings.num_layers) for _ in range(settings.num_heads))
        self.blocks = nn.ModuleList(blocks)
        self.first_values |= {name: "zero" for name, _ in self.blocks.named_parameters(prefix="blocks")}

    def load_target(self, target: Any, initialise: bool) -> None:
        if initialise and self.settings.init_from_target:
            self.start_outputs_from(target)

    def begin(self, final: Tensor) -> Tensor:
        return final.to(self.dtype)

    def step(self, depth: int, hidden: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks[depth](hidden), hidden
