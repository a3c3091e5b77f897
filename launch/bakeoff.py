"""A bake-off: what all variants share is made once, each variant is a run of its own, and one table ends it.

Every head is measured as a recipe's only head would be: greedy identity of its live replies included, because it is a kind's
own cache and drafts that could break it. What no head changes, the rules of verification, is enumerated by
`headstart eval RUN --lossless`, for one of the runs.
"""

import traceback
from collections.abc import Mapping
from pathlib import Path

from headstart.heads.errors import GateFailed, TrainingFailed, WrongInput
from headstart.heads.start import Start
from headstart.launch.commands import opened, run_folder, shared_settings, train_head
from headstart.launch.stages import run_shared
from headstart.launch.variants import Loaded, dump, num_tokens


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
        print(f"{number} heads, each trained on {num_tokens(loaded.shared):,} tokens: {', '.join(loaded.variants)}")
        run_shared(loaded, path, run)
        for place, (name, recipe) in enumerate(loaded.variants.items(), 1):
            print(f"\nhead {place} of {number}: {name}", flush=True)
            try:
                train_head(recipe, path, starts.get(name), f"variant {name} of {run.name}, {comment}", threads)
            except Exception as error:  # the other variants do not depend on it
                if not isinstance(error, GateFailed | WrongInput | TrainingFailed):
                    traceback.print_exc()
                print(f"{name} failed: {error}", flush=True)
                failed[name] = error
    if failed:
        raise_together(failed, number)


def raise_together(failed: dict[str, Exception], number: int) -> None:
    """One error for all variants that failed: of their common kind, else `TrainingFailed`."""
    kinds = {type(error) for error in failed.values()}
    kind = kinds.pop() if len(kinds) == 1 and kinds <= {GateFailed, WrongInput} else TrainingFailed
    told = "\n".join(f"  - {name}: {error}".replace("\n", "\n    ") for name, error in failed.items())
    raise kind(f"{len(failed)} of {number} variants failed, the others are done:\n{told}")
