"""What can be told about a target from its files and config: facts, fingerprint, and whether it is supported."""

import hashlib
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.shipped import read_shipped
from headstart.heads.store import hash_file, hash_json

# Fields of config.json that say which library wrote it, not what the model computes.
VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
SLOW_BYTES = 4e9  # take more than some seconds to hash
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


# Families whose layers are RMS norm, rotary attention, RMS norm and a gated MLP, each a plain sum into the residual.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")


def check_supported(name: str, config: Any) -> None:
    """Refuse a target whose cache cannot forget a rejected token, before its weights are loaded.

    Raises:
        WrongInput: naming the layer type and the ones that work.
    """
    refused = None
    if getattr(config, "is_encoder_decoder", False):
        refused = "encoder-decoder layers"
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    # Sliding windows longer than the context never slide.
    window = getattr(text, "sliding_window", None)
    longest = getattr(text, "max_position_embeddings", 0)
    if window and getattr(text, "use_sliding_window", True) and window < longest and not kinds:
        refused = f"sliding_attention layers (window {window} of {longest} positions)"
    for kind in kinds:
        if kind == "sliding_attention" and window and window >= longest:
            continue
        if kind not in ("full_attention", "attention"):
            refused = f"{kind} layers"
            break
    if getattr(text, "num_attention_heads", None) is None:
        refused = f"{config.model_type} layers without attention heads"
    if getattr(text, "final_logit_softcapping", None):
        raise WrongInput(
            f"target {name}: found final_logit_softcapping, expected logits that are the output head on the final state."
            "\nHeads here learn from these products. Choose a target that neither caps nor scales its logits."
        )
    if refused:
        raise WrongInput(
            f"target {name}: found {refused}, expected full_attention in every layer.\n"
            "Their caches cannot give back the tokens of a rejected draft. Choose a target with ordinary attention "
            "(Llama, Qwen2, Qwen3, Mistral without a window, ..)."
        )


def check_taps(name: str, taps: list[int], num_layers: int) -> None:
    """Refuse taps that do not exist."""
    wrong = [tap for tap in taps if not 0 <= tap <= num_layers]
    if wrong:
        raise WrongInput(
            f"head.taps: found {wrong}, expected 0 .. {num_layers} (tap L is the residual stream after L of the "
            f"{num_layers} layers of {name}).\nRemove them, or leave head.taps empty for the taps engines serve."
        )


def read_facts(name: str, folder: Path, config: Any, tokenizer: Any) -> TargetFacts:
    """The numbers heads are built from, out of the model's config and tokenizer; no weights are loaded."""
    config = config.get_text_config()
    num_heads = config.num_attention_heads
    stop_ids = set(_stop_ids(folder, config)) | set(_as_list(tokenizer.eos_token_id))
    vocab_size = config.vocab_size
    specials = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | stop_ids
    rms_norm_eps: Any = getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_epsilon", 1e-5)
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    return TargetFacts(
        name=name,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocab_size=vocab_size,
        num_tokens=min(len(tokenizer), vocab_size),
        rms_norm_eps=float(rms_norm_eps),
        rope_parameters=dict(rope),
        max_position=config.max_position_embeddings,
        special_ids=sorted(i for i in specials if i < vocab_size),
        stop_ids=sorted(i for i in stop_ids if i < vocab_size),
        fingerprint=fingerprint(folder, tokenizer, stop_ids, set(_as_list(getattr(config, "eos_token_id", None)))),
        **layer_form(config),
        shipped=read_shipped(folder, config),
        model_type=config.model_type,
        architectures=list(config.architectures or []),
    )


def layer_form(config: Any) -> dict[str, Any]:
    """Whether decoder layers are Llama-like, and how they depart from its plain ones: the last fields of the facts."""
    biased = [f"self_attn.{name}_proj" for name in "qkvo"] if getattr(config, "attention_bias", False) else []
    if config.model_type == "qwen2":
        biased = [f"self_attn.{name}_proj" for name in "qkv"]
    if getattr(config, "mlp_bias", False):
        biased += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    return {
        "llama_like": config.model_type in LLAMA_LIKE and config.hidden_act == "silu",
        "layer_biases": biased,
        "query_key_norm": config.model_type == "qwen3",
    }


def fingerprint(folder: Path, tokenizer: Any, stop_ids: set[int], config_stop_ids: set[int]) -> dict[str, str]:
    """Hashes of content, never of names: what changes the target's answers changes its fingerprint.

    That of the weights is empty where none are there: such a target can be planned with, not read.
    Stop tokens are part of the config's hash; they have an entry of their own where the generation config or the tokenizer
    says otherwise.
    """
    stops = {} if stop_ids == config_stop_ids else {"stop_ids": hash_json(sorted(stop_ids))}
    weights = sorted(folder.glob("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    template = tokenizer.chat_template
    tell_hashing(folder, sum(file.stat().st_size for file in weights))
    return {
        "weights": hash_json([_hash_once(*_identity(file)) for file in weights]) if weights else "",
        "config": hash_json({key: value for key, value in config.items() if key not in VOLATILE_CONFIG}),
        "tokenizer": hash_json([hash_file(folder / n) if (folder / n).is_file() else None for n in TOKENIZER_FILES]),
        "chat_template": hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest(),
        **stops,
    }


def _identity(file: Path) -> tuple[Path, int, int]:
    status = file.stat()
    return file, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=64)
def tell_hashing(folder: Path, size: int) -> None:
    """Say once why nothing else happens for a while."""
    if size >= SLOW_BYTES:
        print(f"hashing {size / 1e9:,.0f} GB of weights in {folder}", file=sys.stderr, flush=True)


@lru_cache(maxsize=64)
def _hash_once(file: Path, size: int, modified: int) -> str:
    """A run loads its target several times; the file is hashed again only when it has changed."""
    return hash_file(file)


def _stop_ids(folder: Path, config: Any) -> list[int]:
    """What `generate` would stop at: the generation config's end of sequence, else the model's."""
    path = folder / "generation_config.json"
    if path.is_file():
        stops = _as_list(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
        if stops:
            return stops
    return _as_list(getattr(config, "eos_token_id", None))


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [int(value)]
