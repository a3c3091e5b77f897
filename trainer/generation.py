"""The target answers: many requests share one batch, and a slot is refilled when its reply ends.

A reply depends on its prompt, the sampling rule and its own random numbers, not on the requests beside it. Where a
device's matrix products round differently for other shapes, the chunk of requests is the unit that repeats bit by bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headstart.heads.cache import PositionCache
from headstart.heads.sampling import Sampling, request_uniforms, sample
from headstart.heads.target import States, Target

# Prompt tokens (padding included) of one prefill pass, and what prompt lengths are rounded up to.
PREFILL_TOKENS = 4096
PREFILL_STEP = 16


@dataclass(frozen=True)
class Request:
    """A rendered prompt."""

    prompt_id: str
    token_ids: list[int]


@dataclass
class Reply:
    """What one request got; `logprobs` are under the raw target (temperature 1, no filter)."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""  # stop | length | error
    error: str = ""  # why there is no reply
    states: States | None = None  # of every token fed: prompt and reply but for the last token


@dataclass
class Slot:
    """A request in progress."""

    index: int
    request: Request
    reply: Reply
    limit: int
    uniforms: np.ndarray | None
    buffer: int  # row of the state buffer, which does not move with the cache row

    @property
    def position(self) -> int:
        """Position of the reply's last token, which is fed next."""
        return len(self.request.token_ids) + len(self.reply.token_ids) - 1


