"""The laws of every exported layout: it comes back as it was, and nothing in it can be changed without being noticed."""

import json
import shutil
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.heads.checkpoint import build_head, save_head
from headstart.heads.errors import WrongInput
from headstart.heads.export.comparison import TOLERANCE, difference, golden
from headstart.heads.export.folder import check_folder_name, misleading_path
from headstart.heads.export.mtp import published
from headstart.heads.export.scheme import ENGINES, LAYOUTS, read_served, unservable, unwritten, write_head
from headstart.heads.export.serving import METHODS
from headstart.heads.published import read_start
from headstart.heads.settings import HEADS, TargetSettings
from headstart.heads.shipped import INDEX, tensor_files
from headstart.heads.target import load_target
from headstart.heads.warm_start import take_over
from headstart.launch.export_gate import export_head
from tests.kinds import random_head
from tests.shipped_targets import write_target

# Kind, engine, settings: every layout, and every form that its config can tell.
FORMATS = [
    ("eagle3", "vllm", {"fc_norm": True, "norm_output": True}),
    ("eagle3", "speculators", {"fc_norm": True}),
    ("eagle3", "speculators", {"norm_before_residual": True, "draft_vocab_size": 0}),
    ("eagle3", "sglang", {"taps": [2, 3]}),
    ("eagle3", "llamacpp", {"norm_before_residual": True}),
    ("eagle1", "vllm", {"rope_theta": 500.0}),
    ("eagle1", "sglang", {"intermediate_size": 40}),
    ("medusa", "vllm", {"num_layers": 2}),
    ("medusa", "vllm", {"draft_vocab_size": 0, "own_output": True}),
    ("eagle3", "trtllm", {"fc_norm": True, "norm_output": True, "taps": [1, 4]}),
    ("draft", "trtllm", {"layers": [1], "train_output": True}),
    ("mtp", "vllm", {}),
    ("mtp", "trtllm", {"shipped": True}),
]
every_format = pytest.mark.parametrize(("kind", "engine", "flags"), FORMATS, ids=lambda value: str(value))
DEPTH = 3
HARMLESS = {"speculative_tokens"}  # how many tokens are drafted where the command does not say it
WHOLE = ("eagle1", "draft", "mtp")  # kinds that draft every token of the target


def make_head(kind, target, **flags):
    facts = target.facts
    ids = torch.arange(facts.num_tokens)
    if kind not in WHOLE and flags.get("draft_vocab_size") != 0:
        ids = torch.tensor([0, 1, 2, *range(40, 300, 3)])
    head = random_head(kind, DEPTH, facts, ids, **{"draft_vocab_size": len(ids) % facts.num_tokens, **flags})
    head.load_target(target, initialise=False)
    return head.eval()


@pytest.fixture(scope="module")
def shipping_target(tmp_path_factory):
    """A random Qwen3-Next with an MTP layer, in one file."""
    folder = write_target(tmp_path_factory.mktemp("shipping"), "qwen3_next")
    return load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def target_of(tiny_target, shipping_target):
    return lambda flags: shipping_target if flags.get("shipped") else tiny_target


@pytest.fixture(scope="module")
def exported(target_of, tmp_path_factory):
    """Heads and their folders, each written once, and the tensors that the writer says are the head's own."""
    made = {}

    def export(kind, engine, flags):
        key = (kind, engine, str(flags))
        if key not in made:
            target, kept = target_of(flags), {}
            head = make_head(kind, target, **flags)
            out = tmp_path_factory.mktemp("out") / "head"
            write_head(head, out, engine, describe=lambda _, written: kept.update(written), target=target)
            made[key] = head, out, kept
        return made[key]

    return export


