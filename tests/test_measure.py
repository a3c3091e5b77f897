"""The eval stage on the tiny target: the three files, their rules, the verdicts and the report."""

import dataclasses
import json
import math
import shutil

import pytest

from headstart.eval.decode import decode
from headstart.eval.gate import failures
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate, repeated_ngrams
from headstart.eval.report import write_report
from headstart.eval.sampled_live import request_names
from headstart.eval.settings import EvalSettings
from headstart.eval.speculation import PLAIN, Speculation
from headstart.eval.speed import recommend
from headstart.eval.summary import routes_lost_to_ngram
from headstart.eval.timings import balanced, generate
from headstart.heads.checkpoint import save_head
from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling, request_generator
from headstart.heads.store import read_json
from tests.small_decoding import fitted_head, make_path, make_prompts

SETTINGS = EvalSettings(
    draft_lengths=[1, 3],
    draft_length=3,
    trees=[[2, 2]],
    live_batch=2,
    speed_prompts=2,
    speed_new_tokens=12,
    speed_repeats=2,
    speed_draft_lengths=[2],
    speed_dtype="float32",
    replicates=100,
    min_accept_len=0,
)

INTERVAL = ["value", "low", "high"]
KEYS = {  # in the order of tests/schema_forms.py
    "acceptance": ["schema", "checkpoint", "target", "prompts", "environment", "interval", "rows"],
    "acceptance row": [
        *("source", "drafter", "route", "context", "temperature", "top_k", "top_p", "draft", "draft_length", "tree"),
        *("counting", "num_prompts", "num_tokens", "num_steps", "num_short_steps", "accept_len", "accept_len_macro"),
        *("conditional", "survival", "accepted_histogram", "uniform_start_estimate", "product_of_marginals"),
        "out_of_vocab_share",
    ],
    "lossless": ["schema", "checkpoint", "target", "verdict", "checks", "faults"],
    "check": [
        *("name", "target", "dtype", "sampler", "draft", "shape", "draft_length", "batch", "num_samples", "num_tokens"),
        *("statistic", "p_value", "level", "max_difference", "verdict", "divergences"),
    ],
    "speed": [
        *("schema", "checkpoint", "target", "prompts", "hardware", "absolute", "rows", "recommended"),
        "crossover_concurrency",
    ],
    "speed row": [
        *("engine", "drafter", "route", "temperature", "dtype", "threads", "concurrency", "draft_length", "tree"),
        *("num_prompts", "num_repeats", "order", "num_tokens", "plain_tokens_per_s", "tokens_per_s", "speedup"),
        *("predicted_speedup", "accept_len", "target_step_ms", "verify_step_ms", "draft_step_ms", "cost_ratio"),
        *("ttft_ms", "tpot_ms", "num_divergences", "num_near_ties"),
    ],
}


