"""Peak memory and time of the training loss against the plain one, which holds every pair's logits at once.

    python bench/loss.py [--vocab 49152 151936] [--tokens 256] [--width 576] [--repeats 3]

One reply, depth 3, KL to the target over the whole vocabulary, float32, value and gradients. Each measurement runs in a
process of its own. Bytes are above what the process took before it (the kernel's VmHWM; on an accelerator its allocator's).
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEPTH = 3


def measure(way: str, vocab: int, num_tokens: int, width: int, repeats: int) -> dict[str, float]:
    """Bytes and the median of seconds of one way."""
    import torch

    from headstart.heads.contract import Rollout
    from headstart.trainer.losses import Teacher

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(0)
    batch, output_VH = make_batch(vocab, num_tokens, width, device)
    start_S = torch.arange(num_tokens - DEPTH, device=device)
    valid_SD = torch.ones(len(start_S), DEPTH, dtype=torch.bool, device=device)
    states = torch.randn(len(start_S), DEPTH, width, device=device, requires_grad=True)
    rollout, weight_VH = Rollout(states, start_S, valid_SD), (torch.randn(vocab, width, device=device) * 0.05)
    weight_VH.requires_grad_()
    teacher = Teacher(output_VH, torch.arange(vocab, device=device), torch.float32)
    seconds, before = [], peak(device, reset=True)
    for _ in range(repeats):
        began = time.perf_counter()
        {"fused": fused, "plain": plain}[way](rollout, weight_VH, batch, teacher).backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - began)
        states.grad = weight_VH.grad = None
    return {"bytes": peak(device) - before, "seconds": sorted(seconds)[len(seconds) // 2]}


def make_batch(vocab: int, num_tokens: int, width: int, device: Any) -> Any:
    """A packed batch of one random reply whose recorded log-probabilities are the target's own, and its output head."""
    import numpy as np
    import torch

    from headstart.heads.batch import pack
    from headstart.heads.paths import Path as ReplyPath

    output_VH, final_SH = torch.randn(vocab, width) * 0.05, torch.randn(num_tokens, width)
    token_N = torch.randint(0, vocab, (num_tokens + 1,))
    logprob_N = np.full(num_tokens + 1, np.nan, np.float32)
    for s in range(num_tokens):
        logprob_N[s + 1] = torch.log_softmax(output_VH @ final_SH[s], -1)[token_N[s + 1]]
    generated_N = np.arange(num_tokens + 1) >= 1
    path = ReplyPath("0", "chat", "train", token_N.numpy().astype(np.int32), generated_N, logprob_N, "length", {})
    return pack([(path, torch.zeros(num_tokens, 1), final_SH)]).to(device), output_VH.to(device)


def fused(rollout: Any, weight_VH: Any, batch: Any, teacher: Any) -> Any:
    from headstart.trainer.losses import pair_loss
    from headstart.trainer.settings import LossSettings

    normaliser = float(rollout.valid_SD.sum())
    return pair_loss(rollout, [weight_VH], batch, teacher, LossSettings(depth_decay=1.0), normaliser)[0]


def plain(rollout: Any, weight_VH: Any, batch: Any, teacher: Any) -> Any:
    """As a definition reads: two tables of log-probabilities and their KL, left to autograd."""
    import torch

    with torch.no_grad():
        p_TV = torch.log_softmax(batch.final_TH @ teacher.draft_weight_VdH.t(), -1)
    depth_D = torch.arange(DEPTH, device=p_TV.device)
    p_SDV = p_TV[rollout.start_S[:, None] + 1 + depth_D]
    q_SDV = torch.log_softmax(rollout.state_SDH @ weight_VH.t(), -1)
    return torch.nn.functional.kl_div(q_SDV, p_SDV, reduction="sum", log_target=True) / rollout.valid_SD.sum()


def peak(device: Any, reset: bool = False) -> int:
    """Most bytes since the last reset."""
    import torch

    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=["fused", "plain"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, given.vocab[0], given.tokens, given.width, given.repeats)))
        return
    print(f"{given.tokens} tokens, depth {DEPTH}, width {given.width}")
    print(f"{'vocabulary':>10}{'plain':>12}{'fused':>12}{'ratio':>8}{'plain':>12}{'fused':>12}{'ratio':>8}")
    for vocab in given.vocab:
        found = {}
        for way in ("plain", "fused"):
            sizes = ["--tokens", given.tokens, "--width", given.width, "--repeats", given.repeats]
            command = [sys.executable, __file__, "--way", way, "--vocab", vocab, *sizes]
            out = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout
            found[way] = json.loads(out)
        (a, b), (c, d) = ([found[way][key] for way in ("plain", "fused")] for key in ("bytes", "seconds"))
        print(
            f"{vocab:>10,}{a / 1e6:>9,.0f} MB{b / 1e6:>9,.0f} MB{b / a:>8.2f}{c:>10.2f} s{d:>10.2f} s{d / c:>8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
