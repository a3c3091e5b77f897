"""What two processes do for tests/test_killed_ranks.py: every stage that processes share, of two recipes on one target pass.

`python -m tests.small_stages FOLDER` starts them for every line it reads, which names a stage and a rank that gets a
`kill -9` in its midst, or `end`, or `hang`. It writes their ids, and how they ended. They are forked, because imports would
take longer than the stages. The second recipe asks for other taps, so its features are read back from the recorded replies.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch

from headstart.heads.target import TargetLoader, load_whole
from headstart.launch.processes import Processes, muted
from headstart.launch.recipe import find_recipe, load_recipe
from headstart.launch.run import RunFolder
from headstart.launch.stages import run_head, run_traffic
from headstart.trainer.data import EvaluationRows
from headstart.trainer.loop import Job, train
from headstart.trainer.ranks import Ranks, joined
from tests.small_training import SETTINGS, SmallTarget, make_head, make_paths, make_rows

NUM_STEPS = 60
RECIPE = f"""
prompts.num_train=32 traffic.max_new_tokens=6 traffic.slots=2 traffic.chunk=4 train.num_steps={NUM_STEPS} train.save_every=7
train.log_every=1 tracking.wandb=false
""".split()
STORE = "store"  # where stages are kept too, in their folder
NUM_CHUNKS = 8 + 2 + 4
TAPS = {"first": [1, 2], "second": [0, 4]}
WAIT_S = 600
LAST_PASS = {"traffic": 40, "features": 3}  # of the target on the rank that dies: several rounds are committed by then


class Dying:
    """Loads a target whose process is killed in one of its passes."""

    def __init__(self, stage: str) -> None:
        self.left = LAST_PASS[stage]

    def __call__(self, loader, dtype):
        target = load_whole(loader, dtype)
        target.forward, target._read_batch = self.dying(target.forward), self.dying(target._read_batch)
        return target

    def dying(self, make_pass):
        def or_die(*arguments):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            return make_pass(*arguments)

        return or_die


def run_stages(folder, ranks=None, accumulate=1, part="end"):
    """Both recipes' replies and features, and the head of the second."""
    ranks, (stage, _, victim) = ranks or Ranks(), part.partition("-")
    path = find_recipe("smoke")
    store = f"run.store=file://{folder / STORE}"
    for name, taps in TAPS.items():
        recipe = load_recipe(path, [*RECIPE, store, f"head.taps={taps}", f"train.accumulate={accumulate}"])
        run = RunFolder(folder / name)
        run.folder.mkdir(parents=True, exist_ok=True)
        targets = TargetLoader(recipe.target, taps)
        if victim == str(ranks.rank) and (stage == "traffic" or name == "second"):
            targets.load_by(Dying(stage))
        mode = run_traffic(recipe, path, run, targets, ranks)
    run_head(recipe, run, targets, mode, "single" if ranks.world == 1 else "ddp", ranks)


class Hangs(EvaluationRows):
    """Validation paths that stop the process which reads them."""

    def __iter__(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        return super().__iter__()


def hang(folder, ranks):
    """Training in which the second rank falls silent between two steps."""
    kind = EvaluationRows if ranks.first else Hangs
    job = Job.open(make_head(), SmallTarget().output, make_rows(), SETTINGS, strategy="ddp", ranks=ranks)
    train(job, kind(*make_paths([(3, 5)], split="validation"), 60), folder / "hangs")


def run_rank(part, folder, rank, port):
    """In a process of its own; what it says goes to FOLDER/said-RANK."""
    with (folder / f"said-{rank}").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    patience = timedelta(seconds=10) if part == "hang" else None
    with muted(Processes(rank=rank)), joined(rank, 2, rank, "cpu", patience) as ranks:
        if part == "hang":
            hang(folder, ranks)
        else:
            run_stages(folder, ranks, part=part)


def main(folder):
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [fork.Process(target=run_rank, args=(line.strip(), folder, rank, port)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        print(json.dumps([rank.pid for rank in ranks]), flush=True)
        for rank in ranks:
            rank.join(WAIT_S)
            rank.kill()
            rank.join()
        print(json.dumps([rank.exitcode for rank in ranks]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
