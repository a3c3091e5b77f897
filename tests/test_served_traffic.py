"""Laws of replies from servers: the record is what the target here would have said, whatever happens to the servers."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from headstart.heads.errors import GateFailed, WrongInput
from headstart.heads.features import FeatureReader
from headstart.heads.paths import Prompt, read_paths
from headstart.heads.sampling import Sampling
from headstart.heads.target import TargetLoader
from headstart.trainer.dialects import Asked
from headstart.trainer.generation import Request
from headstart.trainer.server_check import check_choices, check_difference
from headstart.trainer.servers import Broken, Connection, Servers
from headstart.trainer.settings import ServerSettings, TrafficSettings
from headstart.trainer.traffic import make_traffic, traffic_inputs
from tests.reply_server import MODEL, ReplyServer, vllm_answer
from tests.test_prompts import user
from tests.test_traffic import SETTINGS, TINY, hashes, prompts_stage, some_prompts

PROMPTS = some_prompts(30, ("train", "train", "train", "validation", "heldout"))
RECORD = ("prompt_id", "token_ids", "generated", "finish_reason", "stop_token_id", "split", "chunk")


@contextlib.contextmanager
def serving(target, engine="vllm", **options):
    server = ReplyServer(target, engine, **options)
    try:
        yield server
    finally:
        if not server.dead:
            server.kill()


def served(*urls, **values):
    server = ServerSettings(urls=list(urls), **{"model": MODEL, "concurrency": 3, "timeout": 60, **values})
    return replace(SETTINGS, backend="openai", server=server)


def run(root, settings, prompts=PROMPTS):
    return make_traffic(TargetLoader(TINY), prompts_stage(root, prompts), settings, root)


def rows(traffic, *columns):
    return [row for part in sorted(traffic.outputs) for row in parquet.read_table(traffic.folder / part).to_pylist()]


def record(traffic):
    return [{name: row[name] for name in RECORD} for row in rows(traffic)]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The same prompts answered here, each split in the same precision."""
    return run(tmp_path_factory.mktemp("local"), SETTINGS)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_the_record_is_that_of_the_target_here(tmp_path, tiny_target, local, engine):
    with serving(tiny_target, engine) as first, serving(tiny_target, engine) as second:
        traffic, features = run(tmp_path, served(first.url + "/v1", second.url + "/", engine=engine))
        assert min(first.answered, second.answered) > 4
    assert record(traffic) == record(local[0])
    for theirs, ours in zip(rows(traffic), rows(local[0]), strict=True):
        train = theirs["split"] == "train"
        assert theirs["backend"] == (f"openai-{engine}-{MODEL}" if train else "local-float32")
        told = [(a, b) for a, b in zip(theirs["logprob"], ours["logprob"], strict=True) if b is not None]
        assert np.allclose(*zip(*told, strict=True), atol=1e-4)
    reader, own = FeatureReader(features.folder), FeatureReader(local[1].folder)
    for path in read_paths(traffic.folder):
        for a, b in zip(reader.get(path.prompt_id), own.get(path.prompt_id), strict=True):
            assert np.allclose(a.float(), b.float(), atol=2e-2)


def test_turns_of_a_conversation_are_asked_in_order(tmp_path, tiny_target):
    """Each with the target's own replies as its history, as they are here."""
    talks = [
        Prompt(
            "chat",
            (user(f"Question {i}?"), {"role": "assistant", "content": "Tea."}, user("Why?")),
            ("train", "train", "train", "validation", "heldout")[i % 5],
        )
        for i in range(10)
    ]
    here, _ = run(tmp_path / "here", SETTINGS, talks)
    with serving(tiny_target) as server:
        there, _ = run(tmp_path / "there", served(server.url), talks)
    assert record(there) == record(here)
    assert len(rows(there)) == 2 * len(talks)


def test_settings_that_name_no_server_or_ask_nobody_are_refused():
    def wrong(**values):
        return {name for name, _ in TrafficSettings(**values).conflicts()}

    assert wrong(backend="openai") == {"server.urls", "server.model"}
    assert wrong(server=served("http://a").server) == {"server.urls"}
    assert wrong(backend="openai", server=served("http://a").server, replies="recorded") == {"backend"}
    assert wrong(backend="openai", server=served("http://a").server) == wrong() == set()


def test_a_server_killed_twice_loses_and_doubles_nothing(tmp_path, tiny_target, local):
    """It goes in the middle of its work, comes back at the same address, and goes again."""
    lives = []

    def live(port):
        server = ReplyServer(tiny_target, port=port, die_after=5 if len(lives) < 2 else None)
        server.when_dead = lambda: live(server.server_port)
        lives.append(server)
        return server

    traffic, _ = run(tmp_path, served(live(0).url))
    assert [server.dead for server in lives] == [True, True, False]
    lives[-1].kill()
    assert record(traffic) == record(local[0])


