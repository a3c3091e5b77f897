"""Prompts: what is read, what is skipped and why, and who goes into which split."""

import hashlib
import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow
import pytest
from pyarrow.parquet import write_table as write_parquet

from headstart.heads.errors import WrongInput
from headstart.heads.paths import Prompt
from headstart.trainer.prompts import gather, make_prompts, read_prompts
from headstart.trainer.settings import PromptSettings
from headstart.trainer.similarity import NearIndex, grams, jaccard, prompt_text
from headstart.trainer.sources import read_source, role_names
from headstart.trainer.templates import (
    PER_ROUTE,
    Expansion,
    Orders,
    builtin_prompts,
    calculate,
    in_turn,
    load_templates,
    prompts_folder,
    route_prompts,
)

ROUTES = ["chat", "code", "json", "long", "maths", "qa", "summarisation", "translation"]
HELDOUT_SHA256 = "bec6440d8eba6b8e14dfd82b24e6e7be718086f95b83f7d3ee4d261039f42e3b"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def heldout() -> list[Prompt]:
    return read_source(prompts_folder() / "heldout.jsonl", role_names([]), "heldout").prompts


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def questions(number: int, routes: tuple[str, ...] = ("a", "b")) -> list[dict]:
    """Rows that share no five words in a row."""
    words = random.Random(0)
    return [
        {"route": routes[i % len(routes)], "prompt": " ".join(f"w{words.randrange(10**6)}" for _ in range(9))}
        for i in range(number)
    ]


def test_heldout_prompts_are_frozen():
    content = (prompts_folder() / "heldout.jsonl").read_bytes()
    assert hashlib.sha256(content).hexdigest() == HELDOUT_SHA256
    assert Counter(prompt.route for prompt in heldout()) == dict.fromkeys(ROUTES, 30)


def test_no_two_heldout_prompts_are_near_duplicates():
    index = NearIndex()
    for prompt in heldout():
        assert not index.holds_near(prompt)
        index.add(grams(prompt_text(prompt)))


def test_no_training_prompt_is_near_a_heldout_one():
    index = NearIndex.of(heldout())
    assert not any(index.holds_near(prompt) for prompt in builtin_prompts())


def test_index_finds_what_a_comparison_of_all_pairs_finds():
    words = random.Random(1)
    texts = [" ".join(words.choice("abc") for _ in range(words.randrange(1, 12))) for _ in range(60)]
    index = NearIndex(grams(text) for text in texts)
    for text in texts + ["a b", "never seen before at all"]:
        expected = max(jaccard(grams(text), grams(other)) for other in texts)
        assert index.closest(grams(text))[0] == expected


def test_builtin_prompts_are_the_same_every_time_and_no_two_say_the_same():
    prompts = builtin_prompts()
    assert prompts == builtin_prompts.__wrapped__()
    assert Counter(prompt.route for prompt in prompts) == dict.fromkeys(ROUTES, PER_ROUTE)
    assert all(prompt.route == ROUTES[i % len(ROUTES)] for i, prompt in enumerate(prompts))
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)


