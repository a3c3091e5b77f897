"""Timing requests by the reference decoder: who runs, how many together, in what order.

Requests that run together start together, and the batch shrinks as they end; their time is that of the last. Every group
of requests is timed with every variant in one process, in one order and then in the reverse one (ABBA), so that a drift of
the machine falls on all alike. The time is all of it: prefill, the head's reading of the prompt, drafting, verification.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from headstart.eval.decode import Clock, decode
from headstart.eval.drafters import Drafter, HeadDrafter, NgramDrafter
from headstart.eval.replies import Reply
from headstart.eval.settings import EvalSettings
from headstart.eval.speculation import PLAIN, Speculation
from headstart.heads.contract import Head
from headstart.heads.paths import Path
from headstart.heads.precision import choose_precision
from headstart.heads.sampling import Sampling
from headstart.heads.target import Target

GENERATE_PROMPTS = 4  # prompts also timed with transformers.generate
GENERATE_REPEATS = 2
TRIAL_TOKENS = 24  # tokens of the trial that chooses the dtype

Item = TypeVar("Item")


@dataclass(frozen=True)
class Variant:
    """One way to decode requests. No drafter: plain decoding; `generate`: transformers' own loop, one request at a time."""

    name: str  # plain | generate | ngram | the head's kind (`stops early` behind it where confidence ends its drafts)
    draft_length: int
    drafter: Drafter | None = None
    stop_below: float = 0.0  # as told to the drafter

    def run(
        self,
        target: Target,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seed: int = 0,
        occasion: str = "",
    ) -> list[Reply]:
        """Replies to requests that start together; sampled ones draw random numbers of this variant and occasion.

        Drafts are greedy, as engines make them.
        """
        if self.name == "generate":
            return [timed_generate(target, prompt, max_new_tokens, sampling) for prompt in prompts]
        return decode(
            target,
            prompts,
            Speculation(self.drafter, self.draft_length, sampling),
            max_new_tokens,
            batch=len(prompts),
            seed=seed,
            request_ids=[f"speed/{self.name}/{self.draft_length}/{occasion}/{i}" for i in range(len(prompts))],
        )


@dataclass
class Timings:
    """Replies of one variant: `runs[group][repeat]` are those of the requests of a group, which run together."""

    variant: Variant
    runs: list[list[list[Reply]]]

    @property
    def concurrency(self) -> int:
        return len(self.runs[0][0])

    @property
    def seconds_G(self) -> np.ndarray:
        return np.array([sum(max(reply.total_s for reply in run) for run in group) for group in self.runs])

    @property
    def tokens_G(self) -> np.ndarray:
        return np.array([sum(len(r.token_ids) for run in group for r in run) for group in self.runs], dtype=float)

    @property
    def replies(self) -> list[Reply]:
        """One of every prompt that was timed: those of the first repeat."""
        return [reply for group in self.runs if group for reply in group[0]]

    def all(self) -> list[Reply]:
        return [reply for group in self.runs for run in group for reply in run]

    def tokens_per_s(self) -> float | None:
        seconds = self.seconds_G.sum()
        return float(self.tokens_G.sum() / seconds) if seconds > 0 else None


