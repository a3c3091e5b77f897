"""Recorded requests: what is kept, a verdict for every row, and nothing of a person where it should not be."""

import json
from collections import Counter
from pathlib import Path

import pytest

from headstart.heads.errors import GateFailed, WrongInput
from headstart.heads.paths import SPLITS, read_paths
from headstart.heads.settings import TargetSettings
from headstart.heads.target import TargetLoader
from headstart.launch import cli
from headstart.trainer.prompts import gather, make_prompts, prompt_inputs, read_prompts
from headstart.trainer.scrub import PATTERNS, scrub
from headstart.trainer.settings import PromptSettings, TrafficSettings
from headstart.trainer.similarity import prompt_text
from headstart.trainer.sources import ENDS_WITH_REPLY, read_source, role_names, source_hash
from headstart.trainer.traffic import make_traffic
from headstart.trainer.verdicts import check_broken
from tests.test_prompts import assistant, questions, user, write_jsonl

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def logged(text, answer="Yes.", **request):
    """A request of a log with its response."""
    return {
        "request": {"model": "served", "messages": [user(text)], "temperature": 0.7, **request},
        "response": {"id": "r", "choices": [{"message": assistant(answer), "finish_reason": "stop"}], "usage": {}},
    }


def replied(text, **response):
    return {**logged(text), "response": response}


def chosen(text, **choice):
    return replied(text, choices=[{"message": assistant("Yes."), "finish_reason": "stop", **choice}])


