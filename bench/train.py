"""Real tokens/s of the training step from cached features, in the setting that public trainers were measured in.

    python bench/train.py [--kind eagle3] [--steps 40] [--threads 0] [--dtype bfloat16 float32] [--traffic runs/NAME/traffic]

EAGLE-3 or another kind of head, depth 3, 8,192 draft tokens, a target of SmolLM2-135M's shape (hidden 576, 30 layers,
vocabulary 49,152), packed steps of 1,024 tokens. A timed step is everything a step costs: assembling the batch, forward,
backward, clipping, AdamW. "Real" tokens are slots of paths, prompts included, without filler. Features and tokens are
random, which costs what real ones cost; lengths are drawn like those of recorded chat traffic (prompts of about 67 tokens,
replies of about 123 cut at 192), or taken from a traffic folder.

MFU is the share of a measured ceiling: operations of all products of the first step a token (torch's own count, forward and
backward), times tokens/s, over what the fastest of some plain products of that precision reach on this machine just before.
"""

import argparse
import time
from pathlib import Path as FilePath
from typing import Any, get_args, get_type_hints

from headstart.heads.settings import HEADS
from headstart.launch.threads import apply_threads, choose_threads
from headstart.trainer.settings import LossSettings

HIDDEN, VOCAB, DRAFT_VOCAB, NUM_LAYERS = 576, 49_152, 8_192, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", default="eagle3", choices=list(HEADS), help="kind of head")
    parser.add_argument("--steps", type=int, default=40, help="timed steps")
    parser.add_argument("--warmup", type=int, default=8, help="steps before the clock starts")
    parser.add_argument("--threads", type=int, default=0, help="0: the cores this process may use")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--loss", default="kl", choices=get_args(get_type_hints(LossSettings)["kind"]))
    parser.add_argument("--traffic", type=FilePath, help="take path lengths from this traffic folder")
    arguments = parser.parse_args()
    threads = choose_threads(arguments.threads, local_world_size=1)
    apply_threads(threads)
    print(f"threads: {threads}")
    lengths = recorded_lengths(arguments.traffic) if arguments.traffic else drawn_lengths(200)
    header = f"{'products':<10}{'tokens/s':>10}{'pairs/s':>10}{'ms/step':>10}{'tokens/step':>13}{'filler':>8}"
    print(header + f"{'GFLOP/step':>12}{'ceiling':>14}{'MFU':>8}")
    for dtype in arguments.dtype:
        print(measure(dtype, lengths, arguments.warmup, arguments.steps, arguments.loss, arguments.kind), flush=True)


def drawn_lengths(num: int) -> list[tuple[int, int]]:
    """(prompt, reply) lengths of chat traffic: log-normal prompts, replies that stop at a constant rate until cut."""
    import numpy as np

    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(4.0, 0.6, num), 12, 400).astype(int)
    replies = np.clip(random.exponential(198, num), 4, 192).astype(int)
    return list(zip(prompts.tolist(), replies.tolist(), strict=True))


def recorded_lengths(folder: FilePath) -> list[tuple[int, int]]:
    from headstart.heads.paths import read_paths

    return [(path.num_prompt_tokens, path.num_reply_tokens) for path in read_paths(folder, "train")][:400]


