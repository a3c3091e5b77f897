"""A head goes on from another one, of ours or published: the same logits at step 0, or an error that names the field."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.batch import pack
from headstart.heads.checkpoint import save_head
from headstart.heads.errors import WrongInput
from headstart.heads.export.scheme import write_head
from headstart.heads.published import read_start
from headstart.heads.warm_start import start_problems, take_over
from headstart.launch.check import check_loaded
from headstart.launch.commands import start_identity, training_settings
from headstart.launch.recipe import dump_recipe, load_recipe
from headstart.launch.run import RunFolder
from headstart.launch.stages import new_head
from headstart.launch.variants import load
from headstart.trainer.checkpoint import pointed
from headstart.trainer.metrics import METRICS, read_metrics
from tests.kinds import FORMS, make_settings, random_head, rollout_logits
from tests.small_decoding import make_path, make_prompts
from tests.small_training import SETTINGS, make_head, run

IDS = torch.tensor([0, 1, 2, *range(40, 300, 3)])
PLACES = ("the old songs", "a blue atlas", "your notes", "the second book", "this list", "our game")
every_kind = pytest.mark.parametrize("kind", FORMS)


@pytest.fixture(scope="module")
def batch(tiny_target):
    """Paths of random tokens with the target's states."""
    paths = [make_path(p, p[1:], f"p{i}") for i, p in enumerate(make_prompts(tiny_target, [14, 9, 20]))]
    states = tiny_target.read([path.token_N for path in paths])
    return pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])


def trained(kind, target, ids=IDS, **flags):
    """A head of random weights, as if trained."""
    head = random_head(kind, 3, target.facts, ids, draft_vocab_size=len(ids), **flags)
    head.load_target(target, initialise=False)
    return head.eval()


def write_recipe(folder: Path, text: str, model: str = "tiny") -> Path:
    (folder / "mine.jsonl").write_text("".join(f'{{"prompt": "What is the capital of {name}?"}}\n' for name in PLACES))
    (folder / "held.jsonl").write_text('{"prompt": "Name three rivers that flow north."}\n')
    path = folder / "mine.yaml"
    path.write_text(
        f"target: {{model: {model}, dtype: float32, device: cpu}}\n"
        "prompts: {sources: [mine.jsonl], heldout: held.jsonl, num_train: 0, num_validation: 1}\n"
        f"traffic: {{max_new_tokens: 16}}\n{text}\nexport: {{engines: []}}\n"
        "eval: {draft_lengths: [1], draft_length: 1, speed_draft_lengths: [1]}\n"
    )
    return path


def started(folder, target, tmp_path, head="", more=""):
    """The head that a recipe which only names `folder` begins with."""
    path = write_recipe(tmp_path, f"head: {{init_from: {folder}{head}}}\n{more}", target.facts.name)
    loaded = load(path)
    start = check_loaded(loaded, path, [], render=False).starts[""]
    return new_head(loaded.shared, target, [], start).eval()


