"""Settings of prompts, traffic, features and training. No torch here."""

from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

from headstart.heads.rules import (
    Bounds,
    Conflicts,
    Count,
    NonNegative,
    PathText,
    Pattern,
    Positive,
    PositiveShare,
    Share,
)

RoleName = Annotated[
    str,
    Pattern(r"[^=]*[^=\s]\s*=\s*(system|user|assistant|tool)\s*", "NAME=ROLE: system, user, assistant or tool"),
]
TemplateValue = Annotated[
    str, Pattern(r"\s*[^\W\d]\w*\s*=.*\S.*", "NAME=VALUE with a variable of the chat template (enable_thinking=false)")
]


@dataclass(frozen=True)
class PromptSettings:
    """Where requests come from and how they are split."""

    sources: list[PathText] = field(default_factory=lambda: ["builtin"])
    """`builtin`, files or `datasets` folders of {"messages"}, {"prompt"} or {"request","response"} rows, hub:ORG/NAME."""
    heldout: PathText = "builtin"
    """Prompts that are only reported, never trained on or chosen by: `builtin` or a file."""
    routes: list[str] = field(default_factory=list)
    """Keep only these routes; empty keeps all."""
    roles: list[RoleName] = field(default_factory=list)
    """Names that files use for roles, as NAME=ROLE (my_model=assistant); human and gpt are known."""
    template_kwargs: list[TemplateValue] = field(default_factory=list)
    """Arguments of the chat template, as NAME=VALUE (enable_thinking=false); rows that say otherwise are skipped."""
    num_train: Count = 2000
    """Training prompts taken from the sources, balanced over routes; 0 takes all."""
    num_validation: Positive = 64
    """Prompts (by content hash, from the sources) that choose the best checkpoint."""
    max_per_route: Count = 0
    """Training prompts of one route at most; 0 sets no limit."""
    scrub: list[Literal["email", "phone", "ip", "card", "iban", "secret"]] = field(default_factory=list)
    """Replace these in every text of the sources, before anything is stored."""
    max_broken: Share = 0.05
    """Share of a source's rows that may be broken; above it the command does its work and ends with exit code 3."""
    num_heldout: Count = 240
    """Held-out prompts, balanced over routes; 0 takes all."""
    num_synthesized: Count = 0
    """Extra training prompts that the target writes itself from an empty user turn."""

    def conflicts(self) -> Conflicts:
        if not self.sources:
            yield (
                "sources",
                "found no source, expected at least one (validation comes from it); the default is [builtin]",
            )


MIN_TEMPERATURE = 1e-3  # logits over less leave the range of float32, or its precision


def address_problem(url: str) -> str:
    """What is wrong with the address of a server, "" if nothing; an address that may hold a secret is not quoted."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, a bracket left open
        return "found no address of a server, expected one such as http://localhost:8000"
    if "@" in url or parts.query or parts.fragment:
        return (
            "found an address with a user, a password or a query in it, which recipes and logs would keep; expected the "
            "address alone. A key goes into HEADSTART_API_KEY"
        )
    return "" if named else f"found {url!r}, expected an address such as http://localhost:8000"


@dataclass(frozen=True)
class ServerSettings:
    """OpenAI-compatible servers that run the target; HEADSTART_API_KEY, where set, goes with every request."""

    urls: list[str] = field(default_factory=list)
    """Addresses of one or more servers of the same model, such as http://gpu-1:8000."""
    engine: Literal["vllm", "sglang", "llamacpp"] = "vllm"
    """Which server it is: they name token ids and log-probabilities differently."""
    model: str = ""
    """The name under which the servers list the target."""
    concurrency: Positive = 32
    """Requests in flight at each server."""
    timeout: Positive = 600
    """Seconds one reply may take, and for which all servers may be away before the run stops."""
    retries: Count = 4
    """Times a request is asked again after an error or a broken answer."""
    max_failed: Share = 0.01
    """Share of the training prompts that may stay without a reply; more of them stop the run."""


