"""A recipe is checked whole: every problem at once, with place, dotted path and the nearest key."""

import dataclasses
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from headstart.heads.errors import WrongInput
from headstart.heads.settings import HEADS
from headstart.launch.recipe import (
    FIRST_LINE,
    LAST_LINE,
    built_in_recipes,
    dump_recipe,
    find_recipe,
    load_recipe,
)
from headstart.launch.schema import keys
from headstart.launch.settings import BakeoffSettings, Recipe
from headstart.launch.variants import load
from headstart.trainer.settings import LossSettings

LOSSES = get_type_hints(LossSettings)["kind"]


def write(tmp_path: Path, text: str, name: str = "mine.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(WrongInput) as caught:
        load_recipe(path, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:-1]]


# recipe text, then what each reported line must say
BAD_RECIPES = [
    ("train: {num_stepz: 3}", ["mine.yaml:1: train.num_stepz: unknown key; did you mean train.num_steps?"]),
    ("train:\n  lr: 0.1", ["mine.yaml:2: train.lr: unknown key; did you mean train.learning_rate?"]),
    ("learning_rate: 1", ["mine.yaml:1: learning_rate: unknown key; did you mean train.learning_rate?"]),
    ("trian:\n  depth: 3", ["mine.yaml:1: trian: unknown key; did you mean train?"]),
    ("run: {seed: zebra}", ["mine.yaml:1: run.seed: found 'zebra', expected a whole number"]),
    ("run: {name: 2024}", ["run.name: found 2024, expected text in quotes"]),
    ("run: {seed: 9223372036854775808}", ["run.seed: found 9223372036854775808, expected at least 0 and at most"]),
    ("train: &again {loss: *again}", ["nested too deeply, or an alias that holds itself"]),
    ("run: {name: a/b}", ["run.name: found 'a/b', expected letters"]),
    ("head: {draft_vocab_size: -1}", ["head.draft_vocab_size: found -1, expected at least 0"]),
    ("head: {draft_vocab_size: 4.0}", ["head.draft_vocab_size: found 4.0, expected a whole number"]),
    ("head: {draft_vocab_size: 0.5}", ["head.draft_vocab_size: found 0.5, expected a whole number"]),
    ("head: {draft_vocab_size: true}", ["head.draft_vocab_size: found true, expected a whole number"]),
    ("head: {taps: [3, 1, 3]}", ["head.taps: found [3, 1, 3], expected ascending tap ids without repeats: [1, 3]"]),
    ("head: {taps: 2}", ["head.taps: found 2, expected a list of whole numbers, such as [2]"]),
    ("head: {taps: [1, -2]}", ["head.taps[1]: found -2, expected at least 0"]),
    (
        "head: {kind: eagle}",
        ["head.kind: found 'eagle', expected eagle3, eagle1, medusa, hydra, mlp, draft or mtp; did you mean eagle3?"],
    ),
    (
        "head: {kind: [mlp], taps: 1}",
        ["mine.yaml:1: head.kind: found [mlp], expected eagle3, eagle1, medusa, hydra, mlp, draft or mtp"],
    ),
    ("head:\n  num_layers: 2", ["mine.yaml:2: head.num_layers: a key of medusa, hydra only; expected one of kind, dr"]),
    (
        "head:\n  kind: mlp\n  taps: [1]\n  intermediate_size: 8\ntrain: {depth: 4}",
        [
            "mine.yaml:3: head.taps: a key of eagle3 only; expected one of kind, draft_vocab_size, init_from_target, ",
            "mine.yaml:4: head.intermediate_size: a key of eagle3, eagle1, mtp only; did you mean head.inner_size?",
        ],
    ),
    (
        "head: {kind: medusa, num_heads: 3}",
        [
            "mine.yaml:1: eval.draft_lengths: found [1, 2, 3, 4], expected at most head.num_heads = 3, the tokens",
            "mine.yaml:1: eval.speed_draft_lengths: found [2, 3, 4], expected at most head.num_heads = 3",
        ],
    ),
    (
        "head: {kind: mlp, num_heads: 4}\ntrain: {depth: 4}\neval: {trees: [[2, 1, 1, 1, 1]]}",
        ["mine.yaml:3: eval.trees: found [2, 1, 1, 1, 1], 5 deep, expected at most head.num_heads = 4"],
    ),
    (
        "head: {kind: draft}\ntrain:\n  feature_noise: 0.1",
        ["mine.yaml:3: train.feature_noise: found 0.1, expected 0: draft heads read no states of the target"],
    ),
    (
        "train:\n  loss: {feature_weight: 10}",
        ["mine.yaml:2: train.loss.feature_weight: found 10, expected 0: the states of eagle3 do not stand for"],
    ),
    (
        "head: {kind: mlp}",
        ["mine.yaml:1: train.depth: found 3, expected head.num_heads = 4, the tokens that mlp can draft"],
    ),
    (
        "head: {kind: mtp, num_modules: 2}\neval: {draft_lengths: [2], draft_length: 2, speed_draft_lengths: [2]}",
        ["mine.yaml:1: train.depth: found 3, expected head.num_modules = 2, the tokens that mtp can draft"],
    ),
    (
        "head: {kind: mlp, num_heads: 1}\ntrain: {depth: 1}\n"
        "eval: {draft_lengths: [1], draft_length: 1, speed_draft_lengths: [1]}",
        ["mine.yaml:1: head.tie_weights: found true with num_heads = 1"],
    ),
    ("head: {fc_norm: 1}", ["head.fc_norm: found 1, expected true or false"]),
    ("traffic: {temperature: -0.1}", ["traffic.temperature: found -0.1, expected at least 0"]),
    ("traffic: {top_p: 0}", ["traffic.top_p: found 0, expected more than 0 and at most 1"]),
    ("traffic: {top_p: 1.5}", ["traffic.top_p: found 1.5, expected more than 0 and at most 1"]),
    ("traffic: {top_p: 0.9}", ["traffic.top_p: found 0.9 with temperature 0: greedy replies take no filter"]),
    (
        "prompts:\n  roles: [my_model=assistant, bot, a=robot]\n  template_kwargs: [x=1, y, 2=3]",
        [
            "mine.yaml:2: prompts.roles[1]: found 'bot', expected NAME=ROLE",
            "mine.yaml:2: prompts.roles[2]: found 'a=robot', expected NAME=ROLE: system, user, assistant or tool",
            "mine.yaml:3: prompts.template_kwargs[1]: found 'y', expected NAME=VALUE",
            "mine.yaml:3: prompts.template_kwargs[2]: found '2=3', expected NAME=VALUE",
        ],
    ),
    ("traffic: {temperature: hot, top_p: 0.9}", ["traffic.temperature: found 'hot', expected a number"]),
    ("head: {kind: medusa}\ntrain: {dept: 4}", ["mine.yaml:2: train.dept: unknown key; did you mean train.depth?"]),
    ("head: {kind: medusa, num_heads: few}", ["head.num_heads: found 'few', expected a whole number"]),
    (
        "traffic: {slots: 0, top_p: 0.9}\neval: {draft_lengths: [1, 2], concurrency: [x]}\nhead: {kind: medusa}",
        [
            "mine.yaml:1: traffic.slots: found 0, expected at least 1",
            "mine.yaml:1: traffic.top_p: found 0.9 with temperature 0: greedy replies take no filter",
            "mine.yaml:1: train.depth: found 3, expected head.num_heads = 4",
            "mine.yaml:2: eval.concurrency[0]: found 'x', expected a whole number",
            "mine.yaml:2: eval.draft_length: found 4, expected one of draft_lengths = [1, 2]",
        ],
    ),
    ("traffic: {temperature: .nan}", ["traffic.temperature: found nan, expected a number"]),
    ("train: {depth: 0}", ["train.depth: found 0, expected at least 1"]),
    ("train: {depth: null}", ["train.depth: found nothing, expected a whole number"]),
    ("train: 7", ["train: found 7, expected keys with values below it"]),
    ("train: {loss: {kind: kd}}", ["train.loss.kind: found 'kd', expected kl, reverse_kl, jsd, ce, tv or lk_hybrid"]),
    ("traffic: {max_new_tokens: 3}\ntrain: {depth: 2}", ["mine.yaml:1: eval.draft_lengths: found [1, 2, 3, 4]"]),
    ("eval: {draft_lengths: [1, 2]}", ["eval.draft_length: found 4, expected one of draft_lengths = [1, 2]"]),
    ("eval: {trees: [[2, 1], []]}", ["mine.yaml:1: eval.trees: found [] in place 1, expected children per node"]),
    (
        "eval: {trees: [[2], [2]]}",
        ["eval.trees: found [2] in place 1, expected children per node at one or more depths"],
    ),
    ("eval: {trees: [[40, 40]]}", ["eval.trees: found [40, 40] with 1640 nodes, expected at most 1024"]),
    (
        "head: {draft_vocab_size: 300}\neval: {trees: [[2], [1, 301]]}",
        ["mine.yaml:2: eval.trees: found 301 children of one node, expected at most head.draft_vocab_size = 300"],
    ),
    ("eval: {trees: [[2, 0]]}", ["eval.trees[0][1]: found 0, expected at least 1"]),
    ("eval: {trees: [2]}", ["eval.trees[0]: found 2, expected a list of whole numbers, such as [2]"]),
    (
        "traffic: {max_new_tokens: 6}\neval: {trees: [[1], [1, 1, 1, 1, 1, 1]]}",
        ["eval.trees: found [1, 1, 1, 1, 1, 1], 6 deep; a reply has at most traffic.max_new_tokens = 6 tokens"],
    ),
    ("eval: {vocab_sizes: [64, 32]}", ["eval.vocab_sizes: found [64, 32], expected numbers, ascending"]),
    (
        "head: {draft_vocab_size: 300}\neval: {vocab_sizes: [200, 300]}",
        ["mine.yaml:2: eval.vocab_sizes: found 300, expected less than head.draft_vocab_size = 300"],
    ),
    ("eval: {trees: 2}", ["eval.trees: found 2, expected a list of lists of whole numbers"]),
    ("traffic: {temperature: 1.0e-9}", ["traffic.temperature: found 1e-09, expected 0 (greedy) or at least 0.001"]),
    ("eval:\n  draft_lengths: []", ["mine.yaml:2: eval.draft_lengths: found [], expected one or more"]),
    (
        "export: {engines: [vlm]}",
        ["export.engines[0]: found 'vlm', expected vllm, speculators, sglang, trtllm, llamacpp or transformers"],
    ),
    ("prompts: {sources: []}", ["prompts.sources: found no source"]),
    ("train:\n  depth: 2\n  depth: 3", ["mine.yaml:3: depth: given twice; first at mine.yaml:2"]),
    ("train:\n\tdepth: 2", ["mine.yaml:2: not YAML"]),
    ("- target", ["found [target], expected keys with values below it"]),
    (
        "run: {sead: 1}\ntarget: {dtype: fp32}\ntraffic:\n  slots: 0\n  top_k: many\ntrain:\n  depth: 0\n",
        [
            "mine.yaml:1: run.sead: unknown key; did you mean run.seed?",
            "mine.yaml:2: target.dtype: found 'fp32', expected auto, float32 or bfloat16",
            "mine.yaml:4: traffic.slots: found 0, expected at least 1",
            "mine.yaml:5: traffic.top_k: found 'many', expected a whole number",
            "mine.yaml:7: train.depth: found 0, expected at least 1",
        ],
    ),
]