def assert_same_logits(head, other, batch, tolerance=0.0):
    assert torch.equal(head.draft_ids_V, other.draft_ids_V)
    with torch.no_grad():
        ours, theirs = (rollout_logits(h, h.rollout(batch, 3)) for h in (head, other))
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@every_kind
def test_a_saved_head_of_every_kind_goes_on_with_its_own_settings(kind, target, batch, tmp_path):
    flags = {"norm_output": True, "taps": [1, 2, 3]} if kind == "eagle3" else {}
    head = trained(kind, target, **flags)
    (tmp_path / "old").mkdir()
    save_head(tmp_path / "old", head, step=7)
    again = started(tmp_path / "old", target, tmp_path)
    assert again.kind == head.kind
    assert replace(again.settings, init_from="") == replace(head.settings, init_from="")
    assert_same_logits(again, head, batch)
    start = read_start(tmp_path / "old")
    assert again.settings.init_from == start.sha256
    assert set(again.trained_tensors()) <= again.origins().keys()
    save_head(tmp_path / "old", trained(kind, target, seed=1, **flags), step=7)
    assert read_start(tmp_path / "old").sha256 != start.sha256


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_before_residual": True, "rope_theta": 500.0}], ids=str)
@pytest.mark.parametrize("ids", [IDS, torch.arange(500)], ids=["reduced", "whole"])
@pytest.mark.parametrize("layout", ["classic", "speculators"])
def test_an_exported_eagle3_folder_is_read_as_a_published_one(layout, ids, flags, tiny_target, batch, tmp_path):
    head = trained("eagle3", tiny_target, ids, **flags)
    folder = write_head(head, tmp_path / "vllm", "vllm")
    if layout == "speculators":
        config = json.loads((folder / "config.json").read_text())
        outside = (
            "draft_vocab_size",
            "norm_before_residual",
            "fc_norm",
            "norm_output",
            "eagle_aux_hidden_state_layer_ids",
        )
        moved = {k: config.pop(k) for k in outside if k in config and (k != "norm_before_residual" or not config[k])}
        config.pop("norm_before_residual", None)  # true is what speculators means by saying nothing
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": config, **moved}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        tensors["embed_tokens.weight"] = tiny_target.embedding_weight().bfloat16()
        save_file(tensors, folder / "model.safetensors")
    again = started(folder, tiny_target, tmp_path)
    assert again.settings.rope_theta in (500.0, 10000.0)
    assert_same_logits(again, head, batch, 1e-6)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_published_head_over_the_whole_table_gives_the_rows_that_can_be_drafted(prefix, tiny_target, batch, tmp_path):
    """No map; without an output layer it is the target's that counts. Some tools write `model.` before the names."""
    whole = trained("eagle3", tiny_target, torch.arange(512))
    folder = write_head(whole, tmp_path / "vllm", "vllm")
    found = {
        name if name == "lm_head.weight" else prefix + name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert not {"d2t", "t2d"} & found.keys()
    rollout = whole.rollout(batch, 3)
    for rows_VH in (whole.lm_head.weight, tiny_target.output_weight()):
        save_file(found, folder / "model.safetensors")
        head = started(folder, tiny_target, tmp_path)
        assert torch.equal(head.draft_ids_V, torch.arange(500))
        expected = rollout.state_SDH[0] @ rows_VH[:500].T
        torch.testing.assert_close(rollout_logits(head, head.rollout(batch, 3))[0], expected, rtol=1e-5, atol=1e-4)
        found.pop("lm_head.weight", None)


def test_an_eagle_folder_brings_no_vocabulary(tiny_target, batch, tmp_path):
    head = trained("eagle1", tiny_target, torch.arange(500))
    tensors = {name: tensor.detach().clone() for name, tensor in head.trained_tensors().items()}
    tensors["embed_tokens.weight"] = tiny_target.embedding_weight().clone()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    write_published(tmp_path / "eagle", tensors, published_config(tiny_target.facts))
    assert_same_logits(started(tmp_path / "eagle", tiny_target, tmp_path, ", draft_vocab_size: 0"), head, batch)
    assert len(started(tmp_path / "eagle", tiny_target, tmp_path, ", draft_vocab_size: 128").draft_ids_V) == 128


def published_config(facts, **changes):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu",
        "hidden_size": facts.hidden_size, "num_attention_heads": facts.num_heads, "head_dim": facts.head_dim,
        "num_key_value_heads": facts.num_kv_heads, "vocab_size": facts.vocab_size, "rms_norm_eps": facts.rms_norm_eps,
        "intermediate_size": 160, "rope_theta": 10000, "rope_scaling": None, "use_cache": True, **changes,
    }  # fmt: skip


