"""The reference decoder: speculative decoding of a batch of requests, greedy or sampled, with chains or trees of drafts.

Plain decoding is this very code at draft length 0: same forward, cache, dtype and loop, so a speed-up against it is a
speed-up. One step of a request, with `position` that of its last emitted token x_{t+1}:

    propose   d_1 .. d_k after x_{t+1}                       (the drafter; k is capped by what is left)
    forward   x_{t+1}, d_1 .. d_k at position .. position + k  (one pass of the target)
    verify    keep the drafts the target agrees with, and add its own next token from the same pass
    roll back nothing: the next step writes over the rejected positions

A tree of drafts takes the same way: its nodes lie side by side in the cache, each sees its own branch only, and keys and
values of the kept ones are moved together before the next step.

Rows accept different numbers of drafts and stop at different times; a finished row leaves the batch. Greedy replies are
judged all at once by their largest logits; sampled ones row by row by the rules of `verify.py`, with random numbers that
belong to the request. There are no grammars or penalties here: a rule that depends on what was emitted before would have
to be asked again after every draft.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headstart.eval.drafters import Proposal, Session, padded
from headstart.eval.judge import Judge, new_judge
from headstart.eval.replies import Reply
from headstart.eval.speculation import Speculation
from headstart.eval.verify import Uniforms
from headstart.heads.cache import LENGTH_STEP, PositionCache
from headstart.heads.errors import WrongInput
from headstart.heads.sampling import request_generator
from headstart.heads.target import States, Target


class Clock:
    """Wall-clock laps that wait for the device, so that asynchronous work is charged to the phase that caused it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type != "cpu" else None
        self._last = self.now()

    def now(self) -> float:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        last, self._last = self._last, self.now()
        return self._last - last


@torch.inference_mode()
def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    way: Speculation,
    max_new_tokens: int,
    stop_ids: Sequence[int] | None = None,
    *,
    batch: int = 1,
    seed: int = 0,
    request_ids: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Reply]:
    """Decode prompts (token ids), `batch` at a time.

    Args:
        stop_ids: tokens that end a reply; default: the target's.
        seed, request_ids: what a request's random numbers come from; by default its index is its id. A reply does not
            depend on the batch size or on the order of requests.
        progress: called with (finished, all) requests after every batch.

    Raises:
        WrongInput: an empty prompt, one that leaves no room in the target's context, or a tree asked of a drafter of chains.
    """
    context = target.facts.max_position
    for prompt in prompts:
        if not 0 < len(prompt) < context:
            raise WrongInput(
                f"found a prompt of {len(prompt)} tokens, expected 1 to {context - 1}: {target.facts.name!r} has a "
                f"context of {context}.\nShorten the prompt, or choose a target with a longer context."
            )
    stops = set(target.facts.stop_ids if stop_ids is None else stop_ids)
    names = [str(i) for i in range(len(prompts))] if request_ids is None else list(request_ids)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    replies: list[Reply | None] = [None] * len(prompts)
    for begin in range(0, len(order), batch):
        group = order[begin : begin + batch]
        judge = new_judge(way, [Uniforms(request_generator(names[i], seed)) for i in group])
        decoded = decode_batch(target, [list(prompts[i]) for i in group], way, judge, max_new_tokens, stops)
        for i, reply in zip(group, decoded, strict=True):
            replies[i] = reply
        if progress is not None:
            progress(begin + len(group), len(order))
    return [reply for reply in replies if reply is not None]


