"""Checks of a recipe against its target and prompts, before anything is computed: config and tokenizer, no weights."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from headstart.heads.checkpoint import KINDS
from headstart.heads.errors import WrongInput
from headstart.heads.export.scheme import unservable, unwritten
from headstart.heads.object_store import ObjectStore
from headstart.heads.start import Start
from headstart.heads.target import TargetLoader
from headstart.heads.target_facts import check_taps
from headstart.heads.vocabulary import always_drafted
from headstart.heads.warm_start import start_problems
from headstart.heads.weight_files import check_parts
from headstart.launch.needs import measure_needs
from headstart.launch.previous import previous_folder
from headstart.launch.processes import Processes
from headstart.launch.recipe import VARIANTS, describe, place_of
from headstart.launch.schema import Problem
from headstart.launch.settings import Recipe
from headstart.launch.start import find_start
from headstart.launch.variants import Loaded, stored_taps
from headstart.trainer.left_out import LeftOut
from headstart.trainer.prompts import BUILTIN, PromptSet, gather
from headstart.trainer.recorded import Planned, plan_traffic
from headstart.trainer.settings import PromptSettings
from headstart.trainer.sources import source_path

T = TypeVar("T")
SHOWN_SKIPS = 10  # skipped prompt rows that `check` names
Findings = list[tuple[str, str]]
"""Dotted key of the setting at fault, and what is wrong."""


@dataclass(frozen=True)
class Checked:
    """What the checks found on the way; a plan is made of it."""

    target: TargetLoader
    prompts: PromptSet
    planned: Planned
    """The requests of every prompt; none where rendering was not asked for."""
    starts: dict[str, Start]
    """The heads that heads start from, by variant; the only head has no name."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What a run does again: gathering prompts, and rendering requests for traffic."""


def check_loaded(
    loaded: Loaded,
    path: Path,
    overrides: list[str],
    render: bool = True,
    need_weights: bool = True,
    here: bool = True,
    processes: Processes | None = None,
) -> Checked:
    """Check everything that can be known without weights, of every variant.

    Args:
        render: whether to render every prompt, and find those that cannot be asked.
        need_weights: whether the target's weights have to be there; a plan needs its config and tokenizer only.
        here: whether this machine has to be large enough; a plan may be made on another one.
        processes: those that will run it; default: one.

    Raises:
        WrongInput: with every problem found, each with its place in the recipe.
    """
    recipe, processes = loaded.shared, processes or Processes()
    found: Findings = []
    target = attempt(found, "target.model", lambda: TargetLoader(recipe.target, need_weights=need_weights))
    began = time.perf_counter()
    prompts = read_prompts(found, recipe.prompts, path.parent)
    seconds = {"prompts": time.perf_counter() - began, "traffic": 0.0}
    attempt(found, "target.device", lambda: check_device(recipe.target.device))
    if here and recipe.run.store:
        attempt(found, "run.store", lambda: ObjectStore(recipe.run.store).check())
    root = Path(recipe.run.root).expanduser()
    starts: dict[str, Start] = {}
    for name, own in loaded.recipes.items():
        problems = gate_problems(own) + sharded_problems(own)
        start = attempt(problems, "head.init_from", partial(recipe_start, own, root))
        starts |= {} if start is None else {name: start}
        found += in_variant(name, problems)
    planned = None
    if target is not None:
        found += target_problems(recipe, target)
        for name, own in loaded.recipes.items():
            found += in_variant(name, head_problems(own, target, starts.get(name)))
        target.taps = stored_taps(loaded.recipes.values(), target.taps)
        facts = target.facts
        attempt(found, "eval.previous", lambda: previous_folder(recipe.eval.previous, root, facts))
        if prompts is not None and render and target.tokenizer.chat_template:
            began = time.perf_counter()
            planned = attempt(found, "prompts.sources", partial(plan_traffic, target, prompts.prompts, recipe.traffic))
            seconds["traffic"] = time.perf_counter() - began
        if recipe.target.sharded and target.has_weights:
            attempt(found, "target.sharded", lambda: check_parts(facts.name, target.folder))
        if here and not found:
            needs = attempt(found, "target.model", lambda: measure_needs(loaded, target, processes))
            found += [] if needs is None or needs.fits else [("target.model", needs.refusal())]
    if found or target is None or prompts is None:
        raise WrongInput(describe(path, [Problem(place_of(path, overrides, key), key, text) for key, text in found]))
    return Checked(target, prompts, planned or Planned({}, LeftOut()), starts, seconds)


def read_prompts(found: Findings, settings: PromptSettings, base: Path) -> PromptSet | None:
    """All prompts, or None with a finding for each source that cannot be read; one missing file does not hide another."""
    before = len(found)
    for key, name in (("prompts.heldout", settings.heldout), *(("prompts.sources", name) for name in settings.sources)):
        if name != BUILTIN:
            attempt(found, key, partial(source_path, name, base, key))
    return attempt(found, "prompts", lambda: gather(settings, base)) if len(found) == before else None


def recipe_start(recipe: Recipe, root: Path) -> Start | None:
    """The head that a recipe starts from. Raises WrongInput: there is none, or it is a checkpoint of this very run."""
    start = find_start(recipe.head.init_from, root)
    if start is not None and start.folder.is_relative_to((root / recipe.run.name).resolve()):
        raise WrongInput(f"found {start.folder}, a part of this run; give this run another name: run.name=NAME")
    return start