def measure(dtype: str, lengths: list[tuple[int, int]], warmup: int, steps: int, loss: str, kind: str) -> str:
    """One line of the table."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from headstart.heads.memory import keep_freed_memory
    from headstart.trainer.loop import optimizer_step

    keep_freed_memory()
    best = ceiling(dtype)
    job = make_job(dtype, lengths, warmup + steps, loss, kind)
    # Torch counts every product but the one that adds to its first argument in place.
    in_place = {torch.ops.aten.addmm_: lambda _, left, right, **options: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        optimizer_step(job, 1)
    each = counter.get_total_flops() / job.rows.step_tokens(1)
    for step in range(2, warmup + 1):
        optimizer_step(job, step)
    tokens, pairs = 0, 0.0
    began = time.perf_counter()
    for step in range(warmup + 1, warmup + steps + 1):
        pairs += float(optimizer_step(job, step).sums.pairs_D.sum())
        tokens += job.rows.step_tokens(step)
    seconds = time.perf_counter() - began
    slots = sum(-(-job.rows.step_tokens(step) // 64) * 64 for step in range(warmup + 1, warmup + steps + 1))
    return (
        f"{dtype:<10}{tokens / seconds:>10,.0f}{pairs / seconds:>10,.0f}{1e3 * seconds / steps:>10,.0f}"
        f"{tokens / steps:>13,.0f}{1 - tokens / slots:>8.1%}{each * tokens / steps / 1e9:>12,.1f}"
        f"{best / 1e9:>8,.0f} GF/s{each * tokens / seconds / best:>8.1%}"
    )


def ceiling(dtype: str) -> float:
    """Operations a second of plain products in this precision, of the fastest of some sizes."""
    import torch

    from headstart.heads.precision import DTYPES
    from headstart.launch.planning.estimate import product_rate

    device = torch.device("cpu")
    return max(product_rate(width, DTYPES[dtype], device) for width in (HIDDEN, 2 * HIDDEN, 4 * HIDDEN))


def make_job(dtype: Any, lengths: list[tuple[int, int]], num_steps: int, loss: Any, kind: str) -> Any:
    """A head of the asked shape with everything its steps need, on random paths."""
    import torch

    from headstart.heads.checkpoint import build_head
    from headstart.heads.facts import TargetFacts
    from headstart.trainer.data import TrainingRows
    from headstart.trainer.loop import Job
    from headstart.trainer.settings import LossSettings, TrainSettings

    torch.manual_seed(0)
    facts = TargetFacts(
        name="smollm2-135m's shape", hidden_size=HIDDEN, num_layers=NUM_LAYERS, num_heads=9, num_kv_heads=3, head_dim=64,
        intermediate_size=1536, vocab_size=VOCAB, num_tokens=VOCAB, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, max_position=8192, special_ids=[0, 1, 2],
        stop_ids=[2], fingerprint={},
    )  # fmt: skip
    settings = TrainSettings(num_steps=num_steps, batch_tokens=1024, depth=3, dtype=dtype, loss=LossSettings(kind=loss))
    target = RandomTarget(facts)
    sized = {"num_heads": 3} if HEADS[kind]().max_depth is not None else {}
    head = build_head(HEADS[kind](**sized), facts, torch.arange(DRAFT_VOCAB))
    head.load_target(target, initialise=False)
    paths, features = random_paths(lengths)
    rows = TrainingRows(paths, features, settings.batch_tokens, seed=0)
    return Job.open(head, target.embedding_weight(), rows, settings)


class RandomTarget:
    """A tied embedding: all that a head and its loss read from a target."""

    def __init__(self, facts: Any) -> None:
        import torch

        self.facts = facts
        self.table_VH = (torch.randn(facts.vocab_size, facts.hidden_size) * 0.05).bfloat16()
        self.device = self.table_VH.device

    def embedding_weight(self) -> Any:
        return self.table_VH

    def output_weight(self) -> Any:
        return self.table_VH


class RandomFeatures:
    """Random states under every prompt id, as the feature reader hands them out."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}

    def of(self, paths: Any) -> Any:
        return [self.states[path.prompt_id] for path in paths]


def random_paths(lengths: list[tuple[int, int]]) -> Any:
    """Paths over random draft tokens, each recorded with the same log-probability."""
    import numpy as np
    import torch

    from headstart.heads.paths import Path

    paths, features = [], RandomFeatures()
    for i, (prompt, reply) in enumerate(lengths):
        total = prompt + reply
        token_N = torch.randint(0, DRAFT_VOCAB, (total,)).numpy().astype(np.int32)
        generated_N = np.arange(total) >= prompt
        logprob_N = np.where(generated_N, -2.0, np.nan).astype(np.float32)
        path = Path(str(i), "chat", "train", token_N, generated_N, logprob_N, "stop", {})
        taps_SF, final_SH = torch.randn(total - 1, 3 * HIDDEN), torch.randn(total - 1, HIDDEN)
        features.states[path.prompt_id] = taps_SF.bfloat16(), final_SH.bfloat16()
        paths.append(path)
    return paths, features


if __name__ == "__main__":
    main()