# Every way a row of a log can be of no use: the line, and the reason of its verdict.
BROKEN = [
    ('{"request": {"messages": [', "not JSON"),
    ("[1, 2]", "not an object"),
    ({}, "no messages and no prompt"),
    ({"request": "POST /v1/chat/completions"}, "a column is text and not JSON"),
    ({"request": [1]}, "request is not an object"),
    ({"request": {"model": "m"}}, "a request without messages"),
    ({"request": {"prompt": "Once upon"}}, "a text completion, which has no turns"),
    ({"request": {"messages": "hello"}}, "a column is text and not JSON"),
    ({"request": {"messages": []}}, "empty conversation"),
    (logged(""), "an empty user turn"),
    (logged("a", messages=[user("a"), user("b")]), "repeated role user"),
    (logged("a", messages=[{"role": "robot", "content": "a"}]), "unknown role robot"),
    (logged("a", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "a turn that is not text"),
    (
        logged("a", response_format={"type": "json_object"}),
        "response_format constrains the reply, which is not supported",
    ),
    (logged("a", tool_choice="required"), "tool_choice constrains the reply, which is not supported"),
    (logged("a", functions=[{"name": "f"}]), "functions, the older form of tools, are not supported"),
    (logged("a", chat_template="{{ messages }}"), "chat_template: it was rendered by a template of its own"),
    (logged("a", add_generation_prompt=False, continue_final_message=True), "it asks to continue a turn"),
    (logged("a", chat_template_kwargs=[1]), "chat_template_kwargs is not an object"),
    (
        logged("a", chat_template_kwargs={"tokenize": False}),
        "template_kwargs sets tokenize, which is no variable of a chat",
    ),
    (replied("a", error={"message": "overloaded"}), "its response is an error"),
    ({**logged("a"), "error": {"code": 400}, "response": None}, "its response is an error"),
    (replied("a", status_code=429, body={}), "its response is an error"),
    (replied("a", choices=[]), "its response has no choices"),
    (chosen("a", message={"role": "assistant", "content": None}), "its response has no reply"),
    (chosen("a", finish_reason="content_filter"), "its reply ended by content_filter"),
    ({**logged("a"), "response": 7}, "response is not an object"),
    ({**logged("a"), "route": ["x"]}, "route is not text"),
    (logged("half \ud800"), "holds half a surrogate pair, which is no Unicode text"),
]


def write_broken_log(folder: Path) -> tuple[list[dict], int]:
    """A log of twelve good rows between those of `BROKEN`: the good ones, and how many rows it has."""
    good = [logged(row["prompt"]) for row in questions(12)]
    lines = [json.dumps(row) for row in good]
    for i, (row, _) in enumerate(BROKEN):
        lines.insert(i * 2 % (len(lines) + 1), row if isinstance(row, str) else json.dumps(row))
    assert len(BROKEN) >= 20
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    write_jsonl(folder / "held.jsonl", [{"prompt": "Name three rivers that flow north."}])
    return good, len(lines)


def test_a_log_whose_rows_are_broken_in_every_way_gets_a_verdict_for_each(tmp_path: Path, capsys, monkeypatch) -> None:
    good, num_rows = write_broken_log(tmp_path)
    settings = PromptSettings(sources=["log.jsonl"], num_train=6, num_validation=2, num_heldout=4)
    stage = make_prompts(settings, tmp_path / "runs", tmp_path)
    verdicts = [json.loads(line) for line in (stage.folder / "verdicts.jsonl").read_text().splitlines()]
    assert [verdict["row"] for verdict in verdicts] == [*range(1, num_rows + 1)]
    found = Counter(verdict["reason"] for verdict in verdicts if verdict["verdict"] == "dropped")
    assert found.total() == len(BROKEN)
    for _, reason in BROKEN:
        assert any(told.startswith(reason) for told in found), reason
    assert Counter(verdict["verdict"] for verdict in verdicts if verdict["verdict"] != "dropped") == {
        "train": 6,
        "validation": 2,
        "unused": 4,
    }
    assert {prompt_text(p) for p in read_prompts(stage.folder) if p.split != "heldout"} <= {
        row["request"]["messages"][0]["content"] for row in good
    }
    # The command does its work and says so by its exit code.
    monkeypatch.chdir(tmp_path)
    recipe = "target: {model: tiny}\ntraffic: {max_new_tokens: 16}\nhead: {draft_vocab_size: 128}\n"
    recipe += "prompts: {sources: [log.jsonl], heldout: held.jsonl, num_train: 6, num_validation: 2, max_broken: %s}\n"
    (tmp_path / "mine.yaml").write_text(recipe % 0.5)
    assert cli.run(["check", "mine.yaml"]) == cli.GATE_FAILED
    told = capsys.readouterr()
    assert "is fine" not in told.out
    assert f"{len(BROKEN)} of {num_rows} rows of {tmp_path / 'log.jsonl'} are broken" in told.err
    (tmp_path / "mine.yaml").write_text(recipe % 0.9)
    assert cli.run(["check", "mine.yaml"]) == cli.DONE


def test_a_training_on_a_broken_log_ends_whole_and_says_so_by_its_exit_code(tmp_path, capsys, monkeypatch):
    """Every stage runs on the good rows; to allow for the broken ones changes the exit code and nothing else."""
    _, num_rows = write_broken_log(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "target: {model: tiny, dtype: float32, device: cpu}\nrun: {threads: 1}\nexport: {engines: []}\n"
        "prompts: {sources: [log.jsonl], heldout: held.jsonl, num_train: 6, num_validation: 2}\n"
        "traffic: {max_new_tokens: 8}\nhead: {draft_vocab_size: 128}\ntracking: {wandb: false}\n"
        "train: {num_steps: 2, batch_tokens: 256, depth: 2, eval_every: 2, save_every: 2, dtype: float32}\n"
        "eval: {draft_lengths: [2], draft_length: 2, speed_draft_lengths: [2], speed_new_tokens: 4, speed_repeats: 1, "
        "replicates: 50, speed_dtype: float32, fail_slow_plain: false}\n"
    )
    assert cli.run(["train", "mine.yaml"]) == cli.GATE_FAILED
    broken = f"{len(BROKEN)} of {num_rows} rows of {tmp_path / 'log.jsonl'} are broken, expected at most 5.0%"
    assert broken in capsys.readouterr().err
    run = tmp_path / "runs" / "mine"
    assert (run / "report.md").is_file()
    assert (run / "checkpoints" / "best").is_file()
    verdicts = [json.loads(line) for line in (run / "prompts" / "verdicts.jsonl").read_text().splitlines()]
    told = [verdict for verdict in verdicts if verdict["source"].endswith("log.jsonl")]
    assert sorted(verdict["row"] for verdict in told) == [*range(1, num_rows + 1)]
    assert Counter(verdict["verdict"] for verdict in told) == {
        "train": 6, "validation": 2, "unused": 4, "dropped": len(BROKEN)
    }  # fmt: skip
    used = {verdict["id"]: verdict["verdict"] for verdict in verdicts if verdict["verdict"] in SPLITS}
    assert {path.prompt_id: path.split for path in read_paths(run / "traffic")} == used
    measured = (run / "eval" / "acceptance.json").read_bytes()
    assert cli.run(["train", "mine.yaml", "prompts.max_broken=0.9"]) == cli.DONE
    assert (run / "eval" / "acceptance.json").read_bytes() == measured


def test_a_source_fails_by_its_own_share_of_broken_rows(tmp_path):
    write_jsonl(tmp_path / "one.jsonl", [*questions(30), {}])
    write_jsonl(tmp_path / "two.jsonl", [{"prompt": "Where do swallows spend the winter?"}, {}])
    records = gather(PromptSettings(sources=["one.jsonl", "two.jsonl"], num_validation=4), tmp_path).records
    check_broken(records, 0.5)
    with pytest.raises(GateFailed) as failed:
        check_broken(records, 0.05)
    assert "1 of 2 rows of" in str(failed.value)
    assert "one.jsonl" not in str(failed.value)


def test_of_equal_requests_the_verdict_names_the_row_whose_reply_is_kept(tmp_path):
    rows = [logged(row["prompt"]) for row in questions(4)]
    twice = [logged("Why is the sky blue?", answer=answer) for answer in ("Light.", "Air.", "Light.")]
    write_jsonl(tmp_path / "log.jsonl", [*twice, *rows])
    settings = PromptSettings(sources=["log.jsonl"], num_train=0, num_validation=1, num_heldout=4)
    stage = make_prompts(settings, tmp_path / "runs", tmp_path)
    told = [json.loads(line) for line in (stage.folder / "verdicts.jsonl").read_text().splitlines()][:3]
    (kept,) = [p.reply["content"] for p in read_prompts(stage.folder) if p.prompt_id == told[0]["id"]]
    assert [row["verdict"] == "repeated" for row in told] == [kept != "Light.", kept != "Air.", True]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_recorded_request_is_the_conversation_it_was(tmp_path, ending):
    """Tools and template variables are rendered as they were served; the reply is made anew by the target."""
    import datasets

    plain = logged(
        "Why?", messages=[{"role": "system", "content": "Be kind."}, user("Hi"), assistant("Hello."), user("Why?")]
    )
    tools = logged(
        "Rain?", tools=[WEATHER], tool_choice="auto", chat_template_kwargs={"enable_thinking": False}, stop=["\n"]
    )
    tools["request"]["metadata"] = {"route": "agents"}
    batch = {"custom_id": "7", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [user("Batch?")]}}
    result = {**batch, "request": {"body": {"messages": [user("Done?")]}}, "body": None, "route": "batch"}
    result["response"] = {
        "status_code": 200,
        "body": {"choices": [{"message": assistant("Done."), "finish_reason": "stop"}]},
    }
    path = write_jsonl(tmp_path / "log.jsonl", [plain, tools, batch, result])
    if ending == "parquet":
        columns = ("request", "response", "body", "route")
        as_text = [{c: json.dumps(row[c]) if row.get(c) and c != "route" else row.get(c) for c in columns} for row in
                   (plain, tools, batch, result)]  # fmt: skip
        path = tmp_path / "log.parquet"
        datasets.Dataset.from_list(as_text).to_parquet(str(path))
    rows = read_source(path, role_names([]), "train")
    assert not rows.skips
    first, second, third, fourth = rows.prompts
    assert first.messages == tuple(plain["request"]["messages"])
    assert second.messages == (user("Rain?"),)
    assert second.template_kwargs == {"enable_thinking": False, "tools": [WEATHER]}
    assert (first.route, second.route, fourth.route) == ("chat", "agents", "batch")
    assert [prompt_text(prompt) for prompt in (third, fourth)] == ["Batch?", "Done?"]
    assert rows.notes[ENDS_WITH_REPLY] == 3
    assert rows.notes["stop strings of a request left out: the target ends its own replies"] == 1


