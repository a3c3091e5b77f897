"""Laws of a published folder's form: what is of another type than heads have is named, and never read as something else."""

import json

import pytest
import torch
from safetensors.torch import save_file

from headstart.heads.errors import WrongInput
from headstart.heads.published import read_start
from headstart.heads.settings import MedusaSettings
from headstart.heads.warm_start import start_problems

EAGLE = {"fc.weight": torch.ones(8, 16), "layers.0.mlp.gate_proj.weight": torch.ones(4, 8)}
EAGLE3 = {"fc.weight": torch.ones(8, 24), "midlayer.hidden_norm.weight": torch.ones(8),
          "midlayer.mlp.gate_proj.weight": torch.ones(4, 8), "d2t": torch.tensor([0, 4, 4])}  # fmt: skip
MEDUSA = {
    "blocks.0.layers.0.weight": torch.ones(8, 8),
    "lm_head.weight": torch.ones(3, 8),
    "token_map": torch.arange(3),
}
CONFIG = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 12, "draft_vocab_size": 3}


def write(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize("tensors", [EAGLE, EAGLE3, MEDUSA], ids=["eagle", "eagle3", "medusa"])
def test_what_is_of_the_right_form_is_read(tensors, tmp_path):
    nothing = {"eagle_config": None, "rope_parameters": {"rope_theta": None}, "rope_theta": 500}
    assert read_start(write(tmp_path, tensors, CONFIG | nothing)).tensors


ENTRIES = {
    "norm_before_residual": "false", "num_hidden_layers": True, "vocab_size": 12.0, "rope_theta": "10000",
    "rope_parameters": "default", "transformer_layer_config": "llama", "layer_types": 1, "quantization_config": {"bits": 8},
    "eagle_aux_hidden_state_layer_ids": [1.5, 2], "eagle_config": [1],
}  # fmt: skip


@pytest.mark.parametrize("tensors", [EAGLE, EAGLE3, MEDUSA], ids=["eagle", "eagle3", "medusa"])
def test_every_entry_of_another_type_is_named_at_once(tensors, tmp_path):
    with pytest.raises(WrongInput) as caught:
        read_start(write(tmp_path, tensors, CONFIG | ENTRIES))
    assert all(f"found {name}" in str(caught.value) for name in ENTRIES)
    inner = {"eagle_config": {"use_aux_hidden_state": "no"}, "rope_parameters": {"rope_theta": "x"}}
    with pytest.raises(WrongInput, match=r"(?s)eagle_config\.use_aux_hidden_state = 'no'.*rope_parameters\.rope_theta"):
        read_start(write(tmp_path, tensors, CONFIG | inner))


WRONG = [
    (EAGLE, "fc.weight", lambda x: x.to(torch.float8_e4m3fn), "F8_E4M3"),
    (EAGLE, "fc.weight", lambda x: x.to(torch.int8), "I8"),
    (EAGLE3, "midlayer.mlp.gate_proj.weight", lambda x: x > 0, "BOOL"),
    (EAGLE3, "midlayer.mlp.gate_proj.weight", lambda x: x[0, 0].clone(), r"shape \[\]"),
    (EAGLE3, "d2t", lambda x: x[None].clone(), r"shape \[1, 3\]"),
    (EAGLE3, "d2t", lambda x: x.bfloat16(), "BF16"),
    (EAGLE3, "d2t", lambda x: x[:2].clone(), "expected draft_vocab_size = 3"),
    (MEDUSA, "lm_head.weight", lambda x: x[0].clone(), r"shape \[8\]"),
    (MEDUSA, "token_map", lambda x: x + 0.3, "F32"),
    (MEDUSA, "token_map", lambda x: x[:0].clone(), r"shape \[0\]"),
]


@pytest.mark.parametrize(("tensors", "name", "change", "said"), WRONG)
def test_a_tensor_of_another_type_or_shape_is_named(tensors, name, change, said, tmp_path):
    with pytest.raises(WrongInput, match=f"{name}.*{said}|{said}" if name == "d2t" else f"{name}.*{said}"):
        read_start(write(tmp_path, tensors | {name: change(tensors[name])}, CONFIG))


def test_heads_that_are_not_numbered_from_0_are_refused(tmp_path):
    renamed = {name.replace("lm_head.", "lm_heads.1."): tensor for name, tensor in MEDUSA.items()}
    with pytest.raises(WrongInput, match="no output layer of head 0"):
        read_start(write(tmp_path, renamed, CONFIG))


def test_a_map_of_ids_below_0_is_refused(tiny_target, tmp_path):
    start = read_start(write(tmp_path, MEDUSA | {"token_map": torch.arange(-1, 2)}, CONFIG))
    problems = [text for _, text in start_problems(start, MedusaSettings(), tiny_target.facts, tmp_path)]
    assert any("found draft ids -1 to 1" in text for text in problems)