def read_again(kind, folder, head, target):
    """The head that a folder is by itself, read by what is not for exports: as a start, a model or a target."""
    if kind == "mtp":
        target = load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu"))
        settings = HEADS[kind](shipped=True)
    elif kind == "draft":
        settings = HEADS[kind](model=str(folder), train_output=True)
    else:
        start = read_start(folder)
        assert start.kind == kind
        settings = HEADS[kind](**start.settings)
    mapped = kind in LAYOUTS and kind not in WHOLE and start.draft_ids_V is not None
    again = build_head(settings, target.facts, torch.from_numpy(start.draft_ids_V) if mapped else head.draft_ids_V)
    again.load_target(target, initialise=kind in ("mtp", "draft"))
    if kind not in ("mtp", "draft"):
        take_over(again, start)
    return again.eval()


@every_format
def test_a_folder_comes_back_as_the_head_it_was(kind, engine, flags, exported, target_of):
    head, folder, written = exported(kind, engine, flags)
    kept = golden(head)
    assert difference(kept, read_served(folder, engine, head, target_of(flags))) <= 1e-5
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in written.items())
    again = read_again(kind, folder, head, target_of(flags))
    before, after = head.trained_tensors(), again.trained_tensors()
    if kind == "mtp":
        before = written
        after = {path: part for name, tensor in after.items() for path, part in published(again, name, tensor)}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for ours, theirs in zip(kept.blocks, golden(again).blocks, strict=True):
        assert (ours.logits_KV - theirs.logits_KV).abs().max() <= 1e-5 * ours.logits_KV.abs().max()


def changed(value):
    """Other values of a config's entry: every flag turned over, every number and text another, every list disturbed."""
    if value is None:
        return [1]
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


def alike_pairs(tensors, own):
    """Pairs of one shape and other values: all of the head's own; of a target's, which are held bit by bit, neighbours."""
    shapes = {}
    for name in sorted(tensors, key=lambda name: name in own):
        shapes.setdefault(tensors[name].shape, []).append(name)
    for names in shapes.values():
        for (i, a), (j, b) in combinations(enumerate(names), 2):
            if (j == i + 1 or {a, b} <= own.keys()) and not torch.equal(tensors[a], tensors[b]):
                yield a, b


@every_format
def test_no_change_of_a_folder_goes_unnoticed(kind, engine, flags, exported, target_of, tmp_path):
    """Logits are held at positions 0 to 64 and behind a thousand slots: rotary faults show where texts are long."""
    head, folder, own = exported(kind, engine, flags)
    kept = [golden(head, lengths, depth=DEPTH) for lengths in (range(65, 0, -1), (1000,))]
    copied = shutil.copytree(folder, tmp_path / "copied")

    def served_alike():
        try:
            served = read_served(copied, engine, head, target_of(flags))
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
    pairs = list(alike_pairs(tensors, own))
    assert len(pairs) >= 2
    for a, b in pairs:
        save_file({**tensors, a: tensors[b], b: tensors[a]}, copied / "model.safetensors")
        silent += [f"{a} and {b} exchanged"] if served_alike() else []
    for name in tensors:
        save_file({k: v for k, v in tensors.items() if k != name}, copied / "model.safetensors")
        silent += [f"without {name}"] if served_alike() else []
    assert silent == []


