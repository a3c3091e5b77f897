"""Laws of conversations: who says which turn, what is asked with which history, and what the record of it is."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pyarrow.parquet import read_table, write_table

from headstart.eval.heldout import check_paths
from headstart.heads.errors import WrongInput
from headstart.heads.features import FeatureReader
from headstart.heads.paths import UNKNOWN, Prompt, count_cut, read_part, read_paths, trained_on
from headstart.heads.target import TargetLoader
from headstart.trainer.generation import Generator, Request
from headstart.trainer.heldout_traffic import at_temperature, make_heldout_traffic
from headstart.trainer.prompts import PromptSet
from headstart.trainer.recorded import plan_traffic
from headstart.trainer.supervision import training_paths
from headstart.trainer.traffic import make_traffic, sampling_of
from tests.test_traffic import SETTINGS, TINY, hashes, prompts_stage

RECORDED = replace(SETTINGS, replies="recorded")


def turn(role: str, content: str, **fields) -> dict:
    return {"role": role, "content": content, **fields}


def talk(*texts: str, split: str = "train", reply: str | None = None) -> Prompt:
    """User and assistant in turn; the last text is the user's."""
    messages = tuple(turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts))
    return Prompt("chat", messages, split, reply=None if reply is None else turn("assistant", reply))


def rows_of(traffic) -> list[dict]:
    """Rows as they are stored."""
    return [row for name in sorted(hashes(traffic)) for row in read_table(traffic.folder / name).to_pylist()]


def test_the_target_answers_every_turn_with_its_own_replies_as_history(tmp_path, tiny_target):
    talks = [talk(f"Tea {i}?", "foreign words", "And bread?", "more of them", "Why?") for i in range(3)]
    talks += [talk("Rice?"), talk("Rice?", "other words", "Now?", split="validation")]
    traffic, features = make_traffic(TargetLoader(TINY), prompts_stage(tmp_path, talks), SETTINGS, tmp_path)
    rows, reader = rows_of(traffic), FeatureReader(features.folder)
    assert len(rows) == 3 * 3 + 2  # the request that a validation conversation has too is not trained on
    assert [row["split"] for row in rows if row["prompt_id"] == talk("Rice?").prompt_id] == ["validation"]
    generator = Generator(tiny_target, sampling_of(SETTINGS), SETTINGS.max_new_tokens, 1, 300)
    by_id = {row["prompt_id"]: row for row in rows}
    for prompt in talks[:3]:
        history: list[dict] = []
        for place in prompt.turns:
            row = by_id[prompt.request(place).prompt_id]
            history += [prompt.messages[place - 1]]
            assert json.loads(row["messages"]) == history
            asked = tiny_target.render(Prompt("chat", tuple(history)))
            (reply,) = generator.generate([Request(row["prompt_id"], asked)])
            assert row["token_ids"] == asked + reply.token_ids
            assert row["generated"] == [False] * len(asked) + [True] * len(reply.token_ids)
            assert len(reader.get(row["prompt_id"])[0]) == len(row["token_ids"]) - 1
            assert row["conversation"] == prompt.prompt_id
            said = tiny_target.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
            history += [turn("assistant", said.rstrip("\ufffd"))]  # a cut reply may end within a character
        assert "foreign words" not in row["messages"]
    for name in sorted(hashes(traffic)):  # a part without the column tells them by how they open
        table = read_table(traffic.folder / name)
        write_table(table.drop_columns(["conversation"]), tmp_path / name)
        told, opened = list(read_part(traffic.folder / name)), list(read_part(tmp_path / name))
        assert len({path.conversation for path in opened}) == len({path.conversation for path in told})
        assert len({(a.conversation, b.conversation) for a, b in zip(told, opened, strict=True)}) == len(
            {path.conversation for path in told}
        )
    last = replace(SETTINGS, replies="last")
    traffic, _ = make_traffic(TargetLoader(TINY), prompts_stage(tmp_path, talks), last, tmp_path)
    assert [json.loads(row["messages"]) for row in rows_of(traffic)] == [list(prompt.messages) for prompt in talks]


def test_a_call_whose_result_follows_stays_as_the_source_has_it(tmp_path):
    """A result answers the call that the source made; the reply to it is the target's."""
    call = turn("assistant", "I look it up.", tool_calls=[{"function": {"name": "weather", "arguments": "{}"}}])
    prompt = Prompt("chat", (turn("user", "Weather?"), call, turn("tool", "-3")))
    stage = prompts_stage(tmp_path, [prompt])
    traffic, _ = make_traffic(TargetLoader(TINY), stage, SETTINGS, tmp_path)
    assert [json.loads(row["messages"]) for row in rows_of(traffic)] == [[prompt.messages[0]], list(prompt.messages)]


