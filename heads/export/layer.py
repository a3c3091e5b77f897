"""Config fields of decoder layers, as all layouts share them: allow-lists, never a copy of another config."""

from dataclasses import replace
from typing import Any

from headstart.heads.facts import TargetFacts
from headstart.heads.layer_head import LayerHead


def decoder_config(facts: TargetFacts, dtype: str) -> dict[str, Any]:
    """The shape of the layers, rotary positions with their scaling, and the precision."""
    rope = dict(facts.rope_parameters)
    config: dict[str, Any] = {
        "num_hidden_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": facts.rms_norm_eps,
        "max_position_embeddings": facts.max_position,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "vocab_size": facts.vocab_size,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return config


def layer_config(head: LayerHead, dtype: str) -> dict[str, Any]:
    """Of a head that is one Llama layer; rotary positions as trained."""
    width = head.settings.intermediate_size or head.facts.intermediate_size
    return {
        "model_type": "llama",
        **decoder_config(replace(head.rotary.facts, num_layers=1, intermediate_size=width), dtype),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
