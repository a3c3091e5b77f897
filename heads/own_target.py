"""A draft model that is its own target has every draft accepted and saves nothing: it is refused unless it was asked for.

Asked for is a head whose settings say it twice, the target in `head.model` and all of its layers in `head.layers`: a run to
see that every draft is accepted. Whatever else comes to the same is a mistake that good figures would hide.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.lora import is_adapter, plain_name
from headstart.heads.settings import DraftSettings
from headstart.heads.target import Target


def refuse_whole(settings: DraftSettings, layers: list[int], base: TargetFacts | None, facts: TargetFacts) -> None:
    """Refuse settings that make a draft of the whole target: of it, or of a model with its very weights.

    Args:
        layers: that are kept of the target, or of `base` where the settings name a model.

    Raises:
        WrongInput: beginning with the setting to change.
    """
    whole = layers == list(range(facts.num_layers))
    if not whole or base is not None and base.fingerprint["weights"] != facts.fingerprint["weights"]:
        return
    if not asked(settings, facts):
        key = "head.layers" if base is None else "head.model"
        raise WrongInput(f"{key}: {told(settings, facts)}")


def refuse_unchanged(
    settings: DraftSettings, layers: Mapping[str, Tensor], embedding_VH: Tensor, target: Target
) -> None:
    """Refuse a draft whose layers, final norm and embedding are the target's in value, wherever it took them from.

    Args:
        layers: the draft's tensors by name, `layers.0.mlp.up_proj.weight` and the like, those of adapters among them.

    Raises:
        WrongInput: naming what to train instead.
    """
    if asked(settings, target.facts) or not same_layers(layers, target):
        return
    rows = slice(target.facts.num_tokens)  # tables may be padded to other lengths
    if same(embedding_VH[rows], target.embedding_weight()[rows]):
        raise WrongInput(told(settings, target.facts))


def same_layers(layers: Mapping[str, Tensor], target: Target) -> bool:
    """Whether a draft's layers and final norm are all of the target's, and its adapters add nothing."""
    own = {plain_name(name): tensor for name, tensor in layers.items() if not is_adapter(name)}
    num_tensors = 1
    for index in range(target.facts.num_layers):
        theirs = target.layer(index)
        num_tensors += len(theirs)
        if not all(same(own.get(f"layers.{index}.{name}"), tensor) for name, tensor in theirs.items()):
            return False
    added = any(bool(tensor.any()) for name, tensor in layers.items() if ".lora_B." in name)
    return len(own) == num_tensors and same(own.get("norm.weight"), target.final_norm_weight()) and not added


def same(own: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether two tensors are one in the target's precision."""
    if own is None or theirs is None or own.shape != theirs.shape:
        return False
    return torch.equal(own.detach().to(theirs), theirs)


def asked(settings: DraftSettings, facts: TargetFacts) -> bool:
    """Whether the settings say twice that the draft is the target."""
    return bool(settings.model) and settings.layers == list(range(facts.num_layers))


def told(settings: DraftSettings, facts: TargetFacts) -> str:
    every = ",".join(str(layer) for layer in range(facts.num_layers))
    return (
        f"found a draft that is the target {facts.shown_name!r} itself, all {facts.num_layers} layers of it, expected a "
        "smaller model: every draft would be accepted, and nothing saved.\n"
        "Keep fewer of its layers in head.layers, or name a smaller model in head.model. To see the target accept itself "
        f"all the same, say both head.model={settings.model or facts.name} and head.layers=[{every}], with "
        "train.learning_rate=1e-12, which leaves it as it is."
    )
