"""Reply tokens/s of the traffic stage's generator on this machine, prefill and kept states included.

    python bench/traffic.py [--target smollm2-135m] [--dtype bfloat16 float32] [--prompts 256] [--slots 64]
                            [--threads 0] [--max-new-tokens 128]

Greedy replies to built-in prompts, answered as the stage answers them: chunks of even size, one worker a thread. `plain` is
one request at a time through the same forward; `generate` is transformers' own loop, one request at a time, and as many
together as all workers have slots, a batch going on until its last reply has ended: what that costs hangs on how much the
lengths differ (at 128 tokens two thirds of SmolLM2's replies run into the limit, at 512 a third). Replies of the two at that
batch are compared token by token: in float32 all are equal. Every rate is measured in this one run, after a warm-up;
processor time stands beside it, because other work on the machine takes some of the time of either.
"""

import argparse
import time
from collections.abc import Callable

import torch

from headstart.eval.timings import generate as generated
from headstart.heads.sampling import Sampling
from headstart.heads.settings import TargetSettings
from headstart.heads.target import Target, TargetLoader
from headstart.launch.threads import apply_threads, choose_threads
from headstart.trainer.generation import Generator, Reply, Request
from headstart.trainer.templates import builtin_prompts
from headstart.trainer.workers import in_order, num_workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    threads = choose_threads(options.threads, 1)
    apply_threads(threads)
    print(
        f"{options.target}, {options.prompts} prompts, at most {options.max_new_tokens} new tokens, threads {threads}"
    )
    print(
        f"{'dtype':10}{'what':>22}{'replies':>9}{'tokens':>9}{'seconds':>9}{'tokens/s':>10}{'cpu s':>9}{'tokens/cpu s':>14}"
    )
    loader = TargetLoader(TargetSettings(model=options.target))
    everything = builtin_prompts()
    prompts = everything[:: max(1, len(everything) // options.prompts)][: options.prompts]
    requests = [Request(prompt.prompt_id, loader.render(prompt)) for prompt in prompts]
    for dtype in options.dtype:
        target = loader(dtype)
        batched(target, requests[: 2 * options.slots : 2], options.slots, 8)
        own, own_rate = show(
            dtype,
            f"{options.slots} slots",
            lambda t=target: batched(t, requests, options.slots, options.max_new_tokens),
        )
        batch = options.slots * num_workers(target, len(requests))  # as many requests in flight
        together = [requests[i : i + batch] for i in range(0, len(requests), batch)]
        generate(target, together[0], 2)
        theirs, their_rate = show(
            dtype,
            f"generate, batch {batch}",
            lambda t=target, b=together: [r for batch in b for r in generate(t, batch, options.max_new_tokens)],
        )
        by_prompt = {r.prompt_id: reply.token_ids for r, reply in zip(chunked(requests, target), own, strict=True)}
        equal = sum(by_prompt[r.prompt_id] == reply.token_ids for r, reply in zip(requests, theirs, strict=True))
        print(
            f"{dtype:10}{own_rate[0] / their_rate[0]:.2f} times as fast, {own_rate[1] / their_rate[1]:.2f} by processor "
            f"time; {equal} of {len(requests)} replies equal",
            flush=True,
        )
        few = requests[:: max(1, len(requests) // 6)][:6]
        batched(target, few[:1], 1, 8)
        show(dtype, "plain", lambda t=target, f=few: batched(t, f, 1, options.max_new_tokens, workers=1))
        show(dtype, "generate", lambda t=target, f=few: [generate(t, [r], options.max_new_tokens)[0] for r in f])


def show(dtype: str, what: str, run: Callable[[], list[Reply]]) -> tuple[list[Reply], tuple[float, float]]:
    """Time it, print its line, and return the replies with their tokens per second, of the clock and of processors."""
    began, cpu_began = time.perf_counter(), time.process_time()
    replies = run()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    tokens = sum(len(reply.token_ids) for reply in replies)
    line = f"{dtype:10}{what:>22}{len(replies):9}{tokens:9,}{seconds:9.1f}{tokens / seconds:10.1f}"
    print(f"{line}{cpu:9.1f}{tokens / cpu:14.1f}", flush=True)
    return replies, (tokens / seconds, tokens / cpu)


def batched(
    target: Target, requests: list[Request], slots: int, max_new_tokens: int, workers: int | None = None
) -> list[Reply]:
    """Replies as the stage makes them, from the number of chunks a worker pool shares evenly."""
    longest = max(len(request.token_ids) for request in requests)
    workers = workers or num_workers(target, len(requests))
    chunks = split(requests, workers)

    def make_worker() -> Callable[[list[Request]], list[Reply]]:
        generator = Generator(target, Sampling(), max_new_tokens, slots, longest + max_new_tokens)
        return lambda chunk: generator.generate(chunk, torch.bfloat16)

    return [reply for replies in in_order(chunks, make_worker, workers) for reply in replies]


def split(requests: list[Request], workers: int) -> list[list[Request]]:
    return [requests[i::workers] for i in range(workers)]


def chunked(requests: list[Request], target: Target) -> list[Request]:
    """Requests in the order in which `batched` gives their replies."""
    return [request for chunk in split(requests, num_workers(target, len(requests))) for request in chunk]


def generate(target: Target, requests: list[Request], max_new_tokens: int) -> list[Reply]:
    """Replies of transformers' own loop to requests in one left-padded batch, each up to its stop token."""
    return [Reply(ids) for ids in generated(target, [request.token_ids for request in requests], max_new_tokens)]


if __name__ == "__main__":
    main()
