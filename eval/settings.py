"""Settings of evaluation and export. No torch here."""

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Literal

from headstart.heads.rules import Conflicts, Count, NonNegative, PathText, Positive, Share

MAX_NODES = 1024  # of a tree that is measured; engines verify some tens


@dataclass(frozen=True)
class EvalSettings:
    """What is measured before anything is exported."""

    draft_lengths: list[Positive] = field(default_factory=lambda: [1, 2, 3, 4])
    """Draft lengths of the acceptance table (exact, from one pass over the recorded paths)."""
    draft_length: Positive = 4
    """The draft length that the gate, the card and the tables by route speak of, and that training tracks."""
    live_prompts: Count = 0
    """Held-out prompts decoded live, to hold the replies against the recorded and the computed ones; 0 means all."""
    live_batch: Positive = 8
    """Requests decoded together in the live loop."""
    concurrency: list[Positive] = field(default_factory=lambda: [1])
    """Requests that run together where speed is timed; each is compared with plain decoding at the same concurrency."""
    speed_prompts: Positive = 16
    """Held-out prompts that are timed, balanced over routes; more where 6 groups of `concurrency` need more."""
    speed_new_tokens: Positive = 96
    """Longest timed reply, in tokens."""
    speed_repeats: Positive = 4
    """Timings of each prompt and setting, interleaved ABBA."""
    speed_draft_lengths: list[Positive] = field(default_factory=lambda: [2, 3, 4])
    """Draft lengths that are timed."""
    speed_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto takes the faster of float32 and, where it is native, bfloat16; bfloat16 where held-out replies are."""
    trees: list[list[Positive]] = field(default_factory=list)
    """Static trees of greedy drafts to measure (exact, offline): children per node by depth, as in [[3, 2, 1]]."""
    vocab_sizes: list[Positive] = field(default_factory=list)
    """Also measure the head with its draft vocabulary cut to so many tokens, those most used in training replies."""
    ngram: bool = True
    """Measure n-gram (prompt) lookup, and suffix lookup offline, beside the head."""
    stop_below: Share = 0.0
    """Also time the longest draft, ended where the product of confidences falls below this; 0 times none."""
    previous: PathText = ""
    """The head in use so far (a run, checkpoint or export folder): measured beside the new one and compared, paired."""
    replicates: Positive = 2000
    """Bootstrap replicates, drawn over prompts."""
    stop_at_width: NonNegative = 0.0
    """Take held-out prompts until accept_len's interval is at most this wide, as a share of it (0.04); 0 takes all."""
    lossless_samples: Positive = 1024
    """Sampled replies whose first tokens are held against the target's law: with `--lossless`, and at a temperature."""
    lossless_tokens: Positive = 4096
    """Tokens of whole sampled replies that are scored again: with `--lossless`, and at a temperature."""
    min_accept_len: NonNegative = 1.0
    """Gate: a held-out accept_len whose interval lies below this fails."""
    min_speedup: NonNegative = 0.0
    """Gate: a best speedup at the lowest measured concurrency below this fails; 0 only reports."""
    fail_slow_plain: bool = True
    """Gate: plain decoding slower than transformers.generate fails, for speedups over it would mean nothing."""

    def conflicts(self) -> Conflicts:
        if self.vocab_sizes != sorted(set(self.vocab_sizes)):
            yield "vocab_sizes", f"found {self.vocab_sizes}, expected numbers, ascending and without repeats"
        for i, tree in enumerate(self.trees):
            if not tree or tree in self.trees[:i]:
                yield (
                    "trees",
                    f"found {tree} in place {i}, expected children per node at one or more depths, each tree once",
                )
            elif (num_nodes := sum(accumulate(tree, mul))) > MAX_NODES:
                yield "trees", f"found {tree} with {num_nodes} nodes, expected at most {MAX_NODES}"
        if self.draft_lengths and self.draft_length not in self.draft_lengths:
            yield "draft_length", f"found {self.draft_length}, expected one of draft_lengths = {self.draft_lengths}"
        for name in ("draft_lengths", "speed_draft_lengths", "concurrency"):
            numbers = getattr(self, name)
            if not numbers or numbers != sorted(set(numbers)):
                yield name, f"found {numbers}, expected one or more numbers, ascending and without repeats"


Engine = Literal["vllm", "speculators", "sglang", "trtllm", "llamacpp", "transformers"]


@dataclass(frozen=True)
class ExportSettings:
    """Which folders are written once the gate has passed."""

    engines: list[Engine] = field(default_factory=lambda: ["vllm"])
    """vllm, sglang, trtllm, llamacpp; speculators (vLLM's other layout); transformers (draft models). [] writes none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the written tensors: auto (the target's own), float32 or bfloat16."""
