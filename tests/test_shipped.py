"""Laws of MTP layers that targets ship: every family is read as transformers reads it, and merged back tensor by tensor."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from headstart.heads.batch import pack
from headstart.heads.checkpoint import build_head
from headstart.heads.errors import WrongInput
from headstart.heads.export.scheme import unservable, write_head
from headstart.heads.mtp import MTP
from headstart.heads.settings import MTPSettings, TargetSettings
from headstart.heads.target import TargetLoader, load_target
from tests.kinds import rollout_logits
from tests.shipped_targets import FAMILIES, LAYERS, published_layer, write_target
from tests.small_decoding import make_path, make_prompts

DEPTH = 3


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory):
    """A tiny target of each family; those with experts in several files."""
    folder = write_target(tmp_path_factory.mktemp(request.param), request.param, shards=request.param != "mimo")
    return load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu"))


def shipped_head(target, **settings):
    head = build_head(MTPSettings(shipped=True, **settings), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    return head.eval()


def random_batch(target):
    paths = [
        make_path(prompt, [5, 9, 80, 7, 6, 33], str(i)) for i, prompt in enumerate(make_prompts(target, [7, 1, 4]))
    ]
    states = target.read([path.token_N for path in paths])
    return pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)], num_slots=48)


def transformers_layer(target, family, published):
    """transformers' own MTP layer, with published tensors under its names."""
    make_config, layer, prefix, ends, inside = FAMILIES[family]
    config = target.model.config
    layer = MtpLayer(config, layer, type(target.model.model.norm), LAYERS - 1)
    names = dict(zip(ends, ("enorm", "hnorm", "eh_proj", "post_norm"), strict=True))
    found = {}
    experts: dict[str, list] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for path, tensor in published.items():
        name = path.removeprefix(prefix)
        module = name.rpartition(".")[0]
        if module in names:
            found[f"{names[module]}.weight"] = tensor
        elif ".experts." in name:
            experts[name.split(".")[-2]].append(tensor)  # in their order
        else:
            found[f"mtp_block.{name.removeprefix(inside)}"] = tensor
    if experts["up_proj"]:
        gate_up = [torch.cat(pair) for pair in zip(experts["gate_proj"], experts["up_proj"], strict=True)]
        found["mtp_block.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        found["mtp_block.mlp.experts.down_proj"] = torch.stack(experts["down_proj"])
    if config.model_type == "qwen2":  # MiMo's projection reads the state first
        found["eh_proj.weight"] = torch.cat(found["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    layer.load_state_dict(found)
    return layer.eval()


@torch.no_grad()
def assert_same_drafts(head, target, family, published):
    """Every text from scratch, without cache, batch or mask of ours.

    Engines zero x_1 for all families but one, and hand a MiMo the target's state in front of its final norm.
    """
    layer, batch = transformers_layer(target, family, published), random_batch(target)
    state_TH = random_batch(target.with_taps([LAYERS])).taps_TF if family == "mimo" else batch.final_TH
    rollout = head.rollout(batch, DEPTH)
    found_SDV = rollout_logits(head, rollout)
    checked = 0
    for s, start in enumerate(rollout.start_S.tolist()):
        begin = max(offset for offset in batch.offsets if offset <= start)
        hidden = list(state_TH[begin : start + 1])
        for j in range(int(rollout.valid_SD[s].sum())):
            embedded_TH = target.model.model.embed_tokens(batch.next_token_T[begin : start + 1 + j])
            if family != "qwen3_next":
                embedded_TH[0] = 0
            position_1T = torch.arange(len(hidden))[None]
            mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)
            turned = target.model.model.rotary_emb(embedded_TH, position_1T)
            state_1TH = layer(embedded_TH[None], torch.stack(hidden)[None], turned, mask[None, None], position_1T, None)
            hidden.append(state_1TH[0, -1])
            expected_V = target.logits(hidden[-1])[: target.facts.num_tokens]
            torch.testing.assert_close(found_SDV[s, j], expected_V, rtol=0, atol=1e-4 * float(expected_V.abs().max()))
            checked += 1
    assert checked == 3 * (5 + 4 + 3)


@pytest.fixture
def family(request):
    return request.node.callspec.params["target"]


def test_every_family_is_computed_as_transformers_computes_it(target, family):
    assert_same_drafts(shipped_head(target), target, family, published_layer(family))


def tuned_head(target):
    head = shipped_head(target)
    with torch.no_grad():
        for parameter in head.trained_tensors().values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    return head


def read_folder(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_merged_folder_is_the_target_with_the_tuned_layer(target, family, tmp_path):
    source = Path(target.facts.name)
    (source / "README.md").write_text("the target's card")
    head = tuned_head(target)
    own = {}
    folder = tmp_path / "vllm"
    write_head(head, folder, "vllm", target=target, describe=lambda _, written: own.update(written))
    before, after = read_folder(source), read_folder(folder)
    layer = published_layer(family)
    assert before.keys() == after.keys() > layer.keys()
    assert own.keys() == {name for name in layer if not name.endswith("e_score_correction_bias")}
    for name, tensor in before.items():
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape)
        kept = name not in layer or name.endswith("e_score_correction_bias")
        assert torch.equal(after[name], tensor) == kept, name
    assert {file.name for file in folder.iterdir()} == {
        "TARGET_README.md" if file.name == "README.md" else file.name for file in source.iterdir()
    }
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (source / name).exists() == (folder / name).exists()
        assert not (source / name).exists() or (source / name).read_bytes() == (folder / name).read_bytes()
    again = load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu"))
    tokens_1T = torch.tensor([[5, 9, 200, 31, 7]])
    assert torch.equal(again.model(tokens_1T).logits, target.model(tokens_1T).logits)
    assert_same_drafts(head, target, family, {name: after[name] for name in layer})


@pytest.mark.parametrize("shipped", [True, False])
def test_what_lies_beside_a_targets_files_stays_there(shipped, tmp_path):
    """Pickles run code where they are loaded, and a clone's settings hold keys; what engines read goes along."""
    source = write_target(tmp_path / "source", "mimo", layer=shipped)
    before = {file.name for file in source.iterdir()}
    for name in (
        "pytorch_model.bin",
        "training_args.bin",
        "original/consolidated.00.pth",
        ".git/config",
        ".env",
        "run.log",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"\x80\x04.")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    target = load_target(TargetSettings(model=str(source), dtype="float32", device="cpu"))
    folder = write_head((shipped_head if shipped else own_head)(target), tmp_path / "vllm", "vllm", target=target)
    assert {file.name for file in folder.iterdir()} == before | {"additional_chat_templates"}
    assert (folder / "additional_chat_templates" / "tools.jinja").read_text() == "tools"


def test_a_merged_folder_keeps_the_precision_of_every_tensor(tmp_path):
    source = write_target(tmp_path / "source", "deepseek_v3")
    stored = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    target = load_target(TargetSettings(model=str(source), dtype="float32", device="cpu"))
    head = tuned_head(target)
    after = read_folder(write_head(head, tmp_path / "vllm", "vllm", target=target))
    assert {name: tensor.dtype for name, tensor in after.items()} == {n: tensor.dtype for n, tensor in stored.items()}
    assert torch.equal(after[f"model.layers.{LAYERS}.eh_proj.weight"], head.eh_proj.weight.detach().bfloat16())


@pytest.mark.parametrize(("settings", "expected"), [
    (MTPSettings(), "not those of Qwen2"),
    (MTPSettings(shipped=True, draft_vocab_size=100), "whole output head"),
])  # fmt: skip
def test_what_no_engine_serves_is_told_before_training(settings, expected, tiny_shipped_target):
    (problem,) = unservable(settings, tiny_shipped_target.facts, [], "vllm")
    assert expected in problem


def own_head(target, **settings):
    torch.manual_seed(2)
    head = build_head(MTPSettings(**settings), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=False)
    with torch.no_grad():
        for parameter in head.trained_tensors().values():
            parameter += 0.1 * torch.randn_like(parameter)
    return head.eval()


@pytest.mark.parametrize("name", ["tiny_target", "tiny_tied_target", "qwen2"])
def test_a_layer_of_our_own_becomes_a_target_that_ships_one(name, request, tmp_path):
    if name == "qwen2":
        folder = write_target(tmp_path / "source", "mimo", shards=True, layer=False)
        target = load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu"))
        assert not target.facts.shipped
    else:
        target = request.getfixturevalue(name)
    head = own_head(target)
    folder = write_head(head, tmp_path / "vllm", "vllm", target=target)
    again = load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu"))
    batch = random_batch(again)
    with torch.no_grad():
        (expected_PV, found_PV) = (
            rollout_logits(which, rollout)[rollout.valid_SD]
            for which in (head, shipped_head(again))
            for rollout in [which.rollout(batch, DEPTH)]
        )
    torch.testing.assert_close(found_PV, expected_PV, rtol=0, atol=1e-4 * float(expected_PV.abs().max()))
    tokens_1T = torch.tensor([[5, 9, 200, 31, 7]])
    torch.testing.assert_close(again.model(tokens_1T).logits, target.model(tokens_1T).logits, rtol=1e-5, atol=1e-4)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["MiMoForCausalLM"], 1)
    assert config["eos_token_id"] == target.model.config.eos_token_id


@pytest.mark.parametrize(("settings", "expected"), [
    ({"num_modules": 2}, "num_modules = 2"),
    ({"intermediate_size": 8}, "intermediate_size = 8"),
    ({"draft_vocab_size": 64}, "draft_vocab_size = 64"),
])  # fmt: skip
def test_what_is_no_mimo_is_told_before_training(settings, expected, tiny_target):
    (problem,) = unservable(MTPSettings(**settings), tiny_target.facts, [], "vllm")
    assert problem.startswith(expected)
    assert not unservable(MTPSettings(), tiny_target.facts, [], "vllm")


def test_a_target_without_the_layer_is_refused_before_anything_is_loaded(tiny_target):
    with pytest.raises(WrongInput, match=r"^head\.shipped: found true, but tiny ships no MTP layer .* glm4_moe: model"):
        MTP.check(MTPSettings(shipped=True), tiny_target)
    MTP.check(MTPSettings(), tiny_target)


@pytest.mark.parametrize(("family", "shipped", "refused"), [
    ("mimo", True, True), ("mimo", False, True), ("deepseek_v3", True, False), ("deepseek_v3", False, False),
])  # fmt: skip
def test_a_final_norm_that_hides_channels_is_refused_before_anything_is_computed(family, shipped, refused, tmp_path):
    """By layers that read the state in front of it; and again when such a target is loaded."""
    file = write_target(tmp_path, family) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][5] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    loader = TargetLoader(TargetSettings(model=str(tmp_path), dtype="float32", device="cpu"))
    settings = MTPSettings(shipped=shipped)
    if not refused:
        return MTP.check(settings, loader)
    head = build_head(settings, loader.facts, torch.arange(loader.facts.num_tokens))
    for refuse in (lambda: MTP.check(settings, loader), lambda: head.load_target(loader("float32"), initialise=False)):
        with pytest.raises(WrongInput, match="gain of zero at 1 of 64 channels"):
            refuse()