class Generator:
    """Greedy or sampled replies for one chunk of requests after another."""

    def __init__(
        self, target: Target, sampling: Sampling, max_new_tokens: int, num_slots: int, max_length: int, seed: int = 0
    ) -> None:
        """`max_length` bounds prompt plus reply in tokens; cache and state buffers are allocated once for it."""
        self.target = target
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.num_slots = num_slots
        self.max_length = min(max_length, target.facts.max_position)
        self.seed = seed
        self.cache: PositionCache = target.new_cache(num_slots, self.max_length)
        self._stops = set(target.facts.stop_ids)
        facts = target.facts
        shape = (num_slots, self.max_length)
        options = {"dtype": target.dtype, "device": target.device}
        self._taps_SLF = torch.empty(*shape, len(target.taps) * facts.hidden_size, **options)  # type: ignore[call-overload]
        self._final_SLH = torch.empty(*shape, facts.hidden_size, **options)  # type: ignore[call-overload]

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        states_dtype: torch.dtype | None = None,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> list[Reply]:
        """Answer all requests, longest prompt first, in their given order.

        Args:
            states_dtype: precision that the states of a reply are kept in; None keeps none.
            progress: called after every pass with the number of new reply tokens, of finished replies, and of prompt tokens
                that were read, 0 where the pass only went on with replies.
        """
        replies = [Reply() for _ in requests]
        waiting = sorted(range(len(requests)), key=lambda i: (len(requests[i].token_ids), i))  # pop() takes the longest
        slots: list[Slot] = []
        free_buffers = list(range(self.num_slots))
        while waiting or slots:
            # Waiting for a few free slots makes prefill passes worth their while.
            enough = max(1, self.num_slots // 8)
            if waiting and self.num_slots - len(slots) >= min(enough, len(waiting)):
                new = self._take(requests, replies, waiting, free_buffers, self.num_slots - len(slots))
                self._prefill(new, len(slots), states_dtype is not None)
                num_new, read = len(new), sum(len(slot.request.token_ids) for slot in new)
                slots += new
            else:
                self._step(slots, states_dtype is not None)
                num_new, read = len(slots), 0
            finished = self._finish(slots, free_buffers, states_dtype)
            if finished and slots:
                self.cache.shrink(max(slot.position for slot in slots) + 1)
            if progress is not None:
                progress(num_new, finished, read)
        return replies

    def _take(
        self,
        requests: Sequence[Request],
        replies: list[Reply],
        waiting: list[int],
        free_buffers: list[int],
        room: int,
    ) -> list[Slot]:
        width = round_up(len(requests[waiting[-1]].token_ids))
        number = max(1, min(room, len(waiting), PREFILL_TOKENS // width))
        new = []
        for _ in range(number):
            i = waiting.pop()
            request = requests[i]
            limit = min(self.max_new_tokens, self.max_length - len(request.token_ids))
            uniforms = None
            if self.sampling.temperature > 0:
                uniforms = request_uniforms(request.prompt_id, self.seed, limit)
            new.append(Slot(i, request, replies[i], limit, uniforms, free_buffers.pop()))
        return new

    def _prefill(self, new: list[Slot], first_row: int, keep_states: bool) -> None:
        """Read prompts into the cache rows from `first_row` on and emit each reply's first token."""
        device = self.target.device
        lengths = [len(slot.request.token_ids) for slot in new]
        tokens_BT = torch.zeros(len(new), round_up(max(lengths)), dtype=torch.int64)
        for row, slot in enumerate(new):
            tokens_BT[row, : lengths[row]] = torch.tensor(slot.request.token_ids)
        length_B = torch.tensor(lengths)
        states = self.target.forward(
            tokens_BT.to(device),
            torch.zeros(len(new), dtype=torch.int64, device=device),
            self.cache,
            length_B.to(device),
            torch.arange(first_row, first_row + len(new), device=device),
        )
        if keep_states:
            for row, slot in enumerate(new):
                self._taps_SLF[slot.buffer, : lengths[row]] = states.taps[row, : lengths[row]]
                self._final_SLH[slot.buffer, : lengths[row]] = states.final[row, : lengths[row]]
        self._emit(new, states.final[torch.arange(len(new)), length_B - 1])

    def _step(self, slots: list[Slot], keep_states: bool) -> None:
        """Feed every slot's last token and emit its next."""
        device = self.target.device
        position_B = torch.tensor([slot.position for slot in slots], device=device)
        tokens_B1 = torch.tensor([[slot.reply.token_ids[-1]] for slot in slots], device=device)
        states = self.target.forward(tokens_B1, position_B, self.cache)
        if keep_states:
            buffer_B = torch.tensor([slot.buffer for slot in slots], device=device)
            self._taps_SLF[buffer_B, position_B] = states.taps[:, 0]
            self._final_SLH[buffer_B, position_B] = states.final[:, 0]
        self._emit(slots, states.final[:, 0])

    def _emit(self, slots: list[Slot], final_BH: Tensor) -> None:
        logits_BV = self.target.logits(final_BH)
        uniforms_B = None
        if self.sampling.temperature > 0:
            drawn = [slot.uniforms[len(slot.reply.token_ids)] for slot in slots if slot.uniforms is not None]
            uniforms_B = torch.tensor(drawn, dtype=torch.float64, device=logits_BV.device)
        tokens_B = sample(logits_BV, self.sampling, uniforms_B)
        logprob_B = logits_BV.gather(1, tokens_B[:, None]).squeeze(1) - logits_BV.logsumexp(-1)
        for slot, token, logprob in zip(slots, tokens_B.tolist(), logprob_B.tolist(), strict=True):
            reply = slot.reply
            reply.token_ids.append(token)
            reply.logprobs.append(logprob)
            if token in self._stops:
                reply.finish_reason = "stop"
            elif len(reply.token_ids) == slot.limit:
                reply.finish_reason = "length"

    def _finish(self, slots: list[Slot], free_buffers: list[int], states_dtype: torch.dtype | None) -> int:
        """Take finished replies out and close the gaps, so that live rows are the first rows of the cache."""
        finished = 0
        for row in range(len(slots) - 1, -1, -1):
            slot = slots[row]
            if not slot.reply.finish_reason:
                continue
            finished += 1
            free_buffers.append(slot.buffer)
            if states_dtype is not None:
                kept = (buffer[slot.buffer, : slot.position] for buffer in (self._taps_SLF, self._final_SLH))
                slot.reply.states = States(*(states.to("cpu", states_dtype, copy=True) for states in kept))
            last = slots.pop()
            if last is not slot:
                self.cache.move_row(len(slots), row, last.position + 1)
                slots[row] = last
        return finished


def round_up(length: int) -> int:
    """Few widths, so that the CPU library meets few matrix shapes."""
    return -(-length // PREFILL_STEP) * PREFILL_STEP
