"""How long pieces of the stages take here: a few replies, passes, steps and a validation, made by the stages' own code.

What replies take is told by three numbers, fitted to the passes of a sample. A pass that reads takes a time for each prompt
token. One that goes on with n replies takes one_pass + reply_token x n: weights are read once, whatever n is. With them the
passes of a whole chunk are added up, as its slots would be filled (`seconds_of_chunk`).
"""

import heapq
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path as FilePath

import numpy as np

from headstart.heads.memory import keep_freed_memory
from headstart.heads.paths import Path, read_part
from headstart.heads.store import Stage, hash_json, open_stage
from headstart.heads.target import Target, TargetLoader
from headstart.trainer.conversations import Conversation
from headstart.trainer.data import EvaluationRows
from headstart.trainer.features import features_inputs
from headstart.trainer.loop import Job, measure, optimizer_step
from headstart.trainer.progress import Progress
from headstart.trainer.ranks import Ranks
from headstart.trainer.settings import TrafficSettings
from headstart.trainer.traffic import (
    Chunk,
    Share,
    answer_chunks,
    commit,
    keeps_replies,
    num_requests,
    traffic_inputs,
)
from headstart.trainer.workers import in_order

UNTIMED = 2  # first steps meet new shapes and empty caches


def seconds_per_step(job: Job, num_steps: int, budget: float = float("inf")) -> float:
    """Median time of the job's first steps, after those that are not timed. Its head is changed, and of no more use.

    Args:
        num_steps: that are timed at most; none begins after `budget` seconds but the first.
    """
    keep_freed_memory()
    seconds: list[float] = []
    started = time.perf_counter()
    for step in range(1, UNTIMED + num_steps + 1):
        began = time.perf_counter()
        if len(seconds) > UNTIMED and began - started > budget:
            break
        optimizer_step(job, step)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[UNTIMED:])


def seconds_of_validation(job: Job, validation: EvaluationRows) -> float:
    """A measurement of acceptance on the validation replies."""
    seconds: float = measure(job, validation)["validation/seconds"]
    return seconds


def seconds_to_load_batches(rows: EvaluationRows) -> float:
    """Reading stored states and packing them, for a token."""
    began = time.perf_counter()
    tokens = sum(batch.offsets[-1] for batch in rows)
    return (time.perf_counter() - began) / tokens


def seconds_to_read(target: Target, token_ids: Sequence[np.ndarray], workers: int) -> float:
    """What a worker takes for the states of a token, while all of them read."""
    target.read([token_ids[0]])
    jobs = [list(token_ids[worker::workers]) for worker in range(workers)]
    began = time.perf_counter()
    for _ in in_order([job for job in jobs if job], lambda: target.read, workers):
        pass
    return (time.perf_counter() - began) * workers / sum(len(ids) - 1 for ids in token_ids)


@dataclass(frozen=True)
class Pass:
    """One pass of a worker."""

    seconds: float
    tokens: int  # of replies that it gave
    read: int  # prompt tokens; 0: it went on with replies


class Stopwatch(Progress):
    """The progress of a sample, which also keeps what every pass took."""

    def __init__(self, total: int) -> None:
        super().__init__("sample", total)
        self.passes: list[Pass] = []
        self._started = time.perf_counter()
        self._since: dict[int, float] = {}  # by worker

    def add(self, tokens: int, finished: int, read: int = 0) -> None:
        worker = threading.get_ident()
        self.passes.append(Pass(time.perf_counter() - self._since.get(worker, self._started), tokens, read))
        super().add(tokens, finished, read)
        self._since[worker] = time.perf_counter()


@dataclass(frozen=True)
class ReplyTimes:
    """Seconds that replies take a worker, and how long replies are."""

    prompt_token: float
    one_pass: float
    reply_token: float
    lengths: list[float]

    @classmethod
    def of(cls, passes: Sequence[Pass], lengths: list[float]) -> "ReplyTimes":
        reading = [one for one in passes if one.read]
        going_on = [one for one in passes if not one.read]
        prompt_token = sum(one.seconds for one in reading) / max(sum(one.read for one in reading), 1)
        return cls(prompt_token, *line([one.tokens for one in going_on], [one.seconds for one in going_on]), lengths)

    @classmethod
    def of_recorded(cls, passes: Sequence[Pass], paths: Sequence[Path]) -> "ReplyTimes":
        """Of replies that are read, not made: a token is a token."""
        each = sum(one.seconds for one in passes) / sum(len(path.token_N) for path in paths)
        return cls(each, 0.0, each, [path.num_reply_tokens for path in paths])


