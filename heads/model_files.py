"""A model's folder as transformers reads it: its config, and the model with every weight from the folder's files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from headstart.heads.errors import WrongInput
from headstart.heads.made_targets import quiet_transformers
from headstart.heads.shipped import FUSED

# Families that transformers knows under another name only, whose layers are that family's to the letter.
SAME_AS = {"mimo": "qwen2"}


def read_config(folder: Path) -> Any:
    """transformers' config of a model folder.

    Raises:
        OSError, ValueError: no config, or of a family that transformers does not know.
    """
    from transformers import AutoConfig

    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"config.json is no JSON: {error}") from None
    if (family := SAME_AS.get(values.get("model_type", ""))) is None:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return AutoConfig.for_model(family, **{k: v for k, v in values.items() if k not in ("model_type", "auto_map")})


@dataclass(frozen=True)
class ParameterCount:
    """Numbers in the weights of a causal language model."""

    total: int
    layers: int  # in its decoder layers; the others are in embedding, final norm and output head
    largest_layer: int
    active_layers: int  # in its decoder layers, of experts those that a token meets


def count_parameters(folder: Path) -> ParameterCount:
    """Parameters of the causal language model in a folder, told by its config.

    Raises:
        WrongInput: transformers knows no such model for that config.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(folder)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ValueError as error:
        reason = str(error).strip().partition("\n")[0]
        raise WrongInput(f"target.model: {folder} holds no causal language model: {reason}") from None
    text = config.get_text_config()
    layers = decoder_layers(model, text.num_hidden_layers)
    numbers = [num_numbers(layer) for layer in layers]
    idle = 0
    for name, parameter in layers.named_parameters():
        if name.endswith(FUSED):
            idle += parameter.numel() // len(parameter) * (len(parameter) - text.num_experts_per_tok)
    return ParameterCount(num_numbers(model), sum(numbers), max(numbers), sum(numbers) - idle)


def num_numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def decoder_layers(body: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers inside a transformers base model."""
    found = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    if not found:
        raise WrongInput(
            f"{type(body).__name__}: found no list of {num_layers} decoder layers, expected a decoder-only model.\n"
            "Choose a causal language model as the target."
        )
    return found[0]


def weight_bytes(folder: Path, num_parameters: int, dtype: torch.dtype) -> int:
    """Bytes of the weights loaded in `dtype`; quantised ones stay as they are in their files."""
    if getattr(read_config(folder), "quantization_config", None) is None:
        return num_parameters * dtype.itemsize
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_model(name: str, folder: Path, **options: Any) -> Any:
    """The causal language model in a folder, every weight of it from the folder's files.

    Raises:
        WrongInput: files that cannot be read, or weights that are missing or misshapen and would stay random.
    """
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder,
                config=read_config(folder),
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WrongInput(f"target {name}: the weights in {folder} cannot be read: {reason}") from None
    random = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    if random:
        shown = ", ".join(sorted(random)[:4]) + (f" and {len(random) - 4} more" if len(random) > 4 else "")
        raise WrongInput(
            f"target {name}: {folder} lacks {len(random)} weights, or has them in another shape, and they would stay "
            f"random: {shown}.\nCopy the model again, or make its config.json and its weights agree."
        )
    return model
