"""Laws of `headstart compare`: paired by prompt, from stored sums alone, and only where the figures speak of the same."""

import json
import subprocess
import sys

import numpy as np
import pytest

from headstart.eval.compare import compare, comparison_text
from headstart.eval.file_reader import MEMBERS
from headstart.eval.prompt_sums import read_sums, write_sums
from headstart.heads.errors import WrongInput
from headstart.launch import cli

NUM = 80


def make_steps(gain=1.0, noise=0.0, seed=1):
    """Steps of a head whose accept_len is `gain` times the reference's, prompt by prompt but for noise."""
    accept_R = 1 + np.random.default_rng(0).gamma(4, 0.2, NUM)
    return 100 / accept_R / gain * np.exp(np.random.default_rng(seed).normal(0, noise, NUM))


def make_run(root, name, steps_R, *, step=500, order=None, **changes):
    """A run folder that was measured, without its model: recipe, acceptance.json and prompts.json."""
    run = root / name
    (run / "eval").mkdir(parents=True, exist_ok=True)
    (run / "recipe.yaml").write_text("{}\n")
    order = list(range(NUM)) if order is None else order
    checkpoint = {"kind": "eagle3", "step": step, "sha256": f"{name}-{step}"}
    content = {
        "target": {"name": "tiny", "fingerprint": "f"},
        "prompts": {"name": "heldout", "sha256": "s", "max_new_tokens": 101},
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
        "prompt_ids": [f"p{i}" for i in order],
        "routes": [("chat", "code")[i % 2] for i in order],
        "prompt_tokens": [9] * len(order),
        "num_tokens": [100] * len(order),
    } | changes
    row = {"checkpoint": checkpoint, "drafter": "eagle3", "draft": "greedy", "draft_length": 4}
    write_sums(run / "eval", content, [{**row, "num_steps": [float(steps_R[i]) for i in order]}])
    row = dict.fromkeys(MEMBERS["acceptance"].split())  # comparing reads none of them
    names = {"checkpoint": checkpoint, "target": content["target"], "prompts": content["prompts"]}
    acceptance = {"schema": "headstart.acceptance/1", **names, "rows": [row]}
    (run / "eval" / "acceptance.json").write_text(json.dumps(acceptance))
    return run


def test_a_head_that_gains_everywhere_is_better_and_its_equal_is_tied(tmp_path):
    runs = [make_run(tmp_path, name, make_steps(gain)) for name, gain in (("a", 1), ("b", 1.02), ("c", 1), ("d", 0.97))]
    found = {one.label: one for one in compare([read_sums(run) for run in runs]) if one.route == "all"}
    assert [found[name].verdict for name in "bcd"] == ["better", "tied", "worse"]
    assert found["b"].ratio == {"value": pytest.approx(1.02), "low": pytest.approx(1.02), "high": pytest.approx(1.02)}
    assert (found["c"].ratio, found["c"].p) == ({"value": 1.0, "low": 1.0, "high": 1.0}, 1.0)
    assert found["b"].accept_len == pytest.approx(100 * NUM / make_steps(1.02).sum())


def test_of_two_heads_the_verdict_is_tied_exactly_where_the_interval_holds_one(tmp_path):
    reference = read_sums(make_run(tmp_path, "a", make_steps()))
    verdicts = set()
    for i, gain in enumerate(np.linspace(0.98, 1.02, 9)):
        other = read_sums(make_run(tmp_path, f"b{i}", make_steps(gain, noise=0.05)))
        one = compare([reference, other], replicates=1000)[0]
        assert (one.verdict == "tied") == (one.ratio["low"] <= 1 <= one.ratio["high"])
        verdicts.add(one.verdict)
    assert verdicts == {"tied", "better", "worse"}


def test_the_order_in_which_prompts_are_stored_changes_nothing(tmp_path):
    a = make_run(tmp_path, "a", make_steps())
    shuffled = np.random.default_rng(5).permutation(NUM).tolist()
    others = [
        make_run(tmp_path, name, make_steps(1.01, 0.05), order=order) for name, order in (("b", None), ("c", shuffled))
    ]
    found = compare([read_sums(run) for run in (a, *others)])
    b, c = ([(one.route, one.ratio) for one in found if one.label == name] for name in "bc")
    for (route, first), (same, second) in zip(b, c, strict=True):
        assert route == same
        assert first == pytest.approx(second)


def test_several_comparisons_are_corrected(tmp_path):
    a = read_sums(make_run(tmp_path, "a", make_steps()))
    others = [read_sums(make_run(tmp_path, f"b{i}", make_steps(1.01, 0.05, seed=i))) for i in range(5)]
    alone = [compare([a, other], replicates=2000)[0].p for other in others]
    together = [one.p for one in compare([a, *others], replicates=2000) if one.route == "all"]
    assert min(together) == pytest.approx(min(1, 5 * min(alone)))
    assert max(together) >= max(alone)
    assert all(corrected >= p for corrected, p in zip(together, alone, strict=True))


