"""The laws of every exported layout: it comes back as it was, and nothing in it can be changed without being noticed."""

import json
import shutil
from itertools import combinations

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.heads.checkpoint import build_head, save_head
from headstart.heads.errors import WrongInput
from headstart.heads.export.comparison import TOLERANCE, difference, golden
from headstart.heads.export.scheme import read_served, write_head
from headstart.heads.published import read_start
from headstart.heads.settings import HEADS
from headstart.heads.warm_start import take_over
from headstart.launch.export_gate import export_head
from tests.kinds import random_head

# Kind, engine, settings: every layout, and every form that its config can tell.
FORMATS = [
    ("eagle3", "vllm", {"fc_norm": True, "norm_output": True}),
    ("eagle3", "speculators", {"fc_norm": True}),
    ("eagle3", "speculators", {"norm_before_residual": True, "draft_vocab_size": 0}),
    ("eagle3", "sglang", {"taps": [2, 3]}),
    ("eagle3", "llamacpp", {"norm_before_residual": True}),
    ("eagle1", "vllm", {"rope_theta": 500.0}),
    ("eagle1", "sglang", {"intermediate_size": 40}),
    ("medusa", "vllm", {"num_layers": 2, "own_output": True}),
    ("medusa", "vllm", {"draft_vocab_size": 0}),
]
every_format = pytest.mark.parametrize(("kind", "engine", "flags"), FORMATS, ids=lambda value: str(value))
DEPTH = 3
HARMLESS = {"speculative_tokens"}  # how many tokens are drafted where the command does not say it


def make_head(kind, target, **flags):
    facts = target.facts
    ids = torch.arange(facts.num_tokens)
    if kind != "eagle1" and flags.get("draft_vocab_size") != 0:
        ids = torch.tensor([0, 1, 2, *range(40, 300, 3)])
    head = random_head(kind, DEPTH, facts, ids, **{"draft_vocab_size": len(ids) % facts.num_tokens, **flags})
    head.load_target(target, initialise=False)
    return head.eval()


@pytest.fixture(scope="module")
def exported(tiny_target, tmp_path_factory):
    """Heads and their folders, each written once."""
    made = {}

    def export(kind, engine, flags):
        key = (kind, engine, str(flags))
        if key not in made:
            head = make_head(kind, tiny_target, **flags)
            made[key] = head, write_head(head, tmp_path_factory.mktemp("out") / "head", engine)
        return made[key]

    return export


@every_format
def test_a_folder_comes_back_as_the_head_it_was(kind, engine, flags, exported, tiny_target):
    head, folder = exported(kind, engine, flags)
    kept = golden(head)
    assert difference(kept, read_served(folder, engine, head)) <= 1e-5
    start = read_start(folder)
    assert start.kind == kind
    ids = head.draft_ids_V if start.draft_ids_V is None else torch.from_numpy(start.draft_ids_V)
    again = build_head(HEADS[kind](**start.settings), head.facts, ids)
    again.load_target(tiny_target, initialise=False)
    take_over(again, start)
    before, after = head.trained_tensors(), again.trained_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for ours, theirs in zip(kept.blocks, golden(again).blocks, strict=True):
        assert (ours.logits_KV - theirs.logits_KV).abs().max() <= 1e-5 * ours.logits_KV.abs().max()


def changed(value):
    """Other values of a config's entry: every flag turned over, every number and text another, every list disturbed."""
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, (int, float)):
        return [value + 1, value * 2 or -1]
    if isinstance(value, str):
        return [f"{value}x"]
    if isinstance(value, dict):
        told = value.keys() - HARMLESS
        inside = [{**value, name: other} for name in told for other in changed(value[name])]
        return [*inside, *({k: v for k, v in value.items() if k != name} for name in value), {}]
    inside = [[*value[:i], other, *value[i + 1 :]] for i in range(len(value)) for other in changed(value[i])]
    shifted = [[item + 1 for item in value]] if value and all(type(item) is int for item in value) else []
    return [*inside, *shifted, [*value, *value[:1], "x"], *([[]] if value else [])]