def test_what_a_request_hands_to_the_template_is_handed_to_it(tmp_path):
    """And what clients write for nothing is nothing: templates take an empty list of calls for calls."""
    told = {"documents": [{"title": "Tides", "text": "Twice a day."}], "reasoning_effort": "low"}
    turns = [user("Hi"), {**assistant("Hello."), "tool_calls": [], "refusal": None}, user("Why?")]
    row = logged("", messages=turns, chat_template_kwargs={"enable_thinking": False}, tools=[], **told)
    (prompt,) = read_source(write_jsonl(tmp_path / "log.jsonl", [row]), role_names([]), "train").prompts
    assert prompt.template_kwargs == {"enable_thinking": False, **told}
    assert prompt.messages == (user("Hi"), assistant("Hello."), user("Why?"))


def test_a_call_keeps_its_own_arguments_in_every_kind_of_file(tmp_path):
    """Arrow gives every object the fields of all others in its column."""
    import datasets

    def called(**arguments):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return {"messages": [user("Do it."), call, {"role": "tool", "content": "Done."}]}

    rows = [called(city="Oslo"), called(days=3, deep={"a": 1}), called(deep={"b": [2]})]
    expected = read_source(write_jsonl(tmp_path / "rows.jsonl", rows), role_names([]), "train").prompts
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    for name in ("rows.parquet", "saved"):
        assert read_source(tmp_path / name, role_names([]), "train").prompts == expected, name