def test_what_fixes_the_layer_leaves_no_other_choice():
    settings = MTPSettings(shipped=True, num_modules=2, intermediate_size=8, init_from_target=False)
    assert [name for name, _ in settings.conflicts()] == ["num_modules", "intermediate_size", "init_from_target"]


@pytest.mark.parametrize(("change", "expected"), [
    (lambda tensors, base: tensors.pop(f"{base}eh_proj.weight"), "eh_proj.weight is missing"),
    (lambda tensors, base: tensors.update({f"{base}extra.weight": torch.ones(2)}), "extra.weight has no place"),
    (lambda tensors, base: tensors.update({f"{base}enorm.weight": torch.ones(2)}), r"enorm.weight is \(2,\)"),
    (
        lambda tensors, base: tensors.update({f"{base}enorm.weight": torch.ones(64).to(torch.float8_e4m3fn)}),
        "float8_e4m3fn, expected 64 of 16 bits or more",
    ),
])  # fmt: skip
def test_a_layer_that_is_not_whole_is_refused(change, expected, tmp_path):
    folder = write_target(tmp_path, "glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    change(tensors, f"model.layers.{LAYERS}.")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu"))
    with pytest.raises(WrongInput, match=expected):
        shipped_head(target)


def test_a_damaged_file_is_named(tmp_path):
    file = write_target(tmp_path, "mimo") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WrongInput, match=r"model\.safetensors is no whole safetensors file"):
        load_target(TargetSettings(model=str(tmp_path), device="cpu"))
