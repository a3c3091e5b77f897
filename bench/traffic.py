"""Reply tokens/s of the traffic stage's generator on this machine, prefill and kept states included.

    python bench/traffic.py [--target smollm2-135m] [--dtype bfloat16 float32] [--prompts 256] [--slots 64]
                            [--threads 0] [--max-new-tokens 128]

Greedy replies of mixed length to built-in prompts, answered as the stage answers them: chunks of even size, one worker a
thread. `plain` is one request at a time through the same forward; `generate` is transformers' own loop, one request at a
time. Every rate is measured in this one run, after a warm-up.
"""

import argparse
import time
from collections.abc import Callable

import torch

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
    print(f"{'dtype':10}{'what':>22}{'replies':>9}{'tokens':>9}{'seconds':>9}{'tokens/s':>10}")
    loader = TargetLoader(TargetSettings(model=options.target))
    everything = builtin_prompts()
    prompts = everything[:: max(1, len(everything) // options.prompts)][: options.prompts]
    requests = [Request(prompt.prompt_id, loader.render(prompt)) for prompt in prompts]
    for dtype in options.dtype:
        target = loader(dtype)
        batched(target, requests[: 2 * options.slots : 2], options.slots, 8)
        show(
            dtype,
            f"{options.slots} slots",
            lambda t=target: batched(t, requests, options.slots, options.max_new_tokens),
        )
        few = requests[:: max(1, len(requests) // 6)][:6]
        batched(target, few[:1], 1, 8)
        show(dtype, "plain", lambda t=target, f=few: batched(t, f, 1, options.max_new_tokens, workers=1))
        show(dtype, "generate", lambda t=target, f=few: transformers_loop(t, f, options.max_new_tokens))


def show(dtype: str, what: str, run: Callable[[], list[Reply]]) -> None:
    began = time.perf_counter()
    replies = run()
    seconds = time.perf_counter() - began
    tokens = sum(len(reply.token_ids) for reply in replies)
    print(f"{dtype:10}{what:>22}{len(replies):9}{tokens:9,}{seconds:9.1f}{tokens / seconds:10.1f}", flush=True)


def batched(
    target: Target, requests: list[Request], slots: int, max_new_tokens: int, workers: int | None = None
) -> list[Reply]:
    """Replies as the stage makes them, from the number of chunks a worker pool shares evenly."""
    longest = max(len(request.token_ids) for request in requests)
    workers = workers or num_workers(target, len(requests))
    chunks = [requests[i::workers] for i in range(workers)]

    def make_worker() -> Callable[[list[Request]], list[Reply]]:
        generator = Generator(target, Sampling(), max_new_tokens, slots, longest + max_new_tokens)
        return lambda chunk: generator.generate(chunk, torch.bfloat16)

    return [reply for replies in in_order(chunks, make_worker, workers) for reply in replies]


@torch.inference_mode()
def transformers_loop(target: Target, requests: list[Request], max_new_tokens: int) -> list[Reply]:
    replies = []
    for request in requests:
        tokens = torch.tensor([request.token_ids], device=target.device)
        output = target.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=target.facts.stop_ids,
            pad_token_id=target.facts.stop_ids[0],
        )
        replies.append(Reply(output[0, len(request.token_ids) :].tolist()))
    return replies


if __name__ == "__main__":
    main()
