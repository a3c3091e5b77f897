"""One Llama layer as engines compute it, behind whatever a layout feeds it, and the config fields that decide it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.export.readers.files import dtype_problems, value_problems
from headstart.heads.facts import TargetFacts

LAYER_KEYS = {
    *("model_type", "num_hidden_layers", "hidden_act", "attention_bias", "mlp_bias", "dtype", "torch_dtype"),
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("max_position_embeddings", "vocab_size", "tie_word_embeddings", "rope_parameters", "rope_theta"),
}
LAYER_OPTIONAL_KEYS = {"rope_scaling"}


@dataclass
class Cache:
    """Rotated keys and values [L, G, D] of the slots read so far."""

    key_LGD: Tensor
    value_LGD: Tensor


class LlamaLayer:
    """Attention over all slots so far, and the MLP behind it."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> None:
        self.config, self.prefix = config, prefix
        self.weights = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
        self.frequency_R, self.scaling = rotary_frequencies(config)

    def empty_cache(self) -> Cache:
        return Cache(*(torch.empty(0, self.config["num_key_value_heads"], self.config["head_dim"]) for _ in range(2)))

    def __call__(self, x_TI: Tensor, residual_TH: Tensor, position_T: Tensor, cache: Cache) -> Tensor:
        """Append T slots to the cache and return their states [T, H]; attention reads `x`, the residual branch is given."""
        query_TND, key_TGD, value_TGD = (
            self.linear(x_TI, f"self_attn.{name}_proj").unflatten(-1, (-1, self.config["head_dim"])) for name in "qkv"
        )
        cache.key_LGD = torch.cat((cache.key_LGD, self.rotate(key_TGD, position_T)))
        cache.value_LGD = torch.cat((cache.value_LGD, value_TGD))
        repeat = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        key_LND = cache.key_LGD.repeat_interleave(repeat, dim=1)
        value_LND = cache.value_LGD.repeat_interleave(repeat, dim=1)
        score_NTL = torch.einsum("tnd,lnd->ntl", self.rotate(query_TND, position_T), key_LND)
        score_NTL = score_NTL / self.config["head_dim"] ** 0.5
        future_TL = torch.arange(len(key_LND)) > position_T[:, None]
        weight_NTL = score_NTL.masked_fill(future_TL, float("-inf")).softmax(-1)
        attended_TND = torch.einsum("ntl,lnd->tnd", weight_NTL, value_LND)
        r_TH = residual_TH + self.linear(attended_TND.flatten(1), "self_attn.o_proj")
        m_TH = self.norm(r_TH, f"{self.prefix}.post_attention_layernorm")
        inner_TI = functional.silu(self.linear(m_TH, "mlp.gate_proj")) * self.linear(m_TH, "mlp.up_proj")
        return r_TH + self.linear(inner_TI, "mlp.down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{self.prefix}.{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Llama's RMS norm with the weight of that whole name."""
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def rotate(self, x_TND: Tensor, position_T: Tensor) -> Tensor:
        """Llama's rotary form: the first half of the head dimension pairs with the second half."""
        angle_TR = position_T[:, None].float() * self.frequency_R
        cos_TR, sin_TR = (angle_TR.cos() * self.scaling)[:, None], (angle_TR.sin() * self.scaling)[:, None]
        a_TNR, b_TNR = x_TND.chunk(2, dim=-1)
        return torch.cat((a_TNR * cos_TR - b_TNR * sin_TR, b_TNR * cos_TR + a_TNR * sin_TR), dim=-1)


class LlamaDrafter(ABC):
    """A head of one such layer: every slot reads a feature and a token, every later one a state of its own instead."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], prefix: str, embedding_VH: Tensor) -> None:
        self.config, self.embedding_VH = config, embedding_VH
        self.layer = LlamaLayer(config, tensors, prefix)

    def chain(self, features_TF: Tensor, token_U: Tensor, drafted: list[int], depth: int) -> Tensor:
        """Draft logits over the target's vocabulary, [depth, V], -inf where nothing can be drafted.

        Slots hold target features and the tokens one later; step j > 0 reads the state of step j - 1 and `drafted[j - 1]`
        (a target id) at the next position.
        """
        cache, rows, num_slots = self.layer.empty_cache(), [], len(token_U) - 1
        state_H = self.step(self.fuse(features_TF.float()), token_U[1:], torch.arange(num_slots), cache)[-1]
        for j in range(depth):
            logits_V, target_ids_V, recycled_H = self.project(state_H)
            row_V = torch.full((self.config["vocab_size"],), float("-inf"))
            row_V[target_ids_V] = logits_V
            rows.append(row_V)
            if j + 1 < depth:
                token_T, place_T = torch.tensor([drafted[j]]), torch.tensor([num_slots + j])
                state_H = self.step(recycled_H[None], token_T, place_T, cache)[-1]
        return torch.stack(rows)

    def fuse(self, features_TF: Tensor) -> Tensor:
        """What the first steps read of the target's features, [T, H]."""
        return features_TF

    @abstractmethod
    def step(self, hidden_TH: Tensor, token_T: Tensor, position_T: Tensor, cache: Cache) -> Tensor:
        """Append T slots to the cache and return their states [T, H]."""

    @abstractmethod
    def project(self, state_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the draft vocabulary, the target ids that they are of, and the state [H] that is recycled."""


def rotary_frequencies(config: dict[str, Any]) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions, and the factor on cosine and sine."""
    parameters = config["rope_parameters"]
    if parameters.get("rope_type", "default") == "default":
        exponent_R = torch.arange(0, config["head_dim"], 2).float() / config["head_dim"]
        return parameters["rope_theta"] ** -exponent_R, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_parameters")
    llama = LlamaConfig(**{name: config[name] for name in names})
    frequency_R, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](llama, torch.device("cpu"))
    return frequency_R.float(), float(scaling)


def width_values(facts: TargetFacts) -> dict[str, Any]:
    """What a config has to say of the shape of layers with these facts."""
    return {
        "num_hidden_layers": facts.num_layers,
        "hidden_act": "silu",
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab_size,
        "rms_norm_eps": facts.rms_norm_eps,
        "max_position_embeddings": facts.max_position,
    }


def rotary_problems(config: dict[str, Any], facts: TargetFacts) -> list[str]:
    """Rotary positions that are not those of the facts, in the present form and in the one before."""
    rope = facts.rope_parameters
    scaled = rope.get("rope_type", "default") != "default"
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None
    problems = value_problems(config, {"rope_parameters": rope, "rope_theta": rope["rope_theta"]})
    if config.get("rope_scaling") != scaling:
        problems.append(f"rope_scaling is {config.get('rope_scaling')!r}, expected {scaling!r}")
    return problems


def layer_problems(config: dict[str, Any], facts: TargetFacts) -> list[str]:
    """Fields of the layer that are not those of a head for this target, whose rotary positions are the head's own."""
    width = config["intermediate_size"]  # which is the head's own
    expected = {
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **width_values(replace(facts, num_layers=1, intermediate_size=width)),
    }
    problems = value_problems(config, expected) + dtype_problems(config) + rotary_problems(config, facts)
    return problems + ([] if type(width) is int else [f"intermediate_size is {width!r}, expected int"])


def layer_shapes(config: dict[str, Any], prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the layer; its attention reads inputs of `width`."""
    h, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (inner, h),
        "mlp.up_proj": (inner, h),
        "mlp.down_proj": (h, inner),
        "post_attention_layernorm": (h,),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
