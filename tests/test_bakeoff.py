"""A bake-off: one target pass, a run for each head, one table of the figures that those runs hold; killed, it repeats."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headstart.eval.bakeoff import Entry, bakeoff_content
from headstart.eval.bakeoff_text import bakeoff_text, write_bakeoff_report
from headstart.eval.compare import compare_whole
from headstart.eval.prompt_sums import read_sums, write_sums
from headstart.eval.statistics import ratio_interval, resampling_weights
from headstart.heads.store import hash_file, read_json, write_json
from headstart.launch import cli
from headstart.launch.recipe import FIRST_LINE, LAST_LINE
from headstart.launch.rehearsal import rehearse, with_rehearsed_steps
from headstart.launch.run import RunFolder
from headstart.launch.variants import dump, load
from headstart.trainer.metrics import read_metrics
from tests.schema_forms import REHEARSAL
from tests.schema_rules import bakeoff_violations, run_violations, violations
from tests.test_compare import NUM, make_run, make_steps
from tests.test_end_to_end import kill_at

RECIPE = f"""\
{FIRST_LINE}
run: {{threads: 1}}
target: {{model: tiny, dtype: float32}}
prompts: {{sources: [mine.jsonl], heldout: held.jsonl, num_train: 8, num_validation: 2, num_heldout: 8}}
traffic: {{max_new_tokens: 12, slots: 4, chunk: 8}}
head: {{draft_vocab_size: 128}}
train: {{num_steps: 6, batch_tokens: 256, depth: 2, eval_every: 3, save_every: 2, log_every: 1, dtype: float32}}
eval: {{draft_lengths: [2], draft_length: 2, live_prompts: 2, speed_prompts: 1, speed_new_tokens: 6, speed_repeats: 1,
  speed_draft_lengths: [2], speed_dtype: float32, replicates: 100, min_accept_len: 9, fail_slow_plain: false}}
export: {{engines: []}}
tracking: {{wandb: false}}
variants:
  eagle3: {{head: {{taps: [0, 2]}}, export: {{engines: [vllm]}}}}
  medusa: {{head: {{kind: medusa, num_heads: 2}}}}
  jsd: {{train: {{loss: {{kind: jsd}}}}}}
{LAST_LINE}
"""
NAMES = ["eagle3", "medusa", "jsd"]
THINGS = (
    "rivers",
    "old songs",
    "a blue atlas",
    "winter light",
    "ships",
    "glass",
    "copper mines",
    "bread",
    "maps",
    "owls",
)
CLOCKED = ("speed", "train_seconds", "eval_seconds")


@pytest.fixture(scope="module")
def bakeoff(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Folder of the runs of a bake-off whose first head fails its gate, and the exit code."""
    folder = tmp_path_factory.mktemp("bakeoff")
    write_recipe(folder / "three.yaml", RECIPE)
    return folder / "runs", cli.run(["train", str(folder / "three.yaml"), f"run.root={folder / 'runs'}"])


