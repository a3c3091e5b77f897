"""Laws of what is supervised: the rule of serving, checked before training and shown by `headstart inspect`."""

import json
from dataclasses import replace

import numpy as np
import pytest

from headstart.heads import batch as batches
from headstart.heads.errors import WrongInput
from headstart.heads.paths import UNKNOWN, Path
from headstart.launch import cli
from headstart.trainer.data import TrainingRows, padded
from headstart.trainer.inspection import inspection_text
from headstart.trainer.supervision import check_supervision, serving_pairs, trained_pairs
from tests.chat_styles import chatml, style_tokenizer
from tests.small_training import make_lengths, make_paths

STOP = 89


def path_of(tokens: list[int], generated: str, finish: str = "stop", name: str = "a") -> Path:
    """`generated` has an x for every token of a reply."""
    said = np.array([mark == "x" for mark in generated])
    logprob_N = np.where(said, -1.0, np.nan).astype(np.float32)
    return Path(name, "chat", "train", np.array(tokens, dtype=np.int32), said, logprob_N, finish, {"temperature": 0.0})


FIVE_AND_FOUR = path_of([1, 2, 3, 4, 5, 6, 7, 8, STOP], ".....xxxx")


def test_the_pairs_of_a_reply_are_those_that_serving_asks_for():
    """The first one has the last prompt position as its feature."""
    (pairs,) = trained_pairs([FIVE_AND_FOUR], 4)
    assert pairs == {(4, 0), (5, 0), (6, 0), (4, 1), (5, 1), (4, 2)}
    other = path_of([1, 2, 3, STOP], "..xx", name="b")
    assert trained_pairs([other, FIVE_AND_FOUR, other], 4) == [{(1, 0)}, pairs, {(1, 0)}]
    random_paths, _ = make_paths(make_lengths(20, seed=3))
    for path, found in zip(random_paths, trained_pairs(random_paths, 3), strict=True):
        assert found == serving_pairs(path, 3)
    assert check_supervision([FIVE_AND_FOUR, other], [STOP], 4) == [4, 2, 1, 0]


BROKEN = {
    "goes on behind it": path_of([1, 2, 3, STOP, 4, 5], "..xxxx", "length"),
    "was cut by a limit": path_of([1, 2, 3, STOP], "..xx", "length"),
    "its last token 4 ends nothing": path_of([1, 2, 3, 4], "..xx"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_nothing_is_trained_behind_an_end_of_turn(message):
    with pytest.raises(WrongInput, match=message):
        check_supervision([FIVE_AND_FOUR, BROKEN[message]], [STOP], 3)


def test_a_reply_of_a_source_may_end_by_another_token():
    brought = replace(BROKEN["its last token 4 ends nothing"], sampling=UNKNOWN)
    assert check_supervision([brought], [STOP], 1) == [1]


@pytest.mark.parametrize(
    ("shift", "message"), [(1, "is not trained, and serving drafts there"), (-1, "not all in one reply")]
)
def test_a_mask_that_is_off_by_one_is_found(monkeypatch, shift, message):
    """What the check is for."""
    rule = batches.supervised_pairs

    def shifted(batch, depth):
        return rule(replace(batch, next_generated_T=batch.next_generated_T.roll(shift)), depth)

    monkeypatch.setattr("headstart.trainer.supervision.supervised_pairs", shifted)
    with pytest.raises(WrongInput, match=message):
        check_supervision([FIVE_AND_FOUR], [STOP], 2)


def test_packing_adds_less_than_three_percent():
    """However a step is split; and few lengths stand for all."""
    for batch_tokens, shares in ((1024, 1), (1024, 2), (4096, 1), (4096, 8)):
        random_ = np.random.default_rng(batch_tokens)
        lengths = [
            (int(p), int(n)) for p, n in zip(random_.integers(10, 90, 150), random_.integers(8, 128, 150), strict=True)
        ]
        paths, features = make_paths(lengths)
        rows = TrainingRows(paths, features, batch_tokens, seed=0)
        assert 0 < rows.filler_share(shares) < 0.03
    assert len({padded(n) for n in range(1, 4097)}) < 200
    assert all(n <= padded(n) < n + max(n / 32, 8) for n in range(1, 4097))


def test_inspect_shows_every_token_with_its_mask_and_every_pair_with_what_it_reads():
    tokenizer = style_tokenizer(chatml(), "<|im_end|>")
    ids = tokenizer("<|im_start|>user\nTea?<|im_end|>")["input_ids"], tokenizer("Yes, I do.<|im_end|>")["input_ids"]
    path = path_of(ids[0] + ids[1], "." * len(ids[0]) + "x" * len(ids[1]), name="abc")
    text = inspection_text([path], tokenizer, 2, colour=False)
    first = len(ids[0]) - 1
    words = [tokenizer.decode([token]) for token in ids[1]]
    assert f"|{'|'.join(words)}|" in text
    assert f"{len(ids[0])} prompt tokens, {len(ids[1])} of the reply, finish stop" in text
    lines = [line.split() for line in text.splitlines()]
    last = tokenizer.decode(ids[0][-1:])
    read, label = words[0], words[1]
    assert [
        str(first),
        "0",
        f"x_{first}",
        last,
        f"x_{first + 1}",
        read,
        f"x_{first + 2}",
        label.strip(),
        "0.3679",
    ] in lines
    assert "\x1b" not in text
    assert "\x1b[1;32m" in inspection_text([path], tokenizer, 2, colour=True)


@pytest.mark.parametrize("replies", ["all", "recorded"])
def test_inspect_answers_a_recipe_that_has_not_run(tmp_path, monkeypatch, capsys, replies):
    monkeypatch.chdir(tmp_path)
    questions = ("How do I make tea?", "Where does the river rise?", "When does the baker open?", "Why is it so?")
    said = {"role": "assistant", "content": "Boil water."}
    rows = [json.dumps({"messages": [{"role": "user", "content": text}, said]}) for text in questions]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    arguments = [
        f"traffic.replies={replies}",
        "prompts.sources=[rows.jsonl]",
        "prompts.num_validation=1",
        "train.depth=2",
    ]
    (tmp_path / "mine.yaml").write_text(
        "target: {model: tiny, dtype: float32, device: cpu}\ntraffic: {max_new_tokens: 8}\n"
    )
    assert cli.run(["inspect", "mine.yaml", "--rows", "2", *arguments]) == 0
    told = capsys.readouterr().out
    assert told.count("token predicted") == 2
    assert ("Boil water.<im_end>" in told.replace("|", "")) == (replies == "recorded")
    assert "every label is a token of a reply" in told
    assert not (tmp_path / "runs").exists()
