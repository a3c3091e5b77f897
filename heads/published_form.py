"""The form of a published head's folder: types of what its config says, types and dimensions of its tensors.

An entry of another type would be read as another value (the text "false" as true), and weights stored as integers or in 8
bits are none without the scales that a quantisation keeps apart.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from headstart.heads.start import StoredTensor

MAPS = ("d2t", "t2d", "token_map")
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")

INTEGER, NUMBER, FLAG, OBJECT = "an integer", "a number", "true or false", "an object"
TEXTS, IDS = "a list of texts", "a list of integers"
ENTRIES = {
    **dict.fromkeys(("num_hidden_layers", "hidden_size", "target_hidden_size", "intermediate_size", "head_dim"), INTEGER),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "vocab_size", "draft_vocab_size"), INTEGER),
    **dict.fromkeys(("sliding_window",), INTEGER),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "logit_scale", "factor"), NUMBER),
    **dict.fromkeys(("norm_before_residual", "fc_norm", "norm_output", "norm_before_fc", "parallel_drafting"), FLAG),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "use_aux_hidden_state"), FLAG),
    **dict.fromkeys(("eagle_config", "rope_parameters", "rope_scaling", "transformer_layer_config"), OBJECT),
    "layer_types": TEXTS,
    "eagle_aux_hidden_state_layer_ids": IDS,
}  # fmt: skip


def form_problems(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Everything in a config and its tensors that is of another form than published heads have; null is no entry."""
    problems = [*entry_problems(config), *tensor_problems(stored)]
    if config.get("quantization_config"):
        problems.append("found quantization_config, expected the head's own weights, which nobody quantised")
    return problems


def entry_problems(config: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for name, value in config.items():
        if name not in ENTRIES or value is None:
            continue
        if not is_of(value, ENTRIES[name]):
            yield f"found {where}{name} = {value!r}, expected {ENTRIES[name]}"
        elif ENTRIES[name] == OBJECT:
            yield from entry_problems(value, f"{where}{name}.")


def is_of(value: Any, form: str) -> bool:
    if form in (TEXTS, IDS):
        return isinstance(value, list) and all(type(item) is (str if form == TEXTS else int) for item in value)
    return type(value) in {INTEGER: (int,), NUMBER: (int, float), FLAG: (bool,), OBJECT: (dict,)}[form]


def tensor_problems(stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    for name, tensor in stored.items():
        listed = name in MAPS
        dimensions = 1 if listed or "norm" in name or name.endswith("bias") else 2
        if tensor.dtype not in (INTEGERS if listed else FLOATS) or len(tensor.shape) != dimensions or 0 in tensor.shape:
            kind = "integers" if listed else "floating-point numbers of 16 bits or more"
            yield (
                f"found {tensor.name} of type {tensor.dtype} and shape {list(tensor.shape)}, expected {kind} in "
                f"{dimensions} dimension{'s' * (dimensions - 1)}"
            )
