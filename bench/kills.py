"""`kill -9` of one or both of two processes, again and again in one run, against the same run unbroken.

    python bench/kills.py [--kills 20] [--seed 0] [--strategy ddp] [--out FOLDER]

Both are recipes/smoke.yaml in more and smaller pieces, from prompts to report, by two real processes. Moments and victims
are drawn from the seed: some kills fall while the processes start, the others into traffic (with its features), training and
evaluation, each into a part of its own of the stage, so that the run comes forward from kill to kill. The same command goes
on every time. A process whose peer was killed has to end by itself. Processes are forked from one that has imported
everything, because imports take longer than all of the rest.

The exit code is 1 where the two runs differ in a byte of a stage, of the last checkpoint or its optimiser, in a line of
metrics.jsonl or a figure of acceptance, and where anything was lost, doubled, left over, or made again once committed.
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

import headstart.launch.check
import headstart.launch.commands
import headstart.launch.stages  # noqa: F401  all that a process would import after it was forked
from headstart.heads.store import MANIFEST, STAGES, Stage, read_json
from headstart.launch.cli import run
from headstart.trainer.checkpoint import pointed
from headstart.trainer.metrics import METRICS, read_metrics
from headstart.trainer.prompts import read_prompts

WORLD, NUM_STEPS, NUM_CHUNKS = 2, 120, 24
RECIPE = f"""
prompts.num_train=72 prompts.num_validation=8 prompts.num_heldout=16 traffic.chunk=4 traffic.max_new_tokens=8
train.num_steps={NUM_STEPS} train.save_every=4 train.eval_every=40 train.log_every=1 train.batch_tokens=128 train.depth=2
eval.trees=[] eval.vocab_sizes=[] eval.live_prompts=2 eval.speed_prompts=1 eval.speed_repeats=1 eval.speed_draft_lengths=[2]
eval.speed_new_tokens=8 eval.lossless_samples=64 eval.lossless_tokens=64 export.engines=[] tracking.wandb=false
""".split()
SHARES = {"start": 0.15, "traffic": 0.35, "train": 0.4, "eval": 0.1}  # of the kills
CLOCK = ("time", "train/tokens_per_s", "validation/seconds")
PATIENCE_S = 900.0  # for the end of a process whose peer was killed, on a busy machine


@dataclass(frozen=True)
class Moment:
    """When a kill falls: some time after so much of a stage was committed."""

    stage: str
    done: int
    delay: float  # as a share: of the time that a start takes, in the midst of a stage of a tenth of that
    victims: tuple[int, ...]


class Root:
    """What lies on the disk of a run, read while others write it."""

    def __init__(self, folder: Path, strategy: str) -> None:
        self.folder, self.run, self.strategy = folder, folder / "smoke", strategy

    def start(self) -> list[multiprocessing.Process]:
        """The processes, as a launcher starts them; what they say goes to FOLDER.log."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=self.train, args=(rank, port)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        return processes

    def train(self, rank: int, port: int) -> None:
        """In a process of its own: the command."""
        with self.log.open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
        os.environ |= {name: str(value) for name, value in {**places, "MASTER_PORT": port}.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
        sys.exit(run(["train", "smoke", f"run.root={self.folder}", f"train.strategy={self.strategy}", *RECIPE]))

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def stage(self, name: str) -> Stage | None:
        found = sorted(self.folder.glob(f"{STAGES}/{name}-*/{MANIFEST}"))
        return Stage(found[0].parent, read_json(found[0])) if found else None

    def done(self, stage: str) -> int:
        """How much of a stage is committed: chunks, steps, and of an evaluation whether it has begun."""
        if stage == "traffic":
            return len(found.outputs) if (found := self.stage("traffic")) else 0
        if stage == "train":
            return max((line["step"] for line in read_metrics(self.run / METRICS)), default=0)
        return int((self.run / "eval" / MANIFEST).exists())

    def standing(self) -> tuple[int, ...]:
        """Other numbers after every piece that is made."""
        evaluation = self.run / "eval" / MANIFEST
        begun = evaluation.stat().st_mtime_ns if evaluation.exists() else 0
        return self.done("traffic"), self.done("train"), begun

    def place(self) -> str:
        """Where the run stands."""
        if self.done("eval"):
            return "evaluation"
        last = pointed(self.run / "checkpoints", "last")
        if last or self.done("train"):
            return f"step {self.done('train')}, {last.name if last else 'no checkpoint'}"
        traffic = self.stage("traffic")
        return (
            "start"
            if traffic is None
            else f"{len(traffic.outputs)} of {NUM_CHUNKS} chunks, {traffic.manifest['state']}"
        )

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob(".*.tmp"))

    def committed(self) -> dict[str, Any]:
        """What no later life may touch: recorded files, and lines of metrics.jsonl up to the last checkpoint."""
        found: dict[str, Any] = {}
        parts = {name[5:10] for name in traffic.outputs} if (traffic := self.stage("traffic")) else set()
        for name in ("prompts", "traffic", "features"):
            if (stage := self.stage(name)) is None or (name == "prompts" and not stage.complete):
                continue
            for file, output in stage.outputs.items():
                if name != "features" or file[6:11] in parts:  # a chunk is committed with its replies
                    status = (stage.folder / file).stat()
                    found[f"{name}/{file}"] = (output["sha256"], status.st_ino, status.st_mtime_ns)
        if last := pointed(self.run / "checkpoints", "last"):
            step = int(last.name.removeprefix("step-"))
            found |= {f"step {x['step']}": x["time"] for x in read_metrics(self.run / METRICS) if x["step"] <= step}
        return found


