"""The proof that the losslessness battery sees what it should: every seeded fault caught, no sound decoder accused.

Each fault is judged where a certificate judges: by the checks of `lossless.py` on replies that the reference decoder
samples, here from the built-in random target, and by enumeration and samples of the same fault on the toy. A fault that
nothing catches on the tiny target (on the toy, where only enumeration can tell), or a sound decoder that something
catches, is a failure of the battery.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.enumeration import Toy, ToyDecoder, TreeDecoder, compare
from headstart.eval.faults import CONTROLS, FAULTS, STALE_CACHE, Case, RejectedDrafter, StaleCache
from headstart.eval.identity import Rescorer, identity_check
from headstart.eval.law_tests import LEVEL
from headstart.eval.lossless import Decoder, first_tokens_check, martingale_check
from headstart.eval.speculation import PLAIN, Speculation
from headstart.eval.toy_samples import first_tokens_p, martingale_p
from headstart.heads.cache import LENGTH_STEP, PositionCache
from headstart.heads.draft import DraftModel
from headstart.heads.settings import DraftSettings, TargetSettings
from headstart.heads.target import Target, load_target

CACHE_TOKENS = 24  # tokens of a reply in the check of the cache
TINY_TOKENS = 32  # of the tiny target's ids that can be said: few, so that every sequence is met often
TINY_STOPS = tuple(range(3, TINY_TOKENS, 6))  # some of which end a reply, where the case is about that
TINY_SAMPLES = 2000  # replies whose first tokens are counted
TINY_REPLIES, TINY_LENGTH = 64, 40  # whole replies that are scored again, and their tokens
TINY_BATCH = 96
DRAFT_LENGTH = 2
FIRST_TOKENS = DRAFT_LENGTH + 2  # prefill's token, and a block that was accepted whole
NOISE = 0.1  # of the draft's weights, as a share of their spread
Check = dict[str, Any]


@dataclass(frozen=True)
class TinyBench:
    """The built-in random target, a draft model that resembles it, and a prompt."""

    target: Target
    draft: DraftModel
    prompt: list[int]

    @classmethod
    def new(cls) -> "TinyBench":
        target = load_target(TargetSettings(model="tiny", dtype="float32", device="cpu"))
        facts = replace(target.facts, num_tokens=TINY_TOKENS)
        target = Target(target.model, target.tokenizer, facts, target.taps)
        return cls(target, noisy_draft(target, NOISE), list(range(40, 52)))

    def decoder(self, case: Case, seed: int) -> Decoder:
        """The reference decoder with what is wrong in this case."""
        stop_ids = list(TINY_STOPS) if case.stops else []
        facts = replace(self.target.facts, stop_ids=stop_ids)
        target = Target(self.target.model, self.target.tokenizer, facts, self.target.taps)
        drafter = HeadDrafter(self.draft, stop_below=case.stop_below)
        way = Speculation(drafter, DRAFT_LENGTH, case.sampling, case.draft, case.rule, tree=case.tree, parts=case.parts)
        return Decoder(target, way, TINY_BATCH, seed)

    def checks(self, case: Case, seed: int, samples: int = TINY_SAMPLES, replies: int = TINY_REPLIES) -> list[Check]:
        """Both statistical checks of a certificate."""
        decoder = self.decoder(case, seed)
        names = [f"long/{i}" for i in range(replies)]
        return [
            first_tokens_check(decoder, [self.prompt], samples, FIRST_TOKENS),
            martingale_check(decoder, names, [self.prompt] * replies, TINY_LENGTH),
        ]


@torch.no_grad()
def noisy_draft(target: Target, noise: float = 0.05, seed: int = 0) -> DraftModel:
    """A draft model that often agrees with the target: all its layers, with noise as a share of their weights' spread."""
    facts = target.facts
    head = DraftModel(DraftSettings(layers=list(range(facts.num_layers))), facts, torch.arange(facts.num_tokens))
    head.load_target(target, initialise=True)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return head.eval()


def open_toy(case: Case, toy: Toy) -> ToyDecoder:
    """The toy decoder with what is wrong in this case."""
    stop_ids = frozenset([1]) if case.stops else frozenset()
    kind = TreeDecoder if case.tree else ToyDecoder
    return kind(toy, case.rule, case.sampling, case.draft, DRAFT_LENGTH, stop_ids, case.parts, case.stop_below)


def judge_case(case: Case, toy: Toy, bench: TinyBench, seed: int) -> dict[str, Any]:
    """What the battery says about one decoder: an entry of `faults`, `caught_by` null where nothing catches it."""
    wanted = "toy" if case.on_toy_only else "tiny"
    caught: list[tuple[str, str]] = []
    p_values: dict[str, float] = {}
    if not case.on_toy_only:
        checks = bench.checks(case, seed)
        p_values |= {f"{check['name']} on tiny": check["p_value"] for check in checks}
        caught += [(check["name"], "tiny") for check in checks if check["verdict"] == "fail"]
    decoder = open_toy(case, toy)
    found = compare(decoder)
    caught += [] if found.exact else [("enumeration", "toy")]
    on_toy = {"first_tokens": float(first_tokens_p(decoder, seed=seed)[0])}
    if not case.stops:  # long replies do not stop
        on_toy["martingale"] = float(martingale_p(decoder, seed=seed)[0])
    caught += [(name, "toy") for name, p_value in on_toy.items() if p_value < LEVEL]
    p_values |= {f"{name} on toy": p_value for name, p_value in on_toy.items()}
    return fault_entry(
        case.name,
        case.stands_for,
        caught,
        min(p_value for name, p_value in p_values.items() if name.endswith(wanted)),
        wanted,
        max_difference=found.law,
        acceptance_difference=found.acceptance,
        p_values=p_values,
    )