def test_a_conversation_ends_where_its_next_request_is_too_long(tmp_path, capsys):
    loader, talks = TargetLoader(TINY), [talk(f"Tea {i}?", "Yes.", "And bread?") for i in range(4)]
    limit = max(len(loader.render(prompt)) for prompt in talks)
    settings = replace(SETTINGS, max_prompt_tokens=limit)
    traffic, features = make_traffic(loader, prompts_stage(tmp_path, talks), settings, tmp_path)
    told = capsys.readouterr().out
    rows = rows_of(traffic)
    assert 4 <= len(rows) < 8
    assert f"{8 - len(rows)} conversations ended before their last turn: its next request is longer than" in told
    assert len(FeatureReader(features.folder)) == len(rows)


def test_a_few_requests_that_cannot_be_asked_are_named_and_left_out(tmp_path, capsys):
    """A prompt, a later turn, and a held-out prompt are too long; the template refuses one. Above the share nothing runs."""
    loader = TargetLoader(TINY)
    loader.tokenizer.chat_template += (
        "{% if messages[0].content == 'No.' %}{{ raise_exception('none of that') }}{% endif %}"
    )
    long, good = "bread " * 300, [talk(f"Tea {i}?", split=("train", "heldout", "validation")[i % 3]) for i in range(9)]
    bad = [talk(long), talk("Rice?", "Yes.", long), talk("No."), talk(long + "?", split="heldout")]
    stage = prompts_stage(tmp_path, [*good, *bad])
    with pytest.raises(WrongInput, match=r"max_left_out: found 4 of 14 requests(.|\n)*max_prompt_tokens") as refused:
        make_traffic(loader, stage, replace(SETTINGS, max_left_out=0.2), tmp_path)
    assert "cannot render it: TemplateError: none of that: prompt " in str(refused.value)
    settings = replace(SETTINGS, max_left_out=0.3)
    traffic, _ = make_traffic(loader, stage, settings, tmp_path)
    told = capsys.readouterr().out
    assert "left out 3: longer than 200 tokens (traffic.max_prompt_tokens)" in told
    kept = ["route       train  validation     heldout", *(f"{name:5}{4:12}{3:12}{3:12}" for name in ("chat", "all"))]
    assert "\n".join(["10 of 13 prompts are left:", *kept]) + "\n" in told
    talks = plan_traffic(loader, [*good, *bad], settings).conversations
    assert PromptSet([*good, *bad]).describe(talks).splitlines() == kept
    told = [json.loads(line) for line in (traffic.folder / "left_out.jsonl").read_text().splitlines()]
    assert {row["prompt_id"] for row in told} == {prompt.prompt_id for prompt in bad}
    kept = {*(prompt.prompt_id for prompt in good), talk("Rice?").prompt_id}
    assert {row["prompt_id"] for row in rows_of(traffic)} == kept
    assert make_traffic(loader, stage, SETTINGS, tmp_path)[0].key == traffic.key  # the share changes no reply
    held = make_heldout_traffic(loader, stage, at_temperature(settings, 1.0), tmp_path)
    assert {row["prompt_id"] for row in rows_of(held)} == {p.prompt_id for p in good if p.split == "heldout"}
    with pytest.raises(WrongInput, match="nothing is left of: heldout"):
        plan_traffic(loader, [*good[::3], *good[2::3], bad[-1]], replace(SETTINGS, max_left_out=0.9))


def test_conversations_are_made_again_bit_by_bit_and_have_one_id_at_every_temperature(tmp_path):
    """Interrupted between chunks, and answered at another temperature, where the history is another."""
    talks = [talk(f"Tea {i}?", "Yes.", "And bread?", split=("train", "heldout")[i % 2]) for i in range(8)]
    settings = replace(SETTINGS, temperature=1.0, chunk=2)
    stage = prompts_stage(tmp_path, talks)
    whole = make_traffic(TargetLoader(TINY), stage, settings, tmp_path)
    before = tuple(map(hashes, whole))
    for made, name in zip(whole, ("part-00001.parquet", "shard-00001.safetensors"), strict=True):
        (made.folder / name).unlink()
    assert tuple(map(hashes, make_traffic(TargetLoader(TINY), stage, settings, tmp_path))) == before
    greedy = make_heldout_traffic(TargetLoader(TINY), stage, at_temperature(settings, 0.0), tmp_path)
    rows, others = ([row for row in rows_of(made) if row["split"] == "heldout"] for made in (whole[0], greedy))
    assert [row["prompt_id"] for row in rows] == [row["prompt_id"] for row in others]
    assert [row["messages"] for row in rows] != [row["messages"] for row in others]


