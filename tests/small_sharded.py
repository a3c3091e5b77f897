"""What two processes do for tests/test_sharded_target.py: `python -m tests.small_sharded laws FOLDER`, once for each."""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from headstart.heads.checkpoint import build_head
from headstart.heads.features import FeatureReader
from headstart.heads.paths import SPLITS, read_paths
from headstart.heads.settings import TargetSettings
from headstart.heads.sharded_target import load_sharded
from headstart.heads.store import finished_stage
from headstart.heads.target import TargetLoader
from headstart.launch.processes import Processes, muted
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.loop import Job, train
from headstart.trainer.on_policy import OnPolicyRows
from headstart.trainer.progress import Progress
from headstart.trainer.prompts import read_prompts
from headstart.trainer.ranks import Ranks, joined
from headstart.trainer.recorded import plan_traffic
from headstart.trainer.settings import ServerSettings, TrafficSettings, TrainSettings
from headstart.trainer.streamed import StreamedStates
from headstart.trainer.traffic import answer_chunks, make_traffic, open_stages, plan_chunks, shares
from tests.kinds import make_settings
from tests.small_ranks import STRATEGIES

TRAFFIC = TrafficSettings(max_new_tokens=6, slots=2, chunk=2, temperature=1.0)
BATCH_TOKENS = 64  # several passes
# The head is whole on each process under zero2 as under ddp.
STREAMED_BY = (("eagle3", "fsdp2"), *(("draft", strategy) for strategy in STRATEGIES if strategy != "zero2"))
STREAMED = TrainSettings(
    num_steps=8, batch_tokens=150, depth=2, learning_rate=4e-3, warmup_steps=2, dtype="float32", eval_every=8, save_every=8,
    log_every=1,
)  # fmt: skip


def loader_of(model, taps=None):
    return TargetLoader(TargetSettings(model=str(model), dtype="float32", device="cpu", attention="sdpa"), taps)


def some_paths():
    random = np.random.default_rng(3)
    return [random.integers(3, 500, int(length)) for length in random.integers(2, 60, 9)]


def read_some(target, rank):
    """States of some paths on this rank: none on the second, then all dealt out, in passes of unlike number."""
    paths = some_paths()
    with target.together():
        alone = target.read(paths[:5], BATCH_TOKENS) if rank == 0 else []
    with target.together():
        dealt = target.read(paths[rank::3], BATCH_TOKENS)
    return {f"alone-{i}": x for i, x in enumerate(alone)} | {f"dealt-{rank + 3 * i}": x for i, x in enumerate(dealt)}


def read(folder, ranks):
    """Every target under FOLDER/targets: states, and what each rank holds."""
    facts = {}
    for model in sorted((folder / "targets").iterdir()):
        loader = loader_of(model)
        loader.load_by(partial(load_sharded, vote=ranks.any))
        target = loader()
        states = read_some(target, ranks.rank)
        tensors = {name: torch.cat([x.taps, x.final], dim=1) for name, x in states.items()}
        save_file(tensors, folder / f"{model.name}-{ranks.rank}.safetensors")
        last = {name: float(tensor.double().sum()) for name, tensor in target.last_layer().items()}
        facts[model.name] = {"held": target.held_bytes(), "last_layer": last}
    (folder / f"facts-{ranks.rank}.json").write_text(json.dumps(facts))


def traffic(folder, ranks):
    """Replies and states, by a target that is spread and by one that is whole on each; then the states of other taps."""
    for name in ("sharded", "whole"):
        root = folder / name
        prompts = finished_stage(next((root / ".stages").glob("prompts-*")))
        for taps in (None, [0, 4]):
            loader = loader_of("tiny", taps)
            if name == "sharded":
                loader.load_by(partial(load_sharded, vote=ranks.any))
            make_traffic(loader, prompts, TRAFFIC, root, ranks=ranks)


def read_served(loader, root, url, ranks=None):
    """States on a server's replies to the training prompts by prompt id, as exact as the target; then the whole stage.

    A stage stores them in bfloat16.
    """
    ranks = ranks or Ranks()
    server = ServerSettings(urls=[url], model="tiny-model", concurrency=3, timeout=60)
    settings = replace(TRAFFIC, temperature=0.0, backend="openai", server=server)
    prompts = finished_stage(next((root / ".stages").glob("prompts-*")))
    asked = [prompt for prompt in read_prompts(prompts.folder) if prompt.split == "train"]
    talks = plan_traffic(loader, asked, settings).conversations
    chunks = [replace(chunk, states_dtype=torch.float32) for chunk in plan_chunks(asked, settings)]
    with ranks.first_before_others():
        traffic, _ = open_stages(loader, prompts, settings, root, 0, SPLITS, mend=ranks.first, store=None)
    own = shares(chunks, traffic, "float32", settings, ranks)
    answers = answer_chunks(loader, traffic, own, talks, settings, 0, Progress("served", len(asked)), ranks)
    states = {prompt_id: x for found in answers if found for prompt_id, x in found.states.items()}
    make_traffic(loader, prompts, settings, root, ranks=ranks)
    return {prompt_id: torch.cat([x.taps, x.final], dim=1) for prompt_id, x in states.items()}


def served(folder, ranks):
    """Replies of a server, read by a target that is spread."""
    loader = loader_of("tiny")
    loader.load_by(partial(load_sharded, vote=ranks.any))
    states = read_served(loader, folder / "served", (folder / "url").read_text(), ranks)
    save_file(states, folder / f"served-{ranks.rank}.safetensors")


def streamed(root, kind, target, out, **shared):
    """Train a head on states that the target gives it inside the step; a draft model also on what it says itself.

    The latter in two micro-batches: it speaks while gradients of the first are waiting for those of the second.
    """
    own_words = kind == "draft"
    target.pass_tokens = 1  # a row a pass: the shares of a step take passes of unlike number
    settings = replace(STREAMED, on_policy=0.5, accumulate=2, batch_tokens=270) if own_words else STREAMED
    prompts = finished_stage(next((root / ".stages").glob("prompts-*")))
    replies, features = (stage.folder for stage in make_traffic(loader_of("tiny"), prompts, TRAFFIC, root))
    torch.manual_seed(5)
    head = build_head(make_settings(kind, settings.depth), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    source = (list(read_paths(replies, "train")), StreamedStates(target), settings.batch_tokens, 14)
    own = {"head": head, "target": target, "share": settings.on_policy}
    rows = OnPolicyRows(*source, **own) if own_words else TrainingRows(*source)
    validation = EvaluationRows(list(read_paths(replies, "validation")), FeatureReader(features, target.taps), 256)
    train(Job.open(head, target.output_weight(), rows, settings, draft_length=2, **shared), validation, out)
    return rows


def stream(folder, ranks):
    """Training beside a target that is spread, by strategies that spread or copy the head."""
    for kind, strategy in STREAMED_BY:
        loader = loader_of("tiny")
        loader.load_by(partial(load_sharded, vote=ranks.any))
        out = folder / f"streamed-{kind}-{strategy}"
        streamed(folder / "whole", kind, loader(), out, strategy=strategy, ranks=ranks)


def laws(folder, ranks):
    """All of it in one start, which takes longer than any of it."""
    read(folder, ranks)
    traffic(folder, ranks)
    served(folder, ranks)
    stream(folder, ranks)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
    with muted(Processes(rank=rank)), joined(rank, int(os.environ["WORLD_SIZE"]), rank, "cpu") as ranks:
        {"laws": laws}[sys.argv[1]](folder, ranks)
