"""The whole recipe: one dataclass whose fields are the sections of the YAML file. No torch here."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.heads.rules import Bounds, Choice, Conflicts, Pattern, Positive
from headstart.heads.settings import HEADS, Eagle3Settings, HeadSettings, TargetSettings
from headstart.trainer.settings import (
    FeatureSettings,
    PromptSettings,
    TrackingSettings,
    TrafficSettings,
    TrainSettings,
)


@dataclass(frozen=True)
class RunSettings:
    """Where results go and what makes them repeat."""

    name: Annotated[str, Pattern(r"(\w[\w.+-]*)?", "letters, digits and _ . + - only")] = ""
    """Folder under `root`; empty means the recipe file's name."""
    root: str = "runs"
    """Folder for all runs, created in the current folder."""
    store: str = ""
    """Object store that also keeps prompts, replies and states, as an fsspec URL (s3://bucket/heads); empty means none."""
    seed: Annotated[int, Bounds(low=0, high=2**63 - 1)] = 0
    """Seeds head weights, batch order and sampled replies."""
    threads: Annotated[int, Bounds(low=0, high=1024)] = 0
    """CPU threads; 0 means the cores this process may use, shared by the processes on this machine."""

    def conflicts(self) -> Conflicts:
        if self.store and not re.fullmatch(r"\w[\w.+-]*://([^/:@?]+@)?[^/:@?]*(:\d+)?(/[^?]*)?", self.store):
            # What was found is not repeated: it may hold a password.
            yield (
                "store",
                "found a text that is no plain URL, expected one such as s3://bucket/heads or file:///mnt/heads, without "
                "keys or passwords: these come from the environment",
            )


@dataclass(frozen=True)
class BakeoffSettings:
    """The rule by which all variants of a recipe are trained; a recipe without variants has no such section."""

    rule: Literal["equal_tokens", "equal_time"] = "equal_tokens"
    """equal_tokens, or equal_time: as many steps as fit into the time of the first variant's, by a short rehearsal."""
    rehearsal_steps: Positive = 20
    """Optimiser steps of each variant that are timed for equal_time."""


@dataclass(frozen=True)
class Recipe:
    """Everything a run depends on."""

    run: RunSettings = field(default_factory=RunSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    prompts: PromptSettings = field(default_factory=PromptSettings)
    traffic: TrafficSettings = field(default_factory=TrafficSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    head: Annotated[HeadSettings, Choice("kind", HEADS)] = field(default_factory=Eagle3Settings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    export: ExportSettings = field(default_factory=ExportSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def conflicts(self) -> Conflicts:
        longest = self.traffic.max_new_tokens
        reply = f"a reply has at most traffic.max_new_tokens = {longest} tokens, so nothing of that depth is ever met"
        if self.train.depth >= longest:
            yield "train.depth", f"found {self.train.depth}; {reply}"
        if max(self.eval.draft_lengths) >= longest:
            yield "eval.draft_lengths", f"found {self.eval.draft_lengths}; {reply}"
        deepest = max(self.eval.trees, key=len, default=[])
        if len(deepest) >= longest:
            yield "eval.trees", f"found {deepest}, {len(deepest)} deep; {reply}"
        largest = max(self.eval.vocab_sizes, default=0)
        if 0 < (own := self.head.draft_vocab_size) <= largest:
            yield "eval.vocab_sizes", f"found {largest}, expected less than head.draft_vocab_size = {own}, which is cut"
        widest = max((max(tree) for tree in self.eval.trees), default=0)
        if 0 < (most_tokens := self.head.draft_vocab_size) < widest:
            yield (
                "eval.trees",
                f"found {widest} children of one node, expected at most head.draft_vocab_size = {most_tokens}: they are "
                "different draft tokens",
            )
        if (noise := self.train.feature_noise) and self.head.continues_text:
            yield (
                "train.feature_noise",
                f"found {noise:g}, expected 0: {self.head.kind} heads read no states of the target",
            )
        if (weight := self.train.loss.feature_weight) and not self.head.predicts_final:
            able = ", ".join(kind for kind, cls in HEADS.items() if cls().predicts_final)
            yield (
                "train.loss.feature_weight",
                f"found {weight:g}, expected 0: the states of {self.head.kind} do not stand for the target's ({able}'s do)",
            )
        if (share := self.train.on_policy) and not self.head.continues_text:
            able = ", ".join(kind for kind, cls in HEADS.items() if cls().continues_text)
            text = (
                f"found {share:g}, expected 0: {self.head.kind} cannot go on without the target's states ({able} can)"
            )
            yield "train.on_policy", text
        elif share and self.train.loss.kind == "ce":
            text = f"found ce with train.on_policy = {share:g}, where the token said is the draft's own; expected kl, tv, .."
            yield "train.loss.kind", text
        if (most := self.head.max_depth) is not None:
            heads = f"head.{self.head.depth_setting} = {most}, the tokens that {self.head.kind} can draft"
            if self.train.depth != most:
                yield "train.depth", f"found {self.train.depth}, expected {heads}"
            for name in ("draft_lengths", "speed_draft_lengths"):
                if max(found := getattr(self.eval, name)) > most:
                    yield f"eval.{name}", f"found {found}, expected at most {heads}"
            if len(deepest) > most:
                yield "eval.trees", f"found {deepest}, {len(deepest)} deep, expected at most {heads}"