def test_the_first_2000_builtin_prompts_hold_every_pattern_and_few_siblings():
    for route, templates in load_templates().items():
        first = list(islice(route_prompts(templates), 250))
        assert 2 * len(templates.patterns) <= len(first), route
        index, siblings = NearIndex(), 0
        for prompt in first:
            siblings += index.holds_near(prompt)
            index.add(grams(prompt_text(prompt)))
        assert siblings <= 0.1 * len(first), route


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [assistant("Hello."), user("Hi")]}, "starts with the assistant"),
        ({"messages": [user("a"), user("b"), assistant("c")]}, "repeated role user"),
        ({"messages": [assistant("a"), assistant("b")]}, "starts with the assistant"),
        ({"messages": [user("a"), assistant("b"), assistant("c")]}, "repeated role assistant"),
        ({"messages": []}, "empty conversation"),
        ({"messages": [system("Be kind.")]}, "only a system turn"),
        ({"messages": [system("Be kind."), assistant("a")]}, "starts with the assistant"),
        ({"messages": [user("a"), system("b")]}, "system turn after the start"),
        ({"messages": [user("a"), {"role": "tool", "content": "b"}]}, "tool turn without a call"),
        ({"messages": [user("a"), {"role": "my_model", "content": "b"}]}, "unknown role my_model"),
        ({"messages": [{"content": "a"}]}, "a turn without role"),
        ({"messages": [{"role": "user"}]}, "a turn without text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a turn that is not text"),
        ({"messages": [user(" \n")]}, "an empty user turn"),
        ({"messages": ["hello"]}, "a turn is not an object"),
        ({"messages": {"role": "user"}}, "messages are not a list"),
        ({"messages": "hello"}, "a column is text and not JSON"),
        ({"prompt": "hello", "template_kwargs": [1]}, "template_kwargs is not an object"),
        ({"prompt": "hello", "route": 7}, "route is not text"),
        ({"prompt": "hello", "route": " all "}, "route all, which results use for all prompts together"),
        ({"prompt": "half \ud800"}, "holds half a surrogate pair, which is no Unicode text"),
        ({"prompt": "hello", "route": "\ud800"}, "holds half a surrogate pair, which is no Unicode text"),
        ({"messages": [{"role": "\ud800", "content": "a"}]}, "unknown role ?"),
        (
            {"prompt": "hello", "template_kwargs": {"truncation": True, "max_length": 3, "enable_thinking": False}},
            "template_kwargs sets max_length, truncation, which is no variable of a chat template",
        ),
        ({"text": "hello"}, "no messages and no prompt"),
        (  # case 98
            {"prompt": "hello", "response_format": {"type": "json_object"}, "guided_regex": "[0-9]+", "grammar": None},
            "response_format, guided_regex constrains the reply, which is not supported",
        ),
        ([user("hello")], "not an object"),
    ],
)
def test_a_bad_row_is_skipped_with_its_reason_and_the_good_ones_stay(tmp_path, row, reason):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "one"}, row, {"prompt": "two"}])
    rows = read_source(path, role_names([]), "train")
    assert [prompt_text(prompt) for prompt in rows.prompts] == ["one", "two"]
    assert [(skip.row, skip.reason) for skip in rows.skips] == [(2, reason)]


def test_lines_that_are_no_json_are_skipped_and_blank_ones_are_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n\n{"prompt": \n"\xff"\n{"prompt": "two"}\n' + b"[" * 10**5)
    rows = read_source(path, role_names([]), "train")
    assert [prompt_text(prompt) for prompt in rows.prompts] == ["one", "two"]
    assert [(skip.row, skip.reason) for skip in rows.skips] == [(3, "not JSON"), (4, "not UTF-8"), (6, "not JSON")]


def test_a_conversation_that_ends_with_a_reply_loses_it_and_is_counted(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [system("s"), user("a"), assistant("b")]}])
    rows = read_source(path, role_names([]), "train")
    assert rows.prompts[0].messages == (system("s"), user("a"))
    assert rows.prompts[0].reply == assistant("b")  # kept beside the request, for traffic.replies=recorded
    assert sum(rows.notes.values()) == 1


def test_roles_under_other_names_are_mapped_by_the_recipe(tmp_path):
    rows = [{"messages": [user("a"), {"role": "my_model", "content": "b"}, user("c")]}]
    sharegpt = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, user("c")]}]
    for content, names in [(rows, ["my_model=assistant"]), (sharegpt, [])]:
        found = read_source(write_jsonl(tmp_path / "rows.jsonl", content), role_names(names), "train")
        assert found.prompts[0].messages == (user("a"), assistant("b"), user("c"))
    with pytest.raises(WrongInput, match="my_model=robot"):
        role_names(["my_model=robot"])


