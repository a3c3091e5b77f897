"""Heads that others published, read as starts of ours: EAGLE-3, EAGLE and Medusa folders.

    EAGLE-3     config.json of a one-layer Llama (SafeAILab, SpecForge, AngelSlim and our own exports), or with it inside
                `transformer_layer_config` (speculators); `d2t` holds offsets: draft id i stands for target id i + d2t[i]
    EAGLE       the same without taps, norms and output layer: the target's own is used
    Medusa      residual blocks and output layers under numbers (FasterDecoding) or under names (vLLM)

Names of tensors are an allow-list: one that is not read would be a part of the head that is silently lost.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from headstart.heads.description import DESCRIPTION
from headstart.heads.errors import WrongInput
from headstart.heads.published_form import form_problems
from headstart.heads.start import (
    Start,
    StoredTensor,
    read_integers,
    saved_start,
    stored_tensors,
    weight_files,
)
from headstart.heads.store import read_json

# What heads here cannot be: other values would give other logits from the same tensors.
FIXED = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "parallel_drafting": False,
    "logit_scale": 1.0,
}
FLAGS = ("norm_before_residual", "fc_norm", "norm_output")
UNREAD = r"(midlayer|layers\.0)\.self_attn\.rotary_emb\.inv_freq"  # older libraries stored what they can compute
LAYER_NAMES = r"self_attn\.[qkvo]_proj\.weight|mlp\.(gate|up|down)_proj\.weight|post_attention_layernorm\.weight"
EAGLE3_NAMES = (
    r"fc\.weight|fc_norm\.\d+\.weight|norm\.weight|lm_head\.weight|"
    rf"midlayer\.({LAYER_NAMES}|input_layernorm\.weight|hidden_norm\.weight)"
)
EAGLE1_NAMES = rf"fc\.weight|layers\.0\.({LAYER_NAMES})"


def read_start(folder: Path) -> Start:
    """The head in a folder: a checkpoint of ours, or a published one.

    Raises:
        WrongInput: no head there, weights that are pickled or damaged, or a head that ours cannot be.
    """
    if (folder / DESCRIPTION).is_file():
        return saved_start(folder)
    stored = stored_tensors(weight_files(folder))
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if not isinstance(config, dict):
        raise WrongInput(f"{folder / 'config.json'}: found {type(config).__name__}, expected an object.")
    stored = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    stored = {name: tensor for name, tensor in stored.items() if not re.fullmatch(UNREAD, name)}
    refuse(folder, form_problems(config, stored))
    if any(re.match(r"(medusa_heads?\.)?\d+\.\d+\.|blocks\.\d+\.", name) for name in stored):
        return medusa_start(folder, stored)
    inner = config.get("transformer_layer_config") or {}
    told = config.get("speculators_model_type")
    if told not in (None, "eagle3"):
        raise WrongInput(f"{folder / 'config.json'}: found speculators_model_type = {told!r}, expected eagle3.")
    if told is not None or any("hidden_norm" in name for name in stored):
        # The one flag whose default differs between the two forms.
        merged = {
            "norm_before_residual": told is not None,
            **inner,
            **{k: v for k, v in config.items() if k != "model_type"},
        }
        return eagle3_start(folder, merged, stored)
    if "fc.weight" in stored and any(name.startswith("layers.0.") for name in stored):
        return eagle1_start(folder, config, stored)
    if "embed_tokens.weight" in stored and "layers.0.input_layernorm.weight" in stored:
        raise WrongInput(
            f"{folder}: found a whole language model, expected an EAGLE-3, EAGLE or Medusa head.\nA model smaller than the "
            f"target drafts for it as a recipe says: head.kind=draft head.model={folder}. A target is no draft of itself."
        )
    raise WrongInput(
        f"{folder}: found tensors such as {', '.join(sorted(stored)[:3])}, "
        "expected those of an EAGLE-3, EAGLE or Medusa head."
    )


def eagle3_start(folder: Path, config: dict[str, Any], stored: dict[str, StoredTensor]) -> Start:
    """An EAGLE-3 folder, classic or of speculators. Raises as `read_start`."""
    problems = fixed_problems(config)
    stored = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in stored.items()}
    embedding, d2t, t2d = (stored.pop(name, None) for name in ("embed_tokens.weight", "d2t", "t2d"))
    problems += name_problems(stored, EAGLE3_NAMES)
    vocab = int(config.get("vocab_size") or 0)
    num_draft = config.get("draft_vocab_size") or vocab
    ids_V = None
    if d2t is None and num_draft != vocab:
        problems.append(f"found no tensor d2t, expected offsets for draft_vocab_size = {num_draft} of {vocab} tokens")
    elif d2t is not None and (num_draft != vocab or read_integers(d2t).any()):
        ids_V, wrong = ids_of_offsets(read_integers(d2t), None if t2d is None else read_integers(t2d), vocab)
        problems += wrong
        if d2t.shape[0] != num_draft:
            problems.append(f"found {d2t.shape[0]} offsets in d2t, expected draft_vocab_size = {num_draft}")
    taps, wrong = published_taps(config)
    problems += wrong
    if "fc.weight" not in stored or "midlayer.mlp.gate_proj.weight" not in stored:
        problems.append("found no fc.weight or no gate_proj.weight of a layer, expected an EAGLE-3 head's")
    refuse(folder, problems)
    return Start(
        folder=folder,
        layout="EAGLE-3 folder",
        kind="eagle3",
        settings={
            "draft_vocab_size": 0 if ids_V is None else len(ids_V),
            "intermediate_size": stored["midlayer.mlp.gate_proj.weight"].shape[0],
            "rope_theta": own_rope_theta(config),
            "taps": taps,
            **{name: bool(config.get(name, False)) for name in FLAGS},
        },
        target=layer_facts(config),
        tensors=stored,
        draft_ids_V=ids_V,
        embedding=embedding,
        optional=("lm_head.weight",) if ids_V is None else (),
    )


def eagle1_start(folder: Path, config: dict[str, Any], stored: dict[str, StoredTensor]) -> Start:
    """An EAGLE folder; its output layer is the target's, so any draft vocabulary will do. Raises as `read_start`."""
    embedding = stored.pop("embed_tokens.weight", None)
    bias = stored.pop("fc.bias", None)
    problems = fixed_problems(config) + name_problems(stored, EAGLE1_NAMES)
    if bias is not None and not is_zero(bias):
        problems.append("found an fc.bias that is not zero, expected a projection without one")
    if "layers.0.mlp.gate_proj.weight" not in stored:
        problems.append("found no gate_proj.weight of the layer, expected an EAGLE head's")
    refuse(folder, problems)
    width = stored["layers.0.mlp.gate_proj.weight"].shape[0]
    return Start(
        folder=folder,
        layout="EAGLE folder",
        kind="eagle1",
        settings={"intermediate_size": width, "rope_theta": own_rope_theta(config)},
        target=layer_facts(config),
        tensors=stored,
        embedding=embedding,
    )


