"""How often intervals hold, and what a comparison detects: simulated on the prompts of a measured run, no model needed.

    python bench/coverage.py RUN [OTHER] [--draft-length N] [--replications 1000]

RUN and OTHER are names or folders of runs or checkpoints, as for `headstart compare`. The prompts of RUN (a conversation of
several turns is one of them) are taken for the whole world: its accept_len is the truth, samples of 60 and of 200 prompts
are drawn from them with replacement, and every sample gets its interval. With OTHER, its steps are scaled until it is truly
3 % better than RUN; what differs between the two from prompt to prompt stays as it was measured.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from headstart.eval.prompt_sums import PromptSums
from headstart.eval.statistics import (
    conversation_sums,
    endpoints,
    interval,
    looks,
    paired_ratio,
    ratio,
    ratio_interval,
    relative_width,
    resampling_weights,
)
from headstart.eval.tables import table
from headstart.heads.intervals import interval_text
from headstart.launch.commands import measured_head

NUM_PROMPTS = (60, 200)
REPLICATES = 2000
EFFECT = 1.03
STOPPED_FROM, STOPPED_AT = 400, 150  # prompts on hand, and about as many as the stopping rule takes of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("other", metavar="OTHER", nargs="?")
    parser.add_argument("--draft-length", type=int)
    parser.add_argument("--replications", type=int, default=1000)
    options = parser.parse_args()
    head = whole_conversations(measured_head(options.run, options.draft_length))
    whole = ratio_interval(head.tokens_R, head.steps_R, resampling_weights(len(head.tokens_R), REPLICATES, 0))
    print(
        f"{head.label}, draft length {head.conditions['draft_length']}: accept_len {interval_text(whole)} on "
        f"{len(head.tokens_R)} prompts; {options.replications} replications\n"
    )
    header = ["interval of accept_len", "prompts", "coverage", "too low", "too high", "mean width"]
    lines = [line for num in NUM_PROMPTS for line in coverage(head, num, options.replications)]
    lines.append(stopped(head, options.replications, relative_width(whole)))
    print(table(header, lines))
    if options.other:
        other = whole_conversations(measured_head(options.other, options.draft_length).ordered(head.prompt_ids))
        header = ["paired ratio", "prompts", "true ratio", "coverage", "detected", "mean width"]
        lines = [paired(head, other, num, true, options.replications) for num in NUM_PROMPTS for true in (1.0, EFFECT)]
        print(f"\n{other.label} against {head.label}\n{table(header, lines)}")


def whole_conversations(head: PromptSums) -> PromptSums:
    """The same with one entry a conversation in `tokens_R` and `steps_R`."""
    tokens_C, steps_C = (conversation_sums(x_R, head.conversations) for x_R in (head.tokens_R, head.steps_R))
    return replace(head, tokens_R=tokens_C, steps_R=steps_C)


def samples(num_world: int, num_prompts: int, replications: int) -> Iterator[np.ndarray]:
    """Indices of the prompts of each replication."""
    generator = np.random.default_rng(num_prompts)
    for _ in range(replications):
        yield generator.integers(0, num_world, num_prompts)


def coverage(head: PromptSums, num_prompts: int, replications: int) -> list[list[str]]:
    """Lines of plain percentiles and of the interval in use."""
    weights_BR = resampling_weights(num_prompts, REPLICATES, 0)
    ends: dict[str, list[tuple[float, float]]] = {"plain percentiles": [], "in use": []}
    for drawn in samples(len(head.tokens_R), num_prompts, replications):
        found_B = ratio(weights_BR @ head.tokens_R[drawn], weights_BR @ head.steps_R[drawn])
        low, high = np.quantile(found_B, [0.025, 0.975])
        ends["plain percentiles"].append((float(low), float(high)))
        ends["in use"].append(endpoints(found_B, num_prompts))
    return [coverage_line(name, str(num_prompts), truth(head), found) for name, found in ends.items()]


def stopped(head: PromptSums, replications: int, width: float) -> list[str]:
    """The line of the interval in use where `eval.stop_at_width` decides how many prompts are taken."""
    asked = width * float(np.sqrt(len(head.tokens_R) / STOPPED_AT))
    weights = {number: resampling_weights(number, REPLICATES, 0) for number in looks(STOPPED_FROM)}
    ends, taken = [], []
    for drawn in samples(len(head.tokens_R), STOPPED_FROM, replications):
        for number, weights_BR in weights.items():
            found = ratio_interval(head.tokens_R[drawn[:number]], head.steps_R[drawn[:number]], weights_BR)
            if relative_width(found) <= asked:
                break
        ends.append((found["low"] or 0.0, found["high"] or 0.0))
        taken.append(number)
    numbers = f"{min(taken)}-{max(taken)}, mean {np.mean(taken):.0f}"
    return coverage_line(f"in use, stopped at width {asked:.1%}", numbers, truth(head), ends)


def coverage_line(name: str, numbers: str, true: float, ends: list[tuple[float, float]]) -> list[str]:
    low_N, high_N = np.array(ends).T
    below, above = (high_N < true).mean(), (low_N > true).mean()
    width = (high_N - low_N).mean()
    return [name, numbers, f"{1 - below - above:.1%}", f"{below:.1%}", f"{above:.1%}", f"{width:.3f}"]


def paired(head: PromptSums, other: PromptSums, num_prompts: int, true: float, replications: int) -> list[str]:
    """The line of the paired interval; `detected` is the share of intervals that leave 1 on the true side (at 1: either)."""
    weights_BR = resampling_weights(num_prompts, REPLICATES, 0)
    steps_R = other.steps_R * (truth(other) / (true * truth(head)))
    covered, detected, widths = 0, 0, []
    for drawn in samples(len(head.tokens_R), num_prompts, replications):
        both = other.tokens_R[drawn], steps_R[drawn], head.tokens_R[drawn], head.steps_R[drawn]
        value, found_B = paired_ratio(*both, weights_BR)
        found = interval(value, found_B, num_prompts)
        low, high = found["low"] or 0.0, found["high"] or 0.0
        covered += low <= true <= high
        detected += low > 1 or (true == 1 and high < 1)
        widths.append(high - low)
    shares = (f"{covered / replications:.1%}", f"{detected / replications:.1%}", f"{np.mean(widths):.4f}")
    return ["in use", str(num_prompts), f"{true:g}", *shares]


def truth(head: PromptSums) -> float:
    return float(head.tokens_R.sum() / head.steps_R.sum())


if __name__ == "__main__":
    main()