def test_no_route_gets_more_than_its_cap(tmp_path):
    rows = [{**row, "route": "much" if i % 6 else "rare"} for i, row in enumerate(questions(60))]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    base = {"sources": ["rows.jsonl"], "num_train": 0, "num_validation": 4}
    capped = gather(PromptSettings(**base, max_per_route=12), tmp_path)
    counts = Counter(prompt.route for prompt in capped.of("train"))
    assert counts == {"much": 12, "rare": 8}
    everything = gather(PromptSettings(**base), tmp_path)
    assert capped.of("validation") == everything.of("validation")
    assert [p for p in everything.of("train") if p.route == "rare"] == [
        p for p in capped.of("train") if p.route == "rare"
    ]


@pytest.mark.parametrize(
    ("name", "text", "clean"),
    [
        ("email", "Write to ada.b+x@mail.example.org, now", "Write to [email], now"),
        ("phone", "Call +44 20 7946 0958 or (555) 010-4477 or 030 / 123 4567.", "Call [phone] or [phone] or [phone]."),
        ("ip", "from 10.0.212.9 and 2001:db8::ff00:42:8329 at 12:30", "from [ip] and [ip] at 12:30"),
        ("card", "card 4111 1111 1111 1111, order 4111 1111 1111 1112", "card [card], order 4111 1111 1111 1112"),
        ("iban", "to GB82 WEST 1234 5698 7654 32 today", "to [iban] today"),
        (
            "secret",
            "export KEY=sk-abcdefghijklmnop1234 # and AKIAIOSFODNN7EXAMPLE",
            "export KEY=[secret] # and [secret]",
        ),
    ],
)
def test_a_pattern_replaces_its_own_kind_and_nothing_else(name, text, clean):
    assert scrub(text, [name]) == clean
    assert scrub({"a": [text, 7, None], "b": {text: True}}, [name]) == {"a": [clean, 7, None], "b": {clean: True}}
    for other in PATTERNS:
        if other != name:
            assert scrub(clean, [other]) == clean
    maths = "What is 17 * 23 + 1051, and 3.14159265 / 2 on 2024-05-17? Use version 1.2.3 of x = y[0:4]; a::b"
    assert scrub(maths, [name]) == maths


