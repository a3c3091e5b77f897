"""Laws of training by several processes: two real ones that talk over gloo, against one."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from headstart.heads.errors import WrongInput
from headstart.launch.launcher import built_in_configs, launch_command
from headstart.launch.processes import Processes, choose_strategy, find_processes, resume_command
from headstart.trainer.checkpoint import pointed
from headstart.trainer.data import TrainingRows, count_pairs
from headstart.trainer.metrics import METRICS, read_metrics
from headstart.trainer.settings import TrainSettings
from tests.kinds import FORMS
from tests.schema_rules import run_violations
from tests.small_ranks import CURVE, DAMAGED, MIDWAY, SHORT, STOP_STEP, STRATEGIES, rows_of, train_in
from tests.small_training import SETTINGS, make_head, make_rows, run

WAIT_S = 900


def start_ranks(part, folder, world=2, program="tests.small_ranks"):
    """Start the processes as a launcher does; returns them by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", program, part, str(folder)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    environments = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [subprocess.Popen(command, env=environment, **streams) for environment in environments]


def finish(processes):
    """What each process said of an error, once all have ended."""
    return [process.communicate(timeout=WAIT_S)[1] for process in processes]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of all trainings: `single` by this process, the others by two."""
    folder = tmp_path_factory.mktemp("ranks")
    train_in(folder / "single", CURVE)
    ranks = start_ranks("laws", folder)
    errors = finish(ranks)
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    return folder


@pytest.fixture(scope="module")
def facts(trained):
    """What each rank found, by rank."""
    return [json.loads((trained / f"facts-{rank}.json").read_text()) for rank in range(2)]


def lines_of(folder):
    """Lines of metrics.jsonl after the first, without what a clock decides."""
    clock = ("time", "train/tokens_per_s", "validation/seconds")
    return [
        {k: v for k, v in line.items() if k not in clock} for line in read_metrics(folder / METRICS) if line["step"]
    ]


def final_weights(folder):
    return load_file(pointed(folder / "checkpoints", "last") / "head.safetensors")


def assert_alike(folder, other, since=0):
    """Loss lines within 1e-4, the same acceptance, and every saved tensor within a relative Frobenius norm of 1e-4."""
    ours, theirs = lines_of(folder), lines_of(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours[since:], theirs[since:], strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)
        assert [a["tokens"], a["train/num_supervised"], a["train/lr"], a.get("accept_len")] == [
            b["tokens"],
            b["train/num_supervised"],
            b["train/lr"],
            b.get("accept_len"),
        ]
    weights, expected = final_weights(folder), final_weights(other)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (weights[name].double() - tensor.double()).norm() <= 1e-4 * tensor.double().norm(), name


# What two processes compute


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_give_the_curve_and_the_head_of_one(strategy, trained, facts):
    assert [found["world"] for found in facts] == [2, 2]
    assert len(lines_of(trained / strategy)) == 50
    assert_alike(trained / strategy, trained / "single")


def test_ranks_had_unlike_shares_and_now_and_then_none():
    """The curves above are worth something only if shares differed."""
    rows = rows_of(CURVE)
    pairs = []
    for step in range(1, CURVE.num_steps + 1):
        shares = [rows.batch(step, 0, 1, rank, 2).prompt_ids for rank in range(2)]
        of = {path.prompt_id: count_pairs(path, 1)[0] for path in rows.paths}
        pairs.append([sum(of[prompt_id] for prompt_id in share) for share in shares])
    assert sum(0 in step for step in pairs) >= 5
    assert sum(max(step) > 1.2 * min(step) > 0 for step in pairs) >= 5


def test_two_processes_are_one_with_two_micro_batches_bit_for_bit(trained, tmp_path):
    train_in(tmp_path, replace(CURVE, accumulate=2))
    assert lines_of(tmp_path) == lines_of(trained / "ddp")
    ours, theirs = final_weights(tmp_path), final_weights(trained / "ddp")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("kind", FORMS)
def test_every_kind_is_shared_by_every_strategy(kind, facts):
    for found in facts:
        assert all(difference < 1e-4 for difference in found["kinds"][kind].values()), found["kinds"][kind]


WHOLE = {"ddp": ("weights", "moments"), "zero2": ("weights",)}


def test_sharded_state_is_really_sharded(facts):
    whole = facts[0]["ddp"]["held"]
    assert whole == facts[1]["ddp"]["held"]
    assert whole["moments"] == 2 * whole["weights"] > 0
    for strategy in STRATEGIES:
        assert facts[0][strategy]["described"].startswith(f"2 processes, {strategy}: ")
        for name, size in whole.items():
            parts = [found[strategy]["held"][name] for found in facts]
            if name in WHOLE.get(strategy, ()):
                assert parts == [size, size]
            else:
                assert sum(parts) == pytest.approx(size, rel=0.02)  # tensors of odd length are padded
                assert max(parts) < 0.52 * size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shapes_are_those_of_the_whole_head_however_it_lies(strategy, facts):
    expected = {name: list(tensor.shape) for name, tensor in make_head().named_parameters()}
    assert [found[strategy]["shapes"] for found in facts] == [expected] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_weights_of_a_resumed_head_are_the_targets(strategy, trained, facts):
    assert [found[strategy]["frozen"] for found in facts] == [0.0] * 2
    assert "lm_head.weight" not in final_weights(trained / f"{strategy}-frozen")


# Stopping and going on


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_polite_kill_of_one_rank_saves_and_the_rest_is_bit_equal(strategy, trained, facts):
    assert [found[strategy]["stopped"] for found in facts] == [f"step-{STOP_STEP:06d}"] * 2
    broken, unbroken = trained / f"{strategy}-broken", trained / f"{strategy}-unbroken"
    assert lines_of(broken) == lines_of(unbroken)
    last = "checkpoints/step-000009"
    for file in ("head.safetensors", "trainer/optimizer.safetensors"):
        ours, theirs = load_file(broken / last / file), load_file(unbroken / last / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items()), file
    random_states = load_file(broken / last / "trainer/optimizer.safetensors")["random_state"]
    assert len(random_states) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_number_of_processes_goes_on_with_the_same_steps(strategy, trained, tmp_path, capsys):
    assert_alike(trained / f"{strategy}-continued", trained / "single")
    shutil.copytree(trained / strategy, tmp_path / "alone")
    (tmp_path / "alone" / "checkpoints" / "last").write_text(MIDWAY + "\n")
    train_in(tmp_path / "alone", CURVE, head=make_head(seed=5))
    assert f"2 x {strategy} in the checkpoint, 1 x single now" in capsys.readouterr().out
    assert_alike(tmp_path / "alone", trained / "single")


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[-1]])
def test_a_killed_rank_ends_the_other_and_the_rerun_is_bit_equal(strategy, trained, tmp_path):
    ranks = start_ranks(strategy, tmp_path)
    while max((line["step"] for line in read_metrics(tmp_path / METRICS)), default=0) < 23:
        assert all(process.poll() is None for process in ranks), finish(ranks)
        time.sleep(0.01)
    ranks[1].kill()
    _, error = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode != 0
    assert "another process of this training has ended, or does not answer" in error
    assert pointed(tmp_path / "checkpoints", "last").name == "step-000020"
    again = start_ranks(strategy, tmp_path)
    errors = finish(again)
    assert [process.returncode for process in again] == [0, 0], "\n".join(errors)
    assert lines_of(tmp_path) == lines_of(trained / strategy)
    ours, theirs = final_weights(tmp_path), final_weights(trained / strategy)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert not list((tmp_path / "checkpoints").glob(".*.tmp"))


@pytest.fixture
def small_recipe():
    """Overrides that leave little of recipes/smoke.yaml besides its training."""
    eval_less = "eval.trees=[] eval.vocab_sizes=[] eval.live_prompts=1 eval.speed_prompts=1 eval.speed_repeats=1"
    prompts = "prompts.routes=[chat] prompts.num_train=16 prompts.num_validation=2 prompts.num_heldout=2"
    train = "train.num_steps=120 train.save_every=1000 train.log_every=1 train.eval_every=100 export.engines=[]"
    return [*eval_less.split(), *prompts.split(), *train.split(), "eval.speed_draft_lengths=[2]"]


def test_a_recipe_under_an_accelerate_config_is_stopped_and_goes_on_under_another(tmp_path, small_recipe):
    """The literal commands, on real launchers: SIGTERM to the launcher saves on all ranks, and any other one continues."""
    run = tmp_path / "runs" / "smoke"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    launcher = subprocess.Popen(launch_command("fsdp2", "smoke", small_recipe), **streams)
    while max((line["step"] for line in read_metrics(run / METRICS)), default=0) < 5:
        assert launcher.poll() is None, launcher.communicate()[0]
        time.sleep(0.05)
    launcher.terminate()
    printed, _ = launcher.communicate(timeout=WAIT_S)
    assert launcher.returncode != 0
    assert "2 processes, fsdp2: of the" in printed
    assert "interrupted; to continue from here: torchrun --nproc_per_node 2 -m headstart.launch smoke" in printed
    stopped = pointed(run / "checkpoints", "last")
    assert 5 <= int(stopped.name.removeprefix("step-")) < 120
    done = subprocess.run(launch_command("ddp", "smoke", small_recipe), timeout=WAIT_S, check=False, **streams)
    assert done.returncode == 0, done.stdout
    assert f"continuing from {stopped}" in done.stdout
    assert "2 x fsdp2 in the checkpoint, 2 x ddp now" in done.stdout
    assert done.stdout.count("report: ") == 1  # one process measures and prints
    assert run_violations(run) == []


# Faults


def ids_of(rows, step):
    return [rows.paths[row].prompt_id for row in rows.rows(step)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_that_is_not_finite_on_one_rank_is_skipped_by_both(strategy, trained, facts):
    rows = rows_of(SHORT)
    hit = [step for step in range(1, SHORT.num_steps + 1) if DAMAGED in ids_of(rows, step)]
    assert 0 < len(hit) < SHORT.num_steps
    assert [found[strategy]["skipped"] for found in facts] == [len(hit)] * 2
    assert all(tensor.isfinite().all() for tensor in final_weights(trained / f"{strategy}-damaged").values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_cannot_be_trained_ends_both_and_leaves_its_batches(strategy, trained, facts):
    folder = trained / f"{strategy}-hopeless"
    for found in facts:
        assert "5 steps in a row up to step 5" in found[strategy]["failed"]
        assert str(folder / "faults") in found[strategy]["failed"]
    saved = sorted((folder / "faults").iterdir())
    assert [file.name for file in saved] == [f"step-000005.rank-{rank}.micro-0.safetensors" for rank in range(2)]
    rows = rows_of(SHORT)
    taps = [load_file(file)["taps_TF"] for file in saved]
    for rank, taps_TF in enumerate(taps):
        clean = rows.batch(5, 0, 1, rank, 2).taps_TF
        assert torch.equal(taps_TF.isfinite(), clean == 0)
    for prompt_id in ids_of(rows, 5):
        assert prompt_id in facts[0][strategy]["failed"]


class FillsDisk(TrainingRows):
    """Rows from whose step 12 on no file may grow beyond what metrics.jsonl takes."""

    def batch(self, step, *share):
        if step == 12:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return super().batch(step, *share)


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path):
    """The limit on a file's size (RLIMIT_FSIZE) stands for the disk: writing fails in the middle of a file."""
    unbroken, _ = run(tmp_path / "unbroken")
    rows = make_rows()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(Exception, match=r"os error 27|File too large"):
            run(tmp_path / "full", rows=FillsDisk(rows.paths, rows.features, SETTINGS.batch_tokens, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    checkpoints = tmp_path / "full" / "checkpoints"
    assert pointed(checkpoints, "last").name == "step-000010"
    assert not list(checkpoints.glob(".*"))  # of a full disk nothing is wasted
    head, _ = run(tmp_path / "full", head=make_head(seed=5))
    assert all(torch.equal(unbroken.trained_tensors()[name], p) for name, p in head.trained_tensors().items())


# What was asked for, and what was started

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no"}


def test_processes_are_those_that_the_launcher_started():
    assert find_processes({}) == Processes()
    assert not find_processes({"MASTER_ADDR": "127.0.0.1"}).launched
    assert find_processes(TORCHRUN) == Processes(1, 2, 1, 2, launched=True)
    fsdp = {**TORCHRUN, **ACCELERATE, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    assert find_processes(fsdp).asked == "fsdp2"


@pytest.mark.parametrize(
    "environment",
    [
        {**ACCELERATE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    ],
    ids=["accelerate launch --num_processes 2", "mpirun -n 2 python"],
)
def test_processes_other_than_those_asked_for_are_refused(environment):
    with pytest.raises(WrongInput, match="torchrun --nproc_per_node N RECIPE"):
        find_processes(environment)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision: fp16"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offload_optimizer_device: cpu"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme"}, "offload_param_device: nvme"),
        ({"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "deepspeed_config_file: ds.json"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.partition(":")[0],
)
def test_what_a_config_asks_for_and_would_not_get_is_refused(asked, told):
    plain = {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none", "FSDP_OFFLOAD_PARAMS": "false"}
    launched = {**TORCHRUN, **ACCELERATE, **plain, "ACCELERATE_USE_DEEPSPEED": "true"}
    assert find_processes({**launched, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}).asked == "zero3"
    with pytest.raises(WrongInput, match=told):
        find_processes({**launched, **asked})


def test_the_strategy_is_the_recipes_or_the_configs_and_never_silently_another():
    two, fsdp = Processes(world_size=2, launched=True), Processes(world_size=2, launched=True, asked="fsdp2")
    assert choose_strategy(TrainSettings(), Processes()) == "single"
    assert choose_strategy(TrainSettings(), two) == "ddp"
    assert choose_strategy(TrainSettings(), fsdp) == choose_strategy(TrainSettings(strategy="fsdp2"), two) == "fsdp2"
    with pytest.raises(WrongInput, match="train.strategy is ddp, but the accelerate config asks for fsdp2"):
        choose_strategy(TrainSettings(strategy="ddp"), fsdp)
    with pytest.raises(WrongInput, match="without a launcher"):
        choose_strategy(TrainSettings(strategy="fsdp2"), Processes())
    for other in ("fsdp1", "zero1"):
        with pytest.raises(WrongInput, match=f"asks for {other}"):
            choose_strategy(TrainSettings(), replace(two, asked=other))


def test_configs_of_accelerate_are_files_or_ours(tmp_path):
    (tmp_path / "mine.yaml").touch()
    assert str(tmp_path / "mine.yaml") in launch_command(str(tmp_path / "mine.yaml"), "smoke", [])
    assert {"ddp", "fsdp2", "zero2", "zero3"} == built_in_configs().keys()
    with pytest.raises(WrongInput, match="one of ddp, fsdp2, zero2, zero3"):
        launch_command("fsdp", "smoke", [])


def test_the_command_that_goes_on_is_told(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["my recipe.yaml", "run.seed=1"])
    assert resume_command(Processes()) == "python 'my recipe.yaml' run.seed=1"
    two = Processes(world_size=2, local_world_size=2, launched=True)
    assert resume_command(two) == "torchrun --nproc_per_node 2 'my recipe.yaml' run.seed=1"
    assert resume_command(replace(two, world_size=4)).endswith("on every machine")
