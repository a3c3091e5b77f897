"""The traffic stage: the target answers every prompt, and the states of what it just said become features.

Prompts are answered in fixed chunks. A chunk's features are committed before its traffic, so traffic that is recorded
always has the features of the pass that produced it, and a killed run repeats at most the chunk it was in. Features of
other taps, asked for when the traffic is already there, are read back teacher-forced.
"""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path as FilePath
from typing import Any

import torch

from headstart.heads.errors import WrongInput
from headstart.heads.paths import SPLITS, Prompt, read_part
from headstart.heads.sampling import Sampling
from headstart.heads.store import Stage, atomic_path, open_stage, remove_leftovers, stage_inputs
from headstart.heads.target import States, Target, TargetLoader
from headstart.trainer.features import (
    check_disk,
    features_inputs,
    finish,
    has,
    needs_features,
    open_features,
    stored_dtype,
    write_shard,
)
from headstart.trainer.generation import Generator as ReplyGenerator
from headstart.trainer.generation import Reply, Request
from headstart.trainer.progress import Progress
from headstart.trainer.prompts import read_prompts
from headstart.trainer.settings import TrafficSettings
from headstart.trainer.workers import in_order, num_workers

STAGE_VERSION = 1
READ_PATHS = 64  # recorded paths that are read together
NUM_NAMED = 5  # prompts listed in an error

Answers = tuple[list[Reply], list[States]]


@dataclass(frozen=True)
class Chunk:
    """Prompts of one split that are answered and committed together."""

    number: int
    split: str
    prompts: list[Prompt]
    states_dtype: torch.dtype | None  # precision that the target's states are kept in; None keeps none

    @property
    def part(self) -> str:
        return f"part-{self.number:05d}.parquet"


def make_traffic(
    load_target: TargetLoader,
    prompts: Stage,
    settings: TrafficSettings,
    root: FilePath,
    seed: int = 0,
) -> tuple[Stage, Stage]:
    """Answer all prompts of a prompts stage and keep the target's states; reuse and continue what is there.

    The train split is answered in the target's own precision, the others in `settings.eval_dtype`.

    Returns:
        The traffic stage and the features stage, both complete.

    Raises:
        WrongInput: prompts that are too long (before anything runs), or features that do not fit on the disk.
    """
    traffic = open_stage(root, "traffic", traffic_inputs(load_target, prompts, settings, seed), seed)
    traffic.forget_damaged()
    inputs = features_inputs(load_target, traffic)
    # Features of more taps serve where nothing is added to them: replies that are missing bring states of these taps only.
    features = open_features(root, inputs, seed) if traffic.complete else open_stage(root, "features", inputs, seed)
    features.forget_damaged()
    if traffic.complete and features.complete:
        return traffic, features
    remove_leftovers(traffic.folder)
    remove_leftovers(features.folder)
    chunks = plan_chunks(read_prompts(prompts.folder), settings)
    requests = render(load_target, [prompt for chunk in chunks for prompt in chunk.prompts], settings)
    todo = [chunk for chunk in chunks if not has(traffic, chunk.part) or needs_features(features, chunk)]
    missing = [chunk for chunk in todo if needs_features(features, chunk)]
    check_disk(features, missing, requests, settings, load_target)
    progress = Progress("traffic", sum(len(chunk.prompts) for chunk in todo))
    with closing(answer_chunks(load_target, traffic, todo, requests, settings, seed, progress)) as answers:
        for chunk, dtype, (replies, states) in answers:
            if states:
                write_shard(features, chunk, states, load_target.taps)
            if replies:
                write_part(traffic, chunk, requests, replies, settings, dtype)
    progress.finish()
    finish(features)
    finish(traffic)
    return traffic, features


def answer_chunks(
    load_target: TargetLoader,
    traffic: Stage,
    todo: list[Chunk],
    requests: dict[str, Request],
    settings: TrafficSettings,
    seed: int,
    progress: Progress,
) -> Generator[tuple[Chunk, str, Answers], None, None]:
    """Every chunk in order with the precision it was answered in, and its replies and states; close it to stop early."""
    longest = max(len(request.token_ids) for request in requests.values())
    for dtype, group in groupby(
        todo, lambda chunk: load_target.dtype if chunk.split == "train" else settings.eval_dtype
    ):
        target, own = load_target(dtype), list(group)

        def make_worker(target: Target = target) -> Callable[[Chunk], Answers]:
            return Answerer(target, traffic, requests, settings, longest, seed, progress)

        jobs = in_order(own, make_worker, num_workers(target, len(own)), progress.stop)
        with closing(jobs) as answers:
            for chunk, answer in zip(own, answers, strict=True):
                yield chunk, dtype, answer


class Answerer:
    """Answers chunks with one generator, or reads chunks back whose replies are recorded already."""

    def __init__(
        self,
        target: Target,
        traffic: Stage,
        requests: dict[str, Request],
        settings: TrafficSettings,
        longest: int,
        seed: int,
        progress: Progress,
    ) -> None:
        """`longest` prompt of the whole stage, so that chunks do not depend on which of them are left to do."""
        self.target, self.traffic, self.requests, self.progress = target, traffic, requests, progress
        self._make = lambda: ReplyGenerator(
            target,
            sampling_of(settings),
            settings.max_new_tokens,
            settings.slots,
            longest + settings.max_new_tokens,
            seed,
        )
        self._generator: ReplyGenerator | None = None

    def __call__(self, chunk: Chunk) -> Answers:
        """Replies (none where they are recorded) and states of every prompt of a chunk."""
        if has(self.traffic, chunk.part):
            return [], list(self._read(chunk))
        self._generator = self._generator or self._make()
        own = [self.requests[prompt.prompt_id] for prompt in chunk.prompts]
        replies = self._generator.generate(own, chunk.states_dtype, self.progress.add)
        return replies, [reply.states for reply in replies if reply.states is not None]

    def _read(self, chunk: Chunk) -> Iterator[States]:
        """States of a chunk whose replies are recorded, in its precision, a few paths at a time."""
        paths = list(read_part(self.traffic.folder / chunk.part))
        for begin in range(0, len(paths), READ_PATHS):
            few = paths[begin : begin + READ_PATHS]
            for states in self.target.read([path.token_N for path in few]):
                yield States(*(x.to("cpu", chunk.states_dtype) for x in (states.taps, states.final)))
            self.progress.add(0, len(few))


