"""Speed where it will be used: every concurrency against plain decoding at the same one."""

import dataclasses
import json

import pytest

from headstart.eval.decode import decode
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.replies import Reply
from headstart.eval.report import best_speeds
from headstart.eval.speculation import PLAIN
from headstart.eval.timings import Timings, Variant, grouped
from headstart.heads.checkpoint import save_head
from headstart.heads.errors import WrongInput
from headstart.heads.store import read_json
from tests.small_decoding import NO_STOP, fitted_head, make_path, make_prompts
from tests.test_measure import SETTINGS


@pytest.fixture(scope="module")
def head(tiny_target, tmp_path_factory):
    """A saved head and held-out paths of the tiny target."""
    prompts = make_prompts(tiny_target, [9, 14, 11, 20, 8, 13, 10, 16, 12, 7, 15, 18])
    replies = decode(tiny_target, prompts, PLAIN, 12, NO_STOP)
    paths = [make_path(p, r.token_ids, f"p{i}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]
    folder = tmp_path_factory.mktemp("speed")
    save_head(folder, fitted_head(tiny_target, paths[:3], steps=5), step=5)
    return folder, Heldout(paths)


@pytest.fixture
def measure(tiny_target, head):
    def run(folder, concurrency):
        told = []
        settings = dataclasses.replace(SETTINGS, concurrency=concurrency, speed_new_tokens=8, speed_prompts=6)
        evaluate(lambda dtype: tiny_target, *head, settings, folder, parts=["speed"], tell=told.append)
        return read_json(folder / "speed.json"), told

    return run


def test_every_concurrency_has_its_rows_and_those_measured_before_stay(measure, tmp_path):
    speed, _ = measure(tmp_path, [1, 2])
    at = {(row["concurrency"], row["drafter"]): row for row in speed["rows"]}
    assert set(at) == {(c, drafter) for c in (1, 2) for drafter in ("eagle3", "ngram")}
    assert [at[c, "eagle3"]["num_prompts"] for c in (1, 2)] == [6, 12]  # six groups, so that there is an interval
    assert all(row["speedup"]["low"] is not None for row in speed["rows"])
    assert [row["concurrency"] for row in best_speeds(speed)] == [1, 2]

    again, told = measure(tmp_path, [4, 16])
    assert any("concurrency 16: left out, there are 12" in line for line in told)
    assert {row["concurrency"] for row in again["rows"]} == {1, 2, 4}
    assert at[1, "eagle3"] in again["rows"]
    assert again["absolute"]["generate_tokens_per_s"] == speed["absolute"]["generate_tokens_per_s"]
    assert all(row["speedup"]["low"] is None for row in again["rows"] if row["concurrency"] == 4)  # three groups


def test_more_requests_together_than_there_are_prompts_are_refused(measure, tmp_path):
    with pytest.raises(WrongInput, match="found .13, 16., but there are 12 held-out prompts"):
        measure(tmp_path, [13, 16])


def test_rows_of_another_machine_do_not_stay(measure, tmp_path):
    speed, _ = measure(tmp_path, [1])
    elsewhere = {**speed, "hardware": {**speed["hardware"], "cpu": "another"}}
    (tmp_path / "speed.json").write_text(json.dumps(elsewhere))
    again, _ = measure(tmp_path, [4])
    assert {row["concurrency"] for row in again["rows"]} == {4}
    assert again["absolute"]["generate_tokens_per_s"] is None


def test_groups_are_whole():
    assert grouped([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4]]
    assert grouped([1], 2) == []


def test_a_group_takes_as_long_as_its_last_request():
    run = [Reply(token_ids=[5] * 3, total_s=1.0), Reply(token_ids=[5] * 7, total_s=4.0)]
    timed = Timings(Variant("plain", 0), [[run, run]])
    assert timed.concurrency == 2
    assert timed.seconds_G.tolist() == [8.0]
    assert timed.tokens_per_s() == 20 / 8
