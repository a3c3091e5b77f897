"""The laws of an exported folder: it drafts what the head drafts, or it is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.eagle3 import Eagle3
from headstart.heads.errors import WrongInput
from headstart.heads.export.card import RECORD, RECORD_SCHEMA
from headstart.heads.export.comparison import difference, golden, rounded
from headstart.heads.export.eagle3 import config as eagle3_config
from headstart.heads.export.folder import check_folder_name, misleading_path
from headstart.heads.export.readers.eagle3 import KEYS, OPTIONAL_KEYS, read_eagle3
from headstart.heads.export.scheme import write_head
from headstart.heads.settings import Eagle3Settings
from headstart.heads.store import write_json
from headstart.heads.vocabulary import choose_draft_vocabulary

TAPS = [2, 3, 4]


def make_head(target, draft_vocab_size=128, **settings):
    """A head of the tiny target with random norms, so that every tensor matters."""
    torch.manual_seed(3)
    facts = target.facts
    ids = choose_draft_vocabulary(np.zeros(facts.vocab_size), draft_vocab_size, facts)
    head = Eagle3(Eagle3Settings(draft_vocab_size=draft_vocab_size, **settings), facts, torch.from_numpy(ids))
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    head.load_target(target, initialise=False)
    return head


def chain_difference(head, served, depth=4, seed=0):
    return difference(golden(head, depth=depth, seed=seed), served)


def read(folder, head, engine="vllm"):
    return read_eagle3(folder, engine, head.facts, head.embedding_VH)


@pytest.fixture(scope="module")
def head(tiny_target):
    return make_head(tiny_target)


@pytest.fixture(scope="module")
def folder(head, tmp_path_factory):
    return write_head(head, tmp_path_factory.mktemp("export") / "vllm", "vllm")


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copied")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, changes):
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def test_names_and_shapes_are_the_published_ones(folder, head):
    tensors = load_file(folder / "model.safetensors")
    h, i, kv = 64, 160, 32
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "fc.weight": (h, 3 * h),
        "midlayer.self_attn.q_proj.weight": (h, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, h),
        "midlayer.mlp.gate_proj.weight": (i, h),
        "midlayer.mlp.up_proj.weight": (i, h),
        "midlayer.mlp.down_proj.weight": (h, i),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (128, h),
        "d2t": (128,),
        "t2d": (512,),
    }
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"], config["num_hidden_layers"]) == (512, 128, 1)
    assert config["hidden_size"] == config["target_hidden_size"] == 64


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"norm_before_residual": True}, {"norm_output": True}, {"fc_norm": True}, {"taps": [0, 4]}, {"taps": [1]}],
)
def test_served_chains_equal_the_heads_for_every_flag_and_target(settings, tied, request, tmp_path):
    target = request.getfixturevalue("tiny_tied_target" if tied else "tiny_target")
    head = make_head(target, **settings)
    served = read(write_head(head, tmp_path / "vllm", "vllm"), head)
    assert served.taps == head.taps
    for seed in range(5):
        assert chain_difference(head, served, depth=5, seed=seed) < 1e-4
    assert json.loads((tmp_path / "vllm/config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}])
def test_scaled_rotary_positions_survive_the_export(rope, tiny_target, tmp_path):
    head = make_head(tiny_target)
    facts = replace(head.facts, rope_parameters={"rope_theta": 1e4, **rope})
    scaled = Eagle3(head.settings, facts, head.draft_ids_V)
    scaled.load_state_dict(head.state_dict())
    scaled.load_target(tiny_target, initialise=False)
    folder = write_head(scaled, tmp_path / "vllm", "vllm")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == rope


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_flipped_flag_changes_the_logits(flag, copied, head):
    edit_config(copied, **{flag: True})
    assert chain_difference(head, read(copied, head)) > 1e-2


def test_a_flipped_fc_norm_is_refused_by_its_tensors(copied, head):
    edit_config(copied, fc_norm=True)
    with pytest.raises(WrongInput, match=r"tensor fc_norm\.0\.weight is missing"):
        read(copied, head)


def test_no_flag_is_left_to_an_engines_default(folder):
    config = json.loads((folder / "config.json").read_text())
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias"):
        assert config[flag] is False
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_the_vocabulary_map_comes_back_from_its_offsets(folder, head):
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(128) + tensors["d2t"], head.draft_ids_V)
    assert torch.equal(tensors["t2d"].nonzero().squeeze(1), head.draft_ids_V)
    assert torch.equal(read(folder, head).target_ids_V, head.draft_ids_V)


def test_the_vocabulary_is_the_embedding_tables_and_a_full_one_needs_no_map(tiny_target, tmp_path):
    padded = make_head(tiny_target, draft_vocab_size=0)  # every token of the tokenizer, fewer than the table's rows
    config = json.loads((write_head(padded, tmp_path / "padded", "vllm") / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"]) == (512, tiny_target.facts.num_tokens)

    full = Eagle3(padded.settings, padded.facts, torch.arange(512))
    full.load_target(tiny_target, initialise=False)
    folder = write_head(full, tmp_path / "full", "vllm")
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 512
    names = load_file(folder / "model.safetensors").keys()
    assert not {"d2t", "t2d"} & names
    assert "lm_head.weight" in names


def test_taps_stand_in_three_places(folder, head):
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == head.taps
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": head.taps}
    assert config["num_aux_hidden_states"] == len(head.taps)


def test_sglang_gets_ids_one_lower_because_it_adds_one(tiny_target, tmp_path):
    head = make_head(tiny_target, taps=[2, 3])
    folder = write_head(head, tmp_path / "sglang", "sglang")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3]
    assert read(folder, head, "sglang").taps == read(folder, head, "vllm").taps == [2, 3]


def test_a_folder_for_vllm_is_refused_as_sglang_reads_it(tiny_target, tmp_path):
    head = make_head(tiny_target, taps=[2, 3])
    folder = write_head(head, tmp_path / "vllm", "vllm")
    with pytest.raises(WrongInput, match="only if the first is 1"):
        read(folder, head, "sglang")


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        ("sglang", {"taps": [1, 2, 3]}, "only if the first tap is 2"),
        ("sglang", {"taps": TAPS}, "never captured"),
        ("sglang", {"taps": [2, 3], "norm_before_residual": True}, "ignored"),
        ("llamacpp", {"taps": [1, 2]}, "exactly 3"),
        ("llamacpp", {"fc_norm": True}, "fc_norm"),
        ("llamacpp", {"norm_output": True}, "ignored"),
        ("llamacpp", {"taps": TAPS}, "next-token layers"),
        ("trtllm", {"norm_before_residual": True}, "ignored"),
        ("trtllm", {"taps": [0, 2]}, "never captured"),
        ("trtllm", {"taps": [2]}, "past the fusing projection"),
        ("tgi", {}, "no writer, expected one of vllm, speculators"),
    ],
)
def test_what_an_engine_would_ignore_or_misread_is_not_written(engine, settings, message, tiny_target, tmp_path):
    with pytest.raises(WrongInput, match=message):
        write_head(make_head(tiny_target, **settings), tmp_path / "out", engine)
    assert list(tmp_path.iterdir()) == []


def test_the_config_is_an_allow_list(head, tiny_target):
    config = eagle3_config(head, "vllm", "float32")
    assert config.keys() <= KEYS | OPTIONAL_KEYS
    borrowed = tiny_target.model.config.to_dict().keys() - KEYS - OPTIONAL_KEYS
    assert len(borrowed) > 10
    assert not borrowed & config.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_output": None}, "misses"),
        ({"use_cache": True}, "unknown"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"vocab_size": 500}, "vocab_size is 500"),
        ({"max_position_embeddings": 2048}, "max_position_embeddings"),
        ({"rope_theta": 500.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling"),
        ({"draft_vocab_size": "128"}, "expected int"),
        ({"eagle_config": []}, "expected dict"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"norm_output": 0}, "true or false"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}, "not ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "the top level"),
        ({"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "eagle_config"),
        ({"draft_vocab_size": 512}, "lm_head"),
        ({"dtype": "bfloat16", "torch_dtype": "bfloat16"}, "bfloat16"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused(changes, message, copied, head):
    edit_config(copied, **changes)
    with pytest.raises(WrongInput, match=message):
        read(copied, head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"midlayer.hidden_norm.weight": None}, "missing"),
        ({"d2t": None}, "d2t is missing"),
        ({"embed_tokens.weight": torch.zeros(512, 64)}, "should not be there"),
        ({"lm_head.weight": torch.zeros(127, 64)}, "lm_head"),
        ({"lm_head.weight": torch.zeros(128, 64, dtype=torch.bfloat16)}, "lm_head"),
        ({"norm.weight": torch.full((64,), torch.nan)}, "not finite"),
        ({"d2t": torch.zeros(128, dtype=torch.int32)}, "d2t"),
        ({"d2t": torch.arange(128) * 3}, "t2d does not mark|strictly ascending"),
        ({"d2t": torch.arange(128).flip(0)}, "strictly ascending"),
        ({"d2t": torch.arange(128) * 4}, "strictly ascending"),
        ({"t2d": torch.zeros(512, dtype=torch.bool)}, "t2d does not mark"),
    ],
)
def test_wrong_tensors_are_refused(changes, message, copied, head):
    edit_tensors(copied, changes)
    with pytest.raises(WrongInput, match=message):
        read(copied, head)


def test_absolute_ids_in_place_of_offsets_are_refused(copied, head):
    edit_tensors(copied, {"d2t": head.draft_ids_V.clone()})
    with pytest.raises(WrongInput, match="offsets|t2d"):
        read(copied, head)


def test_a_stray_weights_file_is_refused(copied, head):
    (copied / "extra.safetensors").write_bytes(b"")
    with pytest.raises(WrongInput, match=r"extra\.safetensors"):
        read(copied, head)


@pytest.mark.parametrize(
    "name", ["fc.weight", "midlayer.self_attn.k_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.hidden_norm.weight"]
)  # fmt: skip
def test_swapped_halves_or_taps_change_the_logits(name, copied, head):
    weight = load_file(copied / "model.safetensors")[name]
    edit_tensors(copied, {name: weight.roll(weight.shape[-1] // 3, dims=-1).contiguous()})
    assert chain_difference(head, read(copied, head)) > 1e-2


def test_a_bfloat16_folder_drafts_what_the_rounded_head_drafts(head, tmp_path):
    before = {name: tensor.clone() for name, tensor in head.trained_tensors().items()}
    folder = write_head(head, tmp_path / "vllm", "vllm", dtype="bfloat16")
    assert all(torch.equal(before[name], tensor) for name, tensor in head.trained_tensors().items())
    served = read(folder, head)
    assert chain_difference(head, served) > 1e-4
    with rounded(head, torch.bfloat16):
        assert chain_difference(head, served) < 1e-4


def test_an_export_can_be_read_by_the_user_that_serves_it(head, tmp_path):
    folder = write_head(head, tmp_path / "vllm", "vllm")
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir())


def test_a_packed_head_is_not_rounded_in_vain(tiny_target):
    head = make_head(tiny_target).pack()
    with pytest.raises(ValueError, match="round it first"), rounded(head, torch.bfloat16):
        pass


def test_a_folder_that_does_not_draft_alike_gets_no_name(tiny_target, tmp_path):
    head = make_head(tiny_target)
    head.norm_output = True  # the head computes something else than its settings say
    with pytest.raises(WrongInput, match="does not draft"):
        write_head(head, tmp_path / "vllm", "vllm")
    assert list(tmp_path.iterdir()) == []


def test_another_folder_is_never_overwritten(head, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/notes.txt").write_text("mine")
    with pytest.raises(WrongInput, match="no export of ours"):
        write_head(head, tmp_path / "vllm", "vllm")
    (tmp_path / "file").write_text("mine")
    write_head(head, tmp_path / "theirs", "vllm")  # looks like a head of another tool: no record of ours
    for name in ("file", "theirs"):
        with pytest.raises(WrongInput, match="no export of ours"):
            write_head(head, tmp_path / name, "vllm")

    def describe(folder, tensors):
        write_json(folder / RECORD, {"schema": RECORD_SCHEMA})

    write_head(head, tmp_path / "again", "vllm", describe=describe)
    write_head(head, tmp_path / "again", "vllm", describe=describe)


@pytest.mark.parametrize("name", ["my-eagle-head", "dflash", "DSpark-1"])
def test_folder_names_that_mean_another_method_are_refused(name, tmp_path):
    with pytest.raises(WrongInput, match="guesses"):
        check_folder_name(tmp_path / name, "eagle3")
    check_folder_name(tmp_path / "eagle3-head", "eagle3")
    with pytest.raises(WrongInput, match="guesses"):
        check_folder_name(tmp_path / "eagle3-head", "medusa")
    parent = Path("/runs/eagle-2/export/vllm")
    assert "for eagle1, whatever method it is" in misleading_path(parent, "medusa")
    assert misleading_path(parent, "eagle3") == misleading_path(Path("/runs/mine/export/vllm"), "medusa") == ""
