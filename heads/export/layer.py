"""Config fields of a head that is one Llama layer, as its layouts share them."""

from typing import Any

from headstart.heads.layer_head import LayerHead


def layer_config(head: LayerHead, dtype: str) -> dict[str, Any]:
    """An allow-list: the shape of the layer from the target's facts, and rotary positions as trained."""
    facts, rope = head.facts, dict(head.rotary.facts.rope_parameters)
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": facts.hidden_size,
        "intermediate_size": head.settings.intermediate_size or facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": facts.rms_norm_eps,
        "max_position_embeddings": facts.max_position,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "vocab_size": facts.vocab_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return config