@pytest.mark.parametrize(("text", "expected"), BAD_RECIPES, ids=[text.replace("\n", " ") for text, _ in BAD_RECIPES])
def test_every_problem_is_reported_with_its_place(tmp_path: Path, text: str, expected: list[str]) -> None:
    reported = problems_of(write(tmp_path, text))
    assert len(reported) == len(expected), reported
    for line, reported_line in zip(expected, reported, strict=True):
        assert line in reported_line


def test_overrides_win_over_the_recipe_and_the_recipe_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  num_steps: 7\n  depth: 2\n")
    assert load_recipe(path).train.num_steps == 7
    recipe = load_recipe(path, ["train.num_steps=9", "train.loss.kind=tv", "head.taps=[0, 2, 4]", "run.name=x"])
    assert recipe.train.num_steps == 9
    assert recipe.train.depth == 2
    assert recipe.train.loss.kind == "tv"
    assert recipe.head.taps == [0, 2, 4]
    assert recipe.run.name == "x"
    assert recipe.train.batch_tokens == Recipe().train.batch_tokens
    assert load_recipe(path, ["train.num_steps=1", "train.num_steps=2"]).train.num_steps == 2
    assert load_recipe(path, ["train.learning_rate=1e-3"]).train.learning_rate == 1e-3