def in_variant(name: str, found: Findings) -> Findings:
    """Findings under the keys of a variant; of a recipe for one head as they are."""
    return [(f"{VARIANTS}.{name}.{key}" if name else key, text) for key, text in found]


def attempt(found: Findings, key: str, read: Callable[[], T]) -> T | None:
    """The result of `read`, or None with its WrongInput noted under `key`, or under the key that it names itself."""
    try:
        return read()
    except WrongInput as error:
        named = re.match(r"(\w+\.\w+): ", str(error))
        found.append((named[1], str(error)[named.end() :]) if named else (key, str(error)))
        return None


def check_device(name: str) -> None:
    """Refuse a device that torch does not know or this machine does not have."""
    if name in ("auto", "cpu"):
        return
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WrongInput(f"found {name!r}, expected auto, cpu or a device of this machine: {reason}") from None


def target_problems(recipe: Recipe, target: TargetLoader) -> Findings:
    """Settings of prompts and traffic that do not fit this target."""
    found = []
    facts = target.facts
    if not target.tokenizer.chat_template:
        text = f"{target.folder} has a tokenizer without chat template, which chat prompts need"
        text += "; put a chat_template.jinja beside it or choose an instruction-tuned target"
        found.append(("target.model", text))
    longest = recipe.traffic.max_prompt_tokens + recipe.traffic.max_new_tokens
    if longest > facts.max_position:
        text = f"prompt and reply may take {longest} tokens, but the target's context is {facts.max_position}"
        text += f"; expected at most {facts.max_position - recipe.traffic.max_new_tokens}"
        found.append(("traffic.max_prompt_tokens", text))
    return found


def head_problems(recipe: Recipe, target: TargetLoader, start: Start | None) -> Findings:
    """Settings of a head that do not fit this target, or the head that it starts from."""
    found: Findings = []
    facts, taps = target.facts, recipe.head.asked_taps or target.taps
    attempt(found, "head.taps", lambda: check_taps(recipe.target.model, taps, facts.num_layers))
    attempt(found, "head", lambda: KINDS[recipe.head.kind].check(recipe.head, target))
    if recipe.head.draft_vocab_size > facts.num_tokens:
        text = f"found {recipe.head.draft_vocab_size}, but the target's tokenizer has {facts.num_tokens} tokens"
        found.append(("head.draft_vocab_size", f"{text}; 0 takes them all"))
    always = len(always_drafted(facts))
    if 0 < recipe.head.draft_vocab_size < always:
        text = f"found {recipe.head.draft_vocab_size}, but {always} special and stop tokens are always in"
        found.append(("head.draft_vocab_size", text))
    for engine in recipe.export.engines:
        if missing := unwritten(recipe.head.kind, engine):
            found.append(("export.engines", f"{engine}: {missing}; set it to []"))
        problems = unservable(recipe.head, facts, taps, engine)
        found += [("export.engines", f"{engine} would not serve this head: {problem}") for problem in problems]
    if start is not None:
        folder = target.folder
        attempt(found, "head.init_from", lambda: found.extend(start_problems(start, recipe.head, facts, folder)))
    return found


def gate_problems(recipe: Recipe) -> Findings:
    """Exports that the gate would refuse whatever the head is like, told before it is trained."""
    dtype, engines = recipe.traffic.eval_dtype, recipe.export.engines
    if dtype == "float32" or not engines:
        return []
    text = f"found {engines} with traffic.eval_dtype = {dtype}, but figures are proved against float32 replies"
    text += ", so nothing would pass the gate; set it to [] and use headstart export --untested"
    return [("export.engines", text)]


def sharded_problems(recipe: Recipe) -> Findings:
    """What a target that is spread over processes cannot do: passes that one of them makes alone."""
    if not recipe.target.sharded:
        return []
    found: Findings = []
    if recipe.prompts.num_synthesized:
        text = f"found {recipe.prompts.num_synthesized} with target.sharded, whose first process gathers prompts alone"
        found.append(("prompts.num_synthesized", f"{text}; expected 0"))
    if recipe.train.on_policy and recipe.features.mode != "stream":
        text = f"found {recipe.train.on_policy:g} with target.sharded, whose layers are gone when the head is trained"
        found.append(("train.on_policy", f"{text}; expected 0, or features.mode=stream"))
    if engines := recipe.export.engines:
        text = f"found {engines} with target.sharded: nothing is decoded, so nothing would pass the gate; set it to [] and "
        found.append(
            ("export.engines", f"{text}measure where the target fits: headstart eval RUN target.sharded=false")
        )
    return found


def skip_lines(prompts: PromptSet) -> list[str]:
    """The first rows that became no prompt, each with its place and reason."""
    lines = []
    for skip in prompts.skips[:SHOWN_SKIPS]:
        place = f"{skip.source}:{skip.row}" if skip.row else skip.source
        lines.append(f"skipped: {place}: {skip.reason}" + (f" ({skip.text!r})" if skip.text else ""))
    if (more := len(prompts.skips) - SHOWN_SKIPS) > 0:
        lines.append(f"and {more:,} more are skipped; a run lists all of them")
    return lines
