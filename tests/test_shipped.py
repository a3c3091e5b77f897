"""Laws of MTP layers that targets ship: every family is read as transformers reads it, and merged back tensor by tensor."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpLayer

from headstart.heads.batch import pack
from headstart.heads.checkpoint import build_head
from headstart.heads.errors import WrongInput
from headstart.heads.mtp import MTP
from headstart.heads.settings import MTPSettings, TargetSettings
from headstart.heads.target import load_target
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


def transformers_layer(target, family):
    """transformers' own MTP layer, with the published tensors under its names."""
    make_config, layer, prefix, ends, inside = FAMILIES[family]
    config = target.model.config
    layer = MtpLayer(config, layer, type(target.model.model.norm), LAYERS - 1)
    names = dict(zip(ends, ("enorm", "hnorm", "eh_proj", "post_norm"), strict=True))
    found = {}
    experts: dict[str, list] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for path, tensor in published_layer(family).items():
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
def test_every_family_is_computed_as_transformers_computes_it(target, request):
    """Every text from scratch, without cache, batch or mask of ours; engines zero x_1 for all families but one."""
    family = request.node.callspec.params["target"]
    head, layer, batch = shipped_head(target), transformers_layer(target, family), random_batch(target)
    rollout = head.rollout(batch, DEPTH)
    found_SDV = rollout_logits(head, rollout)
    checked = 0
    for s, start in enumerate(rollout.start_S.tolist()):
        begin = max(offset for offset in batch.offsets if offset <= start)
        hidden = list(batch.final_TH[begin : start + 1])
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


def test_a_target_without_the_layer_is_refused_before_anything_is_loaded(tiny_target):
    with pytest.raises(WrongInput, match=r"^head\.shipped: found true, but tiny ships no MTP layer .* glm4_moe: model"):
        MTP.check(MTPSettings(shipped=True), tiny_target)
    MTP.check(MTPSettings(), tiny_target)


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
