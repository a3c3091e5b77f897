"""What tables say of the figures: definitions beside numbers, customary estimates beside exact ones, empty parts as such."""

import dataclasses

import pytest
import torch

from headstart.eval.acceptance import count_replies, reply_acceptance
from headstart.eval.acceptance_rows import acceptance_row
from headstart.eval.contexts import break_even, break_even_text, by_context, context_rows, step_cost
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.replies import Reply, Step, live_counts
from headstart.eval.report import length_part
from headstart.eval.settings import EvalSettings
from headstart.eval.speculation import Speculation
from headstart.eval.speed import crossover, recommend, speed_row
from headstart.eval.subject import read_batches
from headstart.eval.summary import acceptance_text, drafts_kept, speed_text
from headstart.eval.timings import Timings, Variant
from headstart.heads.checkpoint import save_head
from headstart.heads.contract import greedy
from headstart.heads.store import read_json
from tests.schema_rules import acceptance_violations, prompts_violations
from tests.scripted import ScriptedDrafter
from tests.small_decoding import NO_STOP, continuations, fitted_head, make_path, make_prompts
from tests.test_decode import CopyHead

SETTINGS = EvalSettings(draft_lengths=[1, 3], draft_length=3, replicates=100, min_accept_len=0)
CHECKPOINT = {"kind": "eagle3", "step": 7, "sha256": "abc"}


def make_acceptance(rows):
    return {"checkpoint": CHECKPOINT, "prompts": {"name": "heldout", "max_new_tokens": 30}, "rows": rows}


def table_line(text, *beginning):
    """Cells of the first line that begins with these words."""
    lines = [line.split() for line in text.splitlines()]
    return next(line for line in lines if tuple(line[: len(beginning)]) == beginning)