def write_recipe(path: Path, text: str) -> None:
    """A recipe with its prompts beside it; reading the built-in ones takes longer than all the rest."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    for name, question in (
        ("mine", "Write a short note about {}."),
        ("held", "Which three things should I know of {}?"),
    ):
        prompts = [json.dumps({"prompt": question.format(thing)}) for thing in THINGS]
        (path.parent / f"{name}.jsonl").write_text("\n".join(prompts))


def table(runs: Path) -> dict[str, Any]:
    return read_json(runs / "three" / "bakeoff.json")


def test_every_variant_is_a_run_and_all_share_one_target_pass(bakeoff: tuple[Path, int]) -> None:
    runs, _ = bakeoff
    assert sorted(path.name for path in runs.iterdir()) == [".stages", "three", *sorted(f"three-{n}" for n in NAMES)]
    for name in NAMES:
        assert run_violations(runs / f"three-{name}") == []
    stages = sorted(path.name.partition("-")[0] for path in (runs / ".stages").iterdir())
    assert stages == ["features", "prompts", "traffic"]
    for stage in ("prompts", "traffic", "features"):
        assert len({(runs / name / stage).resolve() for name in ("three", *(f"three-{n}" for n in NAMES))}) == 1


def test_the_table_holds_the_figures_of_the_runs(bakeoff: tuple[Path, int]) -> None:
    runs, _ = bakeoff
    assert bakeoff_violations(runs / "three") == []
    content = table(runs)
    assert [row["variant"] for row in content["rows"]] == NAMES
    assert content["rule"] == {"name": "equal_tokens", "num_tokens": 6 * 256}
    for row in content["rows"]:
        evals = {name: read_json(runs / row["run"] / "eval" / f"{name}.json") for name in ("acceptance", "speed")}
        whole = [
            own
            for own in evals["acceptance"]["rows"]
            if (own["source"], own["drafter"], own["route"], own["context"]) == ("offline", row["kind"], "all", "all")
        ]
        assert [(row["accept_len"], row["conditional"])] == [(own["accept_len"], own["conditional"]) for own in whole]
        timed = [own for own in evals["speed"]["rows"] if own["drafter"] == row["kind"]]
        assert [row["speed"]] == [{name: own[name] for name in row["speed"]} for own in timed]
        printed = next(
            line
            for line in (runs / row["run"] / "console.log").read_text().splitlines()
            if "trained parameters" in line
        )
        assert printed.startswith(f"{row['num_parameters']:,} trained parameters")
        assert 0 < row["train_seconds"] < 600
    assert [row["engines"] for row in content["rows"]] == [
        ["vllm", "speculators"],
        ["vllm"],
        ["vllm", "speculators", "llamacpp"],
    ]
    assert (runs / "three" / "report.md").read_text().count("\n| medusa |") == 4  # figures, two verdicts, run


def test_a_variant_that_fails_is_named_and_the_others_are_done(
    bakeoff: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3 is that of the gate which the first one failed; started again, nothing is computed and it fails again."""
    runs, code = bakeoff
    assert code == 3
    failed = {row["variant"]: row["failed"] for row in table(runs)["rows"] if row["failed"]}
    assert list(failed) == ["eagle3"]
    assert "eval.min_accept_len = 9" in failed["eagle3"]
    before = {path: path.stat().st_mtime_ns for path in runs.glob("three-*/eval/*.json")}
    assert cli.run(["train", str(runs.parent / "three.yaml"), f"run.root={runs}"]) == 3
    captured = capsys.readouterr()
    assert "1 of 3 variants failed, the others are done:\n  - eagle3: " in captured.err
    assert "eagle3 failed: " in captured.out
    assert captured.out.count("eval: measured already") == 3
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_it_is_listed_planned_reported_and_not_taken_for_a_run_of_one_head(
    bakeoff: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    runs, _ = bakeoff
    recipe = [str(runs.parent / "three.yaml"), f"run.root={runs}"]
    assert cli.run(["check", *recipe, "--dry-run"]) == 0
    plan = capsys.readouterr().out.partition("\nstages\n")[2].splitlines()
    assert [line.split()[-1] for line in plan[:3]] == ["reused"] * 3
    assert sum("done (6 steps)" in line for line in plan) == 3
    assert cli.run(["ls", "runs", "--root", str(runs)]) == 0
    assert "bake-off, 3 of 3 measured" in capsys.readouterr().out
    content = table(runs)
    (runs / "three" / "bakeoff.json").write_text(json.dumps(content))
    assert cli.run(["report", str(runs / "three")]) == 0
    assert table(runs) == content
    for command in (["eval", str(runs / "three")], ["export", str(runs / "three"), "--engine", "vllm"]):
        assert cli.run(command) == 2
        assert "is a bake-off (eagle3, medusa, jsd), expected a recipe or run of one head" in capsys.readouterr().err
    assert cli.run(["train", *recipe, "variants.jsd.train.learning_rate=0.5"]) == 2
    assert "three-jsd belongs to another training" in capsys.readouterr().err


def test_killed_in_its_second_head_it_ends_with_equal_files(bakeoff: tuple[Path, int], tmp_path: Path) -> None:
    unbroken, _ = bakeoff
    recipe = tmp_path / "recipes" / "smoke.yaml"  # the name that `kill_at` starts
    write_recipe(recipe, RECIPE.replace("run: {threads: 1}", "run: {threads: 1, name: three}"))
    runs = tmp_path / "runs"
    metrics = runs / "three-medusa" / "metrics.jsonl"
    kill_at(tmp_path, lambda: max((line["step"] for line in read_metrics(metrics)), default=0) >= 3, delay=0)
    assert not (runs / "three-jsd").exists()
    assert cli.run(["train", str(recipe), f"run.root={runs}"]) == 3
    for pattern in (".stages/*/part-*", ".stages/*/shard-*", "three-*/checkpoints/step-*/head.safetensors"):
        assert hashes(runs, pattern) == hashes(unbroken, pattern)
    assert without_clock(table(runs)) == without_clock(table(unbroken))


def hashes(runs: Path, pattern: str) -> dict[str, str]:
    found = {str(path.relative_to(runs)): hash_file(path) for path in runs.glob(pattern)}
    assert found
    return found


def without_clock(content: dict[str, Any]) -> dict[str, Any]:
    rows = [{name: value for name, value in row.items() if name not in CLOCKED} for row in content["rows"]]
    for row in rows:
        row["failed"] = bool(row["failed"])  # the message names a folder
    figures = {name: value for name, value in content.items() if name != "seconds"}
    return {**figures, "rows": rows, "ngram": {**content["ngram"], "speed": None}}


def test_equal_time_gives_each_head_the_steps_that_fit_and_keeps_them(
    bakeoff: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one's steps are the budget; another time the counts are read, not timed, for as long as it is the same."""
    runs, _ = bakeoff
    recipe, overrides = runs.parent / "three.yaml", ["bakeoff.rule=equal_time", "bakeoff.rehearsal_steps=1"]
    loaded = load(recipe, overrides)
    run = RunFolder(tmp_path / "three")
    run.folder.mkdir()
    for stage in ("traffic", "features"):
        run.link(stage, runs / "three" / stage)
    rehearsed = rehearse(loaded, run, "cache").variants
    steps = {name: own.train.num_steps for name, own in rehearsed.items()}
    seconds = {
        name: own["seconds_per_step"] for name, own in read_json(run.folder / "rehearsal.json")["variants"].items()
    }
    assert steps == {name: max(1, round(6 * seconds["eagle3"] / seconds[name])) for name in NAMES}
    capsys.readouterr()
    assert rehearse(loaded, run, "cache").variants == rehearsed == with_rehearsed_steps(loaded, run).variants
    assert "rehearsal of" not in capsys.readouterr().out
    resolved = tmp_path / "recipe.yaml"
    resolved.write_text(dump(with_rehearsed_steps(loaded, run), "resolved"))
    assert load(resolved) == loaded
    assert violations(read_json(run.folder / "rehearsal.json"), REHEARSAL) == []
    assert {name: own.train.num_steps for name, own in loaded.variants.items()} == dict.fromkeys(NAMES, 6)
    other = load(recipe, [*overrides, "train.num_steps=7"])
    assert with_rehearsed_steps(other, run) == other
    assert with_rehearsed_steps(load(recipe), run) == load(recipe)
    (found := read_json(run.folder / "rehearsal.json"))["variants"].pop("jsd")
    write_json(run.folder / "rehearsal.json", found)
    again = rehearse(loaded, run, "cache").variants  # a variant that was added
    assert {name: again[name] for name in NAMES[:2]} == {name: rehearsed[name] for name in NAMES[:2]}


def make_entry(root: Path, name: str, gain: float, noise: float = 0.0, lookup: float = 0.8, **changes: Any) -> Entry:
    """A measured head `gain` times as good as a reference, beside n-gram lookup that is `lookup` times as good."""
    steps_R, lookup_R = make_steps(gain, noise, seed=len(name)), make_steps(lookup, 0.02, seed=9)
    run = make_run(root, name, steps_R)
    content = read_json(run / "eval" / "prompts.json")
    row = {"checkpoint": None, "drafter": "ngram", "draft": "greedy", "draft_length": 4, "num_steps": lookup_R.tolist()}
    names = ("target", "prompts", "sampling", "prompt_ids", "routes", "prompt_tokens", "num_tokens")
    write_sums(run / "eval", {name: content[name] for name in names}, [row])
    acceptance = read_json(run / "eval" / "acceptance.json")
    weights_BR = resampling_weights(NUM, 500, 0)
    whole = {"source": "offline", "route": "all", "context": "all", "counting": "reply", "draft": "greedy"}
    whole |= {"draft_length": 4, "tree": None, "num_prompts": NUM, "conditional": []}
    acceptance["rows"] = [
        {
            **acceptance["rows"][0],
            **whole,
            "drafter": drafter,
            "accept_len": ratio_interval([100] * NUM, s_R, weights_BR),
        }
        for drafter, s_R in (("eagle3", steps_R), ("ngram", lookup_R))
    ]
    write_json(run / "eval" / "acceptance.json", acceptance)
    return Entry(name, run, "eagle3", 10, 100, ["vllm"], **changes)


def test_the_table_tells_ties_from_differences_and_names_heads_that_lookup_beats(tmp_path: Path) -> None:
    entries = [
        make_entry(tmp_path, name, gain, noise)
        for name, gain, noise in (("good", 1.1, 0.0), ("alike", 1.1, 0.08), ("worse", 1.0, 0.02), ("weak", 0.79, 0.02))
    ]
    content = bakeoff_content(entries, tmp_path, 4, "equal_tokens")
    rows = {row["variant"]: row for row in content["rows"]}
    best, other = sorted(("good", "alike"), key=lambda name: -rows[name]["accept_len"]["value"])
    assert content["best"] == best
    assert {name: (row["against_best"] or {}).get("verdict") for name, row in rows.items()} == {
        best: None, other: "tied", "worse": "worse", "weak": "worse",
    }  # fmt: skip
    assert {name: row["above_ngram"] for name, row in rows.items()} == {
        "good": True, "alike": True, "worse": True, "weak": False,
    }  # fmt: skip
    assert [row["against_ngram"]["verdict"] for row in rows.values()][:3] == ["better"] * 3
    text = bakeoff_text(content)
    assert f"tied with the best, {best}: {other}\n" in text
    assert "accept_len does not lie above n-gram lookup's" in text
    assert text.partition("lookup's")[2].partition("\n")[0].count("(") == 1
    # Three comparisons with the best are one family: none has a smaller p than alone.
    sums = {name: read_sums(tmp_path / name, draft_length=4) for name in rows}
    for name in ("worse", other):
        alone = compare_whole([sums[best], sums[name]])[0].p
        assert alone is not None
        assert rows[name]["against_best"]["p"] >= min(1, alone)
    assert rows[other]["against_best"]["ratio"] == compare_whole([sums[best], sums[other]])[0].ratio


def test_a_head_that_is_not_measured_has_no_figures_and_says_why(tmp_path: Path) -> None:
    entries = [make_entry(tmp_path, "done", 1.0), Entry("next", tmp_path / "next", "mlp", 10, 100, [])]
    entries.append(Entry("broken", tmp_path / "broken", "mlp", 10, 200, [], failed="no memory"))
    content = bakeoff_content(entries, tmp_path, 4, "equal_time")
    write_json(tmp_path / "bakeoff.json", content)
    assert bakeoff_violations(tmp_path) == []
    assert [row["accept_len"]["value"] is None for row in content["rows"]] == [False, True, True]
    text = write_bakeoff_report(tmp_path, content).read_text()
    for expected in (
        "Failed: broken: no memory",
        "Not measured yet: next",
        "equal time, as rehearsed: on 100 to 200 tokens",
    ):
        assert expected in text
    shutil.rmtree(tmp_path / "done")
    nothing = bakeoff_content(entries, tmp_path, 4, "equal_time")
    assert (nothing["best"], nothing["ngram"], nothing["target"]) == (None, None, None)
    write_json(tmp_path / "bakeoff.json", nothing)
    assert bakeoff_violations(tmp_path) == []
    assert "not measured yet: done, next" in bakeoff_text(nothing)