def test_tool_calls_survive_as_objects_and_as_text(tmp_path):
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": arguments}}]}
        turns = [user("Weather?"), call, {"role": "tool", "content": "-3"}]
        found = read_source(write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns}]), role_names([]), "train")
        assert [turn["role"] for turn in found.prompts[0].messages] == ["user", "assistant", "tool"]
        assert found.prompts[0].messages[1]["tool_calls"] == call["tool_calls"]


def test_every_kind_of_file_gives_the_same_prompts(tmp_path):
    import datasets

    rows = [{"route": "chat", "messages": [user(f"Question {i}?"), assistant("Yes."), user("Why?")]} for i in range(5)]
    expected = read_source(write_jsonl(tmp_path / "rows.jsonl", rows), role_names([]), "train").prompts
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    as_text = [{"route": row["route"], "messages": json.dumps(row["messages"])} for row in rows]
    datasets.Dataset.from_list(as_text).to_parquet(str(tmp_path / "text.parquet"))
    (tmp_path / "plain").mkdir()
    write_jsonl(tmp_path / "plain" / "rows.jsonl", rows)
    assert len(expected) == 5
    for name in ("rows.parquet", "saved", "splits", "rows.json", "text.parquet", "plain"):
        assert read_source(tmp_path / name, role_names([]), "train").prompts == expected, name


def test_the_same_request_counts_once(tmp_path):
    rows = questions(12)
    write_jsonl(tmp_path / "one.jsonl", [*rows, rows[3], rows[3]])
    write_jsonl(tmp_path / "two.jsonl", rows[:4])
    settings = PromptSettings(sources=["one.jsonl", "two.jsonl"], num_train=0, num_validation=2)
    found = gather(settings, tmp_path)
    assert len(found.of("train")) == 10
    assert Counter(skip.reason for skip in found.skips) == {"the same request again": 2, "the same in two sources": 4}


def test_training_prompts_near_a_heldout_or_validation_one_are_dropped(tmp_path):
    rows = questions(12)
    write_jsonl(tmp_path / "held.jsonl", [{"prompt": rows[0]["prompt"] + " please"}])
    write_jsonl(tmp_path / "rows.jsonl", rows)
    settings = PromptSettings(sources=["rows.jsonl"], heldout="held.jsonl", num_train=0, num_validation=2)
    found = gather(settings, tmp_path)
    assert [skip.reason for skip in found.skips] == ["near-duplicate of a held-out prompt"]
    assert found.skips[0].text == rows[0]["prompt"]
    chosen = found.of("validation")[0]
    write_jsonl(tmp_path / "rows.jsonl", [*rows, {"route": chosen.route, "prompt": prompt_text(chosen) + " please"}])
    reasons = Counter(skip.reason for skip in gather(settings, tmp_path).skips)
    assert reasons == {"near-duplicate of a held-out prompt": 1, "near-duplicate of a validation prompt": 1}


