"""The prompts stage: sources in, one file of requests with routes and splits out.

Which split a prompt belongs to depends on what it says and on what else is in the pool, never on the order of rows.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.heads.errors import WrongInput
from headstart.heads.paths import SPLITS, Prompt
from headstart.heads.store import Stage, atomic_path, hash_file, hash_json, open_stage, stage_inputs
from headstart.trainer.settings import PromptSettings
from headstart.trainer.similarity import NearIndex, prompt_text
from headstart.trainer.sources import (
    ALL_ROUTES,
    Rows,
    Skip,
    read_source,
    role_names,
    source_hash,
    source_path,
    template_kwargs,
)
from headstart.trainer.templates import builtin_files, builtin_prompts, in_turn, prompts_folder
from headstart.trainer.verdicts import Record, verdicts

if TYPE_CHECKING:
    from headstart.heads.object_store import ObjectStore
    from headstart.heads.target import TargetLoader

BUILTIN = "builtin"
STAGE_VERSION = 2
READER_VERSION = 2  # raised where a row of a file becomes another prompt; built-in ones do not depend on it
PROMPTS_FILE = "prompts.jsonl"
VERDICTS_FILE = "verdicts.jsonl"


@dataclass
class PromptSet:
    """All prompts of a run, and what became of the rows that gave none."""

    prompts: list[Prompt] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    records: list[Record] = field(default_factory=list)  # every row of the sources, built-in ones aside
    near: dict[str, str] = field(
        default_factory=dict
    )  # why a prompt is left out for one that is nearly the same, by id

    def of(self, split: str) -> list[Prompt]:
        return [prompt for prompt in self.prompts if prompt.split == split]

    def describe(self, kept: Container[str] | None = None) -> str:
        """Counts by route and split, then what was skipped and why.

        Args:
            kept: ids of the prompts that are counted, where it is known which of them can be asked.
        """
        prompts = [prompt for prompt in self.prompts if kept is None or prompt.prompt_id in kept]
        lines = route_table(prompts)
        for reason, number in Counter(skip.reason for skip in self.skips).most_common():
            lines.append(f"skipped {number:,}: {reason}")
        if self.skips:
            lines.append(f"what became of each row: the run's prompts/{VERDICTS_FILE}")
        train, heldout = ({p.route for p in prompts if p.split == split} for split in ("train", "heldout"))
        if unheld := sorted(train - heldout):
            lines.append(
                f"note: no held-out prompt is of {', '.join(unheld)}, so no figure will speak of them; "
                "give your own: prompts.heldout=FILE"
            )
        lines += [f"note {number:,}: {note}" for note, number in self.notes.most_common()]
        return "\n".join(lines)


def route_table(prompts: Iterable[Prompt]) -> list[str]:
    """Counts by route and split."""
    counts = Counter((prompt.route, prompt.split) for prompt in prompts)
    counts.update({(ALL_ROUTES, split): sum(n for (_, own), n in counts.items() if own == split) for split in SPLITS})
    routes = sorted({route for route, _ in counts} - {ALL_ROUTES}) + [ALL_ROUTES]
    width = max(map(len, ("route", *routes)))
    cells = [f"{route:{width}}" + "".join(f"{counts[route, split]:12,}" for split in SPLITS) for route in routes]
    return [f"{'route':{width}}" + "".join(f"{split:>12}" for split in SPLITS), *cells]


def make_prompts(
    settings: PromptSettings,
    root: Path,
    base: Path,
    seed: int = 0,
    target: "TargetLoader | None" = None,
    store: "ObjectStore | None" = None,
) -> Stage:
    """Write `prompts.jsonl` and `verdicts.jsonl` into a stage folder, or reuse the one of the same settings and content.

    Args:
        root: folder of all runs.
        base: folder that relative paths count from (the recipe's).
        seed: draws the target's own prompts; without these it changes nothing.
        target: writes `num_synthesized` prompts; its weights are loaded only for that.
        store: where the stage is kept too, and taken from.
    """
    stage = open_stage(root, "prompts", prompt_inputs(settings, base, seed, target), seed)
    stage.keep_in(store)
    stage.mend()
    if stage.complete:
        return stage
    found = gather(settings, base)
    if settings.num_synthesized and target is not None:
        add_synthesized(found, settings, seed, target)
    print(found.describe())
    rows = [
        {
            "id": prompt.prompt_id,
            "route": prompt.route,
            "split": prompt.split,
            "messages": list(prompt.messages),
            "template_kwargs": prompt.template_kwargs,
            "reply": prompt.reply,
        }
        for prompt in found.prompts
    ]
    write_rows(stage, PROMPTS_FILE, rows)
    unwanted = {record.route for record in found.records} - {*settings.routes} if settings.routes else ()
    write_rows(stage, VERDICTS_FILE, list(verdicts(found.records, found.prompts, found.near, unwanted)))
    stage.finish()
    return stage


def read_prompts(folder: Path, split: str | None = None) -> list[Prompt]:
    """Prompts of a finished stage folder in stored order, optionally of one split."""
    with (folder / PROMPTS_FILE).open(encoding="utf-8") as handle:
        rows = [json.loads(line) for line in handle]
    return [
        Prompt(row["route"], tuple(row["messages"]), row["split"], row["template_kwargs"], row["reply"])
        for row in rows
        if split is None or row["split"] == split
    ]


def write_rows(stage: Stage, name: str, rows: Sequence[dict[str, Any]]) -> None:
    with atomic_path(stage.folder / name) as temporary, temporary.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
    stage.record(name, len(rows))


def add_synthesized(found: PromptSet, settings: PromptSettings, seed: int, target: "TargetLoader") -> None:
    """Let the target write training prompts; they follow those of the sources."""
    from headstart.trainer.synthesis import synthesize

    written = synthesize(target, settings.num_synthesized, seed, found.prompts, settings.routes)
    last = len(found.of("train"))
    kwargs = template_kwargs(settings.template_kwargs)
    found.prompts[last:last] = [replace(prompt, template_kwargs=kwargs) for prompt in written.prompts]
    found.notes[f"written by the target, of {written.num_sampled:,} turns sampled"] = len(written.prompts)
    for reason, number in written.reasons.items():
        found.notes[f"turns of the target not kept: {reason}"] = number


def prompt_inputs(
    settings: PromptSettings, base: Path, seed: int = 0, target: "TargetLoader | None" = None
) -> dict[str, Any]:
    """What the prompts depend on: settings and file content, wherever the files lie; the target if it writes some."""
    apart = ("sources", "heldout", "max_broken")  # known by content; a verdict on the rows, not a choice of them
    dials = {key: value for key, value in asdict(settings).items() if key not in apart}
    for name in ("max_per_route", "scrub"):  # a dial that is off changes nothing, the key included
        if not dials[name]:
            del dials[name]
    dials["sources"] = [content_hash(name, base, "prompts.sources") for name in settings.sources]
    dials["heldout"] = content_hash(settings.heldout, base, "prompts.heldout")
    if not settings.num_synthesized:
        return stage_inputs(STAGE_VERSION, dials, {}, None)
    if target is None:
        raise WrongInput("prompts.num_synthesized: found no target to write prompts, expected one, or set it to 0.")
    dials |= {"seed": seed, "dtype": target.dtype}
    return stage_inputs(STAGE_VERSION, dials, {}, target.facts.fingerprint)


def content_hash(name: str, base: Path, setting: str) -> str:
    if name != BUILTIN:
        return hash_json([READER_VERSION, source_hash(source_path(name, base, setting))])
    if setting == "prompts.heldout":
        return hash_file(prompts_folder() / "heldout.jsonl")
    return hash_json([hash_file(file) for file in builtin_files()])


def gather(settings: PromptSettings, base: Path) -> PromptSet:
    """Read, filter and split all prompts.

    Raises:
        WrongInput: a file is missing, a route is unknown, or a split is left without prompts.
    """
    found = PromptSet()
    roles, kwargs = role_names(settings.roles), template_kwargs(settings.template_kwargs)
    heldout = distinct(read_heldout(settings, base, roles), found, kwargs)
    sources = (distinct(read_training(name, settings, base, roles), found, kwargs) for name in settings.sources)
    pool = [prompt for source in sources for prompt in source]
    pool = unique(pool, found, "the same in two sources")
    check_routes(settings.routes, pool)
    if settings.routes:
        heldout = [prompt for prompt in heldout if prompt.route in settings.routes]
        pool = [prompt for prompt in pool if prompt.route in settings.routes]
    # Only prompts that are asked for are compared: a large file costs its reading.
    apart = without_near(heldout, found, "near-duplicate of a held-out prompt")
    validation = balanced(sorted(pool, key=prompt_order), settings.num_validation, apart)
    chosen = {prompt.prompt_id for prompt in validation}
    rest = [prompt for prompt in pool if prompt.prompt_id not in chosen]
    unlike = without_near(validation, found, "near-duplicate of a validation prompt")
    train = balanced(rest, settings.num_train, lambda prompt: apart(prompt) and unlike(prompt), settings.max_per_route)
    if settings.num_train > len(train):
        found.notes[f"prompts.num_train asks for {settings.num_train:,}, the sources hold {len(train):,}"] = 1
    splits = {
        "train": train,
        "validation": validation,
        "heldout": balanced(heldout, settings.num_heldout),
    }
    check_splits(splits, settings)
    for split, prompts in splits.items():
        found.prompts += [replace(prompt, split=split) for prompt in prompts]
    return found


def read_heldout(settings: PromptSettings, base: Path, roles: dict[str, str]) -> Rows:
    if settings.heldout == BUILTIN:
        return Rows(read_source(prompts_folder() / "heldout.jsonl", roles, "heldout").prompts)
    return read_source(source_path(settings.heldout, base, "prompts.heldout"), roles, "heldout", settings.scrub)


def read_training(name: str, settings: PromptSettings, base: Path, roles: dict[str, str]) -> Rows:
    """Built-in prompts in their committed order; those of a file by content hash, so that its row order is nothing."""
    if name == BUILTIN:
        return Rows(list(builtin_prompts()))
    rows = read_source(source_path(name, base, "prompts.sources"), roles, "train", settings.scrub)
    rows.prompts.sort(key=prompt_order)
    return rows


def prompt_order(prompt: Prompt) -> tuple[str, str, str]:
    """An order by content; equal requests under two routes, or with two replies, have one too."""
    return prompt.prompt_id, prompt.route, json.dumps(prompt.reply, sort_keys=True)


def distinct(rows: Rows, found: PromptSet, kwargs: dict[str, Any]) -> list[Prompt]:
    """Prompts of one source, each once, with the template arguments of all; skipped rows and notes go to `found`."""
    found.skips += rows.skips
    found.notes.update(rows.notes)
    alike, told = [], dict[str, tuple[str, str]]()  # new id, or why there is none, by the row's own
    for prompt in rows.prompts:
        own = prompt.template_kwargs
        if other := [f"{name} = {own[name]!r}" for name in kwargs if own.get(name, kwargs[name]) != kwargs[name]]:
            reason = f"made with {', '.join(other)}, which prompts.template_kwargs says otherwise"
            found.skips.append(skip_of(prompt, reason))
            told[prompt.prompt_id] = "", reason
        else:
            alike.append(replace(prompt, template_kwargs={**own, **kwargs}))
            told[prompt.prompt_id] = alike[-1].prompt_id, ""
    for record in rows.records:
        prompt_id, reason = told.get(record.prompt_id, ("", record.reason))
        found.records.append(replace(record, prompt_id=prompt_id, reason=reason))
    return unique(alike, found, "the same request again")


def unique(prompts: Iterable[Prompt], found: PromptSet, reason: str) -> list[Prompt]:
    kept: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.prompt_id in kept:
            found.skips.append(skip_of(prompt, reason))
        kept.setdefault(prompt.prompt_id, prompt)
    return list(kept.values())


def without_near(others: list[Prompt], found: PromptSet, reason: str) -> Callable[[Prompt], bool]:
    """A filter for prompts none of whose turns is near a turn of `others`; each one dropped is listed once."""
    index = NearIndex.of(prompt.request(turn) for prompt in others for turn in prompt.turns)
    dropped: set[str] = set()

    def fits(prompt: Prompt) -> bool:
        if prompt.prompt_id in dropped:
            return False
        if any(index.holds_near(prompt.request(turn)) for turn in prompt.turns):
            dropped.add(prompt.prompt_id)
            found.near[prompt.prompt_id] = reason
            found.skips.append(skip_of(prompt, reason))
            return False
        return True

    return fits


def skip_of(prompt: Prompt, reason: str) -> Skip:
    return Skip(f"prompt {prompt.prompt_id[:12]}", 0, reason, prompt_text(prompt)[:200])


def balanced(
    prompts: list[Prompt], number: int, fits: Callable[[Prompt], bool] = lambda _: True, most: int = 0
) -> list[Prompt]:
    """The first `number` prompts that fit (0: all), from the routes in turn, at most `most` of each (0: any number).

    Within a route the order stays.
    """
    routes: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        routes[prompt.route].append(prompt)
    fitting = (islice(filter(fits, routes[route]), most or None) for route in sorted(routes))
    return list(islice(in_turn(fitting), number or None))


def check_routes(wanted: list[str], pool: list[Prompt]) -> None:
    known = sorted({prompt.route for prompt in pool})
    unknown = [route for route in wanted if route not in known]
    if unknown:
        raise WrongInput(
            f"prompts.routes: found {', '.join(unknown)}, expected routes of the sources: {', '.join(known)}.\n"
            "Leave prompts.routes out to keep all."
        )


def check_splits(splits: dict[str, list[Prompt]], settings: PromptSettings) -> None:
    if not splits["validation"]:
        raise WrongInput(
            f"prompts.sources: found no usable prompt in {', '.join(settings.sources) or 'an empty list'}, expected at "
            'least two.\nRows need {"messages": [..]} or {"prompt": ".."}.'
        )
    if not splits["train"] and not settings.num_synthesized:
        raise WrongInput(
            f"found {len(splits['validation'])} usable prompts, all taken for validation, none left to train "
            f"on.\nAdd prompts, or lower prompts.num_validation={settings.num_validation}"
        )
    if not splits["heldout"]:
        of_routes = f" of the routes {', '.join(settings.routes)}" if settings.routes else ""
        raise WrongInput(
            f"prompts.heldout: found no usable prompt{of_routes} in {settings.heldout}, expected at least one.\n"
            "Name a file of your own prompts: prompts.heldout=FILE"
        )