def test_problems_of_overrides_stand_beside_those_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  depth: 0\n")
    reported = problems_of(path, "train.steps=3", "depth", "traffic.slots=[", "traffic.chunk=none")
    assert len(reported) == 5, reported
    for line in (
        "command line `depth`: expected key=value",
        "command line `traffic.slots=[`: not YAML",
        "command line `train.steps=3`: train.steps: unknown key; did you mean train.num_steps?",
        "command line `traffic.chunk=none`: traffic.chunk: found 'none', expected a whole number",
        "mine.yaml:2: train.depth: found 0, expected at least 1",
    ):
        assert any(line in reported_line for reported_line in reported), (line, reported)


def test_paths_count_from_the_recipe_and_names_stay_names(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    text = "target: {model: model}\nprompts: {sources: [mine.jsonl, builtin], heldout: ../held.jsonl}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.target.model == str(tmp_path / "model")
    assert recipe.prompts.sources == [str(tmp_path / "mine.jsonl"), "builtin"]
    assert recipe.prompts.heldout == str(tmp_path.parent / "held.jsonl")
    assert load_recipe(write(tmp_path, "target: {model: org/name}")).target.model == "org/name"


def test_paths_of_the_command_line_count_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    path = write(tmp_path, "prompts: {heldout: held.jsonl}\n")
    recipe = load_recipe(path, ["prompts.sources=[mine.jsonl]"])
    assert recipe.prompts.sources == [str(here / "mine.jsonl")]
    assert recipe.prompts.heldout == str(tmp_path / "held.jsonl")


def test_the_resolved_recipe_reads_back_equal_and_is_python_too(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "train: {learning_rate: 1.0e-5}\nhead: {taps: [1, 2]}\n"), ["run.seed=3"])
    resolved = write(tmp_path, dump_recipe(recipe, "resolved from mine.yaml"), "resolved.yaml")
    assert load_recipe(resolved) == recipe
    compile(resolved.read_text(), "resolved.yaml", "exec")
    assert load_recipe(resolved).run.seed == 3


