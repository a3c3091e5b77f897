"""The law of `headstart import`: a published folder becomes a run whose head is that one, and which is measured as ours."""

import json

import pytest
import torch

from headstart.heads.checkpoint import load_head
from headstart.heads.export.scheme import write_head
from headstart.launch import cli
from tests.kinds import random_head
from tests.test_warm_start import write_recipe

HEADS = {"eagle1": {"draft_vocab_size": 0}, "medusa": {"draft_vocab_size": 90}}


@pytest.mark.parametrize("kind", HEADS)
def test_an_imported_head_is_that_head_and_is_measured(kind, tiny_target, tmp_path, capsys):
    ids = (
        torch.tensor([0, 1, 2, *range(40, 301, 3)]) if kind == "medusa" else torch.arange(tiny_target.facts.num_tokens)
    )
    head = random_head(kind, 3, tiny_target.facts, ids, **HEADS[kind])
    head.load_target(tiny_target, initialise=False)
    folder = write_head(head, tmp_path / "theirs", "vllm")
    recipe = write_recipe(tmp_path, "head: {kind: eagle3, draft_vocab_size: 64}\ntracking: {wandb: false}")
    run = tmp_path / "runs" / "theirs"
    assert (
        cli.run(["import", str(folder), "--out", str(run), "--recipe", str(recipe), "eval.draft_lengths=[1, 2, 9]"])
        == 0
    )
    again = load_head(run / "checkpoints" / "step-000000", tiny_target)
    assert torch.equal(again.draft_ids_V, ids)
    before, after = head.trained_tensors(), again.trained_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "headstart eval" in capsys.readouterr().out
    if kind == "medusa":  # of three heads no draft of nine can be
        assert cli.run(["eval", str(run), "--offline", "eval.replicates=100", "eval.ngram=false"]) == 0
        rows = json.loads((run / "eval" / "acceptance.json").read_text())["rows"]
        assert {row["draft_length"] for row in rows if row["drafter"] == kind} == {1, 2}


def test_a_head_of_another_target_is_refused_before_anything_is_answered(tiny_target, tmp_path, capsys):
    head = random_head("eagle1", 3, tiny_target.facts, torch.arange(500), draft_vocab_size=0)
    head.load_target(tiny_target, initialise=False)
    folder = write_head(head, tmp_path / "theirs", "vllm")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    recipe = write_recipe(tmp_path, "")
    run = tmp_path / "runs" / "theirs"
    assert cli.run(["import", str(folder), "--out", str(run), "--recipe", str(recipe)]) == 2
    assert "num_kv_heads of the target = 2, expected 4" in capsys.readouterr().err
    assert not list((run / "checkpoints").glob("step-*"))