def config_mutations(config):
    for key, value in config.items():
        yield f"without {key}", {k: v for k, v in config.items() if k != key}
        for other in changed(value):
            yield f"{key} = {other}", {**config, key: other}
    for key, value in {"quantization_config": {"bits": 4}, "sliding_window": 64, "logit_scale": 2.0}.items():
        yield f"{key} = {value}", {**config, key: value}


@every_format
def test_no_change_of_a_folder_goes_unnoticed(kind, engine, flags, exported, tmp_path):
    """Logits are held at positions 0 to 64 and behind a thousand slots: rotary faults show where texts are long."""
    head, folder = exported(kind, engine, flags)
    kept = [golden(head, lengths, depth=DEPTH) for lengths in (range(65, 0, -1), (1000,))]
    copied = shutil.copytree(folder, tmp_path / "copied")

    def served_alike():
        try:
            served = read_served(copied, engine, head)
        except WrongInput:
            return False
        return all(difference(one, served, limit=TOLERANCE) <= TOLERANCE for one in kept)

    assert served_alike()
    text, tensors = (copied / "config.json").read_text(), load_file(copied / "model.safetensors")
    silent = []
    for what, config in config_mutations(json.loads(text)):
        (copied / "config.json").write_text(json.dumps(config))
        silent += [what] if served_alike() else []
    (copied / "config.json").write_text(text)
    pairs = [(a, b) for a, b in combinations(tensors, 2) if tensors[a].shape == tensors[b].shape]
    assert len(pairs) >= 2
    for a, b in pairs:
        save_file({**tensors, a: tensors[b], b: tensors[a]}, copied / "model.safetensors")
        silent += [f"{a} and {b} exchanged"] if served_alike() else []
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, copied / "model.safetensors")
        silent += [f"without {name}"] if served_alike() else []
    assert silent == []


TAPS_READ = {"use_aux_hidden_state": True}
V, S, E, M = (
    ("eagle3", "speculators", {"fc_norm": True}),
    ("eagle3", "sglang", {"taps": [2, 3]}),
    FORMATS[5],
    FORMATS[7],
)
FAULTS = [
    (V, {"norm_before_residual": None}, {}, "misses \\['norm_before_residual'\\]"),  # whose default is true here
    (V, {"draft_vocab_size": 512}, {}, "lm_head"),
    (V, {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}, {}, "not ascending"),
    (V, {"architectures": ["LlamaForCausalLMEagle3"]}, {}, "architectures"),
    (V, {"speculators_model_type": "dflash"}, {}, "speculators_model_type is 'dflash'"),
    (V, {"transformer_layer_config": []}, {}, "transformer_layer_config is no object"),
    (V, {}, {"midlayer.hidden_norm.weight": torch.zeros(64)}, "midlayer.hidden_norm.weight is not read"),
    (V, {}, {"fc_norm.1.weight": None}, "fc_norm.1.weight is missing"),
    (S, {"eagle_config": {**TAPS_READ, "eagle_aux_hidden_state_layer_ids": [2, 3]}}, {}, "only if the first is 1"),
    (S, {}, {"d2t": torch.arange(90) * 3}, "t2d does not mark|ascending"),
    (E, {"tie_word_embeddings": True}, {}, "tie_word_embeddings is True"),
    (E, {"quantization_config": {"bits": 4}}, {}, "unknown \\['quantization_config'\\]"),
    (E, {"num_hidden_layers": 4}, {}, "num_hidden_layers is 4"),
    (E, {"architectures": ["LlamaForCausalLMEagle"]}, {}, "architectures"),
    (E, {"attention_bias": True}, {}, "attention_bias"),
    (E, {"rope_theta": 10000.0}, {}, "rope_theta is 10000.0, expected 500.0"),
    (E, {"vocab_size": 500}, {}, "vocab_size is 500"),
    (E, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}, {}, "fc.weight is .* torch.float32, not .* torch.bfloat16"),
    (E, {}, {"lm_head.weight": torch.zeros(512, 64)}, "lm_head.weight is not read"),
    (E, {}, {"fc.bias": torch.zeros(64)}, "fc.bias is not read"),
    (E, {}, {"layers.0.input_layernorm.weight": torch.ones(64)}, "input_layernorm.weight is not read"),
    (E, {}, {"norm.weight": torch.ones(64)}, "norm.weight is not read"),
    (E, {}, {"fc.weight": torch.zeros(64, 64)}, "fc.weight is \\(64, 64\\)"),
    (E, {}, {"layers.0.mlp.up_proj.weight": torch.full((160, 64), torch.inf)}, "not finite"),
    (M, {"medusa_fc_bias": False}, {}, "medusa_fc_bias is False"),  # and every bias would be dropped
    (M, {"original_lm_head": True}, {}, "lm_head.weight is missing"),
    (M, {"num_heads": 4}, {}, "blocks.3.layers.0.bias is missing"),
    (M, {"medusa_num_heads": 4}, {}, "unknown \\['medusa_num_heads'\\]"),
    (M, {"truncated_vocab_size": 512}, {}, "lm_heads.0.weight|token_map is not read"),
    (M, {}, {"token_map": torch.arange(90).flip(0)}, "token_map is not strictly ascending"),
    (M, {}, {"token_map": torch.arange(90, dtype=torch.int32)}, "token_map is .* torch.int32"),
    (M, {}, {"medusa_heads.0.0.linear.weight": torch.zeros(64, 64)}, "linear.weight is not read"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "config", "tensors", "message"), FAULTS, ids=[fault[3] for fault in FAULTS])