def test_text_that_is_json_is_scrubbed_as_what_it_holds():
    """Arguments of a call and columns of a log: they stay JSON, and no escape hides what it stands beside."""
    held = '{"to": "\\nada@mail.example.org", "by": "ad\\u0061@mail.example.org", "card": 4111111111111111, "n": [7, true]}'
    clean = {"to": "\n[email]", "by": "[email]", "card": "[card]", "n": [7, True]}
    assert json.loads(scrub(held, ["email", "card"])) == clean
    assert scrub('{"a":1,  "b": "c"}', ["email"]) == '{"a":1,  "b": "c"}'
    assert scrub({"id": 4111111111111111, "yes": True, "half": 0.5}, ["card"]) == {
        "id": "[card]",
        "yes": True,
        "half": 0.5,
    }
    assert scrub("[ada@mail.example.org]", ["email"]) == "[[email]]"


def test_nothing_scrubbed_reaches_a_stage_folder(tmp_path):
    """Whatever a stage stores, of rows that are kept, dropped or repeated, of prompts, replies or verdicts."""
    private = ["ada@mail.example.org", "+44 20 7946 0958", "10.0.212.9"]
    rows = [
        logged(f"{row['prompt']} {private[i % 3]}", answer=f"I wrote to {private[0]}")
        for i, row in enumerate(questions(9))
    ]
    rows += [rows[0], {"messages": [{"role": private[0], "content": "a"}]}, {"prompt": "a", "route": private[1]}]
    rows.append(logged("Look this up", tools=[{"function": {"name": private[2]}}]))
    write_jsonl(tmp_path / "log.jsonl", rows)
    write_jsonl(tmp_path / "held.jsonl", [logged(f"What of {text}?") for text in private])
    settings = PromptSettings(
        sources=["log.jsonl"], heldout="held.jsonl", num_train=0, num_validation=2, scrub=["email", "phone", "ip"]
    )
    loader = TargetLoader(TargetSettings(model="tiny", dtype="float32", device="cpu"))
    stage = make_prompts(settings, tmp_path / "runs", tmp_path)
    traffic, _ = make_traffic(loader, stage, TrafficSettings(max_new_tokens=4, slots=4, chunk=8), tmp_path / "runs")
    stored = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert {file.parent for file in stored} >= {stage.folder, traffic.folder}
    for file in stored:
        content = file.read_bytes()
        assert not [text for text in private if text.encode() in content], file
    assert b"[email]" in (stage.folder / "prompts.jsonl").read_bytes()
    plain = PromptSettings(sources=["log.jsonl"], heldout="held.jsonl", num_train=0, num_validation=2)
    assert prompt_inputs(plain, tmp_path) != prompt_inputs(settings, tmp_path)
    assert not {"scrub", "max_per_route", "max_broken"} & prompt_inputs(plain, tmp_path)["settings"].keys()


def test_a_folder_named_like_a_file_is_read_once_and_a_lost_link_is_named(tmp_path):
    """As writers of many parts name it: train.parquet/part-0.parquet."""
    (tmp_path / "train.jsonl").mkdir()
    (tmp_path / "train.jsonl" / "part-0.jsonl").write_text('{"prompt": "One?"}\n{"prompt": "Two?"}\n')
    assert [record.row for record in read_source(tmp_path, role_names([]), "train").records] == [1, 2]
    (tmp_path / "more.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for read in (source_hash, lambda folder: read_source(folder, role_names([]), "train")):
        with pytest.raises(WrongInput, match=r"more\.jsonl: found a link that leads nowhere"):
            read(tmp_path)


def test_a_data_set_by_name_is_read_like_a_file_or_refused_where_it_cannot_be_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{**row, "score": 1} for row in questions(12)])
    here = gather(PromptSettings(sources=["set"], num_validation=2), tmp_path)
    named = gather(PromptSettings(sources=[f"hub:{tmp_path / 'set'}"], num_validation=2), tmp_path)
    assert named.prompts == here.prompts
    for name in ("hub:nobody/nothing", "hub:nobody/nothing@main:test"):
        with pytest.raises(WrongInput, match=rf"prompts.sources: found no data set {name}(.|\n)*save_to_disk"):
            gather(PromptSettings(sources=[name]), tmp_path)
    with pytest.raises(WrongInput, match="expected hub:ORG/NAME"):
        gather(PromptSettings(sources=["hub:"]), tmp_path)
