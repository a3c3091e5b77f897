"""A few tokens by which a loaded target shows that it computes what its model computes."""

from typing import TYPE_CHECKING

import torch

from headstart.heads.errors import WrongInput

if TYPE_CHECKING:
    from headstart.heads.target import Target


@torch.inference_mode()
def check_probe(target: "Target") -> None:
    """Compare a few tokens, fed in two parts through our cache and output head, with the model's own forward.

    Raises:
        WrongInput: logits that are not finite, a model that scales or caps them, or that positions its cache in another way.
    """
    facts = target.facts
    tokens_1T = (torch.arange(11, device=target.device) * 37 % facts.num_tokens)[None]
    expected = target.model(tokens_1T).logits.float()[0, :, : facts.num_tokens]
    if not bool(expected.isfinite().all()):
        raise WrongInput(
            f"target {facts.name}: its own logits are not finite in {target.dtype}.\n"
            "The weights are damaged, or this precision overflows: copy the model again, or set another target.dtype."
        )
    cache = target.new_cache(1, 16)
    start_1 = torch.zeros(1, dtype=torch.int64, device=target.device)
    first = target.forward(tokens_1T[:, :6], start_1, cache)
    second = target.forward(tokens_1T[:, 6:], start_1 + 6, cache)
    final = torch.cat([first.final, second.final], dim=1)
    found = target.logits(final)[0, :, : facts.num_tokens]
    # Means, because a single position may carry activations so large that bfloat16 says little about its logits.
    difference = float((found - expected).abs().mean())
    scale = float(expected.std())
    if not difference <= scale * (1e-3 if target.dtype == torch.float32 else 0.2):
        raise WrongInput(
            f"target {facts.name}: found logits {difference:.3g} away from the model's own on average (their standard "
            f"deviation is {scale:.3g}), expected the output head on the final state.\n"
            "The model caps or scales its logits, or uses a cache of its own kind. Choose another target."
        )
