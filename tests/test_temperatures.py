"""Acceptance at other temperatures stands beside the run's own and decides nothing."""

import dataclasses
import json

import pytest

from headstart.eval.decode import decode
from headstart.eval.gate import failures, read_evals
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.report import write_report
from headstart.eval.settings import EvalSettings
from headstart.eval.speculation import Speculation
from headstart.eval.summary import acceptance_text, main_row
from headstart.eval.temperatures import temperature_table
from headstart.heads.checkpoint import save_head
from headstart.heads.errors import WrongInput
from headstart.heads.paths import read_paths
from headstart.heads.sampling import Sampling
from headstart.heads.store import read_json
from headstart.heads.target import TargetLoader
from headstart.launch.listing import headline
from headstart.trainer.heldout_traffic import at_temperature, make_heldout_traffic
from headstart.trainer.traffic import make_traffic
from tests.small_decoding import make_path, make_prompts, untrained_head
from tests.test_traffic import SETTINGS as TRAFFIC
from tests.test_traffic import TINY, hashes, prompts_stage, some_prompts

SETTINGS = EvalSettings(draft_lengths=[2], draft_length=2, replicates=50, min_accept_len=1.0, live_batch=8)
TEMPERATURES = (0.0, 1.0, 0.7)


@pytest.fixture(scope="module")
def recorded(tiny_target):
    """Replies to the same prompts at every temperature."""
    prompts = make_prompts(tiny_target, [7, 12, 9, 11, 8, 6, 10])
    names = [f"p{i}" for i in range(len(prompts))]
    found = {}
    for temperature in TEMPERATURES:
        sampling = Sampling(temperature)
        replies = decode(tiny_target, prompts, Speculation(sampling=sampling), 12, batch=8, request_ids=names)
        found[temperature] = [
            make_path(p, r.token_ids, n, sampling) for p, r, n in zip(prompts, replies, names, strict=True)
        ]
    return found


@pytest.fixture(scope="module")
def measure(tiny_target, recorded, tmp_path_factory):
    """A run with a head, and a function that measures it."""
    run = tmp_path_factory.mktemp("run")
    save_head(run, untrained_head(tiny_target), step=1)

    def measured(own, others=(), parts=("offline",)):
        paths = [recorded[temperature] for temperature in others]
        folder = run / "eval"
        evaluate(
            lambda _: tiny_target,
            run,
            Heldout(recorded[own], others=paths, max_new_tokens=12),
            SETTINGS,
            folder,
            parts=parts,
            tell=lambda line: None,
        )
        return read_evals(folder)

    return run, measured


def test_other_temperatures_stand_beside_the_own_one_and_decide_nothing(measure):
    run, measured = measure
    alone = measured(0.0)
    both = measured(0.0, (1.0, 0.7))
    assert both["acceptance"]["rows"] == alone["acceptance"]["rows"]
    others = both["acceptance"]["other_rows"]
    assert {(row["temperature"], row["draft"]) for row in others if row["drafter"] == "eagle3"} == {
        (temperature, draft) for temperature in (1.0, 0.7) for draft in ("greedy", "sampled")
    }
    for row in others:
        row["accept_len"] = {"value": 0.5, "low": 0.4, "high": 0.6}
    file = run / "eval" / "acceptance.json"
    stored = read_json(file)
    assert len(stored["rows"]) == len(both["acceptance"]["rows"]) + len(others)
    worst = {**stored, "rows": others + both["acceptance"]["rows"]}  # in whatever order they are stored
    file.write_text(json.dumps({name: value for name, value in worst.items() if name != "other_rows"}))
    spoilt = read_evals(run / "eval")
    assert failures(spoilt, SETTINGS) == failures(alone, SETTINGS)
    assert main_row(spoilt["acceptance"], "eagle3") == main_row(alone["acceptance"], "eagle3")
    assert "0.50" not in headline(run)
    assert acceptance_text(spoilt["acceptance"], 2).partition("by temperature")[0].count("0.50 [") == 0
    assert read_json(run / "eval" / "prompts.json")["sampling"]["temperature"] == 0
    file.write_text(json.dumps(stored))