def test_a_fault_is_refused_by_its_name(layout, config, tensors, message, exported, tmp_path):
    head, folder = exported(*layout)
    copied = shutil.copytree(folder, tmp_path / "copied")
    for file, changes in (("config.json", config), ("model.safetensors", tensors)):
        held = json.loads((copied / file).read_text()) if file == "config.json" else load_file(copied / file)
        held = {name: value for name, value in {**held, **changes}.items() if value is not None}
        if file == "config.json":
            (copied / file).write_text(json.dumps(held))
        else:
            save_file(held, copied / file)
    with pytest.raises(WrongInput, match=message):
        read_served(copied, layout[1], head)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_eagle_head_of_fewer_tokens_than_the_target_has_is_not_written(engine, tiny_target, tmp_path):
    head = random_head("eagle1", DEPTH, tiny_target.facts, torch.arange(64), draft_vocab_size=64)
    head.load_target(tiny_target, initialise=False)
    with pytest.raises(WrongInput, match="draft_vocab_size = 64, expected 0: the head drafts through the target's"):
        write_head(head, tmp_path / "out", engine)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "engine", "method"), [("eagle1", "sglang", "EAGLE"), ("medusa", "vllm", "medusa")])
def test_the_card_serves_a_kind_by_its_method_and_says_what_it_borrows(kind, engine, method, tiny_target, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000007"
    checkpoint.mkdir(parents=True)
    save_head(checkpoint, make_head(kind, tiny_target), step=7)
    (checkpoint.parent / "best").write_text("step-000007\n")
    options = (EvalSettings(draft_length=3), ExportSettings(dtype="float32"))
    folder = export_head(tmp_path / "run", engine, tiny_target, *options, untested=True)
    card, record = (folder / "README.md").read_text(), json.loads((folder / "headstart.json").read_text())
    assert record["readable_by"] == [engine]
    assert {"sglang": f"--speculative-algorithm {method}", "vllm": f'"method":"{method}"'}[engine] in card
    assert {"eagle1": "its token embedding and its output layer", "medusa": "token_map: their ids"}[kind] in card
    assert "taps" not in card
