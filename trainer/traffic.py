"""The traffic stage: the target answers every prompt, and the states of what it just said become features.

Conversations are answered turn by turn (`trainer/conversations.py`), or keep the replies that they bring
(`trainer/recorded.py`), in fixed chunks of prompts. Servers that hold the target may answer training prompts
(`trainer/served.py`); validation and held-out replies, by which heads are judged, are always made here. Several processes
deal the chunks out in rounds: each writes the files of its own, and the first one commits those of all. A chunk's features
are committed before its traffic, so traffic that is there has the features of the pass that read it, where they are stored,
and a killed run repeats at most the chunks it was in. Features of other taps or splits, asked for when the traffic is there
already, are read back teacher-forced.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path as FilePath
from typing import Any

import torch

from headstart.heads.object_store import ObjectStore
from headstart.heads.paths import SPLITS, UNKNOWN, Prompt, read_part
from headstart.heads.sampling import Sampling
from headstart.heads.store import Stage, atomic_path, open_stage, stage_inputs
from headstart.heads.target import States, Target, TargetLoader
from headstart.trainer.conversations import Answered, Conversation, answer_turns, longest_request, prompt_limit
from headstart.trainer.features import (
    check_disk,
    features_inputs,
    finish,
    has,
    needs_features,
    of_other_replies,
    open_features,
    stored_dtype,
    write_shard,
)
from headstart.trainer.generation import Generator as ReplyGenerator
from headstart.trainer.progress import Progress
from headstart.trainer.prompts import read_prompts
from headstart.trainer.ranks import Ranks
from headstart.trainer.recorded import plan_traffic, read_recorded
from headstart.trainer.rounds import in_rounds
from headstart.trainer.served import AHEAD, Failed, Served, backend_name
from headstart.trainer.settings import TrafficSettings
from headstart.trainer.workers import num_workers

STAGE_VERSION = 1
READ_PATHS = 64  # recorded paths that are read together


@dataclass
class Answers:
    """What a chunk got."""

    chunk: "Chunk"
    backend: str = ""  # who gave the rows
    rows: list[Answered] = field(default_factory=list)
    states: dict[str, States] = field(default_factory=dict)  # by prompt id, in the order of the rows
    ended: Counter[str] = field(default_factory=Counter)  # why conversations ended before their last turn

    @classmethod
    def of(cls, chunk: "Chunk", backend: str, rows: list[Answered], ended: Counter[str] | None = None) -> "Answers":
        states = {row.request.prompt_id: row.reply.states for row in rows if row.reply.states is not None}
        return cls(chunk, backend, rows, states, ended or Counter())


@dataclass(frozen=True)
class Share:
    """Chunks in a row that are answered in the same way, as far as this process answers them: one a round."""

    dtype: str  # precision of the target here
    served: bool  # whether servers answer
    chunks: list["Chunk"]
    num_rounds: int  # as many as a process has that has the most


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
    ranks: Ranks | None = None,
    stored: Sequence[str] = SPLITS,
    store: ObjectStore | None = None,
) -> tuple[Stage, Stage]:
    """Answer all prompts of a prompts stage and keep the target's states; reuse and continue what is there.

    The train split is answered in the target's own precision, the others in `settings.eval_dtype`.

    Args:
        ranks: processes that share the work; all of them call this with the same arguments.
        stored: splits whose states are kept.
        store: where both stages are kept too, and taken from.

    Returns:
        The traffic stage and the features stage, both complete, as the first process knows them.

    Raises:
        WrongInput: too many requests that cannot be asked (before anything runs), or features that do not fit on the disk.
    """
    ranks = ranks or Ranks()
    with ranks.first_before_others():
        traffic, features = open_stages(
            load_target, prompts, settings, root, seed, stored, mend=ranks.first, store=store
        )
    if traffic.complete and features.complete:
        return traffic, features
    asked = read_prompts(prompts.folder)
    planned = plan_traffic(load_target, asked, settings)
    talks = planned.conversations
    print("".join(f"{line}\n" for line in planned.describe()), end="", flush=True)
    if ranks.first:
        planned.write(traffic.folder)
    chunks = plan_chunks([prompt for prompt in asked if prompt.prompt_id in talks], settings, stored)
    todo = [chunk for chunk in chunks if not has(traffic, chunk.part) or needs_features(features, chunk)]
    missing = [chunk for chunk in todo if needs_features(features, chunk)]
    check_disk(features, rows_of(missing, talks), settings, load_target)
    own = shares(todo, traffic, load_target.dtype, settings, ranks)
    longest = settings.max_new_tokens if settings.replies != "recorded" else math.inf
    progress = Progress("traffic", num_requests([chunk for share in own for chunk in share.chunks], talks), longest)
    with closing(answer_chunks(load_target, traffic, own, talks, settings, seed, progress, ranks)) as answers:
        for found in answers:
            commit(found, traffic, features, load_target.taps, settings, ranks)
    progress.finish()
    if ranks.first:
        finish(features)
        finish(traffic)
    return traffic, features


def open_stages(
    load_target: TargetLoader,
    prompts: Stage,
    settings: TrafficSettings,
    root: FilePath,
    seed: int,
    stored: Sequence[str],
    mend: bool,
    store: ObjectStore | None,
) -> tuple[Stage, Stage]:
    """Traffic and features, begun, interrupted or complete.

    With `mend` they go on from what the store has, and what is damaged or left over is cleared away.
    """
    traffic = open_stage(root, "traffic", traffic_inputs(load_target, prompts, settings, seed), seed)
    traffic.keep_in(store)
    if mend:
        traffic.mend()
    inputs = features_inputs(load_target, traffic, stored)
    # Features of more serve where nothing is added to them: replies that are missing bring these taps and splits only.
    features = open_features(root, inputs, seed) if traffic.complete else open_stage(root, "features", inputs, seed)
    features.keep_in(store)
    if mend:
        features.mend()
        features.forget(of_other_replies(features, traffic), "of other replies")
    return traffic, features


def shares(
    todo: list[Chunk], traffic: Stage, dtype: str, settings: TrafficSettings, ranks: Ranks | None = None
) -> list[Share]:
    """What this process has to answer of the chunks that are left; `dtype` is the target's own precision."""
    ranks = ranks or Ranks()

    def how(chunk: Chunk) -> tuple[str, bool]:
        train = chunk.split == "train"
        served = train and settings.backend == "openai" and not has(traffic, chunk.part)
        return dtype if train else settings.eval_dtype, served

    return [
        Share(*key, group[ranks.rank :: ranks.world], -(-len(group) // ranks.world))
        for key, group in ((key, list(found)) for key, found in groupby(todo, how))
    ]


def answer_chunks(
    load_target: TargetLoader,
    traffic: Stage,
    own: Sequence[Share],
    talks: Mapping[str, Conversation],
    settings: TrafficSettings,
    seed: int,
    progress: Progress,
    ranks: Ranks | None = None,
) -> Generator[Answers | None, None, None]:
    """This process's chunks in order, answered, in rounds that end as `in_rounds` says. Close it to stop early."""
    ranks = ranks or Ranks()
    longest = longest_request(talks)
    if any(len(talk.turns) > 1 for talk in talks.values()):
        # The text of a reply may take more tokens in a history than the reply had.
        longest = max(longest, prompt_limit(load_target, settings))
    ended: Counter[str] = Counter()
    for share in own:
        target = load_target(share.dtype)
        workers = num_workers(target, len(share.chunks))
        with ExitStack() as stack:
            servers, stop = None, progress.stop
            if share.served:
                failed = Failed(settings.server.max_failed, traffic, num_requests(share.chunks, talks))
                servers = Served(target, settings, sampling_of(settings), seed, progress, failed)
                stack.enter_context(servers)
                with target.together():
                    if share.chunks:
                        servers.check([talks[prompt.prompt_id].requests[0] for prompt in share.chunks[0].prompts])
                stop = servers.stop
                if not target.sharded:  # whose processes take turns: chunk by chunk, each in one thread
                    workers = max(workers, min(AHEAD, len(share.chunks)))

            def make_worker(target: Target = target, servers: Served | None = servers) -> Callable[[Chunk], Answers]:
                return Answerer(target, traffic, talks, settings, longest, seed, progress, servers)

            rounds = in_rounds(share.chunks, make_worker, workers, stop, share.num_rounds, target, ranks)
            for answer in stack.enter_context(closing(rounds)):
                if answer is not None:
                    ended += answer.ended
                yield answer
    everywhere: Counter[str] = sum(ranks.collect(ended), Counter())
    for reason, number in everywhere.most_common():
        print(f"{number:,} conversations ended before their last turn: {reason}")


def commit(
    answers: Answers | None, traffic: Stage, features: Stage, taps: list[int], settings: TrafficSettings, ranks: Ranks
) -> None:
    """Write what a round gave here; the first process commits the files of all, a chunk's features before its traffic."""
    parts = write_part(traffic, answers, settings) if answers and answers.rows else {}
    shards = {}
    if answers and answers.states:
        of = {**traffic.outputs, **parts}[answers.chunk.part]["sha256"]
        shards = write_shard(features, answers.chunk, answers.states, taps, of)
    for theirs in ranks.collect((shards, parts)):
        if ranks.first:
            features.put(theirs[0])
            traffic.put(theirs[1])
    publish(features, shards, ranks)
    publish(traffic, parts, ranks)


def publish(stage: Stage, own: dict[str, Any], ranks: Ranks) -> None:
    """Bring a round that is committed here into the store, if there is one: each puts its `own` files there."""
    if stage.copy is None:
        return
    stage.send(own)
    others = ranks.collect(own)
    if ranks.first:
        stage.copy.others_sent(others)
        stage.publish()


class Answerer:
    """Answers chunks with one generator, or reads chunks back whose replies are recorded already."""

    def __init__(
        self,
        target: Target,
        traffic: Stage,
        talks: Mapping[str, Conversation],
        settings: TrafficSettings,
        longest: int,
        seed: int,
        progress: Progress,
        servers: Served | None = None,
    ) -> None:
        """`longest` request of the whole stage, so that chunks do not depend on which of them are left to do."""
        self.target, self.traffic, self.talks, self.settings, self.progress = target, traffic, talks, settings, progress
        self.servers = servers
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
        """Rows (none where they are written already) and states of every request of a chunk."""
        if has(self.traffic, chunk.part):
            return Answers(chunk, states=dict(self._read(chunk)))
        talks = [self.talks[prompt.prompt_id] for prompt in chunk.prompts]
        dtype = str(self.target.dtype).removeprefix("torch.")
        if keeps_replies(chunk, self.settings):
            rows = read_recorded(self.target, talks, chunk.states_dtype, self.progress.add)
            return Answers.of(chunk, f"recorded-{dtype}", rows)
        if self.servers is not None:
            backend = backend_name(self.settings)
            ask = partial(self.servers.generate, states_dtype=chunk.states_dtype, chunk=chunk.number)
        else:
            backend = f"local-{dtype}"
            self._generator = self._generator or self._make()
            ask = partial(self._generator.generate, states_dtype=chunk.states_dtype, progress=self.progress.add)
        return Answers.of(chunk, backend, *answer_turns(self.target, talks, self.settings, ask))

    def _read(self, chunk: Chunk) -> Iterator[tuple[str, States]]:
        """States of a chunk whose rows are written, in its precision, a few paths at a time."""
        paths = list(read_part(self.traffic.folder / chunk.part))
        for begin in range(0, len(paths), READ_PATHS):
            few = paths[begin : begin + READ_PATHS]
            for path, states in zip(few, self.target.read([path.token_N for path in few]), strict=True):
                yield path.prompt_id, States(*(x.to("cpu", chunk.states_dtype) for x in (states.taps, states.final)))
            self.progress.add(0, len(few))


def keeps_replies(chunk: Chunk, settings: TrafficSettings) -> bool:
    """Whether a chunk's replies are those of the sources."""
    return settings.replies == "recorded" and chunk.split == "train"


def sampling_of(settings: TrafficSettings) -> Sampling:
    return Sampling(settings.temperature, settings.top_k, settings.top_p)


def traffic_inputs(
    load_target: TargetLoader,
    prompts: Stage,
    settings: TrafficSettings,
    seed: int,
    splits: Sequence[str] = SPLITS,
) -> dict[str, Any]:
    """Everything that changes a reply; the seed does only where tokens are drawn, the target's dtype for training.

    Of servers it is the engine and the name of the model, wherever they are and however they are asked.
    """
    own: dict[str, Any] = {"dtype": load_target.dtype} if "train" in splits else {"splits": list(splits)}
    values = {**asdict(settings), **own, "seed": seed if settings.temperature > 0 else None}
    backend, server = values.pop("backend"), values.pop("server")
    del values["max_left_out"]  # a verdict on the requests, not a choice of them
    if "train" in splits and backend != "local":
        values |= {"backend": backend, "server": {name: server[name] for name in ("engine", "model")}}
    return stage_inputs(STAGE_VERSION, values, {"prompts": prompts.key}, load_target.facts.fingerprint)


def plan_chunks(prompts: list[Prompt], settings: TrafficSettings, stored: Sequence[str] = SPLITS) -> list[Chunk]:
    """Fixed chunks of at most `settings.chunk` prompts of one split, in stored order and of even size.

    States are kept of the splits that are `stored`. A split that fills its slots twice makes two chunks at least, so that
    two workers share it.
    """
    chunks: list[Chunk] = []
    for split in SPLITS:
        own = [prompt for prompt in prompts if prompt.split == split]
        number = max(-(-len(own) // settings.chunk), 2 if len(own) >= 2 * settings.slots else 1)
        bounds = [round(len(own) * i / number) for i in range(number + 1)]
        for begin, end in pairwise(bounds):
            if begin < end:
                dtype = stored_dtype(split, settings) if split in stored else None
                chunks.append(Chunk(len(chunks), split, own[begin:end], dtype))
    return chunks


def num_requests(chunks: Sequence[Chunk], talks: Mapping[str, Conversation]) -> int:
    """Requests that chunks ask, rows or not."""
    return sum(len(talks[prompt.prompt_id].requests) for chunk in chunks for prompt in chunk.prompts)


def rows_of(chunks: Sequence[Chunk], talks: Mapping[str, Conversation]) -> list[tuple[str, int]]:
    """Split, and the most prompt tokens, of every row that chunks will have."""
    return [
        (chunk.split, tokens)
        for chunk in chunks
        for prompt in chunk.prompts
        for tokens in talks[prompt.prompt_id].kept_tokens
    ]


def write_part(traffic: Stage, answers: Answers, settings: TrafficSettings) -> dict[str, Any]:
    """Write a chunk, one Parquet row per request; the file that is to be committed."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    chunk = answers.chunk
    kept = keeps_replies(chunk, settings)
    sampling = json.dumps(UNKNOWN if kept else sampling_of(settings).to_dict())
    rows = []
    for row in answers.rows:
        prompt, prompt_ids, reply = row.prompt, row.request.token_ids, row.reply
        rows.append(
            {
                "prompt_id": row.request.prompt_id,
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
                "backend": answers.backend,
                "chunk": chunk.number,
                "conversation": row.conversation,
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
    return {chunk.part: traffic.describe(chunk.part, len(rows))}