def test_a_run_whose_servers_stay_away_is_continued_where_it_was(tmp_path, tiny_target, local):
    with serving(tiny_target, die_after=14) as server:  # 4 of the check, then beyond the first chunk
        with pytest.raises(WrongInput, match=r"no server has answered for \d+ s(.|\n)*the same command continues"):
            run(tmp_path, served(server.url, timeout=2))
        begun = list(tmp_path.glob(".stages/traffic-*/part-*.parquet"))
        assert begun
    with pytest.raises(WrongInput, match="found no server at"):
        run(tmp_path, served(server.url))
    with serving(tiny_target) as server:
        traffic, _ = run(tmp_path, served(server.url))
        assert 0 < server.answered < 4 + 18
    assert record(traffic) == record(local[0])
    # A finished stage needs no server.
    assert run(tmp_path, served("http://127.0.0.1:1"))[0].key == traffic.key


def spoilt(change):
    """An answer with its only choice changed."""

    def spoil(request, answer):
        change(answer["choices"][0], request)
        return answer

    return spoil


WRONG = {
    "no token ids": (spoilt(lambda c, r: c.pop("token_ids")), "gives no token ids"),
    "other text": (spoilt(lambda c, r: c.update(text="Something else.")), "do not decode to the text"),
    "another prompt": (spoilt(lambda c, r: c["prompt_token_ids"].insert(0, 1)), "read another prompt"),
    "more prompt tokens": (lambda r, a: {**a, "usage": {"prompt_tokens": 3}}, "read 3 prompt tokens"),
    "aborted": (spoilt(lambda c, r: c.update(finish_reason="abort")), "finish_reason 'abort'"),
    "cut short": (
        spoilt(lambda c, r: (c.update(text=""), c["token_ids"].clear(), c.pop("logprobs"))),
        "without a stop token",
    ),
    "no JSON object": (lambda r, a: [a], "no JSON object"),
    "no completion": (lambda r, a: {"object": "embedding"}, "expected a completion"),
    "tempered": (spoilt(lambda c, r: temper(c)), "differ from the target's by"),
    "refused": (lambda r, a: 400, "HTTP 400"),
    "forbidden": (lambda r, a: 401, "HEADSTART_API_KEY"),
}


def cut(choice):
    choice.update(text="", token_ids=[], logprobs=None)


def temper(choice):
    choice["logprobs"]["token_logprobs"] = [2 * x for x in choice["logprobs"]["token_logprobs"]]


@pytest.mark.parametrize("fault", WRONG)
def test_a_server_that_would_spoil_the_record_is_found_before_the_bulk(tmp_path, tiny_target, fault):
    spoil, message = WRONG[fault]
    with serving(tiny_target) as server:
        server.spoil = spoil
        with pytest.raises(WrongInput, match=message):
            run(tmp_path, served(server.url))
        assert server.answered <= 4
    assert not list(tmp_path.glob(".stages/traffic-*/part-*.parquet"))


def test_a_server_of_another_model_engine_or_name_is_found_before_the_bulk(tmp_path, tiny_tied_target, tiny_target):
    with serving(tiny_tied_target) as server, pytest.raises(WrongInput, match="It holds another model"):
        run(tmp_path, served(server.url))
    with serving(tiny_target) as server:
        with pytest.raises(WrongInput, match="but .* is vllm: traffic.server.engine=vllm"):
            run(tmp_path, served(server.url, engine="llamacpp"))
        with pytest.raises(WrongInput, match=rf"found 'mine', expected a model that .* lists: {MODEL}"):
            run(tmp_path, served(server.url, model="mine"))
    with pytest.raises(WrongInput, match="expected an address such as http"):
        run(tmp_path, served("localhost:8000"))


def test_a_server_that_is_another_one_later_is_found(tmp_path, tiny_target, tiny_tied_target):
    """Another model, loaded while prompts are answered, that tells no log-probabilities to be found by."""
    with serving(tiny_target) as server, serving(tiny_tied_target) as other:

        def spoil(request, answer):
            if server.answered >= 4:
                answer = vllm_answer(other, request)
                answer["choices"][0].pop("logprobs")
            return answer

        server.spoil = spoil
        with pytest.raises(WrongInput, match="less likely than its own choices, in the mean"):
            run(tmp_path, served(server.url))
    assert not list(tmp_path.glob(".stages/traffic-*/part-*.parquet"))