@dataclass(frozen=True)
class TrafficSettings:
    """How the target answers."""

    backend: Literal["local", "openai"] = "local"
    """Who answers training prompts: this process, or the servers under `server`. Other splits are always answered here."""
    server: ServerSettings = field(default_factory=ServerSettings)
    """Where the replies of backend `openai` come from."""
    replies: Literal["all", "last", "recorded"] = "all"
    """Assistant turns the target answers: all in order, only the last, or (recorded) none: training rows keep their own."""
    max_new_tokens: Annotated[int, Bounds(low=2)] = 128
    """Longest reply; one cut here gets no invented stop token."""
    temperature: NonNegative = 0.0
    """0 is greedy. Serve with what you train on: figures speak of this setting."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: PositiveShare = 1.0
    """Keep the smallest set of this much mass; 1 keeps all."""
    max_prompt_tokens: Positive = 512
    """Longer requests are left out, and named in traffic/left_out.jsonl."""
    max_left_out: Share = 0.05
    """Share of the requests that may be left out, as too long or not for this chat template; with more, nothing runs."""
    slots: Positive = 64
    """Replies generated at once; a slot is refilled when its reply ends."""
    chunk: Positive = 512
    """Prompts a chunk: the unit of commit, resume and determinism."""
    eval_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of validation and held-out replies: float32, so that live replies can be held against them."""

    def conflicts(self) -> Conflicts:
        for problem in filter(None, map(address_problem, self.server.urls)):
            yield "server.urls", problem
        if self.backend == "openai":
            if not self.server.urls:
                yield (
                    "server.urls",
                    "found none, expected the address of a server that runs the target (http://HOST:PORT)",
                )
            if not self.server.model:
                yield (
                    "server.model",
                    "found none, expected the name that the servers list the target under (/v1/models)",
                )
            if self.replies == "recorded":
                yield "backend", "found openai with traffic.replies = recorded, which asks nobody; expected local"
        elif self.server.urls:
            yield (
                "server.urls",
                f"found {self.server.urls} with traffic.backend = local; expected openai, or no servers",
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            yield "temperature", f"found {self.temperature:g}, expected 0 (greedy) or at least {MIN_TEMPERATURE:g}"
        for name, keeps_all in (("top_k", 0), ("top_p", 1.0)):
            if self.temperature == 0 and (found := getattr(self, name)) != keeps_all:
                yield name, f"found {found:g} with temperature 0: greedy replies take no filter; drop one of them"


@dataclass(frozen=True)
class FeatureSettings:
    """How the target's states reach training."""

    mode: Literal["cache", "stream", "auto"] = "cache"
    """cache (all are stored, once), stream (those of training are read in each step), auto (by free disk)."""


@dataclass(frozen=True)
class LossSettings:
    """What each supervised pair is charged."""

    kind: Literal["kl", "reverse_kl", "jsd", "ce", "tv", "lk_hybrid"] = "kl"
    """kl (forward), reverse_kl, jsd (Jensen-Shannon), ce (recorded token), tv (1 - acceptance), lk_hybrid (KL to TV)."""
    depth_decay: PositiveShare = 0.8
    """Pair (t, j) weighs depth_decay ** j."""
    lk_rate: NonNegative = 3.0
    """lk_hybrid mixes lambda = exp(-lk_rate * acceptance) of KL with 1 - lambda of TV."""
    feature_weight: NonNegative = 0.0
    """Weight of smooth L1 between the head's states and the target's own, for kinds that predict states (eagle1)."""
    chunk: Positive = 1024
    """Pairs projected to the vocabulary at a time."""


@dataclass(frozen=True)
class TrainSettings:
    """The optimiser's budget, in counts so that runs repeat."""

    num_steps: Positive = 1000
    """Optimiser steps of `batch_tokens` tokens each."""
    batch_tokens: Positive = 1024
    """Tokens a step, prompts included, over all ranks and accumulation steps."""
    accumulate: Positive = 1
    """Micro-batches a step is split into; the result does not depend on it."""
    strategy: Literal["auto", "ddp", "fsdp2", "zero2", "zero3"] = "auto"
    """How processes share a head: ddp (whole on each), fsdp2, zero2 or zero3 (sharded); auto: as accelerate says, or ddp."""
    on_policy: Share = 0.0
    """Share of steps on a draft model's own continuations, scored by the target meanwhile (arXiv 2310.08461); 0 is none."""
    cut_replies: bool = True
    """Also learn from replies that a limit cut (without a stop token); false leaves them out."""
    depth: Positive = 3
    """Unroll depth: drafted tokens supervised after every start."""
    learning_rate: Annotated[float, Bounds(above=0)] = 1.5e-3
    """Peak rate of AdamW, reached after `warmup_steps`; from there it falls along a cosine."""
    warmup_steps: Count = 50
    """Steps over which the rate rises linearly to its peak."""
    final_learning_rate: Share = 0.0
    """Rate the cosine ends at, as a share of the peak."""
    weight_decay: NonNegative = 0.0
    """Decoupled decay of matrices (never of norms)."""
    clip_norm: NonNegative = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix products: auto, float32 or bfloat16 (weights and optimiser stay float32)."""
    feature_noise: NonNegative = 0.0
    """Uniform noise on the states a head reads, up to this times 512 / path length (EAGLE-1 had 0.1); 0 adds none."""
    loss: LossSettings = field(default_factory=LossSettings)
    """The loss and its weights."""
    eval_every: Positive = 250
    """Steps between measurements of acceptance on the validation split."""
    save_every: Positive = 250
    """Steps between checkpoints."""
    keep: Positive = 2
    """Checkpoints kept beside `best`."""
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl."""


PACING = ("eval_every", "save_every", "keep", "log_every", "strategy")
"""Settings of training that may change on the way: no weight depends on them, or by rounding alone."""


@dataclass(frozen=True)
class TrackingSettings:
    """Where curves are shown; metrics.jsonl is always the record."""

    wandb: bool = True
    """Log to Weights & Biases, offline unless logged in."""
    project: str = "headstart"
    """W&B project name."""