def measure_speed(
    target: Target,
    head: Head,
    paths: Sequence[Path],
    settings: EvalSettings,
    concurrency: int = 1,
    progress: Callable[[str], None] = lambda line: None,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> list[Timings]:
    """Time every variant on every group of `concurrency` prompts, interleaved.

    The first entry is plain decoding; at concurrency 1 the second is generate. Greedy replies repeat; sampled ones
    (`sampling`, with the run's seed) are drawn anew in every repeat, so that repeats average over them too.
    """
    sampling = sampling or Sampling()
    head_drafter = HeadDrafter(head)
    variants = [Variant("plain", 0), *([Variant("generate", 0)] if concurrency == 1 else [])]
    variants += [Variant(head.kind, length, head_drafter) for length in settings.speed_draft_lengths]
    if settings.stop_below:
        stops = HeadDrafter(head, stop_below=settings.stop_below)
        name = f"{head.kind} stops early"
        variants.append(Variant(name, max(settings.speed_draft_lengths), stops, settings.stop_below))
    if settings.ngram:
        variants.append(Variant("ngram", max(settings.speed_draft_lengths), NgramDrafter()))
    groups = grouped([path.prompt_token_ids for path in paths], concurrency)
    timings = [Timings(variant, [[] for _ in groups]) for variant in variants]
    for variant in variants:  # warm-up: first calls allocate and choose kernels
        variant.run(target, groups[0], min(8, settings.speed_new_tokens), sampling)
    for repeat in range(settings.speed_repeats):
        for g, prompts in enumerate(groups):
            for timing in timings if repeat % 2 == 0 else reversed(timings):
                is_generate = timing.variant.name == "generate"
                if is_generate and (g >= GENERATE_PROMPTS or repeat >= GENERATE_REPEATS):
                    continue
                occasion = f"{concurrency}/{g}/{repeat}"
                run = timing.variant.run(target, prompts, settings.speed_new_tokens, sampling, seed, occasion)
                timing.runs[g].append(run)
        progress(f"speed at concurrency {concurrency}: repeat {repeat + 1} of {settings.speed_repeats}")
    return timings


def grouped(items: Sequence[Item], size: int) -> list[list[Item]]:
    """Groups of exactly `size`; what is left over has no place in a measurement at that concurrency."""
    return [list(items[begin : begin + size]) for begin in range(0, len(items) - size + 1, size)]


def balanced(paths: Sequence[Path], num_prompts: int) -> list[Path]:
    """`num_prompts` paths, taken from the routes in turn, in stored order."""
    routes: dict[str, list[Path]] = {}
    for path in paths:
        routes.setdefault(path.route, []).append(path)
    queues = list(routes.values())
    chosen: list[Path] = []
    for depth in range(max((len(queue) for queue in queues), default=0)):
        chosen.extend(queue[depth] for queue in queues if depth < len(queue))
    return chosen[:num_prompts]


def timed_generate(target: Target, prompt: list[int], max_new_tokens: int, sampling: Sampling) -> Reply:
    """One reply by transformers.generate, timed as a whole."""
    clock = Clock(target.device)
    began = clock.now()
    tokens = generate(target, [prompt], max_new_tokens, sampling)[0]
    return Reply(token_ids=tokens, total_s=clock.now() - began)


def generate(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling | None = None
) -> list[list[int]]:
    """Replies of transformers.generate, prompts left-padded into one batch, cut after the stop token.

    Greedy without a sampling setting; sampled ones use torch's own random numbers. Rows of the embedding table behind the
    tokenizer's ids are padding; generate is told to leave them out, as we do.
    """
    options: dict[str, Any] = {"do_sample": False}
    if sampling is not None and sampling.temperature > 0:
        options = {**sampling.to_dict(), "do_sample": True}
    stops = set(target.facts.stop_ids)
    padding = list(range(target.facts.num_tokens, target.facts.vocab_size))
    width = max(len(prompt) for prompt in prompts)
    tokens_BT = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask_BT[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        output = target.model.generate(
            input_ids=tokens_BT.to(target.device),
            attention_mask=mask_BT.to(target.device),
            max_new_tokens=max_new_tokens,
            **options,
            eos_token_id=sorted(stops) or None,
            pad_token_id=min(stops, default=0),
            suppress_tokens=padding or None,
        )
    replies = []
    for row in output[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
        replies.append(row[:end])
    return replies


def choose_speed_dtype(
    load_target: Callable[[str], Target], wanted: str, prompt: list[int], device: torch.device
) -> tuple[str, dict[str, float]]:
    """The dtype that is timed. `auto`, where bfloat16 is native, decodes a prompt plainly in both and takes the faster.

    Returns:
        The dtype's name, and the seconds a token took in each dtype that was tried.
    """
    if wanted != "auto" or choose_precision("auto", device).dtype == torch.float32:
        return "float32" if wanted == "auto" else wanted, {}
    seconds = {}
    for name in ("float32", "bfloat16"):
        target = load_target(name)
        decode(target, [prompt], PLAIN, 4)
        trials = [decode(target, [prompt], PLAIN, TRIAL_TOKENS)[0] for _ in range(2)]
        seconds[name] = min(sum(trial.verify_s) / max(len(trial.verify_s), 1) for trial in trials)
        del target  # before the next copy is loaded
    return min(seconds, key=lambda name: seconds[name]), seconds