def sampling_of(settings: TrafficSettings) -> Sampling:
    return Sampling(settings.temperature, settings.top_k, settings.top_p)


def traffic_inputs(
    load_target: TargetLoader,
    prompts: Stage,
    settings: TrafficSettings,
    seed: int,
    splits: Sequence[str] = SPLITS,
) -> dict[str, Any]:
    """Everything that changes a reply; the seed does only where tokens are drawn, the target's dtype for training."""
    own = {"dtype": load_target.dtype} if "train" in splits else {"splits": list(splits)}
    values = {**asdict(settings), **own, "seed": seed if settings.temperature > 0 else None}
    return stage_inputs(STAGE_VERSION, values, {"prompts": prompts.key}, load_target.facts.fingerprint)


def plan_chunks(prompts: list[Prompt], settings: TrafficSettings, keep_states: bool = True) -> list[Chunk]:
    """Fixed chunks of at most `settings.chunk` prompts of one split, in stored order and of even size.

    A split that fills its slots twice makes two chunks at least, so that two workers share it.
    """
    chunks: list[Chunk] = []
    for split in SPLITS:
        own = [prompt for prompt in prompts if prompt.split == split]
        number = max(-(-len(own) // settings.chunk), 2 if len(own) >= 2 * settings.slots else 1)
        bounds = [round(len(own) * i / number) for i in range(number + 1)]
        for begin, end in pairwise(bounds):
            if begin < end:
                dtype = stored_dtype(split, settings) if keep_states else None
                chunks.append(Chunk(len(chunks), split, own[begin:end], dtype))
    return chunks


def render(load_target: TargetLoader, prompts: list[Prompt], settings: TrafficSettings) -> dict[str, Request]:
    """Token ids of every prompt.

    Raises:
        WrongInput: prompts longer than `traffic.max_prompt_tokens` or the target's context, the first few named.
    """
    requests: dict[str, Request] = {}
    too_long: list[str] = []
    context = load_target.facts.max_position
    limit = min(settings.max_prompt_tokens, context - 1)
    for prompt in prompts:
        request = Request(prompt.prompt_id, load_target.render(prompt))
        requests[prompt.prompt_id] = request
        if len(request.token_ids) > limit:
            too_long.append(f"{prompt.prompt_id[:12]} ({len(request.token_ids)} tokens)")
    if too_long:
        reason = "traffic.max_prompt_tokens" if limit == settings.max_prompt_tokens else "the target's context"
        raise WrongInput(
            f"prompts: found {len(too_long)} longer than {limit} tokens ({reason}): {', '.join(too_long[:NUM_NAMED])}"
            f"{', ..' if len(too_long) > NUM_NAMED else ''}.\n"
            f"Shorten or remove them, or raise traffic.max_prompt_tokens (the target's context is {context} tokens)."
        )
    if len(requests) < len(prompts):
        raise WrongInput(f"prompts: found {len(prompts) - len(requests)} repeated prompts, expected each once.")
    return requests


def write_part(
    traffic: Stage,
    chunk: Chunk,
    requests: dict[str, Request],
    replies: list[Reply],
    settings: TrafficSettings,
    dtype: str,
) -> None:
    """Commit a chunk: one Parquet row per request."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    sampling = json.dumps(sampling_of(settings).to_dict())
    rows = []
    for prompt, reply in zip(chunk.prompts, replies, strict=True):
        prompt_ids = requests[prompt.prompt_id].token_ids
        rows.append(
            {
                "prompt_id": prompt.prompt_id,
                "route": prompt.route,
                "split": prompt.split,
                "messages": json.dumps(list(prompt.messages), ensure_ascii=False),
                "template_kwargs": json.dumps(prompt.template_kwargs, ensure_ascii=False),
                "token_ids": prompt_ids + reply.token_ids,
                "generated": [False] * len(prompt_ids) + [True] * len(reply.token_ids),
                "logprob": [None] * len(prompt_ids) + reply.logprobs,
                "finish_reason": reply.finish_reason,
                "stop_token_id": reply.token_ids[-1] if reply.finish_reason == "stop" else None,
                "sampling": sampling,
                "backend": f"local-{dtype}",
                "chunk": chunk.number,
            }
        )
    text = arrow.string()
    types = dict.fromkeys(rows[0], text) | {
        "token_ids": arrow.list_(arrow.int32()),
        "generated": arrow.list_(arrow.bool_()),
        "logprob": arrow.list_(arrow.float32()),
        "stop_token_id": arrow.int32(),
        "chunk": arrow.int32(),
    }
    table = arrow.Table.from_pylist(rows, schema=arrow.schema(list(types.items())))
    with atomic_path(traffic.folder / chunk.part) as temporary:
        parquet.write_table(table, temporary)
    traffic.record(chunk.part, len(rows))