def test_routes_are_compared_one_by_one_and_a_route_of_one_prompt_has_no_verdict(tmp_path):
    gain = np.where(np.arange(NUM) % 2, 1.1, 0.95)  # code gains, chat loses
    routes = [("chat", "code")[i % 2] for i in range(NUM - 1)] + ["maths"]
    runs = [make_run(tmp_path, name, make_steps() / by, routes=routes) for name, by in (("a", 1.0), ("b", gain))]
    found = {one.route: one for one in compare([read_sums(run) for run in runs])}
    assert {route: one.verdict for route, one in found.items() if route != "all"} == {
        "chat": "worse",
        "code": "better",
        "maths": "too few prompts",
    }
    assert sum(found[route].num_prompts for route in ("chat", "code", "maths")) == found["all"].num_prompts == NUM
    assert (found["maths"].p, found["maths"].ratio["low"]) == (None, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": {"name": "tiny", "fingerprint": "g"}}, "target.fingerprint ('f' there, 'g' here)"),
        ({"sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0}}, "sampling.temperature (0.0 there, 1.0 here)"),
        (
            {"prompts": {"name": "h", "sha256": "s", "max_new_tokens": 64}},
            "prompts.max_new_tokens (101 there, 64 here)",
        ),
        ({"prompt_ids": [f"p{i + 1}" for i in range(NUM)]}, "prompts (80 there, 80 here, 79 in both)"),
        ({"draft_length": 3}, "draft_length (4 there, 3 here)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_differs_is_refused_by_name(tmp_path, monkeypatch, capsys, changes, named):
    make_run(tmp_path / "runs", "a", make_steps())
    draft_length = changes.pop("draft_length", 4) if "draft_length" in changes else 4
    run = make_run(tmp_path / "runs", "b", make_steps(), **changes)
    file = run / "eval" / "prompts.json"
    content = json.loads(file.read_text())
    content["rows"][0]["draft_length"] = draft_length
    file.write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    assert cli.run(["compare", "a", "b"]) == 2
    message = capsys.readouterr().err
    assert "b cannot be compared with a" in message
    assert named in message
    assert "headstart eval" in message


def test_where_no_sums_are_stored_the_command_that_stores_them_is_named(tmp_path):
    (tmp_path / "eval").mkdir()
    with pytest.raises(WrongInput, match=r"prompts\.json.*\n.*headstart eval"):
        read_sums(tmp_path)
    run = make_run(tmp_path, "a", make_steps())
    with pytest.raises(WrongInput, match=r"step 500, expected step 300.*\n.*headstart eval"):
        read_sums(run, {"sha256": "other", "step": 300})
    with pytest.raises(WrongInput, match=r"draft lengths \[4\], expected 2 .*\n.*--draft-length 2"):
        read_sums(run, draft_length=2)


def test_two_checkpoints_of_a_run_are_kept_side_by_side_while_their_replies_are_the_same(tmp_path):
    make_run(tmp_path, "a", make_steps(), step=300)
    run = make_run(tmp_path, "a", make_steps(1.05), step=600)
    early, late = read_sums(run, {"sha256": "a-300", "step": 300}, "a/300"), read_sums(run)
    assert late.checkpoint["step"] == 600
    assert compare([early, late])[0].verdict == "better"
    make_run(tmp_path, "a", make_steps(1.1), step=600)  # measured again
    assert compare([read_sums(run, {"sha256": "a-300", "step": 300}), read_sums(run)])[0].ratio[
        "value"
    ] == pytest.approx(1.1)
    make_run(tmp_path, "a", make_steps(), step=900, num_tokens=[99] * NUM)  # other replies
    with pytest.raises(WrongInput, match="step 900"):
        read_sums(run, {"sha256": "a-300", "step": 300})


def test_the_command_prints_the_table_with_its_definitions_and_loads_no_model(tmp_path):
    for name, gain in (("a", 1.0), ("b", 1.04)):
        make_run(tmp_path / "runs", name, make_steps(gain, noise=0.02))
    code = "import sys, headstart.launch.cli as c\ntry: c.main()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "compare", "a", "b"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    heads = [read_sums(tmp_path / "runs" / name) for name in "ab"]
    assert done.stdout.strip() == comparison_text(heads, compare(heads)).strip()
    for expected in (
        "80 held-out prompts",
        "draft_length 4",
        "temperature 0",
        "better",
        "bootstrap over prompts",
        "tied  ",
    ):
        assert expected in done.stdout


def test_one_run_is_nothing_to_compare(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "runs", "a", make_steps())
    monkeypatch.chdir(tmp_path)
    assert cli.run(["compare", "a"]) == 2
    assert "two or more" in capsys.readouterr().err
