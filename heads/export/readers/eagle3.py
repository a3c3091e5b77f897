"""An exported EAGLE-3 folder as a serving engine reads it: its loading rules and its forward, written a second time.

Nothing here uses the head's own code, so a folder that reproduces the head's logits through this reader is one whose
names, shapes, order and flags mean to an engine what they mean to us. Engines are lenient (missing tensors stay
uninitialised, wrong tap ids only lower acceptance); this reader refuses all of that.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.store import read_json

EXTRA_FILES = {"config.json", "model.safetensors", "README.md", "headstart.json"}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
KEYS = {
    *("architectures", "model_type", "num_hidden_layers", "hidden_act", "attention_bias", "mlp_bias"),
    *("dtype", "torch_dtype", "hidden_size", "target_hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"),
    *("vocab_size", "draft_vocab_size", "tie_word_embeddings", "rope_parameters", "rope_theta"),
    *("num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids", "eagle_config", *FLAGS),
}
OPTIONAL_KEYS = {"rope_scaling"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def taps_as_read(config: dict[str, Any], engine: str) -> list[int]:
    """Boundary ids (tap L = residual stream after L layers) that `engine` captures for this config.

    vLLM and llama.cpp read the top-level list as boundaries. SGLang reads only `eagle_config`, as indices of the layer
    whose output is taken: one lower (its llama and qwen targets always add one, DeepSeek ones only when the first id is
    1, so the two rules agree exactly on lists that start with 1).
    """
    if engine != "sglang":
        ids = list(config["eagle_aux_hidden_state_layer_ids"])
        return sorted(set(ids)) if engine == "vllm" else ids
    ids = list(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    if ids[:1] != [1]:
        raise WrongInput(
            f"eagle_config lists the tap ids {ids}; SGLang's targets agree on what they mean only if the first is 1."
        )
    return [i + 1 for i in ids]


@dataclass
class Cache:
    """Rotated keys and values [L, G, D] of the slots read so far."""

    key_LGD: Tensor
    value_LGD: Tensor


class ServedEagle3:
    """The loaded head: fuse taps, take one step, map draft ids to target ids."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], taps: list[int], embedding_VH: Tensor
    ) -> None:
        self.config, self.taps, self.embedding_VH = config, taps, embedding_VH
        self.weights = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
        num_draft = config["draft_vocab_size"]
        offset_V = tensors["d2t"] if "d2t" in tensors else torch.zeros(num_draft, dtype=torch.int64)
        self.target_ids_V = torch.arange(num_draft) + offset_V
        self.frequency_R, self.scaling = _rotary_frequencies(config)

    def fuse(self, taps_TF: Tensor) -> Tensor:
        """Feature [T, H] of the concatenated taps, in ascending tap order."""
        taps_TF = taps_TF.float()
        if self.config["fc_norm"]:
            chunks = taps_TF.chunk(self.config["num_aux_hidden_states"], dim=-1)
            taps_TF = torch.cat([self._norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return functional.linear(taps_TF, self.weights["fc.weight"])

    def chain(self, taps_TF: Tensor, next_token_T: Tensor, drafted: list[int], depth: int) -> Tensor:
        """Draft logits over the target's vocabulary, [depth, V], -inf where nothing can be drafted.

        The T slots hold target features and the tokens one later; step j > 0 reads the state of step j - 1 and
        `drafted[j - 1]` (a target id) at the next position.
        """
        position_T = torch.arange(len(next_token_T))
        cache = Cache(*(torch.empty(0, self.config["num_key_value_heads"], self.config["head_dim"]) for _ in range(2)))
        state_H = self._layer(self.fuse(taps_TF), next_token_T, position_T, cache)[-1]
        rows = []
        for j in range(depth):
            normed_H = self._norm(state_H, "norm")
            row_V = torch.full((self.config["vocab_size"],), float("-inf"))
            row_V[self.target_ids_V] = functional.linear(normed_H, self.weights["lm_head.weight"])
            rows.append(row_V)
            if j + 1 < depth:
                recycled_H = normed_H if self.config["norm_output"] else state_H
                token_T, place_T = torch.tensor([drafted[j]]), torch.tensor([len(next_token_T) + j])
                state_H = self._layer(recycled_H[None], token_T, place_T, cache)[-1]
        return torch.stack(rows)

    def _layer(self, hidden_TH: Tensor, token_T: Tensor, position_T: Tensor, cache: Cache) -> Tensor:
        """Append T slots to the cache and return their states before the final norm."""
        normed_TH = self._norm(hidden_TH, "midlayer.hidden_norm")
        embedded_TH = self._norm(self.embedding_VH[token_T].float(), "midlayer.input_layernorm")
        residual_TH = normed_TH if self.config["norm_before_residual"] else hidden_TH
        x_TI = torch.cat((embedded_TH, normed_TH), dim=-1)
        query_TND, key_TGD, value_TGD = (
            functional.linear(x_TI, self.weights[f"midlayer.self_attn.{name}_proj.weight"]).unflatten(
                -1, (-1, self.config["head_dim"])
            )
            for name in "qkv"
        )
        cache.key_LGD = torch.cat((cache.key_LGD, self._rotate(key_TGD, position_T)))
        cache.value_LGD = torch.cat((cache.value_LGD, value_TGD))
        repeat = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        key_LND = cache.key_LGD.repeat_interleave(repeat, dim=1)
        value_LND = cache.value_LGD.repeat_interleave(repeat, dim=1)
        score_NTL = torch.einsum("tnd,lnd->ntl", self._rotate(query_TND, position_T), key_LND)
        score_NTL = score_NTL / self.config["head_dim"] ** 0.5
        future_TL = torch.arange(len(key_LND)) > position_T[:, None]
        weight_NTL = score_NTL.masked_fill(future_TL, float("-inf")).softmax(-1)
        attended_TND = torch.einsum("ntl,lnd->tnd", weight_NTL, value_LND)
        r_TH = residual_TH + functional.linear(
            attended_TND.flatten(1), self.weights["midlayer.self_attn.o_proj.weight"]
        )
        m_TH = self._norm(r_TH, "midlayer.post_attention_layernorm")
        gate_TI = functional.linear(m_TH, self.weights["midlayer.mlp.gate_proj.weight"])
        up_TI = functional.linear(m_TH, self.weights["midlayer.mlp.up_proj.weight"])
        return r_TH + functional.linear(functional.silu(gate_TI) * up_TI, self.weights["midlayer.mlp.down_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _rotate(self, x_TND: Tensor, position_T: Tensor) -> Tensor:
        """Llama's rotary form: the first half of the head dimension pairs with the second half."""
        angle_TR = position_T[:, None].float() * self.frequency_R
        cos_TR, sin_TR = (angle_TR.cos() * self.scaling)[:, None], (angle_TR.sin() * self.scaling)[:, None]
        a_TNR, b_TNR = x_TND.chunk(2, dim=-1)
        return torch.cat((a_TNR * cos_TR - b_TNR * sin_TR, b_TNR * cos_TR + a_TNR * sin_TR), dim=-1)


def read_eagle3(folder: Path, engine: str, facts: TargetFacts, embedding_VH: Tensor) -> ServedEagle3:
    """Load an exported folder by the rules of `engine`, for a target with these facts and this embedding.

    Raises:
        WrongInput: everything found wrong with the folder, in one message.
    """
    problems: list[str] = []
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not {"config.json", "model.safetensors"} <= names:
        raise WrongInput(f"{folder}: found {sorted(names)}, expected config.json and model.safetensors.")
    if extra := names - EXTRA_FILES:
        problems.append(f"files that an engine may load too: {sorted(extra)}")
    config = read_json(folder / "config.json")
    problems += _config_problems(config, facts)
    if problems:
        _refuse(folder, problems)
    taps = taps_as_read(config, engine)
    if taps != config["eagle_aux_hidden_state_layer_ids"]:
        problems.append(f"{engine} would capture the taps {taps}, not {config['eagle_aux_hidden_state_layer_ids']}")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    problems += _tensor_problems(tensors, config)
    if problems:
        _refuse(folder, problems)
    return ServedEagle3(config, tensors, taps, embedding_VH.cpu())


def _refuse(folder: Path, problems: list[str]) -> None:
    raise WrongInput(f"{folder} would not be served as it was trained:\n" + "\n".join(f"  - {p}" for p in problems))


def _config_problems(config: dict[str, Any], facts: TargetFacts) -> list[str]:
    if not isinstance(config, dict):
        return [f"config.json holds {type(config).__name__}, expected an object"]
    missing, unknown = sorted(KEYS - config.keys()), sorted(config.keys() - KEYS - OPTIONAL_KEYS)
    if missing or unknown:
        return [f"config.json misses {missing} and holds the unknown {unknown}"]
    wanted = {"draft_vocab_size": int, "num_aux_hidden_states": int, "eagle_aux_hidden_state_layer_ids": list}
    wanted |= {"vocab_size": int, "intermediate_size": int, "eagle_config": dict}
    if wrong := [f"{k} is {config[k]!r}, expected {t.__name__}" for k, t in wanted.items() if type(config[k]) is not t]:
        return wrong
    rope = facts.rope_parameters
    scaled = rope.get("rope_type", "default") != "default"
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_fc": False,
        "tie_word_embeddings": False,
        "torch_dtype": config["dtype"],
        "hidden_size": facts.hidden_size,
        "target_hidden_size": facts.hidden_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab_size,
        "rms_norm_eps": facts.rms_norm_eps,
        "max_position_embeddings": facts.max_position,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
    }
    problems = [f"{k} is {config[k]!r}, expected {v!r}" for k, v in expected.items() if config[k] != v]
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None
    if config.get("rope_scaling") != scaling:
        problems.append(f"rope_scaling is {config.get('rope_scaling')!r}, expected {scaling!r}")
    problems += [f"{k} is {config[k]!r}, expected true or false" for k in FLAGS if not isinstance(config[k], bool)]
    if config["dtype"] not in DTYPES:
        problems.append(f"dtype is {config['dtype']!r}, expected one of {', '.join(DTYPES)}")
    if not 0 < config["draft_vocab_size"] <= config["vocab_size"]:
        problems.append(f"draft_vocab_size {config['draft_vocab_size']} is not within 1..{config['vocab_size']}")
    ids, inner = config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    if ids != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] > facts.num_layers:
        problems.append(f"tap ids {ids} are not ascending, distinct and within 0..{facts.num_layers}")
    if set(inner) != {"use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids"} or not inner["use_aux_hidden_state"]:
        problems.append(f"eagle_config is {inner}, expected use_aux_hidden_state = true and the tap ids")
    elif inner["eagle_aux_hidden_state_layer_ids"] not in (ids, [i - 1 for i in ids]):
        problems.append(f"eagle_config lists taps {inner['eagle_aux_hidden_state_layer_ids']}, the top level {ids}")
    if config["num_aux_hidden_states"] != len(ids):
        problems.append(f"num_aux_hidden_states is {config['num_aux_hidden_states']}, but {len(ids)} taps are listed")
    return problems


def _tensor_problems(tensors: dict[str, Tensor], config: dict[str, Any]) -> list[str]:
    h, inner, num_taps = config["hidden_size"], config["intermediate_size"], config["num_aux_hidden_states"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    vocab, num_draft, dtype = config["vocab_size"], config["draft_vocab_size"], DTYPES[config["dtype"]]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, num_taps * h),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (num_draft, h),
    }
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(num_taps)}
    dtypes = dict.fromkeys(shapes, dtype)
    if num_draft != vocab:
        shapes |= {"d2t": (num_draft,), "t2d": (vocab,)}
        dtypes |= {"d2t": torch.int64, "t2d": torch.bool}
    problems = [f"tensor {name} is missing" for name in shapes.keys() - tensors.keys()]
    problems += [f"tensor {name} is not read, so it should not be there" for name in tensors.keys() - shapes.keys()]
    for name in sorted(shapes.keys() & tensors.keys()):
        found = tensors[name]
        if tuple(found.shape) != shapes[name] or found.dtype != dtypes[name]:
            problems.append(f"tensor {name} is {tuple(found.shape)} {found.dtype}, not {shapes[name]} {dtypes[name]}")
        elif found.is_floating_point() and not found.isfinite().all():
            problems.append(f"tensor {name} holds values that are not finite")
    if num_draft != vocab and not problems:
        ids_V = torch.arange(num_draft) + tensors["d2t"]
        if not (ids_V.diff() > 0).all() or ids_V[0] < 0 or ids_V[-1] >= vocab:
            problems.append(f"arange + d2t is not strictly ascending within 0..{vocab - 1}: d2t must hold offsets")
        elif not torch.equal(tensors["t2d"].nonzero().squeeze(1), ids_V):
            problems.append("t2d does not mark the tokens that d2t maps to")
    return sorted(problems)


def _rotary_frequencies(config: dict[str, Any]) -> tuple[Tensor, float]:
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