def drawn(number: int, seed: int) -> list[Moment]:
    """The kills in the order in which they fall."""
    source = random.Random(seed)
    counts = {stage: round(number * share) for stage, share in SHARES.items()}
    counts["train"] += number - sum(counts.values())
    whole = {"traffic": NUM_CHUNKS, "train": NUM_STEPS}
    moments = []
    for stage, count in counts.items():
        for i in range(count):
            part = (i + source.random()) / count
            done = int(part * 0.95 * whole[stage]) if stage in whole else int(stage == "eval")
            victims = source.choice(((0,), (1,), (0, 1)))
            moments.append(Moment(stage, done, source.random(), (0,) if stage == "eval" else victims))
    starts, others = moments[: counts["start"]], moments[counts["start"] :]
    for moment in starts:  # before the first chunk, and later before what is there was read
        others.insert(source.randrange(len(others)) if others else 0, moment)
    return others


def wait_for(root: Root, moment: Moment, processes: list[multiprocessing.Process], start_s: float) -> bool:
    """Wait until the moment has come, and this life has made something; whether it came before the processes ended."""
    before = root.standing()
    while moment.stage != "start" and (root.done(moment.stage) < moment.done or root.standing() == before):
        if not processes[0].is_alive():
            return False
        time.sleep(0.02)
    time.sleep(moment.delay * (start_s if moment.stage == "start" else start_s / 10))
    return processes[0].is_alive()


def kill(processes: list[multiprocessing.Process], moment: Moment) -> str:
    """Kill, and see how the other one ends. One that has not met its peer yet is ended, as launchers do it."""
    victims = moment.victims
    for rank in victims:
        processes[rank].kill()
    began = time.perf_counter()
    others = [process for rank, process in enumerate(processes) if rank not in victims]
    for process in others:
        if moment.stage == "start":
            process.terminate()
        process.join(PATIENCE_S)
    waited = [process for process in others if process.is_alive()]
    for process in waited:
        process.terminate()
    finish(processes)
    if waited:
        return "the other one WAITED, and was ended"
    return f"{time.perf_counter() - began:.1f} s, exit code {others[0].exitcode}" if others else "-"


def finish(processes: list[multiprocessing.Process]) -> bool:
    """Wait for their end; whether all went well."""
    for process in processes:
        process.join()
    return not any(process.exitcode for process in processes)


