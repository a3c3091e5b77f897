"""What does not fit the target or the prompts is found before anything is computed, all at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.heads.builtin import resolve_model
from headstart.heads.errors import WrongInput
from headstart.launch.check import check_loaded, skip_lines
from headstart.launch.recipe import FIRST_LINE, LAST_LINE, built_in_recipes, find_recipe, load_recipe
from headstart.launch.variants import load

SCRIPTS = Path(sys.executable).parent


def problems_of(path: Path, *overrides: str) -> str:
    with pytest.raises(WrongInput) as caught:
        check_loaded(load(path, overrides), path, list(overrides))
    return str(caught.value)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of four own prompts on the tiny target."""
    (tmp_path / "mine.jsonl").write_text(
        "".join(
            f'{{"prompt": "What is the capital of country number {i} in {name}?"}}\n' for i, name in enumerate(NAMES)
        )
    )
    (tmp_path / "held.jsonl").write_text('{"prompt": "Name three rivers that flow north."}\n')
    path = tmp_path / "mine.yaml"
    path.write_text(
        "target: {model: tiny}\n"
        "prompts: {sources: [mine.jsonl], heldout: held.jsonl, num_train: 0, num_validation: 1}\n"
        "head: {draft_vocab_size: 128}\n"
        "traffic: {max_new_tokens: 16}\n"
    )
    return path


NAMES = ("old songs", "a blue atlas", "your notes", "the second book", "this list", "our game")


def test_own_prompts_on_the_tiny_target_are_fine(recipe: Path) -> None:
    checked = check_loaded(load(recipe), recipe, [])
    assert checked.target.facts.num_layers == 4
    assert len(checked.planned.conversations) == len(checked.prompts.prompts) == 7


def test_everything_that_does_not_fit_the_target_is_reported_at_once(recipe: Path) -> None:
    text = problems_of(recipe, "head.taps=[1, 5]", "head.draft_vocab_size=501", "target.device=nonsense")
    assert text.startswith("3 problems in")
    assert "head.taps: found [5], expected 0 .. 4" in text
    assert "head.draft_vocab_size: found 501, but the target's tokenizer has 500 tokens" in text
    assert "target.device: found 'nonsense'" in text


def test_an_export_needs_figures_that_are_proved(recipe: Path) -> None:
    bad = "traffic.eval_dtype=bfloat16"
    assert "export.engines: found ['vllm'] with traffic.eval_dtype = bfloat16" in problems_of(recipe, bad)
    for overrides in ([bad, "export.engines=[]"], ["traffic.temperature=0.7"]):
        check_loaded(load(recipe, overrides), recipe, overrides)


def test_what_would_fail_after_hours_is_found_before(recipe: Path) -> None:
    text = problems_of(recipe, "head.draft_vocab_size=2", "export.engines=[vllm, sglang, llamacpp]", "head.taps=[1, 4]")
    assert "head.draft_vocab_size: found 2, but 3 special and stop tokens are always in" in text
    assert "export.engines: sglang would not serve this head: taps [1, 4]" in text
    assert "export.engines: llamacpp would not serve this head: 2 taps, exactly 3 are read" in text


def test_a_kind_without_a_writer_is_trained_and_not_exported(recipe: Path) -> None:
    hydra = ["head.kind=hydra", "train.depth=4"]
    text = problems_of(recipe, *hydra)
    assert text.startswith("1 problem in")
    assert "export.engines: vllm: found no writer for heads of kind 'hydra' (there are: eagle3 for vllm, " in text
    assert "set it to []" in text
    overrides = [*hydra, "export.engines=[]"]
    check_loaded(load(recipe, overrides), recipe, overrides)


def test_a_draft_model_that_is_not_there_or_speaks_otherwise_is_found_before(recipe: Path, tmp_path: Path) -> None:
    draft = ["head.kind=draft", "export.engines=[]"]
    text = problems_of(recipe, *draft, "head.model=nowhere/../x")
    assert "head.model: found no model called 'nowhere/../x'" in text
    other = tmp_path / "other"
    shutil.copytree(resolve_model("tiny"), other)
    for file in other.glob("token*.json"):
        file.write_text(file.read_text(encoding="utf-8").replace("<|im_start|>", "<|turn|>"), encoding="utf-8")
    text = problems_of(recipe, *draft, f"head.model={other}")
    assert text.startswith("1 problem in")
    assert "head.model: draft model" in text
    assert "The first is 1: '<|im_start|>' for the target, '<|turn|>' for the draft" in text


def test_a_draft_of_layers_that_the_target_lacks_is_found_before(recipe: Path) -> None:
    text = problems_of(recipe, "head.kind=draft", "head.layers=[0, 4]", "export.engines=[]")
    assert text.startswith("1 problem in")
    assert "head.layers: found [4], expected 0 .. 3, the decoder layers of 'tiny'" in text


def test_prompts_longer_than_the_limit_or_the_context_are_found(recipe: Path) -> None:
    text = problems_of(recipe, "traffic.max_prompt_tokens=20")
    assert (
        "traffic.max_left_out: found 7 of 7 requests that cannot be asked (nothing is left of: heldout, train, v"
        in text
    )
    assert "longer than 20 tokens (traffic.max_prompt_tokens): prompt " in text
    text = problems_of(recipe, "traffic.max_prompt_tokens=1020")
    assert "the target's context is 1024; expected at most 1008" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("target.model=nowhere/at-all", "target.model: found no model called 'nowhere/at-all'"),
        ("prompts.sources=[/nothing.jsonl]", "prompts.sources: found no file or folder /nothing.jsonl"),
        ("prompts.routes=[poetry]", "poetry"),
    ],
)
def test_missing_things_are_named(recipe: Path, override: str, expected: str) -> None:
    assert expected in problems_of(recipe, override)


