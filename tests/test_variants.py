"""Variants of a recipe: whole recipes laid over one, every problem at once, nothing that would part their traffic."""

from pathlib import Path

import pytest

from headstart.heads.errors import WrongInput
from headstart.launch.check import check_loaded
from headstart.launch.recipe import dump_recipe, load_recipe
from headstart.launch.variants import dump, load, stored_taps
from tests.test_recipe import write

TWO = """\
run: {seed: 3}
target: {model: tiny}
head: {draft_vocab_size: 64}
train: {num_steps: 8, depth: 3}
export: {engines: []}
variants:
  eagle3:
  medusa: {head: {kind: medusa, num_heads: 2}, train: {depth: 2, learning_rate: 0.5}}
eval: {draft_lengths: [1, 2], draft_length: 2, speed_draft_lengths: [2]}
"""


def problems_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(WrongInput) as caught:
        load(path, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:-1]]


def test_a_variant_is_the_recipe_with_its_own_settings_laid_over(tmp_path: Path) -> None:
    """And is what a recipe file with these settings would be, under its own run name."""
    loaded = load(write(tmp_path, TWO))
    assert list(loaded.variants) == ["eagle3", "medusa"]
    base = TWO.partition("variants:")[0] + TWO.splitlines()[-1]
    plain = load_recipe(write(tmp_path, base.replace("{seed: 3}", "{seed: 3, name: mine-eagle3}"), "plain.yaml"))
    assert loaded.variants["eagle3"] == plain
    assert loaded.shared.run.name == "mine"
    medusa = loaded.variants["medusa"]
    assert (medusa.head.kind, medusa.head.draft_vocab_size, medusa.head.max_depth) == ("medusa", 64, 2)
    assert (medusa.train.depth, medusa.train.learning_rate, medusa.train.num_steps) == (2, 0.5, 8)
    assert medusa.run.name == "mine-medusa"
    assert load_recipe(write(tmp_path, dump_recipe(medusa, "resolved"), "medusa.yaml")) == medusa


def test_the_command_line_wins_over_variants_and_reaches_into_them(tmp_path: Path) -> None:
    path = write(tmp_path, TWO)
    variants = load(path, ["train.learning_rate=0.25", "variants.medusa.train.warmup_steps=7", "run.name=x"]).variants
    assert [recipe.train.learning_rate for recipe in variants.values()] == [0.25, 0.25]
    assert [recipe.train.warmup_steps for recipe in variants.values()] == [50, 7]
    assert [recipe.run.name for recipe in variants.values()] == ["x-eagle3", "x-medusa"]
    plain = write(tmp_path, "train: {depth: 2}\n", "plain.yaml")
    assert load(plain).variants == {}
    assert load(plain).recipes[""] == load_recipe(plain)
    wide = load(plain, ["variants.wide.head.fc_norm=true", "bakeoff.rule=equal_time"])
    assert (list(wide.variants), wide.bakeoff.rule) == (["wide"], "equal_time")
    with pytest.raises(WrongInput, match="bakeoff: unknown key"):
        load(plain, ["bakeoff.rule=equal_time"])


def test_the_resolved_bake_off_reads_back_equal_and_is_python_too(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, TWO), ["variants.eagle3.head.taps=[0, 2]"])
    resolved = write(tmp_path, dump(loaded, "resolved"), "recipe.yaml")
    assert load(resolved) == loaded
    compile(resolved.read_text(), "recipe.yaml", "exec")
    with pytest.raises(WrongInput, match=r"is a bake-off \(eagle3, medusa\), expected a recipe or run of one head"):
        load_recipe(resolved)


