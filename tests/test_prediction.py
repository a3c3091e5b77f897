"""Laws of what a plan predicts: its work is the work that is done, its seconds add up, and it is kept for the run."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.heads.paths import Prompt, read_paths
from headstart.heads.sampling import Sampling
from headstart.heads.store import Stage, read_json
from headstart.launch import cli
from headstart.launch.planning.plan import time_rows_of
from headstart.launch.planning.prediction import PLAN, SCHEMA, read_kept
from headstart.launch.planning.remaining import Remaining, num_validations
from headstart.launch.recipe import FIRST_LINE, LAST_LINE
from headstart.launch.run import RunFolder
from headstart.trainer.generation import Generator
from headstart.trainer.metrics import read_metrics
from headstart.trainer.progress import Progress
from headstart.trainer.rehearsal import (
    Pass,
    ReplyTimes,
    Stopwatch,
    makespan,
    seconds_of_chunk,
    unlimited,
    work_of_chunk,
)
from headstart.trainer.settings import TrafficSettings, TrainSettings
from headstart.trainer.traffic import plan_chunks, shares
from tests.schema_forms import PREDICTION
from tests.schema_rules import violations
from tests.test_bakeoff import write_recipe
from tests.test_traffic import requests_of

RECIPE = f"""\
{FIRST_LINE}
run: {{threads: 1}}
target: {{model: tiny, dtype: float32}}
prompts: {{sources: [mine.jsonl], heldout: held.jsonl, num_train: 8, num_validation: 2, num_heldout: 8}}
traffic: {{max_new_tokens: 12, slots: 2, chunk: 3}}
head: {{draft_vocab_size: 128}}
train: {{num_steps: 7, batch_tokens: 256, depth: 2, eval_every: 3, save_every: 4, log_every: 1, dtype: float32}}
eval: {{draft_lengths: [2], draft_length: 2, live_prompts: 1, speed_prompts: 1, speed_new_tokens: 6, speed_repeats: 1,
  speed_draft_lengths: [2], speed_dtype: float32, replicates: 100, ngram: false, fail_slow_plain: false}}
export: {{engines: []}}
tracking: {{wandb: false}}
{LAST_LINE}
"""


@pytest.mark.parametrize("slots", [1, 3, 6])
def test_the_passes_of_a_chunk_are_those_that_a_generator_makes(tiny_target, slots):
    requests, watch = requests_of(tiny_target, 13), Stopwatch(13)
    replies = Generator(tiny_target, Sampling(1.0), 16, slots, 128).generate(requests, progress=watch.add)
    lengths = [len(reply.token_ids) for reply in replies]
    assert min(lengths) < max(lengths)
    going_on = [one for one in watch.passes if not one.read]
    prompt_tokens = [len(request.token_ids) for request in requests]
    done = sum(one.read for one in watch.passes), len(going_on), sum(one.tokens for one in going_on)
    assert work_of_chunk(prompt_tokens, lengths, slots) == done

    # What is told of the sample by its times is what it took, whatever that was.
    passes = [replace(one, seconds=0.02 * one.read + 0.3 + 0.01 * one.tokens**1.5) for one in watch.passes]
    took = sum(one.seconds for one in passes)
    assert seconds_of_chunk(ReplyTimes.of(passes, lengths), prompt_tokens, slots) == pytest.approx(took)


def test_times_are_found_again_and_are_never_negative():
    passes = [Pass(0.5 + 0.25 * n, n, 0) for n in (1, 2, 5, 8)] + [Pass(3.0, 2, 60), Pass(1.5, 1, 30)]
    times = ReplyTimes.of(passes, [4.0])
    assert (times.prompt_token, times.one_pass, times.reply_token) == pytest.approx((0.05, 0.5, 0.25))
    for seconds in ([5.0, 3.0, 2.0], [0.1, 5.0, 20.0], []):
        made = [Pass(each, n + 1, 0) for n, each in enumerate(seconds)]
        times = ReplyTimes.of(made, [4.0])
        assert min(times.one_pass, times.reply_token) >= 0
        told = times.one_pass * len(made) + times.reply_token * sum(one.tokens for one in made)
        assert told == pytest.approx(sum(seconds))


def test_jobs_are_taken_in_order_by_whoever_is_free():
    assert makespan([5, 1, 1, 1, 4], 2) == 7  # 5 | 1 1 1 4
    assert makespan([2, 3, 4], 1) == 9
    assert makespan([2, 3, 4], 5) == 4
    assert makespan([], 3) == 0


def test_a_sample_is_answered_beside_as_many_chunks_as_the_stage_answers():
    """One chunk of training prompts has two threads of its own, or shares them with the chunk of the others."""
    sizes = {"train": 3, "validation": 1, "heldout": 1}
    prompts = [
        Prompt("chat", ({"role": "user", "content": f"{split} {i}"},), split)
        for split, number in sizes.items()
        for i in range(number)
    ]
    absent = Stage(Path("nowhere"), {"outputs": {}})
    for settings, dtype, number in (
        (TrafficSettings(chunk=3), "float32", (3, 3)),
        (TrafficSettings(chunk=3), "bfloat16", (1, 2)),
        (TrafficSettings(chunk=1), "bfloat16", (3, 2)),
    ):
        chunks = plan_chunks(prompts, settings)
        left = Remaining(absent, absent, absent, [], {}, chunks, shares(chunks, absent, dtype, settings))
        assert (left.most_at_once(train=True), left.most_at_once(train=False)) == number


def test_replies_that_a_sample_cut_end_as_often_as_the_others_did():
    assert unlimited([3, 8, 8], [False, False, True], 0) == [3, 8, 8]
    assert unlimited([8, 8], [True, True], 12) == [20, 20]
    random = np.random.default_rng(0)
    whole = np.minimum(random.geometric(0.05, 20_000), 60)
    told = unlimited(np.minimum(whole, 20).tolist(), (whole > 20).tolist(), 40)
    assert np.mean(told) == pytest.approx(whole.mean(), rel=0.02)


def test_time_left_is_told_by_the_tokens_of_replies_in_progress():
    """Three slots, replies that run to the limit of 5 tokens: whatever was done, all of it is 12 replies of 5."""
    progress = Progress("traffic", 12, most_tokens=5)
    for number in range(1, 20):
        progress.add(3, 3 * (number % 5 == 0))
        if progress.finished:
            assert progress.tokens * (1 + progress.left()) == pytest.approx(60)
    early = Progress("traffic", 12, most_tokens=5)
    early.add(10, 1)  # nine are in progress, and one ended at its first token
    assert early.left() == pytest.approx(5)


@pytest.mark.parametrize(
    ("num_steps", "every", "done", "number"), [(7, 3, 0, 4), (6, 3, 0, 3), (7, 3, 3, 2), (7, 9, 7, 0)]
)
def test_validations_are_counted_as_training_makes_them(num_steps, every, done, number):
    assert num_validations(TrainSettings(num_steps=num_steps, eval_every=every), done) == number


def test_what_has_begun_keeps_the_prediction_it_began_with(tmp_path: Path) -> None:
    run, settings = RunFolder(tmp_path / "one"), {"seed": 0}

    def plan(seconds: dict[str, float], begun: list[str]) -> list[tuple[str, str, str]]:
        predicted = {name: {"seconds": each} for name, each in seconds.items()}
        return time_rows_of(run, settings, predicted, begun, ["traffic", "train"])

    plan({"traffic": 50.0, "train": 20.0}, begun=[])
    rows = plan({"traffic": 8.0, "train": 30.0}, begun=["traffic"])
    assert rows == [("traffic", "8 s", ""), ("train", "30 s", "")]
    assert read_kept(run, settings) == {"traffic": {"seconds": 50.0}, "train": {"seconds": 30.0}}
    assert read_kept(run, {"seed": 1}) == {}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A run that was planned before it was made, and what was predicted for it."""
    folder = tmp_path_factory.mktemp("planned")
    write_recipe(folder / "one.yaml", RECIPE)
    (another := folder / "runs" / f".one.{os.getppid()}.tmp").mkdir(parents=True)
    assert cli.run(["plan", str(folder / "one.yaml"), f"run.root={folder / 'runs'}"]) == 0
    # The sample is gone, and that of a plan which is being made is not.
    assert {path.name for path in (folder / "runs").iterdir()} == {"one", another.name}
    kept = (folder / "runs" / "one" / PLAN).read_bytes()
    assert cli.run(["train", str(folder / "one.yaml"), f"run.root={folder / 'runs'}"]) in (0, 3)
    return folder, kept