def test_replies_of_the_sources_are_rows_that_say_so(tmp_path, tiny_target):
    """Kept for training only, with the target's states and log-probabilities, and no figure can be made on them."""
    talks = [talk(f"Tea {i}?", "Boil water.", "And bread?", reply="Bake it. " + "Slowly. " * i) for i in range(6)]
    held = [talk("Rice?", split="heldout", reply="No."), talk("Soup?", split="validation", reply="No.")]
    bad = [talk("Salt?"), talk("Oil?", reply="Yes.<|im_end|>No.")]
    traffic, features = make_traffic(
        TargetLoader(TINY), prompts_stage(tmp_path, talks + held + bad), RECORDED, tmp_path
    )
    rows = rows_of(traffic)
    train = [row for row in rows if row["split"] == "train"]
    assert len(train) == 12
    (left_out,) = map(json.loads, (traffic.folder / "left_out.jsonl").read_text().splitlines())
    assert left_out["prompt_id"] == bad[1].prompt_id
    assert left_out["reason"].startswith("the reply holds <|im_end|>, which ends it")
    assert {row["backend"] for row in train} == {"recorded-float32"}
    assert {json.loads(row["sampling"])["recorded"] for row in train} == {True}
    assert {row["backend"] for row in rows if row["split"] != "train"} == {"local-float32"}
    decode = tiny_target.tokenizer.decode
    reader = FeatureReader(features.folder)
    for path, row in zip(read_paths(traffic.folder, "train"), train, strict=True):
        said = decode(path.token_N[path.num_prompt_tokens :])
        if path.finish_reason == "stop":
            assert said in ("Boil water.<|im_end|>", "Bake it. " + "Slowly. " * said.count("Slowly.") + "<|im_end|>")
        else:
            assert path.num_reply_tokens == SETTINGS.max_new_tokens
            assert said.startswith("Bake it. Slowly.")
            assert row["stop_token_id"] is None
        states = tiny_target.read([path.token_N])[0]
        expected = tiny_target.logits(states.final[path.num_prompt_tokens - 1 :]).log_softmax(-1)
        token_R1 = torch.from_numpy(path.token_N[path.num_prompt_tokens :].astype(np.int64))[:, None]
        found = torch.from_numpy(path.logprob_N[path.num_prompt_tokens :])
        torch.testing.assert_close(found, expected.gather(1, token_R1).squeeze(1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(reader.get(path.prompt_id)[1].float(), states.final, atol=0.05, rtol=0.02)
    paths = list(read_paths(traffic.folder, "train"))
    assert {path.finish_reason for path in paths} == {"stop", "length"}
    assert paths[0].sampling == UNKNOWN
    assert [path.conversation for path in paths] == [prompt.prompt_id for prompt in talks for _ in range(2)]
    with pytest.raises(WrongInput, match="replies that a source brought"):
        check_paths(paths)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "traffic").symlink_to(traffic.folder)
    assert (
        trained_on(tmp_path / "run")
        == "trained on replies that its sources brought, not on what the target says itself"
    )
    assert not trained_on(tmp_path)


def test_rows_without_a_usable_reply_are_counted_and_none_at_all_is_an_error():
    """Case 1: found before anything is computed."""
    loader, bad = TargetLoader(TINY), talk("Oil?", reply="Yes.<|im_end|>No.")
    rows = [
        bad,
        talk("Tea?", reply="Yes."),
        talk("Soup?", "Hot.", "When?", reply="Now."),
        talk("Soup?", split="heldout"),
    ]
    told = "\n".join(plan_traffic(loader, rows, RECORDED).describe())
    assert "2 kept of 4" in told
    assert "left out 1: another row, or a held-out one, has the same request" in told
    assert "which ends it, before its last word" in told
    assert "reply as it is trained: 'Yes.<|im_end|>'" in told
    with pytest.raises(WrongInput, match=r"which ends it.*\n.*traffic.replies=all"):
        plan_traffic(loader, [bad], RECORDED)


def test_another_limit_is_another_record(tmp_path):
    """Case 22; and case 19: replies that are cut are counted, and end as they were cut."""
    talks = [talk(f"Tea {i}?", reply="Boil water, then wait for a while. " * 3) for i in range(5)]
    stage = prompts_stage(tmp_path, [*talks, talk("A?", reply="B")])
    for limit in (12, 6):
        settings = replace(RECORDED, max_new_tokens=limit)
        traffic, _ = make_traffic(TargetLoader(TINY), stage, settings, tmp_path)
        assert {path.num_reply_tokens for path in read_paths(traffic.folder)} == {limit, 2}
        assert count_cut(traffic.folder) == (5, 6)
        assert len(training_paths(traffic.folder, cut_replies=True)) == 6
        assert [path.finish_reason for path in training_paths(traffic.folder, cut_replies=False)] == ["stop"]
