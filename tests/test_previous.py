"""The previous head beside the new one: the same replies, its own taps, one paired comparison."""

import dataclasses
from pathlib import Path

import pytest
import torch

from headstart.eval.compare import REPLICATES, compare_route
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.heldout import Heldout
from headstart.eval.measure import evaluate
from headstart.eval.prompt_sums import read_sums
from headstart.eval.report import write_report
from headstart.eval.settings import EvalSettings
from headstart.eval.speculation import PLAIN, Speculation
from headstart.heads.checkpoint import build_head, checkpoint_identity, save_head
from headstart.heads.errors import WrongInput
from headstart.heads.settings import Eagle3Settings, MedusaSettings
from headstart.heads.store import read_json, write_json
from headstart.launch.previous import previous_folder
from tests.schema_rules import acceptance_violations, prompts_violations
from tests.small_decoding import NO_STOP, fitted_head, make_path, make_prompts

SETTINGS = EvalSettings(draft_lengths=[1, 2], draft_length=2, replicates=50, ngram=False)


@pytest.fixture(scope="module")
def recorded(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12, 20, 9, 6, 15, 8])
    replies = decode(tiny_target, prompts, PLAIN, 16, NO_STOP, batch=7)
    return [make_path(p, r.token_ids, f"p{i}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))]


@pytest.fixture(scope="module")
def run(tiny_target, recorded, tmp_path_factory):
    """A run whose checkpoint was fitted, and an older one with other taps that was not."""
    root = tmp_path_factory.mktemp("runs")
    torch.manual_seed(1)
    old = build_head(Eagle3Settings(taps=[1, 3]), tiny_target.facts, torch.arange(0, 500, 3))
    old.load_target(tiny_target, initialise=True)
    for name, head, step in (("new", fitted_head(tiny_target, recorded), 9), ("old", old.eval(), 5)):
        folder = root / name / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        save_head(folder, head, step)
        (root / name / "checkpoints" / "best").write_text(folder.name)
        (root / name / "recipe.yaml").write_text("")
    return root


def test_another_set_of_taps_is_read_from_the_same_weights(tiny_target, recorded):
    other = tiny_target.with_taps([1, 3])
    tokens = [path.token_N for path in recorded[:2]]
    width = tiny_target.facts.hidden_size
    whole = tiny_target.with_taps([0, 1, 2, 3, 4])
    for states, wanted in zip(whole.read(tokens), other.read(tokens), strict=True):
        assert torch.equal(states.taps[:, [*range(width, 2 * width), *range(3 * width, 4 * width)]], wanted.taps)
        assert torch.equal(states.final, wanted.final)
    assert tiny_target.read(tokens)[0].taps.shape[1] == len(tiny_target.taps) * width
    by_hooks = type(tiny_target)(
        tiny_target.model, tiny_target.tokenizer, tiny_target.facts, tiny_target.taps, direct=False
    )
    for a, b in zip(by_hooks.with_taps([1, 3]).read(tokens), other.read(tokens), strict=True):
        torch.testing.assert_close(a.taps, b.taps, rtol=1e-4, atol=1e-4)


def test_both_heads_are_measured_on_the_same_replies_and_compared(tiny_target, recorded, run):
    new, old = (run / name / "checkpoints" / step for name, step in (("new", "step-000009"), ("old", "step-000005")))
    told: list[str] = []
    results = evaluate(
        lambda dtype: tiny_target,
        new,
        Heldout(recorded, previous=old),
        SETTINGS,
        run / "new" / "eval",
        parts=["offline"],
        tell=told.append,
    )
    evaluate(
        lambda dtype: tiny_target.with_taps([1, 3]),
        old,
        Heldout(recorded),
        SETTINGS,
        run / "old" / "eval",
        parts=["offline"],
        tell=told.append,
    )
    for file, rules in (("acceptance", acceptance_violations), ("prompts", prompts_violations)):
        assert rules(run / "new" / "eval" / f"{file}.json") == []
    acceptance = results["acceptance"]
    mine = [row for row in acceptance["rows"] if row["drafter"] == "previous"]
    alone = read_json(run / "old" / "eval" / "acceptance.json")["rows"]
    assert [{**row, "drafter": "eagle3"} for row in mine] == [
        {**row, "checkpoint": checkpoint_identity(old)} for row in alone
    ]
    sums = [read_sums(run / name, checkpoint_identity(folder)) for name, folder in (("new", new), ("old", old))]
    again = read_sums(run / "new", checkpoint_identity(old))
    assert again.steps_R.tolist() == sums[1].steps_R.tolist()
    found = compare_route(*sums, "all", 0, REPLICATES)
    assert acceptance["previous"]["ratio"] == found.ratio
    assert acceptance["previous"]["verdict"] == "better"
    expected = f"{found.accept_len:.2f} against {found.reference_accept_len:.2f}, ratio {found.ratio['value']:.3f}"
    assert expected in told[told.index(next(text for text in told if "against the previous head" in text))]
    assert expected in write_report(run / "new").read_text()


def test_a_previous_head_of_another_kind_may_draft_fewer_tokens(tiny_target, recorded, run, tmp_path):
    head = build_head(MedusaSettings(num_heads=1), tiny_target.facts, torch.arange(500))
    head.load_target(tiny_target, initialise=True)
    save_head(tmp_path, head, 3)
    new = run / "new" / "checkpoints" / "step-000009"
    results = evaluate(
        lambda dtype: tiny_target,
        new,
        Heldout(recorded, previous=tmp_path),
        SETTINGS,
        tmp_path / "eval",
        parts=["offline"],
        tell=lambda line: None,
    )
    rows = [row for row in results["acceptance"]["rows"] if (row["drafter"], row["route"]) == ("previous", "all")]
    short, long = rows[0], next(row for row in rows if row["draft_length"] == 2)
    assert long["accept_len"] == short["accept_len"]
    assert long["conditional"] == [*short["conditional"], {"value": None, "low": None, "high": None}]
    without = evaluate(
        lambda dtype: tiny_target,
        new,
        Heldout(recorded),
        SETTINGS,
        tmp_path / "eval",
        parts=["offline"],
        tell=lambda line: None,
    )["acceptance"]
    assert "previous" not in {row["drafter"] for row in without["rows"]} | without.keys()


def test_a_previous_head_is_found_by_run_checkpoint_or_export(tiny_target, run, tmp_path):
    facts, step = tiny_target.facts, run / "old" / "checkpoints" / "step-000005"
    export = run / "old" / "export" / "vllm"
    export.mkdir(parents=True)
    record = {"schema": "headstart.export/1", "checkpoint": checkpoint_identity(step)}
    write_json(export / "headstart.json", record)
    for text in ("old", str(run / "old"), str(step), str(export)):
        assert previous_folder(text, run, facts) == step.resolve()
    assert previous_folder("", run, facts) is None
    record["checkpoint"]["sha256"] = "gone"
    write_json(export / "headstart.json", record)
    other = dataclasses.replace(facts, fingerprint={**facts.fingerprint, "weights": "others"})
    for text, target, named in (
        (str(export), facts, "no checkpoint"),
        ("nowhere", facts, "found no run"),
        ("old", other, "weights"),
    ):
        with pytest.raises(WrongInput, match=named):
            previous_folder(text, run, target)


def test_a_previous_head_that_is_missing_is_a_finding_of_check(tmp_path: Path):
    from headstart.launch.check import check_loaded
    from headstart.launch.variants import load

    (tmp_path / "mine.jsonl").write_text("".join(f'{{"prompt": "Count to {n} in words."}}\n' for n in range(40, 46)))
    path = tmp_path / "mine.yaml"
    path.write_text(
        "target: {model: tiny}\nprompts: {sources: [mine.jsonl], heldout: mine.jsonl}\n"
        "traffic: {max_new_tokens: 16}\nhead: {draft_vocab_size: 128}\neval: {previous: ./older}\n"
    )
    loaded = load(path)
    assert loaded.shared.eval.previous == str(tmp_path / "older")
    with pytest.raises(WrongInput, match=r"mine.yaml:5: eval.previous: .*older: found no run"):
        check_loaded(loaded, path, [], render=False)


def test_a_session_follows_the_taps_of_its_target(tiny_target, recorded, run):
    """What the comparison rests on: live, the head with other taps gives the same replies."""
    from headstart.heads.checkpoint import load_head

    other = tiny_target.with_taps([1, 3])
    head = load_head(run / "old" / "checkpoints" / "step-000005", other)
    path = recorded[0]
    prompt = path.prompt_token_ids
    found = decode(other, [prompt], Speculation(HeadDrafter(head), 2), 16, NO_STOP)[0]
    assert found.token_ids == path.token_N[path.num_prompt_tokens :].tolist()