def medusa_start(folder: Path, stored: dict[str, StoredTensor]) -> Start:
    """Medusa heads, as many as there are tensors for: published configs say other numbers. Raises as `read_start`."""
    stored = {re.sub(r"^medusa_heads?\.", "", name): tensor for name, tensor in stored.items()}
    token_map = stored.pop("token_map", None)
    numbers = [match.groups() for name in stored if (match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name))]
    outputs = {head: int(place) for head, place in numbers}  # the last place of a numbered head is its output layer
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        name = "lm_heads.0.weight" if name == "lm_head.weight" else name
        if (match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name)) and outputs[match[1]] == int(match[2]):
            name = f"lm_heads.{match[1]}.weight"
        renamed[re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)] = tensor
    problems = name_problems(renamed, r"blocks\.\d+\.layers\.\d+\.(weight|bias)|lm_heads\.\d+\.weight")
    blocks = [
        tuple(map(int, match.groups())) for n in renamed if (match := re.match(r"blocks\.(\d+)\.layers\.(\d+)\.w", n))
    ]
    num_outputs = sum(name.startswith("lm_heads.") for name in renamed)
    num_heads = len({head for head, _ in blocks})
    if not blocks or num_outputs not in (1, num_heads):
        problems.append(
            f"found {num_outputs} output layers for {num_heads} heads, expected one for each or one for all"
        )
    elif "lm_heads.0.weight" not in renamed:
        problems.append("found no output layer of head 0, expected heads that are numbered from 0")
    refuse(folder, problems)
    rows, hidden = renamed["lm_heads.0.weight"].shape
    ids_V = None if token_map is None else read_integers(token_map).astype(np.int64)
    return Start(
        folder=folder,
        layout="Medusa folder",
        kind="medusa",
        settings={
            "num_heads": num_heads,
            "num_layers": 1 + max(layer for _, layer in blocks),
            "own_output": num_outputs > 1,
            "draft_vocab_size": 0 if ids_V is None else len(ids_V),
        },
        target={"hidden_size": hidden, **({"vocab_size": rows} if ids_V is None else {})},
        tensors=renamed,
        draft_ids_V=ids_V,
        optional=tuple(f"blocks.{head}.layers.{layer}.bias" for head, layer in blocks),
    )


