"""Write an MTP layer of our own as a target that ships one: MiMo, which is Qwen2 with such a layer.

Engines load MTP layers only as a part of targets that they know. A Llama-like target is a Qwen2, whose biases may be zero,
so target and layer together are a MiMo: the folder holds both, and the target computes what it did.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headstart.heads.errors import WrongInput
from headstart.heads.export.layer import decoder_config
from headstart.heads.export.layout import Request
from headstart.heads.export.shards import stored, write_shards
from headstart.heads.export.target_files import copy_files
from headstart.heads.facts import TargetFacts
from headstart.heads.mtp import MTP
from headstart.heads.shipped import BIASED, ENDS, INDEX, LAYOUTS, tensor_files
from headstart.heads.store import write_json

MIMO = LAYOUTS["qwen2"]
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_mimo(head: MTP, source: Path, folder: Path, request: Request) -> dict[str, Tensor]:
    """The target with its new layer, zero biases and an output head, in a folder that is there.

    Raises:
        WrongInput: tensors under unusual names.
    """
    old = tensor_files(source)
    if EMBEDDING not in old:
        raise WrongInput(f"{source}: found no {EMBEDDING}, expected the target's tensors under their usual names.")
    embedding_VH = load(old, EMBEDDING)
    layer = {name: tensor.to(embedding_VH.dtype) for name, tensor in trained_layer(head).items()}
    held = {name: told for file in sorted(set(old.values())) for name, told in stored(file).items()}
    shapes = {name: shape for name, (shape, _) in held.items()} | {name: tensor.shape for name, tensor in layer.items()}
    stems = [
        name.removesuffix(".weight") for name in shapes if name.endswith(tuple(f"{part}.weight" for part in BIASED))
    ]
    biases = {
        f"{stem}.bias": embedding_VH.new_zeros(shapes[f"{stem}.weight"][0])
        for stem in stems
        if f"{stem}.bias" not in shapes
    }
    own = layer | biases | ({} if OUTPUT in old else {OUTPUT: embedding_VH})
    sizes = {name: size for name, (_, size) in held.items()} | {name: tensor.nbytes for name, tensor in own.items()}
    write_shards(
        folder,
        sizes,
        lambda names: {name: own[name] if name in own else load(old, name) for name in names},
        request.shard_bytes,
    )
    write_json(folder / "config.json", mimo_config(head.facts, source, str(embedding_VH.dtype).removeprefix("torch.")))
    copy_files(source, folder, but=(INDEX, "config.json"))
    return {name: tensor for name, tensor in own.items() if name.startswith(MIMO.prefix)}


def load(places: dict[str, Path], name: str) -> Tensor:
    with safe_open(places[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def mimo_config(facts: TargetFacts, source: Path, dtype: str) -> dict[str, Any]:
    """The whole config.json: Qwen2's fields out of the target's facts, and the number of MTP layers."""
    target = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        **decoder_config(facts, dtype),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        **{name: target[name] for name in KEPT if name in target},
    }


def trained_layer(head: MTP) -> dict[str, Tensor]:
    """The head's tensors by published names; MiMo's projection reads the state first."""
    base, found = MIMO.base(head.facts.num_layers), {}
    for name, tensor in head.layer.named_parameters():
        module, _, leaf = name.partition(".")
        value = tensor.detach().cpu()
        if module == "eh_proj":
            value = torch.cat(value.chunk(2, dim=1)[::-1], dim=1)
        path = f"{MIMO.ends[ENDS.index(module)]}.{leaf}" if module in ENDS else name
        found[base + path] = value.contiguous()
    return found