@pytest.mark.parametrize("name", sorted(built_in_recipes()))
def test_every_built_in_recipe_is_valid_and_carries_the_launch_lines(name: str) -> None:
    path = find_recipe(name)
    assert load(path).shared.run.name == Path(name).name
    lines = path.read_text().splitlines()
    assert FIRST_LINE in lines
    assert lines[-1] == LAST_LINE
    compile(path.read_text(), str(path), "exec")


@pytest.mark.parametrize("kind", HEADS)
def test_every_kind_has_a_recipe_that_shares_the_targets_answers(kind: str) -> None:
    eagle = load_recipe(find_recipe("eagle"))
    recipe = load_recipe(find_recipe("eagle" if kind == "eagle3" else kind))
    assert recipe.head.kind == kind
    assert recipe.head.asked_taps == eagle.head.asked_taps
    for section in ("target", "prompts", "traffic", "features"):
        assert getattr(recipe, section) == getattr(eagle, section)
    assert recipe.run.seed == eagle.run.seed


def test_the_bake_off_has_every_kind_and_shares_its_traffic_with_that_of_every_loss() -> None:
    heads, losses = load(find_recipe("bakeoff")).variants, load(find_recipe("losses")).variants
    assert {recipe.head.kind for recipe in heads.values()} == set(HEADS)
    assert set(losses) == {recipe.train.loss.kind for recipe in losses.values()} == set(get_args(LOSSES))
    first, second = heads["eagle3"], losses["kl"]
    length = ("num_steps", "warmup_steps", "eval_every", "save_every")
    as_long = dataclasses.replace(second.train, **{name: getattr(first.train, name) for name in length})
    assert (first.head, first.train) == (second.head, as_long)
    for section in ("target", "prompts", "traffic", "features"):
        assert getattr(first, section) == getattr(second, section)


def test_every_setting_has_a_doc() -> None:
    assert [key.path for cls in (Recipe, BakeoffSettings) for key in keys(cls) if not key.doc.endswith(".")] == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mine.yaml", "mine"),
        ("my head (2).yaml", "my-head-2"),
        ("größe 数学.v2.yaml", "größe-数学.v2"),
        ("..yaml", "run"),
    ],
)
def test_a_run_named_after_its_file_can_be_read_again(tmp_path: Path, file: str, name: str) -> None:
    recipe = load_recipe(write(tmp_path, "target: {model: tiny}", file))
    assert recipe.run.name == name
    assert load_recipe(write(tmp_path, dump_recipe(recipe, "resolved"), "recipe.yaml")) == recipe


def test_a_missing_recipe_names_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="does not exist"):
        find_recipe(str(tmp_path / "nothing.yaml"))
    with pytest.raises(WrongInput, match="is a folder"):
        find_recipe(str(tmp_path))