# what is written under variants, then what each reported line must say
BAD_VARIANTS = [
    ("{}", ["mine.yaml:5: variants: found a section, expected names with settings below them"]),
    ("[medusa]", ["mine.yaml:5: variants: found [medusa], expected names with settings below them"]),
    ("{a: 3}", ["mine.yaml:5: variants.a: found 3, expected keys with values below it"]),
    ("{a/b: {}}", ["mine.yaml:5: variants.a/b: expected a name of letters"]),
    (
        "\n  a: {head: {kind: medusaa}, trian: {}}\n  b:\n    train:\n      num_stepz: 3\n      loss: {kind: kd}",
        [
            "mine.yaml:6: variants.a.trian: unknown key; did you mean train?",
            "mine.yaml:6: variants.a.head.kind: found 'medusaa', expected eagle3, eagle1, medusa",
            "mine.yaml:9: variants.b.train.num_stepz: unknown key; did you mean train.num_steps?",
            "mine.yaml:10: variants.b.train.loss.kind: found 'kd', expected kl, ",
        ],
    ),
    (
        "\n  a: {target: {model: x}, prompts: {}, traffic: {slots: 1}, run: {seed: 1}}\n  b: {eval: {}, features: {}}",
        [f"variants.a.{name}: is shared by all variants" for name in ("target", "prompts", "traffic", "run")]
        + [f"variants.b.{name}: is shared by all variants" for name in ("eval", "features")],
    ),
    (
        "{a: {}, b: {train: {num_steps: 4, batch_tokens: 2048}}}\nbakeoff: {rule: equal_times, steps: 3}",
        [
            "mine.yaml:6: bakeoff.steps: unknown key; expected one of rule, rehearsal_steps",
            "mine.yaml:6: bakeoff.rule: found 'equal_times', expected equal_tokens or equal_time; did you mean equal_time?",
        ],
    ),
    (
        "{a: {}, b: {train: {num_steps: 4}}}\nbakeoff: {rule: equal_time}",
        ["mine.yaml:5: variants.b.train.num_steps: found 4 steps of 1,024 = 4,096 tokens, expected 8,192 as for a"],
    ),
    (
        "\n  a:\n  b: {train: {num_steps: 4}}\n  c: {train: {num_steps: 4, batch_tokens: 2048}}",
        [
            "mine.yaml:7: variants.b.train.num_steps: found 4 steps of 1,024 = 4,096 tokens, expected 8,192 as for a (8 "
            "steps of 1,024): heads are compared at equal tokens"
        ],
    ),
]


@pytest.mark.parametrize(("variants", "expected"), BAD_VARIANTS, ids=[text.split("\n")[-1] for text, _ in BAD_VARIANTS])
def test_every_problem_of_every_variant_is_reported_with_its_place(
    tmp_path: Path, variants: str, expected: list[str]
) -> None:
    text = f"target: {{model: tiny}}\n\n\ntrain: {{num_steps: 8}}\nvariants: {variants}\n"
    reported = problems_of(write(tmp_path, text))
    assert len(reported) == len(expected), reported
    for line, reported_line in zip(expected, reported, strict=True):
        assert line in reported_line


def test_a_problem_of_shared_settings_names_the_variants_that_have_it(tmp_path: Path) -> None:
    """Once, and without names where all have it."""
    path = write(tmp_path, TWO.replace("depth: 2, ", ""))
    (reported,) = problems_of(path)
    assert reported.startswith("mine.yaml:4: train.depth: found 3, expected head.num_heads = 2")
    assert reported.endswith("(variant medusa)")
    path = write(tmp_path, TWO)
    (reported,) = problems_of(path, "head.fc_norm=true")
    assert "head.fc_norm: a key of eagle3 only" in reported
    assert reported.endswith("(variant medusa)")
    (reported,) = problems_of(path, "eval.replicates=none")
    assert reported.endswith("eval.replicates: found 'none', expected a whole number")
    assert "expected 0: heads that stop at other numbers" in problems_of(path, "eval.stop_at_width=0.1")[0]


def test_variants_are_checked_against_the_target_and_features_hold_the_taps_of_all(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "Name {number} rivers that flow {way}."}}' for number in (3, 5) for way in ("north", "west")]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    (tmp_path / "held.jsonl").write_text('{"prompt": "What is the capital of this country?"}\n')
    path = write(tmp_path, f"{TWO}prompts: {{sources: [mine.jsonl], heldout: held.jsonl, num_validation: 1}}\n")
    bad = ["variants.eagle3.head.taps=[1, 9]", "variants.medusa.export.engines=[sglang]"]
    with pytest.raises(WrongInput) as caught:
        check_loaded(load(path, bad), path, bad, render=False)
    for expected in (
        "variants.eagle3.head.taps: found [9], expected 0 .. 4",
        "variants.medusa.export.engines: sglang: found no writer for heads of kind 'medusa': it has no Medusa heads",
    ):
        assert expected in str(caught.value)
    good = ["variants.eagle3.head.taps=[0, 2]", "variants.third.head.taps=[3]"]
    default = check_loaded(load(path), path, [], render=False).target.taps
    taps = check_loaded(load(path, good), path, good, render=False).target.taps
    assert taps == stored_taps(load(path, good).variants.values(), default) == sorted({0, 2, 3, *default})
