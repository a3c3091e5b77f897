"""Eval files that are damaged or were edited: refused by name, or measured again, and never believed."""

import dataclasses
import json
import shutil

import pytest

from headstart.eval.decode import decode
from headstart.eval.file_reader import read_eval
from headstart.eval.gate import failures
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.prompt_sums import read_sums
from headstart.eval.report import write_report
from headstart.eval.speculation import PLAIN
from headstart.heads.checkpoint import save_head
from headstart.heads.errors import WrongInput
from headstart.heads.store import read_json
from tests.small_decoding import fitted_head, make_path, make_prompts
from tests.test_measure import SETTINGS


@pytest.fixture(scope="module")
def recorded(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12])
    replies = decode(tiny_target, prompts, PLAIN, 12)
    return [make_path(p, r.token_ids, f"p{i}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]


@pytest.fixture(scope="module")
def measured(tiny_target, recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_head(folder, fitted_head(tiny_target, recorded, steps=2), step=2)
    evaluate(lambda dtype: tiny_target, folder, Heldout(recorded), SETTINGS, folder / "eval", tell=lambda line: None)
    return folder


def without(content, *path):
    """JSON without the entry at a path; what holds it is changed in place."""
    *parents, last = path
    held = content
    for name in parents:
        held = held[name]
    del held[last]
    return content


EDITED = [
    ("acceptance", ("checkpoint",)),
    ("acceptance", ("rows", 0, "tree")),
    ("lossless", ("checks", 1, "num_tokens")),
    ("speed", ("absolute",)),
    ("speed", ("rows", 0, "speedup")),
    ("calibration", ("rows", 0, "bins")),
    ("prompts", ("rows", 0, "draft_length")),
]


@pytest.mark.parametrize(("name", "entry"), EDITED)
def test_a_file_without_an_entry_that_is_read_is_refused_by_name(measured, name, entry, tmp_path):
    shutil.copytree(measured / "eval", tmp_path / "eval")
    file = tmp_path / "eval" / f"{name}.json"
    file.write_text(json.dumps(without(read_json(file), *entry)))
    with pytest.raises(WrongInput, match=rf"found no .*{entry[-1]}(.|\n)*headstart eval {tmp_path}"):
        read_sums(tmp_path) if name == "prompts" else write_report(tmp_path)


@pytest.mark.parametrize(
    ("name", "entry"), [("acceptance", "checkpoint"), ("speed", "absolute"), ("prompts", "target")]
)
def test_an_entry_of_another_kind_is_refused_by_name(measured, name, entry, tmp_path):
    shutil.copytree(measured / "eval", tmp_path / "eval")
    file = tmp_path / "eval" / f"{name}.json"
    for value in (None, [], "edited", {}):
        file.write_text(json.dumps({**read_json(measured / "eval" / file.name), entry: value}))
        with pytest.raises(WrongInput, match=rf"{file.name}: found no entries in {entry}"):
            read_eval(file)


def test_a_damaged_file_that_would_stay_is_told_before_anything_is_computed(measured, recorded, tmp_path):
    (tmp_path / "speed.json").write_text("{")
    with pytest.raises(WrongInput, match=r"speed.json: found no JSON"):
        evaluate(None, measured, Heldout(recorded), SETTINGS, tmp_path, parts=["offline"])


def test_damaged_sums_are_measured_again(tiny_target, measured, recorded, tmp_path):
    (tmp_path / "prompts.json").write_text("{")
    told: list[str] = []
    evaluate(
        lambda _: tiny_target, measured, Heldout(recorded), SETTINGS, tmp_path, parts=["offline"], tell=told.append
    )
    mine, theirs = (read_json(folder / "prompts.json") for folder in (tmp_path, measured / "eval"))
    assert mine["num_tokens"] == theirs["num_tokens"]


def test_a_tree_that_the_head_cannot_draft_is_refused(tiny_target, measured, recorded, tmp_path):
    """Else a recorded token that is no draft token would count as a child of it."""
    wide = dataclasses.replace(SETTINGS, trees=[[1000]])
    with pytest.raises(WrongInput, match="1000 children of one node, expected at most"):
        evaluate(
            lambda _: tiny_target,
            measured,
            Heldout(recorded),
            wide,
            tmp_path,
            parts=["offline"],
            tell=lambda line: None,
        )
    assert not (tmp_path / "acceptance.json").exists()


def test_the_gate_reads_the_checks_and_not_the_verdict_alone(measured):
    lossless = read_json(measured / "eval" / "lossless.json")
    evals = {"acceptance": None, "lossless": lossless, "speed": None}
    assert failures(evals, SETTINGS) == []
    tree = {**lossless["checks"][0], "shape": "tree", "verdict": "fail"}
    assert "greedy_identity" in failures({**evals, "lossless": {**lossless, "checks": [tree]}}, SETTINGS)[0]
    assert "compared a token" in failures({**evals, "lossless": {**lossless, "checks": []}}, SETTINGS)[0]
