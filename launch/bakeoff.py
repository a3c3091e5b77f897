"""A bake-off: what all variants share is made once, each variant is a run of its own, and one table ends it.

Every head is measured as a recipe's only head would be: greedy identity of its live replies included, because it is a kind's
own cache and drafts that could break it. What no head changes, the rules of verification, is enumerated by
`headstart eval RUN --lossless`, for one of the runs.
"""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.eval.bakeoff import SCHEMA, Entry, bakeoff_content
from headstart.eval.bakeoff_text import REPORT, bakeoff_text, write_bakeoff_report
from headstart.heads.errors import GateFailed, TrainingFailed, WrongInput
from headstart.heads.export.scheme import ENGINES, unservable, unwritten
from headstart.heads.start import Start
from headstart.heads.store import read_json, write_json
from headstart.heads.target import TargetLoader
from headstart.launch.commands import opened, run_folder, shared_settings, train_head
from headstart.launch.rehearsal import rehearse
from headstart.launch.run import RunFolder
from headstart.launch.stages import run_shared
from headstart.launch.variants import Loaded, dump, num_tokens

BAKEOFF = "bakeoff.json"


def train_variants(loaded: Loaded, path: Path, starts: Mapping[str, Start], comment: str, threads: str) -> None:
    """Run a bake-off, or continue one: finished variants are reused.

    Args:
        starts: heads that variants go on from.

    Raises:
        GateFailed, WrongInput, TrainingFailed: variants failed, after all others have run; each is named.
    """
    run, number = run_folder(loaded.shared), len(loaded.variants)
    failed: dict[str, Exception] = {}
    with opened(run):
        run.claim({"settings": shared_settings(loaded.shared)})
        run.write_recipe(dump(loaded, comment))
        print(f"bake-off {run.folder}\nthreads: {threads}")
        print(f"{number} heads, {loaded.bakeoff.rule.replace('_', ' ')}: {', '.join(loaded.variants)}")
        mode = run_shared(loaded, path, run)
        if loaded.bakeoff.rule == "equal_time":
            loaded = rehearse(loaded, run, mode)
        content = write_table(loaded, run, {})
        for place, (name, recipe) in enumerate(loaded.variants.items(), 1):
            print(f"\nhead {place} of {number}: {name}", flush=True)
            try:
                train_head(recipe, path, starts.get(name), f"variant {name} of {run.name}, {comment}", threads)
            except Exception as error:  # the other variants do not depend on it
                if not isinstance(error, GateFailed | WrongInput | TrainingFailed):
                    traceback.print_exc()
                print(f"{name} failed: {error}", flush=True)
                failed[name] = error
            content = write_table(loaded, run, {name: str(error) for name, error in failed.items()})
        print(f"\n{bakeoff_text(content)}\nreport: {run.folder / REPORT}")
    if failed:
        raise_together(failed, number)


def write_table(loaded: Loaded, run: RunFolder, failed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write bakeoff.json and report.md of the runs as they stand.

    Args:
        failed: why variants failed; default: as the table there says.
    """
    file = run.folder / BAKEOFF
    if failed is None:
        rows = read_json(file, SCHEMA)["rows"] if file.exists() else []
        failed = {row["variant"]: row["failed"] for row in rows if row["failed"]}
    targets = TargetLoader(loaded.shared.target)
    entries = []
    for name, recipe in loaded.variants.items():
        kind, taps = recipe.head.kind, recipe.head.asked_taps or targets.taps
        written = [engine for engine in ENGINES if not unwritten(kind, engine)]
        able = [engine for engine in written if not unservable(recipe.head, targets.facts, taps, engine)]
        entries.append(
            Entry(
                variant=name,
                run=run.root / f"{run.name}-{name}",
                kind=kind,
                num_steps=recipe.train.num_steps,
                num_tokens=num_tokens(recipe),
                engines=able,
                failed=failed.get(name),
            )
        )
    content = bakeoff_content(entries, run.folder, loaded.shared.eval.draft_length, loaded.bakeoff.rule)
    write_json(file, content)
    write_bakeoff_report(run.folder, content)
    return content


def raise_together(failed: dict[str, Exception], number: int) -> None:
    """One error for all variants that failed: of their common kind, else `TrainingFailed`."""
    kinds = {type(error) for error in failed.values()}
    kind = kinds.pop() if len(kinds) == 1 and kinds <= {GateFailed, WrongInput} else TrainingFailed
    told = "\n".join(f"  - {name}: {error}".replace("\n", "\n    ") for name, error in failed.items())
    raise kind(f"{len(failed)} of {number} variants failed, the others are done:\n{told}")