def test_routes_that_no_figure_will_speak_of_are_named(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", questions(40, ("cooking", "code")))
    told = gather(PromptSettings(sources=["rows.jsonl"], num_validation=4), tmp_path).describe()
    assert "no held-out prompt is of cooking, so no figure" in told
    write_jsonl(tmp_path / "held.jsonl", [{"route": "cooking", "prompt": "How long does rice cook?"}])
    own = PromptSettings(sources=["rows.jsonl"], heldout="held.jsonl", num_validation=4, routes=["cooking"])
    assert "no held-out prompt" not in gather(own, tmp_path).describe()


def test_splits_are_disjoint_balanced_and_stable_under_the_order_of_rows(tmp_path):
    rows = questions(60, ("a", "b", "c"))
    settings = PromptSettings(sources=["rows.jsonl"], num_train=24, num_validation=6, num_heldout=16)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    found = gather(settings, tmp_path)
    ids = [prompt.prompt_id for prompt in found.prompts]
    assert len(set(ids)) == len(ids) == 24 + 6 + 16
    assert Counter((p.split, p.route) for p in found.prompts if p.split != "heldout") == {
        **{("train", route): 8 for route in "abc"},
        **{("validation", route): 2 for route in "abc"},
    }
    assert set(Counter(p.route for p in found.of("heldout")).values()) == {2}
    random.Random(2).shuffle(rows)
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert gather(settings, tmp_path).prompts == found.prompts


def test_validation_does_not_depend_on_the_number_of_training_prompts():
    routes = ["maths", "qa"]
    small = gather(PromptSettings(routes=routes, num_train=16, num_validation=16), Path())
    large = gather(PromptSettings(routes=routes, num_train=128, num_validation=16), Path())
    assert small.of("validation") == large.of("validation")
    assert small.of("train") == large.of("train")[:16]


def test_template_arguments_of_a_recipe_are_those_of_every_prompt(tmp_path):
    """Case 8: a row that was made with other ones is skipped, one that says nothing gets them."""
    said = [{"enable_thinking": False}, {"enable_thinking": True}, {"style": "brief"}, {}]
    rows = [{**row, "template_kwargs": kwargs} for row, kwargs in zip(questions(4), said, strict=True)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    arguments = ["enable_thinking=false", "language=en"]
    settings = PromptSettings(sources=["rows.jsonl"], num_train=0, num_validation=1, template_kwargs=arguments)
    found = gather(settings, tmp_path)
    kept = [prompt.template_kwargs for prompt in found.prompts if prompt.split != "heldout"]
    own = {"enable_thinking": False, "language": "en"}
    assert sorted(kept, key=len) == [own, own, own | {"style": "brief"}]
    assert {json.dumps(prompt.template_kwargs) for prompt in found.of("heldout")} == {json.dumps(own)}
    (skip,) = found.skips
    assert "enable_thinking = True" in skip.reason
    for wrong in ("enable_thinking", "=false", "tokenize=false"):
        with pytest.raises(WrongInput, match="prompts.template_kwargs: found"):
            gather(PromptSettings(template_kwargs=[wrong]), tmp_path)


def test_only_wanted_routes_are_kept():
    found = gather(PromptSettings(routes=["code", "qa"], num_train=20, num_validation=4), Path())
    assert {prompt.route for prompt in found.prompts} == {"code", "qa"}


def test_wrong_prompts_say_what_was_expected(tmp_path):
    def fails(message: str, **settings) -> None:
        with pytest.raises(WrongInput, match=message):
            gather(PromptSettings(**settings), tmp_path)

    write_jsonl(tmp_path / "empty.jsonl", [])
    write_jsonl(tmp_path / "three.jsonl", questions(3))
    (tmp_path / "rows.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.parquet").write_text("hello")
    fails("no file or folder", sources=["missing.jsonl"])
    fails("no usable prompt", sources=["empty.jsonl"])
    fails("none left to train", sources=["three.jsonl"], num_validation=3)
    fails("found poetry, expected routes of the sources: chat, code", routes=["chat", "poetry"])
    fails(
        "prompts.heldout: found no usable prompt of the routes a",
        sources=["three.jsonl"],
        routes=["a"],
        num_validation=1,
    )
    fails("no usable prompt", heldout="empty.jsonl")
    fails("ends in .jsonl", sources=["rows.txt"])
    fails("no `datasets` folder", sources=["folder"])
    fails("no whole Parquet file", sources=["bad.parquet"])
    write_parquet(pyarrow.table({"prompt": [f"{i} {i * i}" for i in range(900)]}), tmp_path / "damaged.parquet")
    content = bytearray((tmp_path / "damaged.parquet").read_bytes())
    content[100:2000] = bytes(1900)
    (tmp_path / "damaged.parquet").write_bytes(content)
    fails("no whole Parquet file", sources=["damaged.parquet"])
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "dataset_info.json").write_text("{")
    fails("no `datasets` folder that can be loaded", sources=["stored"])
    (tmp_path / "loop").symlink_to("loop")
    fails("no file or folder", sources=["./loop"])


def test_the_stage_is_reused_while_settings_and_content_stay(tmp_path):
    rows = questions(20)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    write_jsonl(tmp_path / "here" / "rows.jsonl", [*rows, {"text": "bad"}])
    settings = PromptSettings(sources=["rows.jsonl"], num_train=0, num_validation=4, num_heldout=8)
    stage = make_prompts(settings, tmp_path / "runs", tmp_path / "here")
    prompts = gather(settings, tmp_path / "here").prompts
    assert stage.complete
    assert read_prompts(stage.folder) == prompts
    assert read_prompts(stage.folder, "heldout") == [prompt for prompt in prompts if prompt.split == "heldout"]
    assert stage.outputs["prompts.jsonl"]["rows"] == len(prompts)
    told = [json.loads(line) for line in (stage.folder / "verdicts.jsonl").read_text().splitlines()]
    assert [verdict["row"] for verdict in told] == [*range(1, 22)]
    assert (told[-1]["verdict"], told[-1]["reason"]) == ("dropped", "no messages and no prompt")
    splits = {verdict["id"]: verdict["verdict"] for verdict in told[:-1]}
    assert splits == {prompt.prompt_id: prompt.split for prompt in prompts if prompt.split != "heldout"}

    made = (stage.folder / "prompts.jsonl").stat().st_mtime_ns
    write_jsonl(tmp_path / "there" / "rows.jsonl", [*rows, {"text": "bad"}])
    again = make_prompts(settings, tmp_path / "runs", tmp_path / "there", seed=5)
    assert again.folder == stage.folder
    assert (again.folder / "prompts.jsonl").stat().st_mtime_ns == made
    write_jsonl(tmp_path / "there" / "rows.jsonl", rows)
    assert make_prompts(settings, tmp_path / "runs", tmp_path / "there").folder != stage.folder


def test_an_interrupted_stage_is_made_again(tmp_path):
    settings = PromptSettings(routes=["maths"], num_train=16, num_validation=8, num_heldout=8)
    stage = make_prompts(settings, tmp_path, tmp_path)
    manifest = stage.folder / "manifest.json"
    held = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**held, "state": "running", "outputs": {}}))
    (stage.folder / "prompts.jsonl").write_text('{"half": ')
    again = make_prompts(settings, tmp_path, tmp_path)
    assert again.complete
    assert again.outputs == held["outputs"]


