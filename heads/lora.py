"""Low-rank adapters (Hu et al., arXiv 2106.09685) on the projections of decoder layers, by peft.

W x + B (A x)     A [rank, in], B [out, rank]; B starts at zero, so that training starts at W
"""

from torch import nn

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapt(layers: nn.Module, rank: int) -> None:
    """Put adapters on all projections inside `layers`; every other parameter there is frozen.

    What the layers are scaled by (`lora_alpha`) is the rank itself: the product enters as it is, whatever the rank.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, bias="none", target_modules=PROJECTIONS)
    inject_adapter_in_model(config, layers)
    for name, parameter in layers.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def merge(layers: nn.Module) -> None:
    """Add the adapters' products to the projections, which then compute alone; adapters that are merged stay so."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in layers.modules():
        if isinstance(module, BaseTunerLayer) and not module.merged:
            module.merge()


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """A parameter's name in layers without adapters."""
    return name.replace(".base_layer.", ".")