def fixed_problems(config: dict[str, Any]) -> list[str]:
    """Keys of the config that a head here cannot follow."""
    inner = config.get("eagle_config") or {}
    found = {**config, **{name: inner[name] for name in ("norm_before_fc",) if name in inner}}
    problems = [
        f"found {k} = {found[k]!r}, expected {v!r}" for k, v in FIXED.items() if found.get(k, v) not in (v, None)
    ]
    if not inner.get("use_aux_hidden_state", True):
        problems.append("found eagle_config.use_aux_hidden_state = false, expected a head that reads taps")
    slides = "sliding_attention" in (config.get("layer_types") or ())
    slides = slides or bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    if slides:
        problems.append(f"found sliding_window = {config.get('sliding_window')}, expected a layer that sees all slots")
    if config.get("target_hidden_size", config.get("hidden_size")) != config.get("hidden_size"):
        problems.append(f"found target_hidden_size = {config['target_hidden_size']}, expected the head's own width")
    return problems


def name_problems(stored: dict[str, StoredTensor], known: str) -> list[str]:
    unknown = sorted(tensor.name for name, tensor in stored.items() if not re.fullmatch(known, name))
    return [f"found the tensors {', '.join(unknown)}, which heads of this kind do not have"] if unknown else []


def is_zero(stored: StoredTensor) -> bool:
    with safe_open(stored.file, framework="pt") as file:
        return not bool(file.get_tensor(stored.name).any())


def refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        raise WrongInput(
            f"{folder} is no head that can be gone on with:\n" + "\n".join(f"  - {text}" for text in problems)
        )


def layer_facts(config: dict[str, Any]) -> dict[str, Any]:
    """What the config of a one-layer head says of its target."""
    width, num_heads = config.get("hidden_size", 0), config.get("num_attention_heads", 0)
    facts = {
        "hidden_size": width,
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or width // max(num_heads, 1),
        "vocab_size": config.get("vocab_size"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
    }
    return facts | ({} if own_rope_theta(config) else {"rope_parameters": rope_of(config)})


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in transformers' present form, out of that or the one before. A config without has base 10,000."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {name: value for name, value in told.items() if value is not None}
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    return {"rope_theta": float(config.get("rope_theta") or 10000.0), **rope, "rope_type": kind}


def own_rope_theta(config: dict[str, Any]) -> float:
    """Base of unscaled rotary positions; 0 where they are scaled, which heads here take over from their target only."""
    rope = rope_of(config)
    return float(rope["rope_theta"]) if rope["rope_type"] == "default" else 0.0


def published_taps(config: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Tap ids, none meaning the default ones, and what is wrong with them.

    At the top level they count layers before the tap. Inside `eagle_config` two conventions are in use: the same, or the
    index of the layer whose output is taken, whose default list begins with 1 and stands for [2, ..].
    """
    inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = config.get("eagle_aux_hidden_state_layer_ids")
    if taps is None and inner:
        if inner[0] not in (1, 2):
            text = f"found eagle_config.eagle_aux_hidden_state_layer_ids = {inner}, which tools read in two ways; "
            text += "expected the list at the top level of config.json, each id the number of layers before the tap"
            return [], [text]
        taps = [tap + 1 for tap in inner] if inner[0] == 1 else inner
    return sorted(set(taps or [])), []


def ids_of_offsets(d2t_V: np.ndarray, t2d: np.ndarray | None, vocab: int) -> tuple[np.ndarray | None, list[str]]:
    """Target ids of a published vocabulary map, and what is wrong with it."""
    place_V = np.arange(len(d2t_V))
    ids_V = place_V + d2t_V.astype(np.int64)
    rising = bool((np.diff(ids_V) > 0).all())
    absolute = bool((np.diff(d2t_V) > 0).all()) and bool(len(d2t_V) > 1)
    if not rising or ids_V[0] < 0 or ids_V[-1] >= vocab:
        text = f"found values in d2t by which draft ids would stand for {ids_V.min()} .. {ids_V.max()}"
        text += "" if rising else ", not ascending"
        hint = "; these are the ids themselves" if absolute and d2t_V[-1] < vocab else ""
        return None, [f"{text}{hint}; expected offsets: target id = index + d2t[index], within 0 .. {vocab - 1}"]
    doubt = ""
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), ids_V):
        doubt = "t2d marks others"
    elif t2d is None and absolute:
        doubt = "they may be the ids themselves, and no t2d is there to tell"
    if doubt:
        text = f"found values in d2t that are no offsets for certain ({doubt}), expected target id = index + d2t[index]"
        return None, [text]
    return ids_V, []