def differences(root: Root, whole: Root) -> Iterator[str]:
    """Where a run that is done is not the unbroken one."""
    for name in ("prompts", "traffic", "features"):
        ours, theirs = root.stage(name), whole.stage(name)
        if ours is None or theirs is None or not (ours.complete and theirs.complete):
            yield f"{name} is not complete"
            continue
        if ours.outputs != theirs.outputs:
            yield f"{name}: other files"
        if damaged := ours.damaged():
            yield f"{name}: {damaged} are not what the manifest says"
        if {f.name for f in ours.folder.iterdir()} != {f.name for f in theirs.folder.iterdir()}:
            yield f"{name}: other names in its folder"
    yield from wrong_rows(root)
    for pointer in ("last", "best"):
        ours, theirs = (pointed(r.run / "checkpoints", pointer) for r in (root, whole))
        if ours is None or theirs is None or ours.name != theirs.name:
            yield f"{pointer} is {ours}"
            continue
        for file in ("head.safetensors", "trainer/optimizer.safetensors"):
            if not filecmp.cmp(ours / file, theirs / file, shallow=False):
                yield f"{pointer}/{file}: other bits"
    lines = [
        [{k: v for k, v in x.items() if k not in CLOCK} for x in read_metrics(r.run / METRICS)] for r in (root, whole)
    ]
    if lines[0] != lines[1] or [line["step"] for line in lines[0]] != list(range(NUM_STEPS + 1)):
        yield "metrics.jsonl: other lines"
    rows = [json.loads((r.run / "eval" / "acceptance.json").read_text())["rows"] for r in (root, whole)]
    if rows[0] != rows[1]:
        yield "eval/acceptance.json: other figures"
    if left := root.leftovers():
        yield f"left over: {left}"


def wrong_rows(root: Root) -> Iterator[str]:
    """Prompts that were lost or answered twice."""
    traffic, prompts = root.stage("traffic"), root.stage("prompts")
    assert traffic is not None
    assert prompts is not None
    tables = (parquet.read_table(traffic.folder / name, columns=["prompt_id"]) for name in traffic.outputs)
    answered = Counter(row["prompt_id"] for table in tables for row in table.to_pylist())
    asked = {prompt.request(turn).prompt_id for prompt in read_prompts(prompts.folder) for turn in prompt.turns}
    if lost := asked - answered.keys():
        yield f"{len(lost)} prompts lost"
    if doubled := [i for i, number in answered.items() if number > 1]:
        yield f"{len(doubled)} prompts answered twice"


def unbroken(root: Root) -> float:
    """Run to the end; returns the seconds until the first chunk was there."""
    began, start_s = time.perf_counter(), 0.0
    processes = root.start()
    while processes[0].is_alive():
        if not start_s and root.done("traffic"):
            start_s = time.perf_counter() - began
        time.sleep(0.05)
    if not finish(processes):
        raise SystemExit(f"the unbroken run failed: {root.log}")
    print(f"unbroken: {time.perf_counter() - began:.0f} s, of which {start_s:.0f} s until the first chunk", flush=True)
    return start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp2", "zero2", "zero3"])
    parser.add_argument("--out", type=Path, help="new folder that is kept (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headstart-kills-") as temporary:
        out = options.out or Path(temporary)
        whole, root = (Root(out / name, options.strategy) for name in ("whole", "killed"))
        for either in (whole, root):
            either.folder.mkdir(parents=True)
        start_s = unbroken(whole)
        faults = killed(root, drawn(options.kills, options.seed), start_s)
        faults += differences(root, whole)
    print("\n".join(f"FAIL {fault}" for fault in faults) or "every byte and figure is that of the unbroken run: pass")
    sys.exit(1 if faults else 0)


def killed(root: Root, moments: list[Moment], start_s: float) -> list[str]:
    """Start, kill and start again until no kill is left, then run to the end; returns what went wrong on the way."""
    faults: list[str] = []
    before: dict[str, Any] = {}
    print(
        f"{'kill':>4}  {'victims':8} {'where':34} {'committed':>9}  how the other one ended, and what was half written"
    )
    for number, moment in enumerate([*moments, None], 1):
        processes = root.start()
        if moment is None:
            if not finish(processes):
                faults.append(f"the last start failed: {root.log}")
        elif not wait_for(root, moment, processes, start_s):
            finish(processes)
            faults.append(f"kill {number}: the run ended before {moment}")
        else:
            place, ended = root.place(), kill(processes, moment)
            half = ", ".join(root.leftovers())
            if "WAITED" in ended:
                faults.append(f"kill {number}: a process waited for one that was killed")
        found = root.committed()
        touched = [name for name, value in before.items() if found.get(name) != value]
        if touched:
            faults.append(f"after kill {number}: committed and yet lost or made again: {touched[:5]}")
        before = found
        if moment is not None:
            victims = " and ".join(map(str, moment.victims))
            print(f"{number:>4}  {victims:8} {place:34} {len(found):>9}  {ended} {half}".rstrip(), flush=True)
    return faults


if __name__ == "__main__":
    main()
