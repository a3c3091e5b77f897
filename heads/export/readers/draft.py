"""An exported draft model as every engine with draft models reads it: an ordinary language model, by transformers' class."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.export.readers.files import (
    DTYPES,
    dtype_problems,
    key_problems,
    read_config_file,
    read_weights,
    refuse_any,
    tensor_problems,
    value_problems,
)
from headstart.heads.export.readers.llama_layer import rotary_problems, width_values
from headstart.heads.facts import TargetFacts
from headstart.heads.model_files import read_config, read_model

BIASES = {"attention_bias": "self_attn.o_proj", "mlp_bias": "mlp.up_proj"}
# What each family's config says of biases; the rest is built into its layers.
FAMILIES = {
    "llama": ("LlamaForCausalLM", ("attention_bias", "mlp_bias")),
    "qwen2": ("Qwen2ForCausalLM", ()),
    "qwen3": ("Qwen3ForCausalLM", ("attention_bias",)),
}
KEYS = {
    *("architectures", "model_type", "num_hidden_layers", "hidden_act", "dtype", "torch_dtype", "tie_word_embeddings"),
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("max_position_embeddings", "vocab_size", "rope_parameters", "rope_theta"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


class ServedDraft:
    """The loaded model, which reads the text alone."""

    taps: list[int] = []

    def __init__(self, model: Any, num_tokens: int) -> None:
        self.model, self.num_tokens = model, num_tokens

    @torch.no_grad()
    def chain(self, features_TF: Tensor, token_U: Tensor, drafted: list[int], depth: int) -> Tensor:
        """Draft logits [depth, V] behind the text and what is drafted, -inf for rows that no token has."""
        text_W = torch.cat((token_U, torch.tensor(drafted[: depth - 1], dtype=torch.int64)))
        logits_KV: Tensor = self.model(text_W[None]).logits[0, len(token_U) - 1 :].float()
        logits_KV[:, self.num_tokens :] = float("-inf")
        return logits_KV


def read_draft(folder: Path, form: TargetFacts, target: TargetFacts) -> ServedDraft:
    """Load a folder that is a language model of this form, beside a target.

    Raises:
        WrongInput: everything found wrong with the folder, in one message.
    """
    config, tensors = read_config_file(folder), read_weights(folder)
    family = config.get("model_type")
    if family not in FAMILIES:
        refuse_any(folder, [f"model_type is {family!r}, expected one of {', '.join(FAMILIES)}"])
    architecture, biases = FAMILIES[str(family)]
    refuse_any(folder, key_problems(config, KEYS | set(biases), {"rope_scaling"}))
    expected = {
        "architectures": [architecture],
        **width_values(replace(form, vocab_size=target.vocab_size)),
        **{name: BIASES[name] in form.layer_biases for name in biases},
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": None,
        "eos_token_id": target.stop_ids,
        "pad_token_id": None,
    }
    problems = value_problems(config, expected) + dtype_problems(config) + rotary_problems(config, form)
    refuse_any(folder, problems)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        places = AutoModelForCausalLM.from_config(read_config(folder)).state_dict()
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    shapes = {name: tuple(tensor.shape) for name, tensor in places.items() if name not in tied}
    refuse_any(folder, tensor_problems(tensors, shapes, dict.fromkeys(shapes, DTYPES[config["dtype"]])))
    return ServedDraft(read_model(str(folder), folder, dtype=torch.float32).eval(), target.num_tokens)
