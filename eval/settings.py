"""Settings of evaluation and export. No torch here."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EvalSettings:
    """What is measured before anything is exported."""

    draft_lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    """Draft lengths of the acceptance table (exact, from one pass over the recorded paths)."""
    draft_length: int = 4
    """The draft length reported first, and tracked during training."""
    live_prompts: int = 0
    """Held-out prompts decoded live to prove greedy identity; 0 means all."""
    live_batch: int = 8
    """Requests decoded together in the live loop."""
    speed_prompts: int = 16
    """Held-out prompts timed at concurrency 1, balanced over routes."""
    speed_new_tokens: int = 96
    """Longest timed reply."""
    speed_repeats: int = 4
    """Timings of each prompt and setting, interleaved ABBA."""
    speed_draft_lengths: list[int] = field(default_factory=lambda: [2, 3, 4])
    """Draft lengths that are timed."""
    speed_dtype: str = "auto"
    """auto times plain decoding in float32 and bfloat16 and takes the faster."""
    ngram: bool = True
    """Measure n-gram (prompt) lookup beside the head."""
    replicates: int = 2000
    """Bootstrap replicates, drawn over prompts."""
    min_accept_len: float = 1.0
    """Gate: a held-out accept_len whose interval lies below this fails."""
    min_speedup: float = 0.0
    """Gate: a best speedup below this fails; 0 only reports."""


@dataclass(frozen=True)
class ExportSettings:
    """Which folders are written once the gate has passed."""

    engines: list[str] = field(default_factory=lambda: ["vllm"])
    """vllm, sglang, llamacpp: all three read the EAGLE-3 folder, each gets its own card and launch line."""
    dtype: str = "auto"
    """Precision of the written tensors: auto (the target's own), float32 or bfloat16."""