def fault_entry(
    name: str, stands_for: str, caught: Sequence[tuple[str, str]], p_value: float | None, wanted: str, **more: Any
) -> dict[str, Any]:
    """An entry of `faults`; `wanted` is the target on which a fault has to be caught."""
    first = next((check for check, target in caught if target == wanted), None)
    others = [f"{check} on {target}" for check, target in caught if (check, target) != (first, wanted)]
    return {
        "name": name,
        "caught_by": first,
        "p_value": p_value,
        "target": wanted,
        "also_caught_by": others,
        "stands_for": stands_for,
        **more,
    }


def judge_cache(target: Target, cache: type[PositionCache], name: str) -> dict[str, Any]:
    """Greedy identity of the real decoder on a cache of this kind, with drafts that are rejected."""
    # Prompts that fill their padded width: prefill then writes no position that replies write again.
    prompts = [[5 + (i * j) % 400 for j in range(LENGTH_STEP)] for i in (3, 7, 11)]
    names = [str(i) for i in range(len(prompts))]

    def replies(way: Speculation) -> list[list[int]]:
        return [reply.token_ids for reply in decode(target, prompts, way, CACHE_TOKENS, [], batch=len(prompts))]

    plain = replies(PLAIN)
    with replaced_cache(target, cache):
        found = replies(Speculation(RejectedDrafter(), 3))
    check = identity_check(Rescorer(target), names, prompts, plain, found, against="plain", draft_length=3, batch=3)
    caught = [("greedy_identity", "tiny")] if check["verdict"] == "fail" else []
    stands_for = " ".join((cache.__doc__ or "").split())
    return fault_entry(name, stands_for, caught, None, "tiny", largest_gap=check["max_difference"])


@contextmanager
def replaced_cache(target: Target, cache: type[PositionCache]) -> Iterator[None]:
    """While open, a target hands out caches of another kind."""
    target.new_cache = partial(cache, target.facts.num_layers)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.new_cache


def prove(seed: int = 0, tell: Callable[[str], None] = lambda line: None) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the battery over every fault and over sound decoders.

    Returns:
        Entries of `faults` in eval/lossless.json, and what is wrong with the battery: faults that it did not catch on
        their target, and sound decoders that something did.
    """
    toy, bench = Toy.random(vocab_size=4, draft_size=3, seed=1), TinyBench.new()
    faults = [judge_case(case, toy, bench, seed) for case in FAULTS]
    faults.append(judge_cache(bench.target, StaleCache, STALE_CACHE))
    for found in faults:
        also = f" (also {', '.join(found['also_caught_by'])})" if found["also_caught_by"] else ""
        tell(f"fault {found['name']}: caught on {found['target']} by {found['caught_by'] or 'nothing'}{also}")
    controls = [judge_case(case, toy, bench, seed) for case in CONTROLS]
    controls.append(judge_cache(bench.target, PositionCache, "sound_cache"))
    problems = [
        f"nothing caught the seeded fault {found['name']} on {found['target']}"
        for found in faults
        if not found["caught_by"]
    ]
    for control in controls:
        alarms = [control["caught_by"]] if control["caught_by"] else []
        problems += [
            f"{alarm} raised a false alarm at {control['name']}" for alarm in alarms + control["also_caught_by"]
        ]
    return faults, problems


def false_alarms(num_runs: int, seed: int = 0) -> dict[str, np.ndarray]:
    """p-values of both statistical checks over runs of sound toys: rules and samplers in turn, drawn anew each run."""
    toy = Toy.random(vocab_size=4, draft_size=3, seed=1)
    p_values: dict[str, list[np.ndarray]] = {"first_tokens": [], "martingale": []}
    shares = np.array_split(np.arange(num_runs), len(CONTROLS))
    for i, (case, share) in enumerate(zip(CONTROLS, shares, strict=True)):
        decoder = open_toy(case, toy)
        p_values["first_tokens"].append(first_tokens_p(decoder, len(share), 2_000, seed + i))
        p_values["martingale"].append(martingale_p(decoder, len(share), 2_000, seed + i))
    return {name: np.concatenate(values) for name, values in p_values.items()}


def false_alarms_on_tiny(num_runs: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The same of sound ways to decode on the tiny target, 400 replies and 960 tokens a run: slower, so fewer of them."""
    bench, sound = TinyBench.new(), [case for case in CONTROLS if not case.on_toy_only]
    p_values: dict[str, list[float]] = {"first_tokens": [], "martingale": []}
    for run in range(num_runs):
        for check in bench.checks(sound[run % len(sound)], seed + run, samples=400, replies=24):
            p_values[check["name"]].append(check["p_value"])
    return {name: np.array(values) for name, values in p_values.items()}