def write_published(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MEDUSA = {
    "numbered": lambda i, j: f"{i}.{j}.linear",
    "prefixed": lambda i, j: f"medusa_head.{i}.{j}.linear",
    "named": lambda i, j: f"blocks.{i}.layers.{j}",
}


@pytest.mark.parametrize("form", [*MEDUSA, "shared"])
def test_published_medusa_heads(form, tiny_target, batch, tmp_path):
    """Written by hand from the definition: x + silu(W x + b), then an output layer over the whole table."""
    random = torch.Generator().manual_seed(5)
    width, vocab = tiny_target.facts.hidden_size, tiny_target.facts.vocab_size
    name = MEDUSA.get(form, MEDUSA["named"])
    tensors, outputs = {}, []
    for i in range(3):
        for j in range(2):
            tensors[f"{name(i, j)}.weight"] = torch.randn(width, width, generator=random) * 0.1
            tensors[f"{name(i, j)}.bias"] = torch.randn(width, generator=random)
        outputs.append(torch.randn(vocab, width, generator=random))
        output = {"named": f"lm_heads.{i}", "shared": "lm_head"}.get(form, name(i, 2).removesuffix(".linear"))
        tensors[f"{output}.weight"] = outputs[i]
    # Published configs have been seen to name fewer heads than the file holds.
    write_published(tmp_path / "heads", tensors, {"medusa_num_heads": 2, "medusa_num_layers": 1})
    head = started(tmp_path / "heads", tiny_target, tmp_path, more="train: {depth: 3}")
    assert (head.settings.num_heads, head.settings.num_layers, head.settings.own_output) == (3, 2, form != "shared")
    rollout = head.rollout(batch, 3)
    x = batch.final_TH[rollout.start_S[0]]
    for depth in range(3):
        y = x
        for j in range(2):
            y = y + torch.nn.functional.silu(
                tensors[f"{name(depth, j)}.weight"] @ y + tensors[f"{name(depth, j)}.bias"]
            )
        expected = (outputs[2 if form == "shared" else depth] @ y)[:500]
        torch.testing.assert_close(head.logits(rollout.state_SDH[0, depth], depth), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def exported(tiny_target, tmp_path_factory):
    return write_head(trained("eagle3", tiny_target), tmp_path_factory.mktemp("export") / "vllm", "vllm")


FAULTS = {
    "absolute ids": ({"d2t": lambda t: t["d2t"] + torch.arange(len(t["d2t"]))}, {}, r"d2t.*offsets"),
    "absolute ids, unmarked": ({"d2t": lambda t: t["d2t"] + torch.arange(len(t["d2t"])), "t2d": None}, {}, "d2t.*the ids"),
    "no map": ({"d2t": None}, {}, "found no tensor d2t"),
    "a map of other tokens": ({"t2d": lambda t: t["t2d"].roll(1)}, {}, "t2d marks others"),
    "a missing tensor": ({"norm.weight": None}, {}, "tensor norm.weight is missing"),
    "an unknown tensor": ({"midlayer.self_attn.q_norm.weight": lambda t: torch.ones(16)}, {}, "q_norm"),
    "another shape": ({"fc.weight": lambda t: t["fc.weight"][:, :-64]}, {}, r"fc.weight of shape \[64, 128\]"),
    "another width": ({}, {"hidden_size": 32, "target_hidden_size": 32}, "hidden_size of the target = 64, expected 32"),
    "other heads": ({}, {"num_attention_heads": 8}, "num_heads of the target = 4, expected 8"),
    "another table": ({}, {"vocab_size": 640}, "vocab_size of the target = 512, expected 640"),
    "scaled positions": ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rotary positions"),
    "two layers": ({}, {"num_hidden_layers": 2}, "num_hidden_layers = 2, expected 1"),
    "norm before fc": ({}, {"norm_before_fc": True}, "norm_before_fc = True, expected False"),
    "a window": ({}, {"sliding_window": 512}, "sliding_window = 512"),
    "an own embedding": ({"embed_tokens.weight": lambda t: torch.ones(512, 64)}, {}, "another embedding"),
    "ambiguous taps": (
        {}, {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}},
        "two ways",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_would_start_wrong_is_refused_before_anything_is_computed(fault, exported, tiny_target, tmp_path):
    changes, config_changes, message = FAULTS[fault]
    folder = shutil.copytree(exported, tmp_path / "copied")
    found = load_file(folder / "model.safetensors")
    tensors = dict(found)
    for name, change in changes.items():
        tensors.pop(name, None)
        if change is not None:
            tensors[name] = change(found)
    config = {**json.loads((folder / "config.json").read_text()), **config_changes}
    write_published(folder, tensors, {k: v for k, v in config.items() if v is not None})
    path = write_recipe(tmp_path, "head: {init_from: ./copied}")
    with pytest.raises(WrongInput, match=rf"(?s)mine.yaml:4: head\.\w+: .*{message}") as caught:
        check_loaded(load(path), path, [], render=False)
    assert str(folder) in str(caught.value)


def test_taps_inside_eagle_config_may_be_one_lower(exported, tiny_target, tmp_path):
    """The two lists that are in use for the same three states of a target of four layers."""
    config = json.loads((exported / "config.json").read_text())
    for listed in ([1, 2, 3], [2, 3, 4]):
        inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": listed}}
        folder = write_published(
            tmp_path / "other", load_file(exported / "model.safetensors"),
            {**{k: v for k, v in config.items() if k != "eagle_aux_hidden_state_layer_ids"}, **inner},
        )  # fmt: skip
        assert read_start(folder).settings["taps"] == [2, 3, 4]


def test_settings_that_the_recipe_says_otherwise_are_refused_where_they_stand(exported, tmp_path):
    path = write_recipe(
        tmp_path,
        f"head:\n  init_from: {exported}\n  draft_vocab_size: 128\n  intermediate_size: 160\n  norm_output: true",
    )
    with pytest.raises(WrongInput) as caught:
        check_loaded(load(path), path, [], render=False)
    text = str(caught.value)
    assert text.startswith("2 problems")
    assert f"mine.yaml:6: head.draft_vocab_size: found draft_vocab_size = 128, expected {len(IDS)}" in text
    assert "mine.yaml:8: head.norm_output: found norm_output = True, expected False" in text
    path = write_recipe(tmp_path, f"head: {{kind: medusa, init_from: {exported}}}")
    with pytest.raises(WrongInput, match=r"head.kind: found 'medusa', expected eagle3"):
        load_recipe(path)


def test_pickled_weights_are_never_loaded(tmp_path):
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x04.")
    path = write_recipe(tmp_path, "head: {init_from: ./}")
    with pytest.raises(
        WrongInput, match=r"head.init_from: .*medusa_lm_head.pt, expected \*.safetensors.*\n.*save_file"
    ):
        load_recipe(path)
    run_folder = tmp_path / "runs" / "young"
    (run_folder / "checkpoints").mkdir(parents=True)
    (run_folder / "recipe.yaml").write_text("")
    with pytest.raises(WrongInput, match="found no checkpoint 'best'.*Train first"):
        load_recipe(write_recipe(tmp_path, f"head: {{init_from: {run_folder}}}"))
    with pytest.raises(WrongInput, match=r"found no run there(.|\n)*A published head is named by its folder"):
        load_recipe(write_recipe(tmp_path, "head: {init_from: nowhere}"))


def test_a_head_of_another_tokenizer_is_refused_and_one_of_other_weights_goes_on(tiny_target, tmp_path):
    save_head(tmp_path, trained("medusa", tiny_target), step=1)
    start, facts = read_start(tmp_path), tiny_target.facts
    settings = make_settings("medusa", 3, draft_vocab_size=len(IDS))
    for part, wrong in (("weights", []), ("tokenizer", ["head.init_from"])):
        other = replace(facts, fingerprint={**facts.fingerprint, part: "other"})
        assert [key for key, _ in start_problems(start, settings, other, tmp_path)] == wrong


@every_kind
def test_training_goes_on_from_where_the_checkpoint_stood(kind, tmp_path):
    """Step 0 of the second training is the last measurement of the first, and its identity is the checkpoint's content."""
    settings = replace(SETTINGS, num_steps=4, eval_every=4)
    first, _ = run(tmp_path / "first", settings, head=make_head(kind=kind), draft_length=3)
    start = read_start(tmp_path / "first" / "checkpoints" / "step-000004")
    head = make_head(kind=kind, seed=1, init_from=start.sha256)
    take_over(head, start)
    _, progress = run(tmp_path / "second", settings, head=head, draft_length=3)
    before, after = (read_metrics(tmp_path / name / METRICS) for name in ("first", "second"))
    keys = [key for key in before[-1] if key.startswith(("accept", "survival"))]
    assert len(keys) > 6
    assert {key: before[-1][key] for key in keys} == {key: after[0][key] for key in keys}
    assert progress.step == 4
    with pytest.raises(WrongInput, match="head.init_from"):
        run(
            tmp_path / "second",
            replace(settings, num_steps=8),
            head=make_head(kind=kind, init_from="others"),
            draft_length=3,
        )


def test_a_start_that_training_only_harms_stays_the_best(tmp_path):
    head = make_head(init_from="a head")
    settings = replace(SETTINGS, num_steps=6, eval_every=2, save_every=2, learning_rate=0.5, keep=1)
    lines = run_and_read(tmp_path, head, settings)
    assert max(line["accept_len"] for line in lines if "accept_len" in line) == lines[0]["accept_len"]
    assert pointed(tmp_path / "checkpoints", "best").name == "step-000000"
    assert pointed(tmp_path / "checkpoints", "last").name == "step-000006"


def run_and_read(folder, head, settings):
    """The lines of a training on validation paths that its first weights already draft well."""
    run(folder, settings, head=head, draft_length=3)
    return read_metrics(folder / METRICS)


def test_a_run_belongs_to_the_content_that_it_started_from(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(exported, tmp_path / "old")
    path = write_recipe(tmp_path, "head: {init_from: ./old}")
    recipe = load_recipe(path)
    mine = RunFolder(tmp_path / "runs" / "mine")
    mine.folder.mkdir(parents=True)
    claims = {"settings": training_settings(recipe), "start": start_identity(read_start(folder))}
    mine.claim(claims)
    moved = folder.rename(tmp_path / "moved")
    again = load_recipe(write_recipe(tmp_path, "head: {init_from: ./moved}"))
    mine.compare({"settings": training_settings(again), "start": start_identity(read_start(moved))})
    tensors = load_file(moved / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] * 2}, moved / "model.safetensors")
    with pytest.raises(WrongInput, match="start"):
        mine.compare({"settings": training_settings(again), "start": start_identity(read_start(moved))})
    shutil.rmtree(moved)  # a finished run is read and measured without what it began with
    mine.write_recipe(dump_recipe(recipe, "resolved"))
    assert load_recipe(mine.recipe) == recipe
    start = tmp_path / "runs" / "mine" / "checkpoints" / "step-000001"
    shutil.copytree(exported, start)
    path = write_recipe(tmp_path, f"head: {{init_from: {start}}}")
    with pytest.raises(WrongInput, match="a part of this run"):
        check_loaded(load(path), path, [], render=False)