TAPS_READ = {"use_aux_hidden_state": True}
V, S, E, M, T, D, OWN, TUNED = (FORMATS[i] for i in (1, 3, 5, 7, 9, 10, 11, 12))
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
    (S, {"target_hidden_size": 96}, {}, "target_hidden_size is 96, expected 64"),
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
    (M, {"original_lm_head": False}, {}, "lm_heads.0.weight is missing"),
    (M, {"num_heads": 4}, {}, "blocks.3.layers.0.bias is missing"),
    (M, {"medusa_num_heads": 4}, {}, "unknown \\['medusa_num_heads'\\]"),
    (M, {"truncated_vocab_size": 512}, {}, "lm_heads.0.weight|token_map is not read"),
    (M, {}, {"token_map": torch.arange(90).flip(0)}, "token_map is not strictly ascending"),
    (M, {}, {"token_map": torch.arange(90, dtype=torch.int32)}, "token_map is .* torch.int32"),
    (M, {}, {"medusa_heads.0.0.linear.weight": torch.zeros(64, 64)}, "linear.weight is not read"),
    (T, {"norm_before_residual": True}, {}, "norm_before_residual is true, which trtllm ignores"),
    (T, {"eagle_config": {**TAPS_READ, "eagle_aux_hidden_state_layer_ids": [1, 4]}}, {}, r"capture the taps \[2, 5\]"),
    (D, {"architectures": ["MistralForCausalLM"]}, {}, "architectures"),
    (D, {"model_type": "gpt2"}, {}, "model_type is 'gpt2'"),
    (D, {"num_hidden_layers": 2}, {}, "num_hidden_layers is 2, expected 1"),
    (D, {"vocab_size": 500}, {}, "vocab_size is 500, expected 512"),
    (D, {"tie_word_embeddings": True}, {}, "tie_word_embeddings is True"),
    (D, {"quantization_config": {"bits": 4}}, {}, "unknown \\['quantization_config'\\]"),
    (D, {}, {"lm_head.weight": None}, "tie_word_embeddings is False, expected True"),
    (D, {}, {"model.norm.weight": None}, "model.norm.weight is missing"),
    (D, {}, {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, "q_norm.weight is not read"),
    (OWN, {"architectures": ["Qwen2ForCausalLM"]}, {}, "architectures"),
    (OWN, {"num_nextn_predict_layers": 3}, {}, "num_nextn_predict_layers is 3"),
    (OWN, {}, {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias is not zero"),
    (OWN, {}, {"model.layers.1.self_attn.v_proj.bias": None}, "v_proj.bias is missing"),
    (OWN, {}, {"model.norm.weight": torch.ones(64) * 2}, "model.norm.weight is not the target's"),
    (OWN, {}, {"model.mtp_layers.0.input_proj.weight": None}, "input_proj.weight is missing"),
    (OWN, {}, {"model.mtp_layers.0.more.weight": torch.ones(2)}, "more.weight has no place"),
    (OWN, {}, {"model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128).bfloat16()}, "bfloat16, the config says"),
    (TUNED, {"num_hidden_layers": 3}, {}, "config.json is not the target's"),
    (TUNED, {}, {"model.norm.weight": torch.ones(64).bfloat16()}, "model.norm.weight is not the target's"),
    (TUNED, {}, {"model.norm.weight": None}, "tensor model.norm.weight is in None"),
    (TUNED, {}, {"mtp.more.weight": torch.ones(2)}, "mtp.more.weight is in model.safetensors"),
    (TUNED, {}, {"mtp.fc.weight": torch.full((64, 128), torch.nan)}, "mtp.fc.weight holds values that are not finite"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "config", "tensors", "message"), FAULTS, ids=[fault[3] for fault in FAULTS])
def test_a_fault_is_refused_by_its_name(layout, config, tensors, message, exported, target_of, tmp_path):
    head, folder, _ = exported(*layout)
    copied = shutil.copytree(folder, tmp_path / "copied")
    for file, changes in (("config.json", config), ("model.safetensors", tensors)):
        held = json.loads((copied / file).read_text()) if file == "config.json" else load_file(copied / file)
        removed = {name for name, value in changes.items() if value is None}
        held = {name: value for name, value in {**held, **changes}.items() if name not in removed}
        if file == "config.json":
            (copied / file).write_text(json.dumps(held))
        else:
            save_file(held, copied / file)
    with pytest.raises(WrongInput, match=message):
        read_served(copied, layout[1], head, target_of(layout[2]))


@pytest.mark.parametrize("layout", [V, M, D, OWN], ids=str)
def test_large_weights_are_several_files_that_hold_the_same(layout, exported, target_of, tmp_path):
    head, whole, _ = exported(*layout)
    target, sharded = target_of(layout[2]), tmp_path / "sharded"
    write_head(head, sharded, layout[1], target=target, shard_bytes=100_000)
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) >= 2
    assert files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    index, places = json.loads((sharded / INDEX).read_text()), tensor_files(sharded)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {name: load_file(file)[name].nbytes for name, file in places.items()} == {
        name: tensor.nbytes for name, tensor in tensors.items()
    }
    expected = load_file(whole / "model.safetensors")
    assert tensors.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert difference(golden(head), read_served(sharded, layout[1], head, target)) <= 1e-5
    if layout[0] in ("eagle3", "medusa"):
        assert read_start(sharded).tensors.keys() == read_start(whole).tensors.keys()
    name = next(name for name, file in index["weight_map"].items() if file == files[0].name)
    for told in (None, files[-1].name):
        changed = {k: v for k, v in {**index["weight_map"], name: told}.items() if v is not None}
        (sharded / INDEX).write_text(json.dumps({**index, "weight_map": changed}))
        with pytest.raises(WrongInput, match=f"{INDEX} has {name} in {told}"):
            read_served(sharded, layout[1], head, target)
    (sharded / INDEX).write_text(json.dumps(index))
    (sharded / "model.safetensors").write_bytes(files[0].read_bytes())
    with pytest.raises(WrongInput, match="or shards and"):
        read_served(sharded, layout[1], head, target)


@pytest.mark.parametrize(("kind", "flags"), [*((kind, {}) for kind in WHOLE), ("medusa", {"own_output": True})])
def test_a_smaller_vocabulary_that_engines_would_not_keep_to_is_not_written(kind, flags, tiny_target, tmp_path):
    head = random_head(kind, DEPTH, tiny_target.facts, torch.arange(64), draft_vocab_size=64, **flags)
    for engine in LAYOUTS[kind].versions:
        with pytest.raises(WrongInput, match="draft_vocab_size = 64, expected 0"):
            write_head(head, tmp_path / "out", engine, target=tiny_target)
    assert not (tmp_path / "out").exists()


def test_every_engine_has_a_version_a_method_and_a_folder_name_that_means_nothing_else(tmp_path):
    assert {kind: methods.keys() for kind, methods in METHODS.items()} == {
        kind: layout.versions.keys() for kind, layout in LAYOUTS.items()
    }
    assert {engine for layout in LAYOUTS.values() for engine in layout.versions} == set(ENGINES)
    for kind, layout in LAYOUTS.items():
        for engine, version in layout.versions.items():
            assert version
            check_folder_name(tmp_path / engine, kind)
            assert not misleading_path(tmp_path / "runs/mine/export" / engine, kind)
        with pytest.raises(WrongInput, match="guesses"):
            check_folder_name(tmp_path / "medusa-mtp-eagle-test", "medusa" if kind == "eagle1" else kind)


CLASSES = {
    ("eagle3", "speculators"): "Eagle3Speculator",
    **{("eagle3", engine): "LlamaForCausalLMEagle3" for engine in ("vllm", "sglang", "trtllm", "llamacpp")},
    ("eagle1", "vllm"): "LlamaForCausalLM",
    ("eagle1", "sglang"): "LlamaForCausalLMEagle",
    ("medusa", "vllm"): "MedusaModel",
}


@every_format
def test_classes_and_prefixes_are_those_that_an_engine_looks_for(kind, engine, flags, exported, tiny_target):
    """A class decides which loader is taken, and with it which prefix it adds."""
    _, folder, own = exported(kind, engine, flags)
    config = json.loads((folder / "config.json").read_text())
    whole = {"draft": "LlamaForCausalLM", "mtp": "Qwen3NextForCausalLM" if flags else "MiMoForCausalLM"}
    assert config["architectures"] == [whole.get(kind) or CLASSES[kind, engine]]
    assert any(name.startswith("model.") for name in own) is (kind in whole and not flags.get("shipped"))
    assert ("fc.bias" in own) is ((kind, engine) == ("eagle1", "sglang"))
    if engine == "speculators":
        verifier = config["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(("kind", "engine", "reason"), [
    ("medusa", "trtllm", "engines of its older flow"), ("eagle1", "trtllm", "EAGLE-3 only"), ("mlp", "vllm", "0.9"),
    ("hydra", "vllm", "hydra"),
])  # fmt: skip
def test_a_kind_without_writer_says_why(kind, engine, reason):
    assert reason in unwritten(kind, engine)


@pytest.mark.parametrize(("kind", "flags"), [("eagle3", {}), ("draft", {})])
def test_a_target_that_an_engine_runs_no_drafter_for_is_told_before_training(kind, flags, tiny_target, tmp_path):
    facts = replace(tiny_target.facts, model_type="gpt_neox")
    (problem,) = unservable(HEADS[kind](draft_vocab_size=0, **flags), facts, [2, 3], "trtllm")
    assert problem.startswith("targets of type 'gpt_neox' run no drafter there, only llama")
    head = make_head(kind, tiny_target, **flags)
    head.facts = facts
    with pytest.raises(WrongInput, match="gpt_neox"):
        write_head(head, tmp_path / "out", "trtllm", target=tiny_target)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "able"), [
    ("deepseek_v3", ["vllm"]), ("glm4_moe", ["vllm"]), ("qwen3_next", ["vllm", "sglang", "trtllm"]),
    ("qwen2", ["vllm"]),
])  # fmt: skip
def test_engines_that_treat_the_first_slot_or_the_state_otherwise_get_no_mtp_layer(family, able, tiny_target):
    facts = replace(tiny_target.facts, shipped={"layout": family})
    problems = {engine: unservable(HEADS["mtp"](shipped=True), facts, [], engine) for engine in METHODS["mtp"]}
    assert [engine for engine, found in problems.items() if not found] == able
    reasons = ("position 0 is not zeroed", "not known there", "behind the final norm there")
    assert all(any(reason in p for reason in reasons) for found in problems.values() for p in found)


