"""What engines serve of each kind of head, and the one way a folder is written, proved and read again.

After writing, a reader (`heads/export/readers/`) loads the folder by the engine's own rules and must reproduce the head's
logits over several drafted blocks; only then does it get its name.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.heads.contract import Head
from headstart.heads.errors import WrongInput
from headstart.heads.export import draft, eagle1, eagle3, medusa, mtp
from headstart.heads.export.comparison import TOLERANCE, Served, difference, golden
from headstart.heads.export.folder import check_folder_name, fresh_folder
from headstart.heads.export.layout import Layout, Request
from headstart.heads.export.readers.files import DTYPES
from headstart.heads.export.shards import SHARD_BYTES
from headstart.heads.facts import TargetFacts
from headstart.heads.settings import HeadSettings
from headstart.heads.target import Target

LAYOUTS: dict[str, Layout] = {
    layout.kind: layout for layout in (eagle3.LAYOUT, eagle1.LAYOUT, medusa.LAYOUT, draft.LAYOUT, mtp.LAYOUT)
}
# speculators is a layout, which vLLM loads; the others load folders of their own name.
ENGINES = ("vllm", "speculators", "sglang", "trtllm", "llamacpp", "transformers")
# Why there is no writer where another engine, or an older one, has such heads.
UNWRITTEN = {
    ("medusa", "trtllm"): "it builds Medusa heads into engines of its older flow; its PyTorch backend has none",
    ("eagle1", "trtllm"): "of EAGLE heads its PyTorch backend runs EAGLE-3 only",
    ("medusa", "sglang"): "it has no Medusa heads",
    ("medusa", "llamacpp"): "it has no Medusa heads",
    ("eagle1", "llamacpp"): "of EAGLE heads it runs EAGLE-3 only",
    ("mtp", "llamacpp"): "it knows MTP layers only of architectures that headstart has no writer for",
    ("mlp", "vllm"): "it served MLP speculators up to 0.9 only",
}


def unwritten(kind: str, engine: str) -> str:
    """What to say where a kind of head has no writer for an engine; empty where it has one."""
    if kind in LAYOUTS and engine in LAYOUTS[kind].versions:
        return ""
    reason = f": {UNWRITTEN[kind, engine]}" if (kind, engine) in UNWRITTEN else ""
    written = "; ".join(f"{layout.kind} for {', '.join(layout.versions)}" for layout in LAYOUTS.values())
    return f"found no writer for heads of kind {kind!r}{reason} (there are: {written})"


def unservable(settings: HeadSettings, facts: TargetFacts, taps: list[int], engine: str) -> list[str]:
    """What `engine` would ignore or misread about a head of these settings; known before it is trained."""
    return (
        [] if unwritten(settings.kind, engine) else list(LAYOUTS[settings.kind].limits(settings, facts, taps, engine))
    )


def refuse_unservable(head: Head, engine: str) -> None:
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


def write_head(
    head: Any,
    out: Path,
    engine: str,
    dtype: str = "float32",
    describe: Callable[[Path, dict[str, Tensor]], None] | None = None,
    target: Target | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `out` for `engine`, checked.

    Args:
        dtype: of the written tensors, by name; layers that are written into their target have those of its files.
        describe: may add the card before the folder gets its name; it is given the head's own tensors as written.
        target: the head's, where the folder holds a part of it (draft models, MTP layers).
        shard_bytes: weights beyond it go into several files.

    Raises:
        WrongInput: the engine could not serve this head as trained, `out` cannot be used, or the reader does not
            reproduce the head's logits. Nothing is left under `out` then.
    """
    refuse_unservable(head, engine)
    check_folder_name(out, head.kind)
    layout = LAYOUTS[head.kind]
    with fresh_folder(out) as folder:
        written = layout.write(head, folder, Request(engine, DTYPES[dtype], target, shard_bytes))
        served = layout.read(folder, engine, head, target)
        if served.taps != head.taps:
            raise WrongInput(f"{out}: the engine would capture the taps {served.taps}, the head reads {head.taps}.")
        with layout.as_written(head, written) as rounded_head:
            apart = difference(golden(rounded_head), served)
        if not apart <= TOLERANCE:
            raise WrongInput(
                f"{out}: the written folder does not draft what the head drafts: largest difference {apart:.2e} "
                f"of the largest logit, allowed {TOLERANCE:.0e}.\n"
                "This is a fault of the export, not of the head: please report it."
            )
        if describe is not None:
            describe(folder, written)
    return out


def read_served(folder: Path, engine: str, head: Head, target: Target | None = None) -> Served:
    """A written folder as `engine` reads it, beside the target of `head`.

    Raises:
        WrongInput: everything found wrong with the folder, in one message.
    """
    return LAYOUTS[head.kind].read(folder, engine, head, target)


def readers_of(folder: Path, head: Head) -> list[str]:
    """Engines that would read a folder as the head was trained: all that can serve it, where they read one form alike."""
    return [engine for engine in ENGINES if _serves(folder, engine, head)]


def _serves(folder: Path, engine: str, head: Head) -> bool:
    try:
        refuse_unservable(head, engine)
        if not LAYOUTS[head.kind].alike:
            read_served(folder, engine, head)
    except WrongInput:
        return False
    return True
