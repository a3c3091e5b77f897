"""What engines can and cannot serve, known from the settings of a head before it is trained. No torch here."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headstart.heads.errors import WrongInput
from headstart.heads.export.card import METHODS
from headstart.heads.facts import TargetFacts
from headstart.heads.settings import (
    DraftSettings,
    Eagle1Settings,
    Eagle3Settings,
    HeadSettings,
    LayerSettings,
    MTPSettings,
)
from headstart.heads.shipped import unlike_mimo

if TYPE_CHECKING:
    from headstart.heads.contract import Head

# speculators is a layout, which vLLM loads; the others load folders of their own name.
ENGINES = ("vllm", "speculators", "sglang", "llamacpp", "transformers")
# Engines that each kind of head is written for.
WRITERS: dict[str, tuple[str, ...]] = {kind: tuple(methods) for kind, methods in METHODS.items()}


def refuse_unservable(head: "Head", engine: str) -> None:
    """Raise WrongInput with everything about the head that `engine` would ignore or misread."""
    if engine not in ENGINES:
        raise WrongInput(f"engine {engine!r}: found no writer, expected one of {', '.join(ENGINES)}.")
    if missing := unwritten(head.kind, engine):
        raise WrongInput(f"{engine}: {missing}. Until then the head is measured and decoded here only.")
    if problems := unservable(head.settings, head.facts, head.taps, engine):
        raise WrongInput(
            f"{engine} would not serve this head as it was trained:\n"
            + "\n".join(f"  - {p}" for p in problems)
            + "\nExport for another engine, or train with other head settings."
        )


def unwritten(kind: str, engine: str) -> str:
    """What to say where a kind of head has no writer for an engine; empty where it has one."""
    if engine in WRITERS.get(kind, ()):
        return ""
    written = "; ".join(f"{name} for {', '.join(engines)}" for name, engines in WRITERS.items())
    return f"found no writer for heads of kind {kind!r} yet (there are: {written})"


def unservable(settings: HeadSettings, facts: TargetFacts, taps: list[int], engine: str) -> list[str]:
    """What `engine` would ignore or misread about a head of these settings; known before it is trained."""
    if unwritten(settings.kind, engine):
        return []
    found: list[str] = []
    if isinstance(settings, DraftSettings):
        found += reduced(settings, facts, "it would draft every token")
    elif isinstance(settings, MTPSettings):
        # Engines know MTP layers as a part of some targets' own files.
        found += [] if settings.shipped else unlike_mimo(settings, facts)
        found += reduced(settings, facts, "the layer drafts through the target's whole output head")
    elif isinstance(settings, Eagle1Settings):
        found += partial_rotary(settings, facts)
        found += reduced(settings, facts, "the head drafts through the target's whole output head")
    elif isinstance(settings, Eagle3Settings):
        rope = settings.rope_parameters(facts.rope_parameters)
        found += partial_rotary(settings, facts)
        if engine == "sglang":
            found += sglang_taps(settings, facts, taps)
        if engine == "llamacpp":
            found += llamacpp_eagle3(settings, facts, taps, rope)
    return found


def reduced(settings: HeadSettings, facts: TargetFacts, reason: str) -> Iterator[str]:
    """A draft vocabulary that the engine would not keep to."""
    if 0 < (size := settings.draft_vocab_size) < facts.num_tokens:
        yield f"draft_vocab_size = {size}, expected 0: {reason}"


def partial_rotary(settings: LayerSettings, facts: TargetFacts) -> Iterator[str]:
    if settings.rope_parameters(facts.rope_parameters).get("partial_rotary_factor", 1.0) != 1.0:
        yield "rotary positions on a part of the head dimension are not supported"


def sglang_taps(settings: Eagle3Settings, facts: TargetFacts, taps: list[int]) -> Iterator[str]:
    if settings.norm_before_residual:
        yield "norm_before_residual = true is ignored"
    if taps[0] != 2:
        yield f"taps {taps}: its targets read the same layers from one list only if the first tap is 2"
    if taps[-1] == facts.num_layers:
        yield f"tap {taps[-1]} (after the last layer) is never captured"


def llamacpp_eagle3(
    settings: Eagle3Settings, facts: TargetFacts, taps: list[int], rope: dict[str, Any]
) -> Iterator[str]:
    if len(taps) != 3:
        yield f"{len(taps)} taps, exactly 3 are read"
    if settings.fc_norm:
        yield "fc_norm is not supported"
    if settings.norm_output:
        yield "norm_output = true is ignored"
    if taps[-1] == facts.num_layers:
        yield f"tap {taps[-1]} (after the last layer) exists only for targets with next-token layers"
    if rope.get("rope_type", "default") == "yarn":
        yield "yarn rotary positions are untried"
