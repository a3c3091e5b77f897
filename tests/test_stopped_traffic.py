"""Laws of a polite end while prompts are answered: what is whole is kept, and the command that goes on is told."""

import os
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import pytest

from headstart.heads.store import MANIFEST, read_json
from tests.reply_server import MODEL
from tests.test_served_traffic import run, served, serving, wait_for
from tests.test_traffic import hashes

HEADSTART = str(Path(sys.executable).parent / "headstart")
PROMPTS = "prompts.routes=[chat] prompts.num_train=24 prompts.num_validation=4 prompts.num_heldout=4 traffic.chunk=8"
PARTS = ".stages/traffic-*/part-*.parquet"


def train_until(tmp_path, number, condition, *settings):
    """Exit code and output of a real run that gets a signal as soon as `condition` holds."""
    command = [HEADSTART, "train", "smoke", *PROMPTS.split(), *settings]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command, **streams) as process:
        wait_for(lambda: condition() or process.poll() is not None, seconds=90)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
    return process.returncode, printed


def assert_ended_well(code, printed, number):
    assert code == 130, printed
    assert f"{number.name}: keeping the replies of chunks that are whole; once more stops at once" in printed
    assert f"interrupted; to continue from here: {HEADSTART} train smoke " in printed
    assert "Traceback" not in printed


def committed(root):
    """Numbers of the chunks that the manifest knows; no half file is left."""
    (stage,) = root.glob(".stages/traffic-*")
    assert not list(root.rglob(".*.tmp"))
    return [int(name[5:10]) for name in read_json(stage / MANIFEST)["outputs"]]


def test_a_run_that_servers_answer_is_stopped_by_a_kill(tmp_path, tiny_target):
    """While the server holds its answers back."""
    asked, go = [], threading.Event()
    with serving(tiny_target) as server:
        server.spoil = lambda request, answer: (asked.append(1), len(asked) > 4 and go.wait(60), answer)[2]
        servers = f"traffic.server.urls=[{server.url}] traffic.server.model={MODEL} traffic.backend=openai"
        code, printed = train_until(tmp_path, signal.SIGTERM, lambda: len(asked) > 5, *servers.split())
        go.set()
    assert_ended_well(code, printed, signal.SIGTERM)
    assert committed(tmp_path / "runs") == []


def test_a_run_that_answers_itself_is_stopped_by_ctrl_c(tmp_path):
    slow = ["traffic.max_new_tokens=200", "traffic.slots=1"]
    code, printed = train_until(tmp_path, signal.SIGINT, lambda: list((tmp_path / "runs").glob(PARTS)), *slow)
    assert_ended_well(code, printed, signal.SIGINT)
    assert 0 in committed(tmp_path / "runs")


def test_a_chunk_behind_one_that_is_not_whole_is_kept(tmp_path, tiny_target):
    """And a record with such a gap is continued as one without."""
    numbers, go = count(1), threading.Event()

    def hold(request, answer):
        number = next(numbers)
        if number == 6:  # of the first chunk: the check has asked 4
            go.wait(60)
        if number == 4 + 6 + 6 + 2:  # the first two chunks have 6 each
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    before = signal.getsignal(signal.SIGTERM)
    with serving(tiny_target) as server:
        whole, _ = run(tmp_path / "whole", served(server.url))
        server.spoil = hold
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, served(server.url, concurrency=2))
        go.set()
        assert signal.getsignal(signal.SIGTERM) == before
        assert {0, 1} & {*committed(tmp_path)} == {1}
        server.spoil = lambda request, answer: answer
        traffic, _ = run(tmp_path, served(server.url))
    assert hashes(traffic) == hashes(whole)
