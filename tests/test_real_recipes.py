"""Recipes for targets that no test machine holds: planned in full from config and tokenizer, refused where too large."""

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from headstart.heads.store import write_json
from headstart.heads.target import TargetLoader
from headstart.launch import cli
from headstart.launch.needs import measure_needs, parameters
from headstart.launch.recipe import built_in_recipes
from headstart.launch.variants import load
from headstart.trainer.features import token_bytes

CONFIGS = Path(__file__).parent / "data" / "targets"
REAL = {name.removeprefix("real/"): path for name, path in built_in_recipes().items() if name.startswith("real/")}
# Parameters of the target in billions as its makers state them, taps of N layers, bytes of a token's features.
STATED = {
    "qwen3-8b": (8.2, [2, 18, 33], 32768),
    "qwen3-30b-a3b": (30.5, [2, 24, 45], 16384),
    "llama-3.3-70b": (70.6, [2, 40, 77], 65536),
    "deepseek-v3": (671.0, [2, 30, 58], 57344),
}
NUM_WORDS = 33_000
SCALE = (Path(__file__).parent.parent / "docs" / "scale.md").read_text(encoding="utf-8")
PLANS = re.findall(r"<!-- headstart plan real/(\S+) (.*?) -->\n(.*?)\n<!-- end -->", SCALE, re.S)
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}assistant"


@pytest.fixture
def arguments(request, tmp_path):
    """Arguments that let a recipe meet its target's config beside a tokenizer of enough words, and short prompts."""
    name = request.param
    folder = tmp_path / name
    folder.mkdir()
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    write_json(folder / "config.json", config)
    vocab = {"assistant": 0, **{f"w{i}": i for i in range(1, NUM_WORDS)}}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w1"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    write_json(folder / "tokenizer.json", tokenizer)
    kind = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "w2",
        "unk_token": "w1",
        "chat_template": TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", kind)
    random = Random(0)
    for file, number in (("mine.jsonl", 70), ("held.jsonl", 240)):  # validation takes 64 of the former
        texts = [" ".join(f"w{random.randrange(3, NUM_WORDS)}" for _ in range(6)) for _ in range(number)]
        (tmp_path / file).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    prompts = (f"prompts.sources=[{tmp_path / 'mine.jsonl'}]", f"prompts.heldout={tmp_path / 'held.jsonl'}")
    rest = (f"run.root={tmp_path / 'runs'}", "run.threads=1", "target.device=cpu")
    return [str(REAL[name]), f"target.model={folder}", *prompts, *rest]


@pytest.mark.parametrize(("arguments", "name"), [(name, name) for name in REAL], indirect=["arguments"])
def test_a_real_recipe_is_planned_without_weights(arguments, name, capsys):
    billions, taps, bytes_a_token = STATED[name]
    assert cli.run(["train", *arguments, "--dry-run"]) == 0
    out = capsys.readouterr().out
    lines = {
        line.split("  ")[1]: line for line in out.splitlines() if line.startswith("  ") and len(line.split("  ")) > 2
    }
    recipe = load(REAL[name], arguments[1:])
    loader = TargetLoader(recipe.shared.target, need_weights=False)
    needs = measure_needs(recipe, loader)
    assert str(taps) in lines["taps"]
    assert ", ".join(f"{tap} after {tap} layers" for tap in taps) in out
    assert "32,000" in lines["draft vocabulary"]
    assert token_bytes(loader, torch.bfloat16) == bytes_a_token
    assert f"about {bytes_a_token // 1000}" in lines["features"] or recipe.shared.traffic.eval_dtype == "float32"
    assert needs.counted.total / 1e9 == pytest.approx(billions, abs=0.06)
    assert parameters(needs.counted.total) in out
    assert parameters(needs.num_trained) in lines["head"]
    hidden, draft_rows = bytes_a_token // 8, 32000
    assert needs.num_trained > hidden * (3 * hidden + draft_rows)
    assert "once the target's weights are there" in lines["traffic"]


@pytest.mark.parametrize("arguments", ["llama-3.3-70b"], indirect=True)
def test_what_no_single_device_holds_is_refused_with_the_numbers(arguments, capsys):
    arguments = [*arguments, "target.sharded=false"]
    assert cli.run(["check", *arguments]) == cli.WRONG_INPUT
    told = capsys.readouterr().err
    assert "target.model: needs " in told
    assert "141.11 GB for the target in bfloat16" in told
    recipe = load(REAL["llama-3.3-70b"], arguments[1:])
    needs = replace(measure_needs(recipe, TargetLoader(recipe.shared.target, need_weights=False)), memory=80 * 10**9)
    assert not needs.fits
    least = needs.least_processes
    assert needs.spread(least).fits
    assert not needs.spread(least - 1).fits
    assert f"spread it over at least {least} processes: target.sharded=true" in needs.refusal()
    spread = replace(needs.spread(8), cache=0)
    layers = spread.own_layers + spread.gathered
    assert spread.total == spread.ends + max(layers, spread.head)
    assert replace(spread, streams=True).total == spread.ends + layers + spread.head  # beside each other
    assert cli.run(["train", *arguments]) == cli.WRONG_INPUT
    assert "found no *.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["qwen3-8b"], indirect=True)
def test_a_machine_that_is_large_enough_is_told_by_its_memory(arguments):
    recipe = load(REAL["qwen3-8b"], arguments[1:])
    needs = measure_needs(recipe, TargetLoader(recipe.shared.target, need_weights=False))
    assert needs.target.keys() == {"bfloat16", "float32"}
    assert needs.total == max(needs.target.values()) + max(needs.cache, needs.head)
    assert needs.device == torch.device("cpu")
    assert replace(needs, memory=80 * 10**9).fits
    assert not replace(needs, memory=needs.total - 1).fits
    assert replace(needs, memory=None).fits


@pytest.mark.parametrize("arguments", ["qwen3-8b"], indirect=True)
def test_quantised_weights_take_what_their_files_take(arguments):
    recipe = load(REAL["qwen3-8b"], arguments[1:])
    folder = Path(recipe.shared.target.model)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "quantization_config": {"quant_method": "fp8"}})
    (folder / "model.safetensors").write_bytes(b"0" * 1000)
    needs = measure_needs(recipe, TargetLoader(recipe.shared.target))
    assert set(needs.target.values()) == {1000}


@pytest.mark.parametrize(("arguments", "options", "told"), PLANS, indirect=["arguments"])
def test_figures_of_the_docs_are_those_that_plan_calculates(arguments, options, told, capsys):
    assert cli.run(["plan", *arguments, *options.split()]) == 0
    calculated = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    lines = [" ".join(line.split()) for line in told.splitlines() if line.strip()]
    assert len(lines) > 5
    assert [line for line in lines if line not in calculated] == []


def test_the_docs_have_plans_for_a_dense_target_and_for_experts():
    assert {name for name, *_ in PLANS} == {"llama-3.3-70b", "deepseek-v3"}
