"""The law of a server's answer: whatever its form, it is a reply that can be recorded or is refused as one answer."""

import copy

import pytest

from headstart.heads.errors import WrongInput
from headstart.heads.sampling import Sampling
from headstart.trainer.dialects import Asked, BadAnswer
from headstart.trainer.generation import Request
from headstart.trainer.server_check import check_evidence
from headstart.trainer.settings import ServerSettings

REQUEST, IDS = Request("a", [5, 6]), [50, 60, 70, 80]


def answer(tokenizer, engine):
    text, logprobs = tokenizer.decode(IDS), [-1.0, None, -2, -0.5]
    if engine == "vllm":
        choice = {"text": text, "finish_reason": "length", "token_ids": IDS, "logprobs": {"token_logprobs": logprobs}}
        return {"choices": [choice], "usage": {"prompt_tokens": 2}}
    told = [{"id": i, "logprob": p} for i, p in zip(IDS, logprobs, strict=True)]
    return {"content": text, "tokens": IDS, "completion_probabilities": told, "tokens_evaluated": 2}


def choice(**values):
    return lambda content: content["choices"][0].update(values)


def whole(**values):
    return lambda content: content.update(values)


REFUSED = [
    ("vllm", choice(token_ids=[-1, 60, 70, 80]), "token id -1"),
    ("vllm", choice(token_ids=[2**40, 60, 70, 80]), "token id 1099511627776"),
    ("vllm", choice(token_ids=[505, 60, 70, 80]), "token id 505"),
    ("vllm", choice(logprobs={"token_logprobs": ["-1"] * 4}), "no list of numbers"),
    ("vllm", choice(logprobs={"token_logprobs": [float("nan")] * 4}), "no list of numbers"),
    ("vllm", choice(logprobs={"token_logprobs": [True] * 4}), "no list of numbers"),
    ("vllm", choice(logprobs={"token_logprobs": "four"}), "no list of numbers"),
    ("vllm", choice(logprobs={"token_logprobs": [-1.0] * 3}), "3 log-probabilities for 4"),
    ("vllm", whole(choices={"0": "stop"}), "expected a completion"),
    ("llamacpp", lambda content: content.pop("content"), "expected a completion"),
    ("llamacpp", whole(tokens=[-5, *IDS[1:]]), "token id -5"),
]


@pytest.mark.parametrize(("engine", "change", "said"), REFUSED)
def test_an_answer_of_another_form_is_refused_and_ends_no_run(engine, change, said, tiny_target):
    content = copy.deepcopy(answer(tiny_target.tokenizer, engine))
    change(content)
    with pytest.raises(BadAnswer, match=said):
        asked(tiny_target, engine).reply(content, REQUEST, len(IDS))


UNTOLD = [
    ("vllm", whole(usage=[2])),
    ("vllm", choice(logprobs=[1])),
    *(("llamacpp", whole(completion_probabilities=told)) for told in (5, ["a"], {"a": 1}, None)),
]


@pytest.mark.parametrize(("engine", "change"), UNTOLD)
def test_what_an_answer_tells_besides_may_be_anything(engine, change, tiny_target):
    content = copy.deepcopy(answer(tiny_target.tokenizer, engine))
    plain = asked(tiny_target, engine).reply(content, REQUEST, len(IDS))
    assert (plain.token_ids, plain.logprobs) == (IDS, [-1.0, None, -2, -0.5])
    change(content)
    assert asked(tiny_target, engine).reply(content, REQUEST, len(IDS)).token_ids == IDS


def asked(target, engine):
    return Asked(target.facts, target.tokenizer, ServerSettings(urls=["http://a"], model="m", engine=engine), 0)


def test_drawn_replies_without_log_probabilities_are_no_evidence_of_their_model():
    untold = [[None, None], [None]]
    with pytest.raises(WrongInput, match=r"tells no log-probabilities(.|\n)*traffic\.temperature=0"):
        check_evidence(untold, "a server", Sampling(0.8))
    check_evidence(untold, "a server", Sampling())
    check_evidence([*untold, [-1.0]], "a server", Sampling(0.8))
    check_evidence([], "a server", Sampling(0.8))