def decode_batch(
    target: Target,
    prompts: list[list[int]],
    way: Speculation,
    judge: Judge,
    max_new_tokens: int,
    stop_ids: set[int],
) -> list[Reply]:
    """Decode requests that run together from prefill to the end of the longest reply."""
    clock = Clock(target.device)
    began = clock.now()
    context = target.facts.max_position
    limits = [min(max_new_tokens, context - len(prompt)) for prompt in prompts]
    room = max(len(prompt) for prompt in prompts) + max_new_tokens + way.num_slots + 1
    cache = target.new_cache(len(prompts), min(room, context + way.num_slots))
    replies = [Reply() for _ in prompts]
    states, last_BH = prefill(target, prompts, cache)
    first_tokens = judge.first_tokens(target.logits(last_BH))
    for reply, token, limit in zip(replies, first_tokens, limits, strict=True):
        reply.token_ids.append(token)
        reply.finish_reason = "stop" if token in stop_ids else "length" if limit == 1 else ""
        reply.first_token_s = reply.total_s = clock.now() - began
    session = way.drafter.start(prompts, first_tokens, states, room) if way.drafter and way.draft_length else None
    active = list(range(len(prompts)))  # request of each batch row
    while active := leave_finished(active, replies, prompts, cache, session):
        clock.lap()
        position = [len(prompts[i]) + len(replies[i].token_ids) - 1 for i in active]
        left = [None if way.whole_blocks else limits[i] - len(replies[i].token_ids) for i in active]
        caps = [draft_cap(way, p, remaining, context) for p, remaining in zip(position, left, strict=True)]
        if session is not None and max(caps) > 0:
            proposal = judge.propose(session, active, caps)
        else:
            proposal = Proposal(torch.zeros(len(active), 0, dtype=torch.int64, device=target.device), [0] * len(active))
        draft_s = clock.lap()
        last = torch.tensor([[replies[i].token_ids[-1]] for i in active], device=target.device)
        states = target.forward(
            torch.cat((last, proposal.tokens_BK), dim=1),
            torch.tensor(position, device=target.device),
            cache,
            torch.tensor([length + 1 for length in proposal.length_B], device=target.device),
            trees=proposal.trees,
        )
        blocks = judge.blocks(active, target.logits(states.final), proposal)
        states = keep_path(states, cache, position, proposal, blocks)
        verify_s = clock.lap()
        for row, i in enumerate(active):
            way.parts.append(replies[i], blocks[row], proposal.depth_below(row, blocks[row]), limits[i], stop_ids)
        if session is not None:
            session.accept(states, blocks)
            draft_s += clock.lap()
        for i in active:
            replies[i].draft_s.append(draft_s)
            replies[i].verify_s.append(verify_s)
            replies[i].total_s = clock.now() - began
    return replies


def prefill(target: Target, prompts: list[list[int]], cache: PositionCache) -> tuple[States, Tensor]:
    """Read the prompts in one pass: their states, and the final state [B, H] that each reply's first token follows.

    A prompt that several requests share is read once, and its keys and values are copied.
    """
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    source_B = [distinct[tuple(prompt)] for prompt in prompts]
    tokens_BT = padded(list(distinct), target.device, multiple=LENGTH_STEP)
    length_B = torch.tensor([len(prompt) for prompt in distinct], device=target.device)
    states = target.forward(tokens_BT, torch.zeros_like(length_B), cache, length_B)
    # From the last row on: a source lies at or before its row, so none is overwritten before it was copied.
    for row in reversed(range(len(prompts))):
        if row != source_B[row]:
            cache.move_row(source_B[row], row, len(prompts[row]))
    states = States(states.taps[source_B], states.final[source_B])
    length_B = length_B[source_B]
    last_BH = states.final[torch.arange(len(prompts), device=target.device), length_B - 1]
    return states, last_BH


def keep_path(
    states: States, cache: PositionCache, position: list[int], proposal: Proposal, blocks: list[list[int]]
) -> States:
    """After a tree: the cache as if only its kept path had been fed, and the states of that path [B, 1 + most kept]."""
    if proposal.trees is None:
        return states
    device = states.final.device
    path_BK = padded([proposal.path(row, block) for row, block in enumerate(blocks)], device)
    start_B = torch.tensor(position, device=device)
    if path_BK.shape[1] > 1:
        cache.move_slots(start_B[:, None] + path_BK[:, 1:], start_B + 1)
    row_B1 = torch.arange(len(blocks), device=device)[:, None]
    return States(states.taps[row_B1, path_BK], states.final[row_B1, path_BK])


def draft_cap(way: Speculation, position: int, remaining: int | None, context: int) -> int:
    """How many tokens may be drafted after `position`: within the reply, the target's context and the drafter's."""
    cap = min(way.draft_length, context - 1 - position)
    if remaining is not None:
        cap = min(cap, remaining)
    if way.drafter is not None and way.drafter.max_position is not None:
        cap = min(cap, way.drafter.max_position - position + 1)  # the first draft is made one slot before `position`
    return max(cap, 0)


def leave_finished(
    active: list[int], replies: list[Reply], prompts: list[list[int]], cache: PositionCache, session: Session | None
) -> list[int]:
    """Drop finished rows from cache and session; the rest move up in order."""
    keep = [row for row, i in enumerate(active) if not replies[i].finish_reason]
    if len(keep) == len(active) or not keep:
        return [active[row] for row in keep]
    for row, source in enumerate(keep):
        if row != source:
            i = active[source]
            cache.move_row(source, row, len(prompts[i]) + len(replies[i].token_ids))
    if session is not None:
        session.select(keep)
    return [active[row] for row in keep]
