"""The law of drafts that are their own target: refused before anything is computed unless asked for, whatever names them."""

import shutil

import pytest
import torch

from headstart.eval.decode import decode
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.eval.speculation import PLAIN
from headstart.heads.checkpoint import save_head
from headstart.heads.draft import DraftModel
from headstart.heads.errors import WrongInput
from headstart.heads.settings import DraftSettings
from headstart.heads.store import read_json
from headstart.launch import cli
from headstart.launch.export_gate import export_head
from tests.small_decoding import NO_STOP, make_path, make_prompts

ALL = [0, 1, 2, 3]
REFUSED = r"found a draft that is the target 'tiny' itself(.|\n)*say both head\.model=\S+ and head\.layers=\[0,1,2,3\]"


@pytest.fixture(scope="module")
def copied(tiny_folder, tmp_path_factory):
    return str(shutil.copytree(tiny_folder, tmp_path_factory.mktemp("models") / "copy"))


@pytest.mark.parametrize(
    ("key", "settings"), [("head.layers", {"layers": ALL}), ("head.model", {"model": "tiny"}), ("head.model", {})]
)
def test_settings_that_make_a_draft_of_the_whole_target_are_refused(key, settings, copied, tiny_target):
    with pytest.raises(WrongInput, match=rf"{key}: {REFUSED}"):
        DraftModel.check(DraftSettings(**(settings or {"model": copied})), tiny_target)


@pytest.mark.parametrize("settings", [{}, {"model": "tiny", "layers": [0, 3]}, {"model": "tiny", "layers": ALL}])
def test_a_part_of_the_target_is_a_draft_and_so_is_all_of_it_where_both_are_said(settings, tiny_target):
    DraftModel.check(DraftSettings(**settings), tiny_target)


@pytest.mark.parametrize("named", ["tiny", "copied"])
@pytest.mark.parametrize("command", [["eval"], ["export", "--engine", "vllm"], ["import", "--out", "x"]])
def test_a_targets_name_or_folder_is_no_head(command, named, copied, capsys):
    assert cli.run([*command, copied if named == "copied" else named]) == 2
    told = capsys.readouterr().err
    assert "found a model, expected" in told or "found a whole language model, expected" in told
    assert "headstart cp eagle" in told or f"head.kind=draft head.model={copied}" in told


def checkpoint(folder, target, change=0.0, **settings):
    """A run whose only checkpoint is a draft of all of the target's layers, moved by `change` in one number."""
    head = DraftModel(DraftSettings(**settings), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    with torch.no_grad():
        next(iter(reversed(head.trained_tensors().values()))).view(-1)[0] += change
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    save_head(folder / "checkpoints" / "step-000001", head.eval(), step=1)
    return folder


def export(run, target):
    export_head(run, "vllm", target, EvalSettings(), ExportSettings(), "step-000001", untested=True)


def measure(run, target):
    prompts = make_prompts(target, [7, 12, 9])
    replies = decode(target, prompts, PLAIN, 12, NO_STOP, batch=3)
    paths = [make_path(p, r.token_ids, f"p{i}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]
    settings = EvalSettings(draft_lengths=[3], draft_length=3, replicates=50, ngram=False)
    heldout = Heldout(paths, "float32", 12)
    evaluate(
        lambda dtype: target, run / "checkpoints" / "step-000001", heldout, settings, run / "eval", parts=["offline"]
    )


@pytest.mark.parametrize("settings", [{"layers": ALL}, {"layers": ALL, "lora_rank": 2}, {"model": "copied"}])
@pytest.mark.parametrize("command", [export, measure])
def test_a_head_with_the_targets_own_weights_is_refused(command, settings, copied, tiny_target, tmp_path):
    settings = settings if "layers" in settings else {"model": copied}
    with pytest.raises(WrongInput, match=REFUSED):
        command(checkpoint(tmp_path / "run", tiny_target, **settings), tiny_target)
    assert not (tmp_path / "run" / "export").exists()
    assert not (tmp_path / "run" / "eval").exists()


@pytest.mark.parametrize("settings", [{"layers": ALL}, {"layers": ALL, "lora_rank": 2}])
def test_a_head_that_training_has_moved_is_another_model(settings, tiny_target, tmp_path):
    export(checkpoint(tmp_path / "run", tiny_target, change=0.1, **settings), tiny_target)


def test_a_target_that_was_asked_to_draft_for_itself_accepts_everything(tiny_target, tmp_path):
    run = checkpoint(tmp_path / "run", tiny_target, model="tiny", layers=ALL)
    measure(run, tiny_target)
    rows = [row for row in read_json(run / "eval" / "acceptance.json")["rows"] if row["drafter"] == "draft"]
    assert [s["value"] for s in rows[0]["survival"]] == [1.0, 1.0, 1.0]