def test_templates_fill_names_numbers_and_arithmetic():
    words = {"city": ["oslo", "rome"], "trip": ["from {{city.a}} to {{city.b}}"]}
    filled = Expansion(Orders(words), "here", 0).fill(
        "{{^trip}}: {{n:3..9}} * 4 + 1 = {{= n * 4 + 1}}, {{city.a}}, {{n}}"
    )
    left, right = filled.split(": ")
    assert left.startswith("From ")
    assert {left.split()[1], left.split()[3]} == {"oslo", "rome"}
    number = int(right.split()[0])
    assert right == f"{number} * 4 + 1 = {number * 4 + 1}, {left.split()[1]}, {number}"
    assert calculate("-(7 // 2) ** 2 % 5", {}) == -((7 // 2) ** 2) % 5
    with pytest.raises(ValueError, match="no arithmetic"):
        calculate("f(2)", {})


def test_a_place_goes_through_its_whole_list_before_an_entry_returns():
    orders = Orders({"city": [str(i) for i in range(7)]})
    first = [orders.entry("city", "here", number) for number in range(7)]
    second = [orders.entry("city", "here", number) for number in range(7, 14)]
    assert sorted(first) == sorted(second)
    assert first != second


def test_items_are_taken_in_turn():
    assert list(in_turn([[1, 2, 3], [], [4], [5, 6]])) == [1, 4, 5, 2, 6, 3]