@pytest.fixture(scope="module")
def paths(tiny_target):
    """16 replies, some to long prompts and one of a single token, which takes no step; chat and code in turn."""
    prompts = make_prompts(tiny_target, [9, 20, 150, 30, 14, 140, 11, 12, 13, 10, 16, 17, 8, 19, 21, 22])
    replies = make_prompts(tiny_target, [12, 1, 20, 16, 9, 11, 8, 14, 18, 7, 9, 12, 15, 10, 6, 13], seed=1)
    found = [make_path(p, r, f"p{i:02d}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]
    return [dataclasses.replace(path, route=("chat", "code")[i % 2]) for i, path in enumerate(found)]


@pytest.fixture(scope="module")
def measure(tiny_target, paths, tmp_path_factory):
    """Offline figures of a fitted head; returns the folder of the files and what was told."""
    run = tmp_path_factory.mktemp("run")
    save_head(run, fitted_head(tiny_target, paths[2:5]), step=7)

    def measure(settings=SETTINGS, name="eval"):
        told = []
        routes = ["chat", "code", "maths"]
        evaluate(
            lambda dtype: tiny_target,
            run,
            Heldout(paths, routes=routes),
            settings,
            run / name,
            parts=["offline"],
            tell=told.append,
        )
        return run / name, told

    return measure


@pytest.fixture(scope="module")
def measured(measure):
    return measure()


def num_judged(paths):
    return sum(path.num_reply_tokens - 1 for path in paths)


def test_accept_len_is_over_all_rounds_and_the_table_says_so(tiny_target):
    """Two prompts of unequal length: 12 steps of 2 tokens and 3 steps of 4; the mean of the two means would be 3."""
    prompts = make_prompts(tiny_target, [6, 11])
    text = continuations(tiny_target, prompts, 40)
    replies = [
        decode(tiny_target, [prompt], Speculation(ScriptedDrafter(text, num_right), 4), limit, NO_STOP)[0]
        for prompt, num_right, limit in zip(prompts, (1, 3), (1 + 24, 1 + 12), strict=True)
    ]
    counts = live_counts(replies, "ab", "ab", 4)
    row = acceptance_row(counts, source="offline", drafter="eagle3", draft_length=4, replicates=100)
    assert row["accept_len"]["value"] == 36 / 15
    assert drafts_kept(row) == 21 / 15 == pytest.approx(row["accept_len"]["value"] - 1)  # the same without the bonus
    shown = acceptance_text(make_acceptance([row]), 4)
    assert table_line(shown, "eagle3", "offline", "4")[3] == "2.40"
    assert "1.40" in table_line(shown, "eagle3", "offline", "4")
    for word in ("accept_len", "drafts", "uniform", "product", "a_k", "[low,"):
        assert len(table_line(shown, word)) > 5  # a line that defines it
    assert "corrected or bonus token included" in shown


class AstrayHead(CopyHead):
    """Right while it is fed true tokens, wrong on its own outputs."""

    def rollout(self, batch, depth):
        found = super().rollout(batch, depth)
        sign_D = torch.where(torch.arange(depth) == 0, 1.0, -1.0)
        return dataclasses.replace(found, state_SDH=found.state_SDH * sign_D[:, None])

    def draft(self, state, depth, sampler=greedy):
        found = super().draft(state, depth, sampler)
        tokens_BK = found.tokens_BK.clone()
        tokens_BK[:, 1:] = (tokens_BK[:, 1:] + 1) % self.facts.num_tokens
        return dataclasses.replace(found, tokens_BK=tokens_BK)


def test_a_head_that_is_right_only_on_true_tokens_shows_both_numbers_in_one_line(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12])
    head = AstrayHead(tiny_target, 1)
    live = decode(tiny_target, prompts, Speculation(HeadDrafter(head), 4), 1 + 20, NO_STOP, batch=2)
    paths = [make_path(p, r.token_ids, name) for p, r, name in zip(prompts, live, "ab", strict=True)]
    counts = count_replies(reply_acceptance(head, read_batches(tiny_target, head, paths), 4), 4)
    assert [c.num_steps for c in counts] == [c.num_steps for c in live_counts(live, "ab", "ab", 4)] == [10, 10]
    row = acceptance_row(counts, source="offline", drafter="eagle3", draft_length=4, replicates=100)
    cells = table_line(acceptance_text(make_acceptance([row]), 4), "eagle3", "offline", "4")
    assert cells[3] == "2.00"  # of the 5 that its first drafts promise
    assert cells[-5:-1] == ["1.000", "0.000", "-", "-"]


def test_customary_estimates_stand_beside_the_exact_one(measured):
    folder, told = measured
    row = next(r for r in read_json(folder / "acceptance.json")["rows"] if r["draft_length"] == 3)
    cells = table_line(told[-1], "eagle3", "offline", "3")
    for value in (row["accept_len"]["value"], row["uniform_start_estimate"], row["product_of_marginals"]):
        assert f"{value:.2f}" in cells


def test_a_route_without_replies_is_shown_as_empty(measured, paths):
    folder, told = measured
    assert acceptance_violations(folder / "acceptance.json") == []
    row = next(r for r in read_json(folder / "acceptance.json")["rows"] if r["route"] == "maths")
    assert (row["num_prompts"], row["num_tokens"]) == (0, 0)
    assert row["accept_len"] == {"value": None, "low": None, "high": None}
    by_route = told[-1].partition("by route")[2]
    assert table_line(by_route, "maths") == ["maths", "0", "0", "-", "-", "-"]
    for route in ("chat", "code"):
        replies = [path for path in paths if path.route == route]
        cells = table_line(by_route, route)
        assert cells[1:3] == [str(len(replies)), str(num_judged(replies))]
        assert cells[4].startswith("[")


def test_every_prompt_is_in_one_bucket_of_its_length(measured, paths):
    folder, told = measured
    acceptance = read_json(folder / "acceptance.json")
    rows = context_rows(acceptance, "eagle3", 3)
    whole = next(r for r in acceptance["rows"] if (r["route"], r["context"], r["draft_length"]) == ("all", "all", 3))
    assert [(row["context"], row["num_prompts"]) for row in rows] == [("0-128", 14), ("128-256", 2)]
    for name in ("num_prompts", "num_tokens", "num_steps"):
        assert sum(row[name] for row in rows) == pytest.approx(whole[name])
    by_length = told[-1].partition("by prompt length")[2]
    assert table_line(by_length, "128-256")[1:3] == ["2", str(num_judged([paths[2], paths[5]]))]
    assert "break-even: unknown" in by_length  # nothing was timed


def test_an_empty_bucket_between_two_is_there():
    replies = [dataclasses.make_dataclass("Counts", ["prompt_id"])(name) for name in "abcd"]
    lengths = dict(zip("abcd", (127, 600, 128, 0), strict=True))
    found = {name: [c.prompt_id for c in held] for name, held in by_context(replies, lengths).items()}
    assert found == {"0-128": ["a", "d"], "128-256": ["c"], "256-512": [], "512-1024": ["b"]}
    assert by_context([], {}) == {}


def length_row(context, value):
    ends = {"value": value, "low": value and value - 0.1, "high": value and value + 0.1}
    names = {"source": "offline", "drafter": "eagle3", "draft": "greedy", "draft_length": 3, "route": "all"}
    return {**names, "context": context, "num_prompts": 5, "num_tokens": 90, "accept_len": ends}


@pytest.mark.parametrize(
    ("values", "expected", "said"),
    [
        ((1.9, 1.6, None, 1.3, 1.1), 512, "loses for prompts of 512 tokens and more"),
        ((1.9, 1.3, 1.6, 1.5, 1.4), None, "not reached"),  # a dip between is no break-even
        ((1.9, 1.3, 1.6, 1.5, 1.1), 1024, "1024 tokens and more"),
        ((1.2, 1.1, None, 1.0, 1.3), 0, "loses at every length"),
    ],
)
def test_the_prompt_length_from_which_drafting_loses_is_named(tmp_path, values, expected, said):
    contexts = ("0-128", "128-256", "256-512", "512-1024", "1024-2048")
    rows = [length_row(context, value) for context, value in zip(contexts, values, strict=True)]
    timed = {"engine": "reference", "drafter": "eagle3", "concurrency": 1, "draft_length": 3}
    speed = {"checkpoint": CHECKPOINT, "rows": [{**timed, "accept_len": 1.75, "predicted_speedup": 1.25}]}
    acceptance = make_acceptance(list(reversed(rows)))
    cost = step_cost(acceptance, speed, 3)
    assert cost == 1.4
    assert context_rows(acceptance, "eagle3", 3) == rows
    assert break_even(rows, cost) == expected
    assert said in break_even_text(rows, cost)
    part = length_part(acceptance, speed, 3, tmp_path / "lengths.png")
    assert said in part
    assert f"{values[0] / 1.4:.2f}" in part
    assert (tmp_path / "lengths.png").stat().st_size > 1000
    assert step_cost(acceptance, {**speed, "checkpoint": {**CHECKPOINT, "sha256": "other"}}, 3) is None


def fake_timings(concurrency, draft_length):
    """24 tokens after the first, by a clock that is a formula: draft step 0.3, verification 1 + 0.1 a token in the batch.

    One draft a step is right, so a step emits 2 tokens with drafts and 1 without.
    """
    kept = min(draft_length, 1)
    num_steps = 24 // (kept + 1)
    verify = 1 + 0.1 * concurrency * (draft_length + 1)
    draft = 0.3 * draft_length
    reply = Reply(
        token_ids=[5] * 25,
        steps=[Step(kept, min(draft_length, kept + 1), False, kept, draft_length)] * num_steps,
        total_s=num_steps * (verify + draft),
        draft_s=[draft] * num_steps,
        verify_s=[verify] * num_steps,
    )
    return Timings(Variant("eagle3" if draft_length else "plain", draft_length), [[[reply] * concurrency]] * 3)


def test_slowdowns_are_printed_as_such_with_where_to_switch_off():
    rows = []
    for concurrency in (1, 8, 32):
        for length in (2, 5, 10):
            timings = [fake_timings(concurrency, k) for k in (length, 0)]
            rows.append(speed_row(*timings, {"divergences": []}, "float32", SETTINGS, 0))
    expected = {(1, 2): 1.16, (1, 5): 0.71, (1, 10): 0.43, (8, 2): 0.90, (32, 2): 0.75}
    for (concurrency, length), speedup in expected.items():
        row = next(r for r in rows if (r["concurrency"], r["draft_length"]) == (concurrency, length))
        assert row["speedup"]["value"] == pytest.approx(speedup, abs=0.005)
        assert row["predicted_speedup"] == pytest.approx(row["speedup"]["value"])
        assert row["cost_ratio"] == pytest.approx(0.3 / (1 + 0.1 * concurrency))
    recommended = recommend(rows, "eagle3", {2: {"chat": 2.0, "json": 1.5}})
    assert [(x["concurrency"], x["draft_length"]) for x in recommended] == [([1, 1], 2), ([8, 32], 0)]
    assert recommended[0]["routes_off"] == ["json"]  # a step costs 1.9 / 1.1 = 1.73 plain ones
    assert crossover(recommended) == 8
    absolute = {f"{name}_tokens_per_s": None for name in ("generate", "plain", "memory_bandwidth_bound")}
    shown = speed_text(
        {
            "checkpoint": CHECKPOINT,
            "hardware": {"cpu": "a formula", "cores": 1, "gpu": None},
            "absolute": absolute,
            "rows": rows,
            "recommended": recommended,
            "crossover_concurrency": crossover(recommended),
        }
    )
    assert "0.75" in table_line(shown, "eagle3", "float32", "32", "2")
    assert "0.43" in table_line(shown, "eagle3", "float32", "1", "10")
    assert "at concurrency 1: draft length 2, off for json" in shown
    assert "at concurrency 8 to 32: no drafting" in shown
    assert "switch drafting off from concurrency 8 on (at 1 it still pays)" in shown  # both sides


def test_stored_sums_give_the_figures_of_the_table(measured):
    folder, _ = measured
    assert prompts_violations(folder / "prompts.json") == []
    sums, rows = read_json(folder / "prompts.json"), read_json(folder / "acceptance.json")["rows"]
    assert len(sums["rows"]) == 6  # the head, n-gram and suffix lookup, at two draft lengths
    for stored in sums["rows"]:
        assert (stored["checkpoint"] is None) == (stored["drafter"] in ("ngram", "suffix"))
        for row in rows:
            if (
                all(row[name] == stored[name] for name in ("drafter", "draft", "draft_length"))
                and row["context"] == "all"
            ):
                here = [i for i, route in enumerate(sums["routes"]) if row["route"] in ("all", route)]
                assert sum(sums["num_tokens"][i] for i in here) == row["num_tokens"]
                assert sum(stored["num_steps"][i] for i in here) == pytest.approx(row["num_steps"])


@pytest.mark.parametrize(("width", "taken"), [(1e9, 8), (1e-9, 16)])
def test_prompts_are_added_until_the_interval_is_narrow_enough(measure, measured, monkeypatch, width, taken):
    monkeypatch.setattr("headstart.eval.heldout.looks", lambda num: [8, num])
    folder, told = measure(dataclasses.replace(SETTINGS, stop_at_width=width), f"eval-{taken}")
    sums, everything = (read_json(x / "prompts.json") for x in (folder, measured[0]))
    for name in ("prompt_ids", "num_tokens", "routes"):
        assert sums[name] == everything[name][:taken]
    assert [row["num_steps"] for row in sums["rows"]] == [row["num_steps"][:taken] for row in everything["rows"]]
    rows = read_json(folder / "acceptance.json")["rows"]
    assert next(row for row in rows if row["route"] == row["context"] == "all")["num_prompts"] == taken
    assert any("no prompts are left" in line for line in told) == (taken == 16)
