"""A training job that fits into a test: a small head on seeded random paths and features.

`python -m tests.small_training FOLDER` trains it to the end, continuing from what lies in FOLDER.
"""

import sys
from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np
import torch

from headstart.heads.checkpoint import build_head
from headstart.heads.facts import TargetFacts
from headstart.heads.paths import Path
from headstart.heads.vocabulary import choose_draft_vocabulary
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.loop import Job, train
from headstart.trainer.settings import TrainSettings
from tests.kinds import fill_shipped, make_settings, random_layer, shipped_layer

FACTS = TargetFacts(
    name="small", hidden_size=32, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
    vocab_size=96, num_tokens=90, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    max_position=256, special_ids=[0, 1, 89], stop_ids=[89], fingerprint={"weights": "none"}, shipped=shipped_layer(32),
)  # fmt: skip
SETTINGS = TrainSettings(
    num_steps=24, batch_tokens=160, learning_rate=4e-3, warmup_steps=4, dtype="float32", eval_every=8, save_every=5,
    log_every=3, keep=2,
)  # fmt: skip


class SmallTarget:
    """The weights a head and its loss read from a target."""

    facts = FACTS
    device = torch.device("cpu")

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(FACTS.vocab_size, FACTS.hidden_size, generator=random)
        self.output = torch.randn(FACTS.vocab_size, FACTS.hidden_size, generator=random) * 0.5
        self.output[FACTS.num_tokens :] = 0

    def embedding_weight(self):
        return self.embedding

    def output_weight(self):
        return self.output

    def final_norm_weight(self):
        return self.layer(-1)["input_layernorm.weight"]

    def layer(self, index):
        return random_layer(FACTS, index)

    def read_shipped(self, tensors, whole):
        fill_shipped(tensors, whole)


class RandomFeatures:
    """Seeded states for every path, in the cache's dtype."""

    def __init__(self) -> None:
        self.states = {}

    def get(self, prompt_id):
        return self.states[prompt_id]

    def of(self, paths):
        return [self.get(path.prompt_id) for path in paths]


def make_paths(lengths, split="train", seed=0, features=None):
    """Random paths of (prompt, reply) lengths; log-probabilities are those of the features under the small target."""
    random = torch.Generator().manual_seed(seed)
    target, features = SmallTarget(), features or RandomFeatures()
    paths = []
    for i, (prompt, reply) in enumerate(lengths):
        total = prompt + reply
        token_N = torch.randint(0, FACTS.num_tokens, (total,), generator=random)
        taps_SF = torch.randn(total - 1, 3 * FACTS.hidden_size, generator=random).bfloat16()
        final_SH = torch.randn(total - 1, FACTS.hidden_size, generator=random).bfloat16()
        logprob_SV = torch.log_softmax(final_SH.float() @ target.output[: FACTS.num_tokens].T, -1)
        logprob_N = np.full(total, np.nan, np.float32)
        logprob_N[1:] = logprob_SV.gather(1, token_N[1:, None]).squeeze(1)
        generated_N = np.arange(total) >= prompt
        logprob_N[~generated_N] = np.nan
        path = Path(
            prompt_id=f"{split}-{i}", route=("chat", "code")[i % 2], split=split, token_N=token_N.numpy().astype(np.int32),
            generated_N=generated_N, logprob_N=logprob_N, finish_reason="length", sampling={"temperature": 0.0},
        )  # fmt: skip
        features.states[path.prompt_id] = taps_SF, final_SH
        paths.append(path)
    return paths, features


def make_lengths(num, seed=0):
    random = np.random.default_rng(seed)
    return [(int(random.integers(1, 20)), int(random.integers(1, 40))) for _ in range(num)]


def make_head(seed=0, kind="eagle3", whole_vocabulary=False, **flags):
    torch.manual_seed(seed)
    size = 0 if whole_vocabulary else 70
    draft_ids = torch.from_numpy(choose_draft_vocabulary(np.zeros(FACTS.vocab_size), size, FACTS))
    head = build_head(make_settings(kind, SETTINGS.depth, **flags), FACTS, draft_ids)
    head.load_target(SmallTarget(), initialise=False)
    return head


def make_rows(settings=SETTINGS, num=14, seed=0):
    paths, features = make_paths(make_lengths(num))
    return TrainingRows(paths, features, settings.batch_tokens, seed)


def make_validation():
    paths, features = make_paths(make_lengths(4, seed=9), split="validation", seed=3)
    return EvaluationRows(paths, features, 256)


def open_job(settings=SETTINGS, **shape):
    return replace(Job.open(make_head(), SmallTarget().output, make_rows(settings), settings), **shape)


def run(folder, settings=SETTINGS, rows=None, head=None, draft_length=4, **tracked):
    """Train in `folder`; returns the head and where training stands."""
    folder.mkdir(parents=True, exist_ok=True)
    head = head or make_head()
    job = Job.open(head, SmallTarget().output, rows or make_rows(settings), settings, draft_length)
    return head, train(job, make_validation(), folder, **tracked)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(FilePath(sys.argv[1]), replace(SETTINGS, num_steps=int(sys.argv[2]), log_every=1))