CARDS = [
    (E, ["vllm"], ["its token embedding and its output layer", '"method":"eagle"', '"$TARGET" --port 8000 --dtype float32']),
    (M, ["vllm"], ["token_map: their ids", '"method":"medusa"']),
    (T, ["vllm", "trtllm"], ["decoding_type: Eagle3", "--extra_llm_api_options"]),
    (D, ["vllm", "sglang", "trtllm", "llamacpp", "transformers"], [
        "Draft model for tiny", '"method":"draft_model"', "STANDALONE", "Draft_Target", "draft-simple", "assistant_model=",
        '"$TARGET" --outtype f32', '"$HEAD" --outtype f32',
    ]),
    (OWN, ["vllm"], ['"method":"mtp"', "MiMo", "input_proj"]),
    (TUNED, ["vllm", "sglang", "trtllm"], ["decoding_type: MTP", "bit by bit", "mtp.layers.0.mlp.experts.*.up_proj.weight"]),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "readable", "said"), CARDS, ids=[card[0][0] for card in CARDS])
def test_the_card_serves_a_kind_by_its_method_in_every_engine_that_reads_it(
    layout, readable, said, target_of, tmp_path
):
    kind, engine, flags = layout
    target = target_of(flags)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000007"
    checkpoint.mkdir(parents=True)
    save_head(checkpoint, make_head(kind, target, **flags), step=7)
    (checkpoint.parent / "best").write_text("step-000007\n")
    options = (EvalSettings(draft_length=3), ExportSettings(dtype="float32"))
    folder = export_head(tmp_path / "run", engine, target, *options, untested=True)
    card, record = (folder / "README.md").read_text(), json.loads((folder / "headstart.json").read_text())
    assert record["readable_by"] == readable
    assert card.startswith("**UNTESTED.**")
    assert all(text in card for text in said)
    assert ("taps" in card) is (kind == "eagle3")
    assert f"positions written for: {target.facts.max_position}" in card
    if "trtllm" in readable:
        options = yaml.safe_load(card.split("cat > trtllm.yaml <<EOF\n")[1].split("EOF\n")[0])["speculative_config"]
        assert (options["decoding_type"], options["max_draft_len"]) == (METHODS[kind]["trtllm"], 3)
        assert options.get("speculative_model") == (None if kind == "mtp" else "$HEAD")
        assert options.get("eagle3_layers_to_capture") == ([0, 3] if kind == "eagle3" else None)
    stored = {
        name: tensor.shape for file in set(tensor_files(folder).values()) for name, tensor in load_file(file).items()
    }
    assert {name: list(stored[name]) for name in record["tensors"]} == record["tensors"]