@pytest.fixture(scope="module")
def recorded(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12, 20, 9])
    replies = decode(tiny_target, prompts, PLAIN, 20)
    paths = [make_path(p, r.token_ids, f"p{i}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]
    return [dataclasses.replace(path, route=("chat", "code")[i % 2]) for i, path in enumerate(paths)]


@pytest.fixture(scope="module")
def measured(tiny_target, recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_head(folder, fitted_head(tiny_target, recorded[:2]), step=5)
    evaluate(lambda dtype: tiny_target, folder, Heldout(recorded), SETTINGS, folder / "eval", tell=lambda line: None)
    return folder


def measure_again(target, run, paths, settings, part, folder=None):
    """One part alone, with what it tells."""
    told: list[str] = []
    folder = folder or run / "eval"
    evaluate(lambda dtype: target, run, Heldout(paths), settings, folder, parts=[part], tell=told.append)
    return told


def keys_in_order(value, expected):
    return [key for key in value if key in expected] == expected


def test_files_follow_the_schema(measured):
    for name, rows, row_name in (
        ("acceptance", "rows", "acceptance row"),
        ("lossless", "checks", "check"),
        ("speed", "rows", "speed row"),
    ):
        text = (measured / "eval" / f"{name}.json").read_text()
        assert "NaN" not in text
        assert "Infinity" not in text
        value = json.loads(text)
        assert value["schema"] == f"headstart.{name}/1"
        assert keys_in_order(value, KEYS[name])
        assert value[rows]
        for row in value[rows]:
            assert keys_in_order(row, KEYS[row_name])
    for row in read_json(measured / "eval" / "acceptance.json")["rows"]:
        for bounds in (row["accept_len"], row["accept_len_macro"], *row["conditional"], *row["survival"]):
            assert list(bounds) == INTERVAL


def test_rows_keep_the_laws_of_counting(measured):
    for row in read_json(measured / "eval" / "acceptance.json")["rows"]:
        histogram = row["accepted_histogram"]
        assert len(histogram) == row["draft_length"] + 1
        assert sum(histogram) == pytest.approx(row["num_steps"])
        drafted = sum(k * steps for k, steps in enumerate(histogram))
        assert row["num_tokens"] == pytest.approx(row["num_steps"] + drafted - row["num_short_steps"])
        assert row["accept_len"]["value"] == pytest.approx(row["num_tokens"] / row["num_steps"])
        known = [a["value"] for a in row["conditional"] if a["value"] is not None]
        assert [s["value"] for s in row["survival"]][: len(known)] == pytest.approx(
            [math.prod(known[: k + 1]) for k in range(len(known))]
        )


def test_a_tree_has_a_row_of_its_own(measured):
    rows = read_json(measured / "eval" / "acceptance.json")["rows"]
    (row,) = [row for row in rows if row["tree"] is not None]
    assert row["tree"] == [-1, 0, 0, 1, 1, 2, 2]
    assert (row["source"], row["draft"], row["draft_length"], row["route"]) == ("offline", "greedy", 2, "all")
    first = next(r for r in rows if r["source"] == "offline" and r["draft_length"] == 1 and r["route"] == "all")
    assert row["num_steps"] < first["num_steps"]
    assert write_report(measured).read_text().count("eagle3, tree 2-2 (6 nodes)") == 1


def test_live_run_agrees_with_offline_and_the_verdict_is_lossless(measured):
    acceptance = read_json(measured / "eval" / "acceptance.json")
    assert acceptance["live_agreement"]["num_equal"] == acceptance["live_agreement"]["num_replies"] == 4
    rows = {
        row["source"]: row
        for row in acceptance["rows"]
        if row["route"] == row["context"] == "all"
        and row["draft_length"] == 3
        and row["drafter"] == "eagle3"
        and row["counting"] == "reply"
    }
    assert rows["live"]["accepted_histogram"] == rows["offline"]["accepted_histogram"]
    assert rows["live"]["accept_len"] == rows["offline"]["accept_len"]
    lossless = read_json(measured / "eval" / "lossless.json")
    assert lossless["verdict"] == "lossless"
    assert {check["against"] for check in lossless["checks"]} == {"recorded", "generate", "plain"}


def test_a_part_measured_again_keeps_the_rest(tiny_target, measured, recorded):
    before = read_json(measured / "eval" / "acceptance.json")
    engine_row = {**before["rows"][0], "source": "vllm-0.32.0"}
    before["rows"].append(engine_row)
    (measured / "eval" / "acceptance.json").write_text(json.dumps(before))
    quick = dataclasses.replace(SETTINGS, ngram=False)
    told = measure_again(tiny_target, measured, recorded, quick, "live")
    after = read_json(measured / "eval" / "acceptance.json")
    assert engine_row in after["rows"]
    assert len(after["rows"]) == len(before["rows"])
    assert len(read_json(measured / "eval" / "lossless.json")["checks"]) == 6
    assert "lossless: lossless" in told[-1]
    measure_again(tiny_target, measured, recorded, quick, "offline")
    assert read_json(measured / "eval" / "acceptance.json")["live_agreement"] == after["live_agreement"]


def test_a_certificate_alone_leaves_every_other_figure(tiny_target, measured, recorded, tmp_path):
    shutil.copytree(measured / "eval", tmp_path / "eval")
    before = {file.name: file.read_bytes() for file in (tmp_path / "eval").iterdir()}
    few = dataclasses.replace(SETTINGS, lossless_samples=64, lossless_tokens=64)
    measure_again(tiny_target, measured, recorded, few, "lossless", tmp_path / "eval")
    changed = {file.name for file in (tmp_path / "eval").iterdir() if file.read_bytes() != before.get(file.name)}
    assert changed == {"lossless.json"}
    lossless = read_json(tmp_path / "eval" / "lossless.json")
    names = {check["name"] for check in lossless["checks"]}
    assert {"enumeration", "first_tokens", "martingale", "greedy_identity"} <= names
    assert lossless["verdict"] == "lossless"


def test_a_failed_check_stays_until_the_same_check_passes(tiny_target, measured, recorded, tmp_path):
    shutil.copytree(measured / "eval", tmp_path / "eval")
    file = tmp_path / "eval" / "lossless.json"
    before = read_json(file)
    failed = {**before["checks"][0], "draft_length": 7, "verdict": "fail"}
    file.write_text(json.dumps({**before, "verdict": "lossy", "checks": [*before["checks"], failed]}))
    told = measure_again(tiny_target, measured, recorded, SETTINGS, "live", tmp_path / "eval")
    assert read_json(file)["verdict"] == "lossy"
    assert any("until the same check passes" in line and "draft length 7" in line for line in told)
    again = dataclasses.replace(SETTINGS, draft_lengths=[7], draft_length=7)
    measure_again(tiny_target, measured, recorded, again, "live", tmp_path / "eval")
    assert read_json(file)["verdict"] == "lossless"


def test_report_shows_every_part(measured):
    (measured / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 2.0}\n{"step": 2, "accept_len": 1.2, "accept_len_low": 1.1, "accept_len_high": 1.3}\n'
        '{"step": 3, "accept_len": 1.'  # a killed training leaves half a line
    )
    text = write_report(measured).read_text()
    for expected in ("## Acceptance", "## By route", "## Output: lossless", "## Speed", "training.png", "How to read"):
        assert expected in text
    assert (measured / "acceptance.png").stat().st_size > 1000
    assert (measured / "training.png").stat().st_size > 1000


def test_report_without_measurements_names_the_command(tmp_path):
    with pytest.raises(WrongInput, match="headstart eval"):
        write_report(tmp_path)


def test_paths_of_several_sampling_settings_are_refused(tiny_target, recorded, tmp_path):
    mixed = [recorded[0], dataclasses.replace(recorded[1], sampling={"temperature": 1.0})]
    for paths in ([], mixed):
        with pytest.raises(WrongInput):
            evaluate(lambda dtype: tiny_target, tmp_path, Heldout(paths), SETTINGS, tmp_path / "eval")


SAMPLING = Sampling(0.7, 40, 0.9)
SAMPLED_SETTINGS = dataclasses.replace(
    SETTINGS, live_batch=8, lossless_samples=64, lossless_tokens=64, fail_slow_plain=False
)


@pytest.fixture(scope="module")
def sampled(tiny_target, recorded, tmp_path_factory):
    """A head measured on replies of a temperature: the folder, and what evaluate returned."""
    folder = tmp_path_factory.mktemp("sampled")
    save_head(folder, fitted_head(tiny_target, recorded[:2]), step=1)
    prompts = make_prompts(tiny_target, [7, 12, 9, 15, 8, 11, 6, 10], seed=3)
    names = [f"p{i}" for i in range(len(prompts))]
    replies = decode(tiny_target, prompts, Speculation(sampling=SAMPLING), 10, batch=8, request_ids=names)
    paths = [make_path(p, r.token_ids, n, SAMPLING) for p, r, n in zip(prompts, replies, names, strict=True)]
    heldout = Heldout(paths, max_new_tokens=10)
    told: list[str] = []
    return folder, evaluate(lambda _: tiny_target, folder, heldout, SAMPLED_SETTINGS, folder / "eval", tell=told.append)


def test_sampled_replies_have_a_verdict_by_themselves(sampled):
    _, results = sampled
    assert results["lossless"]["verdict"] == "lossless"
    names = {check["name"] for check in results["lossless"]["checks"]}
    assert names == {"enumeration", "first_tokens", "martingale", "greedy_identity"}
    assert failures(results, SAMPLED_SETTINGS) == []
    rows = results["acceptance"]["rows"]
    kinds = {(row["source"], row["draft"]) for row in rows if row["drafter"] == "eagle3"}
    assert kinds == {(source, draft) for source in ("offline", "live") for draft in ("greedy", "sampled")}
    assert all(row[name] == value for row in rows for name, value in SAMPLING.to_dict().items())
    speed = [row for row in results["speed"]["rows"] if row["drafter"] == "eagle3"]
    assert speed
    assert all(row["temperature"] == SAMPLING.temperature and row["num_divergences"] is None for row in speed)


def test_sampled_live_replies_are_held_against_the_offline_figures(sampled):
    folder, results = sampled
    agreed = results["acceptance"]["live_agreement"]
    assert agreed["num_replies"] == 8
    rows = results["acceptance"]["rows"]
    for draft in ("greedy", "sampled"):
        live, offline = (
            next(
                row["accept_len"]["value"]
                for row in rows
                if (row["source"], row["draft"], row["draft_length"], row["counting"]) == (source, draft, 3, "reply")
            )
            for source in ("live", "offline")
        )
        assert agreed[draft]["difference"] == pytest.approx(live - offline)
        assert agreed[draft]["p_value"] > 1e-4
    assert "sampled drafts" in write_report(folder).read_text()
    agreed["sampled"]["p_value"] = 9e-5
    assert "sampled drafts" in failures(results, SAMPLED_SETTINGS)[0]


def test_live_replies_have_random_numbers_of_their_own(recorded):
    """Not those that made the recorded reply: the comparison would be of a reply with itself."""
    names = [name for draft in ("greedy", "sampled") for name in request_names(draft, recorded)]
    numbers = [request_generator(name, 0).random() for name in [*names, *(path.prompt_id for path in recorded)]]
    assert len({*numbers}) == 3 * len(recorded)


def test_generate_gives_the_plain_replies(tiny_target):
    prompts = make_prompts(tiny_target, [6, 17, 11], seed=4)
    plain = decode(tiny_target, prompts, PLAIN, 16)
    assert generate(tiny_target, prompts, 16) == [reply.token_ids for reply in plain]


def test_balanced_takes_routes_in_turn(recorded):
    assert [path.prompt_id for path in balanced(recorded, 3)] == ["p0", "p1", "p2"]
    assert [path.route for path in balanced(sorted(recorded, key=lambda p: p.route), 4)] == ["chat", "code"] * 2


def test_repeated_8grams_are_counted_within_a_reply():
    looping = make_path([1, 2], [5, 6] * 10)
    shares = repeated_ngrams([looping])
    assert shares["all"] == shares["chat"] == pytest.approx((13 - 2) / 13)
    assert repeated_ngrams([make_path([1], [5, 6])])["all"] is None


def speed_rows(speedup):
    row = {"drafter": "eagle3", "concurrency": 1, "draft_length": 3, "accept_len": 1.8, "predicted_speedup": 1.5}
    return [{**row, "speedup": {"value": speedup, "low": speedup - 0.1, "high": speedup + 0.1}}]


def test_recommendation_switches_off_where_drafting_costs_more():
    advice = recommend(speed_rows(1.4), "eagle3", {3: {"chat": 1.9, "json": 1.1}})[0]
    assert advice["draft_length"] == 3
    assert advice["routes_off"] == ["json"]  # a step costs 1.8 / 1.5 = 1.2 plain steps
    assert '"num_speculative_tokens": 3' in advice["flags"]
    assert recommend(speed_rows(0.9), "eagle3", {})[0]["draft_length"] == 0


def test_plain_decoding_below_generate_fails_the_gate():
    def speed(plain):
        absolute = {"generate_tokens_per_s": 10.0, "plain_tokens_per_s": plain}
        return {"checkpoint": {"kind": "eagle3"}, "absolute": absolute, "rows": []}

    for plain, num_reasons in ((9.0, 1), (11.0, 0), (None, 0)):
        evals = {"acceptance": None, "lossless": None, "speed": speed(plain)}
        assert len(failures(evals, SETTINGS)) == num_reasons


def test_unexplained_live_steps_fail_the_gate(measured):
    acceptance = read_json(measured / "eval" / "acceptance.json")
    evals = {"acceptance": acceptance, "lossless": None, "speed": None}
    assert failures(evals, SETTINGS) == []
    acceptance["live_agreement"]["unexplained"] = ["p3"]
    assert "p3" in failures(evals, SETTINGS)[0]


def test_routes_lost_to_lookup_are_named(measured):
    acceptance = read_json(measured / "eval" / "acceptance.json")
    for row in acceptance["rows"]:
        if row["drafter"] == "ngram" and row["route"] == "code":
            row["accept_len"]["value"] = 9.0
    assert "code" in routes_lost_to_ngram(acceptance, 3)