def test_one_reply_of_another_model_is_found_among_many():
    asked = Asked(None, None, served("http://a").server, 0)
    own = [[-1.0] * 20 for _ in range(40)]
    check_difference([*own[:39], [-1.05] * 20], own, "a", asked)
    check_difference([*own[:39], [-1.6] * 4], [*own[:39], [-1.0] * 4], "a", asked)  # few tokens may differ by chance
    with pytest.raises(WrongInput, match=r"differ from the target's by 0\.600 nats in the mean of 20 tokens"):
        check_difference([*own[:39], [-1.6] * 20], own, "a", asked)
    ties = [[0.0] * 19 + [0.4] for _ in range(40)]
    check_choices(ties, "a")
    check_choices([], "a")
    with pytest.raises(WrongInput, match="a whole reply that the target would not give"):
        check_choices([*ties, [0.5] * 20], "a")


def test_a_pause_in_the_asking_is_no_absence_of_the_servers(tiny_target):
    """Nothing was asked for longer than `timeout`; the one who then says `not now` is asked again."""
    requests = [Request(str(i), [5, 6, 7 + i]) for i in range(3)]
    with serving(tiny_target) as server:
        asked = Asked(tiny_target.facts, tiny_target.tokenizer, served(server.url, timeout=1, retries=20).server, 0)
        with Servers(asked, Sampling(), 4) as servers:
            first = servers.wait(servers.send(requests))
            time.sleep(1.2)
            busy = iter([503])
            server.spoil = lambda request, answer: next(busy, answer)
            assert servers.wait(servers.send(requests)) == first
    assert {reply.finish_reason for reply in first} <= {"stop", "length"}


def test_an_answer_that_trickles_in_is_given_up_when_its_time_is_over(tiny_target):
    """Every byte comes within the time-out, the whole does not: that was an attempt, and another one may do better."""

    def ask(retries):
        asked = Asked(
            tiny_target.facts, tiny_target.tokenizer, served(server.url, timeout=1, retries=retries).server, 0
        )
        with Servers(asked, Sampling(), 4) as servers:
            return servers.wait(servers.send([Request("a", [5, 6, 7])]))

    with serving(tiny_target) as server:
        (whole,) = ask(0)
        server.pause = 0.2
        (lost,) = ask(0)
        assert (lost.finish_reason, lost.token_ids) == ("error", [])
        assert lost.error == f"{server.url}: no whole answer in 1 s (traffic.server.timeout)"
        server.spoil = lambda request, answer: setattr(server, "pause", 0.2 if server.pause == 0 else 0.0) or answer
        server.pause = 0.0  # the first answer trickles, the second comes whole
        assert ask(1) == [whole]


def test_a_request_that_is_ended_is_not_sent_again(tiny_target):
    got, go = [], threading.Event()
    with serving(tiny_target) as server:
        server.spoil = lambda request, answer: (got.append(1), go.wait(30), answer)[2]
        connection = Connection(server.url, 60)
        connection.call("/v1/models")  # so that the connection is one that rested
        ending = threading.Thread(target=lambda: (wait_for(lambda: got), connection.end()))
        ending.start()
        asked = Asked(tiny_target.facts, tiny_target.tokenizer, served(server.url).server, 0)
        payload = asked.dialect.payload(Request("a", [5, 6]), 2, Sampling(), asked)
        with pytest.raises(Broken):
            connection.call("/v1/completions", payload)
        ending.join()
        go.set()
    assert got == [1]


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_no_secret_is_told(tmp_path, tiny_target, monkeypatch):
    """Neither a key, whatever is wrong with it and whatever a server says of it, nor what an address holds."""
    monkeypatch.setenv("HEADSTART_API_KEY", "sk-very\nsecret")
    with serving(tiny_target) as server:
        with pytest.raises(WrongInput, match="HEADSTART_API_KEY: found characters") as wrong:
            run(tmp_path, served(server.url))
        assert "secret" not in str(wrong.value)
        monkeypatch.setenv("HEADSTART_API_KEY", "sk-secret\n")
        server.spoil = lambda request, answer: 401
        with pytest.raises(WrongInput, match=r"no: Bearer \[HEADSTART_API_KEY\]") as refused:
            run(tmp_path, served(server.url))
        assert "secret" not in str(refused.value)
    for url in ("http://me:secret@gpu-1:8000", "me:secret@gpu-1", "https://gpu-1/v1?key=secret", "http://gpu-1:secret"):
        settings = served(url)
        (found,) = settings.conflicts()
        assert found[0] == "server.urls"
        assert "secret" not in found[1]
        with pytest.raises(WrongInput) as unusable:
            run(tmp_path, settings)
        assert "secret" not in str(unusable.value)