def test_a_temperature_measured_again_replaces_itself_alone(measure):
    _, measured = measure
    first = measured(0.0, (1.0, 0.7))["acceptance"]
    again = measured(0.0, (1.0,))["acceptance"]
    own = measured(0.0)["acceptance"]
    for later in (again, own):
        assert sorted(map(json.dumps, later["other_rows"])) == sorted(map(json.dumps, first["other_rows"]))
        assert later["rows"] == first["rows"]


def test_the_table_has_a_line_for_each_temperature_and_no_tree(measure):
    run, measured = measure
    acceptance = measured(0.0, (1.0, 0.7))["acceptance"]
    header, lines = temperature_table(acceptance, 2)
    other = {"value": 9.0, "low": 9.0, "high": 9.0}
    trees = [{**row, "tree": [-1, 0, 0, 1, 2], "accept_len": other} for row in acceptance["rows"]]
    assert temperature_table({**acceptance, "rows": [*acceptance["rows"], *trees]}, 2)[1] == lines
    assert header == ["temperature", "eagle3", "ngram", "suffix", "eagle3 sampled"]
    assert [line[0] for line in lines] == ["0", "0.7", "1"]
    assert lines[0][4] == "-"  # nothing to sample at temperature 0
    assert "## By temperature, draft length 2" in write_report(run).read_text()
    assert temperature_table({**acceptance, "other_rows": []}, 2)[1] == []


def test_live_replies_of_another_temperature_change_no_verdict(measure):
    _, measured = measure
    evals = measured(1.0, (0.0, 0.7), parts=("live",))
    assert evals["lossless"] is None  # greedy replies of another setting are no proof, and none against this one
    live = [row for row in evals["acceptance"]["other_rows"] if row["source"] == "live" and row["counting"] == "reply"]
    assert {(row["temperature"], row["draft"]) for row in live} == {(0.0, "greedy"), (0.7, "greedy"), (0.7, "sampled")}
    assert all("agreement" in row for row in live)
    assert set(evals["acceptance"]["live_agreement"]) >= {"greedy", "sampled"}


def test_turns_that_a_conversation_did_not_reach_at_another_temperature_are_counted_and_left_out(
    tiny_target, recorded, measure
):
    run, _ = measure
    told: list[str] = []

    def measured(others):
        evaluate(
            lambda _: tiny_target,
            run,
            Heldout(recorded[0.0], others=others),
            SETTINGS,
            run / "eval",
            parts=("offline",),
            tell=told.append,
        )
        rows = [row for row in read_evals(run / "eval")["acceptance"]["other_rows"] if row["source"] == "offline"]
        whole = [row for row in rows if row["route"] == row["context"] == "all"]
        return {row["num_prompts"] for row in whole if row["temperature"] == 1.0}

    assert measured([recorded[1.0][2:]]) == {5}
    assert any(line.startswith("2 of 7 turns are left out there") for line in told)
    assert measured([recorded[1.0]]) == {7}
    with pytest.raises(WrongInput, match="no held-out replies"):
        measured([[dataclasses.replace(path, prompt_id="another") for path in recorded[1.0]]])


def test_heldout_prompts_are_answered_as_traffic_would_answer_them(tmp_path):
    """The same replies at the same setting, of held-out prompts only; a stage of its own that is reused and continued."""
    targets = TargetLoader(TINY)
    prompts = prompts_stage(tmp_path, some_prompts(12, ("train", "heldout", "validation")))
    settings = at_temperature(dataclasses.replace(TRAFFIC, top_k=20), 0.9)
    stage = make_heldout_traffic(targets, prompts, settings, tmp_path)
    found = list(read_paths(stage.folder))
    assert {path.split for path in found} == {"heldout"}
    assert found[0].sampling == Sampling(0.9, 20).to_dict()
    whole, _ = make_traffic(targets, prompts, settings, tmp_path)
    expected = list(read_paths(whole.folder, "heldout"))
    assert whole.key != stage.key
    assert [path.token_N.tolist() for path in found] == [path.token_N.tolist() for path in expected]

    before = hashes(stage)
    (stage.folder / "part-00000.parquet").unlink()
    again = make_heldout_traffic(targets, prompts, settings, tmp_path)
    assert hashes(again) == before
    assert again.folder == stage.folder
    assert make_heldout_traffic(targets, prompts, at_temperature(settings, 0.0), tmp_path).key != stage.key