def test_every_missing_prompt_file_is_named_at_once(recipe: Path) -> None:
    text = problems_of(recipe, "prompts.sources=[/one.jsonl, /two.jsonl]", "prompts.heldout=/three.jsonl")
    assert text.startswith("3 problems in")
    assert all(f"found no file or folder /{name}.jsonl" in text for name in ("one", "two", "three"))


@pytest.mark.parametrize("variants", ["", "variants: {a: {}, b: {head: {kind: mlp}}}\n"], ids=["one head", "variants"])
def test_missing_files_are_named_beside_keys_that_are_wrong(recipe: Path, variants: str) -> None:
    content = recipe.read_text().replace("mine.jsonl", "nine.jsonl").replace("model: tiny", "model: ./nowhere")
    recipe.write_text(content.replace("max_new_tokens", "max_new_token") + variants)
    text = problems_of(recipe, "prompts.heldout=/three.jsonl", "prompts.num_train=many")
    assert text.startswith("5 problems in")
    for told in ("unknown key; did you mean traffic.max_new_tokens?", "prompts.num_train: found 'many'"):
        assert told in text
    for file in ("nine.jsonl", "/three.jsonl"):
        assert f"{file}, expected `builtin`" in text
    assert f"{recipe.name}:1: target.model: found no model called" in text


def test_empty_prompt_files_are_refused(recipe: Path) -> None:
    (recipe.parent / "mine.jsonl").write_text("")
    assert "prompts" in problems_of(recipe)


def test_a_tokenizer_without_chat_template_is_refused(recipe: Path, tiny_folder: Path) -> None:
    bare = recipe.parent / "bare"
    shutil.copytree(tiny_folder, bare)
    (bare / "chat_template.jinja").unlink()
    text = problems_of(recipe, f"target.model={bare}")
    assert "without chat template" in text


def test_a_prompt_that_the_chat_template_refuses_is_named(recipe: Path, tiny_folder: Path) -> None:
    strict = recipe.parent / "strict"
    shutil.copytree(tiny_folder, strict)
    (strict / "chat_template.jinja").write_text("{{ raise_exception('no user turn') }}")
    text = problems_of(recipe, f"target.model={strict}")
    assert "cannot render it: TemplateError: no user turn" in text


def test_a_folder_that_holds_no_model_is_refused(recipe: Path) -> None:
    (recipe.parent / "empty").mkdir()
    (recipe.parent / "empty" / "config.json").write_text("{}")
    assert "holds no decoder-only language model" in problems_of(recipe, f"target.model={recipe.parent / 'empty'}")


@pytest.mark.parametrize("name", sorted(name for name in built_in_recipes() if not name.startswith("real/")))
def test_every_built_in_recipe_fits_its_target(name: str, recipe: Path) -> None:
    path, overrides = find_recipe(name), []
    loaded, eagle = load(path), load_recipe(find_recipe("eagle"))
    if name != "eagle" and (loaded.variants or loaded.shared.prompts == eagle.prompts):  # read and rendered once
        few = {"sources": f"[{recipe.parent / 'mine.jsonl'}]", "heldout": recipe.parent / "held.jsonl"}
        few |= {"num_train": 0, "num_validation": 1}
        overrides = [f"prompts.{key}={value}" for key, value in few.items()]
    check_loaded(load(path, overrides), path, overrides)


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "mine.yaml", "--dry-run"],
        [str(SCRIPTS / "headstart"), "train", "mine.yaml", "--dry-run"],
        [sys.executable, "-m", "headstart.launch", "mine.yaml", "--dry-run"],
        [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", "mine.yaml", "--dry-run"],
    ],
    ids=["python", "headstart", "module", "accelerate"],
)
def test_every_launcher_reads_the_recipe_and_takes_the_same_threads(command: list[str], recipe: Path) -> None:
    recipe.write_text(f"{FIRST_LINE}\n{recipe.read_text()}{LAST_LINE}\n")
    elsewhere = recipe.parent / "elsewhere"
    elsewhere.mkdir()
    before = sorted(recipe.parent.iterdir())
    command = [part.replace("mine.yaml", str(recipe)) for part in command]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model: tiny" in done.stdout
    assert f"checking {recipe} against its target and prompts\n" in done.stderr
    threads = next(line for line in done.stdout.splitlines() if line.startswith("  threads           "))
    assert threads.split()[1] == str(len(os.sched_getaffinity(0)))
    assert [*elsewhere.iterdir()] == []  # a dry run writes nothing
    assert sorted(recipe.parent.iterdir()) == before


def test_check_names_the_rows_it_skips(recipe: Path) -> None:
    with (recipe.parent / "mine.jsonl").open("a") as rows:
        rows.write('{"prompt": ""}\n' + '{"text": 1}\n' * 12)
    lines = skip_lines(check_loaded(load(recipe), recipe, []).prompts)
    assert "mine.jsonl:7: an empty user turn" in lines[0]
    assert "mine.jsonl:8: no messages and no prompt" in lines[1]
    assert lines[-1] == "and 3 more are skipped; a run lists all of them"