def test_the_work_that_is_predicted_is_the_work_that_is_done(planned: tuple[Path, bytes]) -> None:
    run = planned[0] / "runs" / "one"
    content = read_json(run / PLAN, SCHEMA)
    assert violations(content, PREDICTION, PLAN) == []
    stages, paths = content["stages"], list(read_paths(run / "traffic"))
    assert list(stages) == ["prompts", "traffic", "train"]
    assert work(stages["traffic"]) == {
        "num_requests": len(paths),
        "num_prompt_tokens": sum(path.num_prompt_tokens for path in paths),
        "num_chunks": len(list((run / "traffic").glob("part-*.parquet"))),
    }
    lines = read_metrics(run / "metrics.jsonl")
    assert work(stages["train"]) == {
        "num_steps": lines[-1]["step"],
        "num_validations": sum("accept_len" in line for line in lines),
    }


def work(stage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stage.items() if name != "seconds"}


def test_a_finished_run_shows_what_it_took_beside_what_was_predicted(
    planned: tuple[Path, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kept = planned
    arguments = ["plan", str(folder / "one.yaml"), f"run.root={folder / 'runs'}"]
    assert cli.run(arguments) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.partition("\ntime\n")[2].splitlines() if line]
    assert [(row[0], row[1]) for row in rows] == [(name, "took") for name in ("prompts", "traffic", "train", "eval")]
    assert ["predicted" in row[3:5] for row in rows] == [True, True, True, False]
    assert "sampled" not in printed
    assert (folder / "runs" / "one" / PLAN).read_bytes() == kept

    # Replies and states are there: only the head is sampled, on them, and a plan of other settings replaces another one.
    for steps, mode in ((9, "cache"), (11, "stream")):
        assert cli.run([*arguments, "run.name=two", f"train.num_steps={steps}", f"features.mode={mode}"]) == 0
        printed = capsys.readouterr().out
        assert "replies in" not in printed
        stages = read_json(folder / "runs" / "two" / PLAN, SCHEMA)["stages"]
        assert {name: stage["num_steps"] for name, stage in stages.items()} == {"train": steps}