def test_a_prompt_without_reply_is_recorded_as_such_and_read_by_nobody(tmp_path, tiny_target, local):
    """Two prompts fail for good, one at first only; the share that may fail decides whether the run goes on."""
    loader = TargetLoader(TINY)
    train = [prompt for prompt in PROMPTS if prompt.split == "train"]
    bad, shaky = [loader.render(prompt) for prompt in train[6:8]], loader.render(train[9])
    tries = []

    def spoil(request, answer):
        if request["prompt"] == shaky:
            tries.append(1)
            return 500 if len(tries) == 1 else answer
        return 400 if request["prompt"] == bad[0] else 500 if request["prompt"] == bad[1] else answer

    with serving(tiny_target) as server:
        server.spoil = spoil
        with pytest.raises(GateFailed, match=r"of 18 training requests got no reply(.|\n)*max_failed"):
            run(tmp_path, served(server.url, retries=1))
        traffic, features = run(tmp_path, served(server.url, retries=1, max_failed=0.2))
    lost = {prompt.prompt_id for prompt in train[6:8]}
    for row in rows(traffic):
        assert (row["finish_reason"] == "error") == (row["prompt_id"] in lost)
        if row["prompt_id"] in lost:
            assert not any(row["generated"])
            assert set(row["logprob"]) == {None}
            assert row["stop_token_id"] is None
    others = [row for row in record(local[0]) if row["prompt_id"] not in lost]
    assert [row for row in record(traffic) if row["finish_reason"] != "error"] == others
    assert {path.prompt_id for path in read_paths(traffic.folder)} == {p.prompt_id for p in PROMPTS} - lost
    reader = FeatureReader(features.folder)
    assert all(len(reader.get(path.prompt_id)[1]) == len(path.token_N) - 1 for path in read_paths(traffic.folder))
    # Other taps are read back from the record, around the missing rows.
    again = make_traffic(
        TargetLoader(TINY, [0, 4]), prompts_stage(tmp_path, PROMPTS), served("http://127.0.0.1:1"), tmp_path
    )
    assert hashes(again[0]) == hashes(traffic)
    assert FeatureReader(again[1].folder).get(train[0].prompt_id)[0].shape[1] == 2 * 64


def test_a_reply_goes_no_further_than_the_targets_stop_token(tmp_path, tiny_target):
    """Engines may know fewer stop tokens than the target has: what they say beyond one is not the target's."""
    stop = tiny_target.facts.stop_ids[0]

    def spoil(request, answer):
        choice = answer["choices"][0]
        if len(choice["token_ids"]) > 4:
            choice["token_ids"][3] = stop
            choice["text"] = tiny_target.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
            told = choice["logprobs"]["token_logprobs"]
            told[3:] = [None] * len(told[3:])
        return answer

    sampled = {"temperature": 1.0}  # greedily the check would find the planted stop tokens
    with serving(tiny_target) as server:
        server.spoil = spoil
        traffic, _ = run(tmp_path, replace(served(server.url), **sampled))
    replies = [row for row in rows(traffic) if row["split"] == "train" and len(row["token_ids"]) > 4]
    for row in replies:
        reply = [token for token, own in zip(row["token_ids"], row["generated"], strict=True) if own]
        assert len(reply) <= 4 or stop not in reply
        assert (row["finish_reason"] == "stop") == (reply[-1] in tiny_target.facts.stop_ids)
        assert all((p is None) != g for p, g in zip(row["logprob"], row["generated"], strict=True))  # filled in here
    assert any(row["stop_token_id"] == stop for row in replies)


def test_the_key_knows_who_answered_and_not_where(tmp_path):
    loader, stage = TargetLoader(TINY), prompts_stage(tmp_path, PROMPTS)
    base = served("http://a")

    def inputs(settings, **options):
        return traffic_inputs(loader, stage, settings, 0, **options)

    def changed(**values):
        return replace(base, server=replace(base.server, **values))

    assert inputs(base) != inputs(SETTINGS)
    assert inputs(base) == inputs(changed(urls=["http://b"], concurrency=1, timeout=5, retries=0, max_failed=0.5))
    assert inputs(base) != inputs(changed(engine="sglang"))
    assert inputs(base) != inputs(changed(model="other"))
    # Held-out replies are local in any case, and local traffic has the key it had before there were servers.
    assert inputs(base, splits=("heldout",)) == inputs(SETTINGS, splits=("heldout",))
    assert not {"backend", "server"} & inputs(SETTINGS)["settings"].keys()


@pytest.mark.skipif("HEADSTART_ENGINE_TESTS" not in os.environ, reason="installs or starts a serving engine")
def test_a_real_server_that_is_killed_gives_our_record():
    """vLLM answers 60 prompts in float32; the script fails where a prompt is lost, doubled or parts but for a near tie."""
    script = Path(__file__).parents[1] / "bench" / "served.py"
    command = [sys.executable, str(script), "--prompts", "60", "--kills", "1", "--max-new-tokens", "16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