def line(tokens: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, b) of the line a + b x tokens that is closest to the seconds, neither of them negative."""
    if not tokens:
        return 0.0, 0.0
    (a, b), *_ = np.linalg.lstsq(np.stack([np.ones(len(tokens)), tokens], 1), np.array(seconds), rcond=None)
    if b < 0:
        return statistics.mean(seconds), 0.0
    return (0.0, sum(seconds) / sum(tokens)) if a < 0 else (float(a), float(b))


def seconds_of_chunk(
    times: ReplyTimes, prompt_tokens: Sequence[int], slots: int, lengths: Sequence[float] = ()
) -> float:
    """What a worker takes for a chunk of requests.

    Args:
        lengths: of the replies; default: those of the sample, over and over.
    """
    lengths = lengths or list(islice(cycle(times.lengths), len(prompt_tokens)))
    reading, passes, given = work_of_chunk(prompt_tokens, lengths, slots)
    return times.prompt_token * reading + times.one_pass * passes + times.reply_token * given


def work_of_chunk(prompt_tokens: Sequence[int], lengths: Sequence[float], slots: int) -> tuple[int, float, float]:
    """Prompt tokens that are read, passes that go on with replies, and tokens these give.

    The first token of a reply comes from the pass that reads its prompt. A slot is refilled when its reply ends, with the
    longest prompt that waits.
    """
    order = sorted(range(len(lengths)), key=lambda i: (prompt_tokens[i], i), reverse=True)
    return sum(prompt_tokens), makespan([lengths[i] - 1 for i in order], slots), sum(lengths) - len(lengths)


def makespan(jobs: Iterable[float], workers: int) -> float:
    """When the last of the jobs ends that so many workers take in this order, each the next one as soon as it is free."""
    ends = [0.0] * workers
    for job in jobs:
        heapq.heapreplace(ends, ends[0] + job)
    return max(ends)


def unlimited(lengths: Sequence[int], cut: Sequence[bool], rest: int) -> list[float]:
    """Lengths of replies, of which some were cut, as they are expected where `rest` more tokens are allowed.

    Replies go on to end at each token as often as those of the sample did.
    """
    rate = (len(cut) - sum(cut)) / sum(lengths)
    more = (1 - (1 - rate) ** rest) / rate if rate else rest
    return [length + more * was_cut for length, was_cut in zip(lengths, cut, strict=True)]


def rehearse_replies(
    load_target: TargetLoader,
    chunks: Sequence[Chunk],
    talks: Mapping[str, Conversation],
    settings: TrafficSettings,
    most_tokens: int,
    root: FilePath,
    seed: int,
) -> tuple[ReplyTimes, Stage, Stage]:
    """Answer a few chunks of one split, one a worker, by the target in this process.

    Args:
        most_tokens: of a reply, where `settings` allow more.
        root: folder of the traffic and the features that come of it.

    Returns:
        What it took, and the two stages, finished.
    """
    limited = replace(settings, max_new_tokens=min(settings.max_new_tokens, most_tokens))
    prompts = Stage(FilePath(), {"key": hash_json([prompt.prompt_id for chunk in chunks for prompt in chunk.prompts])})
    traffic = open_stage(root, "traffic", traffic_inputs(load_target, prompts, limited, seed), seed)
    features = open_stage(root, "features", features_inputs(load_target, traffic), seed)
    dtype = load_target.dtype if chunks[0].split == "train" else settings.eval_dtype
    load_target(dtype)
    watch = Stopwatch(num_requests(chunks, talks))
    share = Share(dtype, served=False, chunks=list(chunks), num_rounds=len(chunks))
    with closing(answer_chunks(load_target, traffic, [share], talks, limited, seed, watch)) as answers:
        for found in answers:
            commit(found, traffic, features, load_target.taps, limited, Ranks())
    for stage in (features, traffic):
        stage.finish()
    paths = [path for chunk in chunks for path in read_part(traffic.folder / chunk.part)]
    if keeps_replies(chunks[0], settings):
        return ReplyTimes.of_recorded(watch.passes, paths), traffic, features
    told, cut = [path.num_reply_tokens for path in paths], [path.finish_reason == "length" for path in paths]
    lengths = unlimited(told, cut, settings.max_new_tokens - limited.max_new_tokens)
    return ReplyTimes.of(watch.passes, lengths), traffic, features
