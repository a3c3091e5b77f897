"""Export behind the gate: no unmeasured or failed checkpoint leaves the run, unless told so on the card's first line."""

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.eval.gate import failures, of_checkpoint, read_evals, require_gate, unmeasured
from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.heads.builtin import resolve_model
from headstart.heads.checkpoint import checkpoint_identity, load_head
from headstart.heads.contract import Head
from headstart.heads.export.card import RECORD, RECORD_SCHEMA, write_card
from headstart.heads.export.folder import export_dtype, misleading_path
from headstart.heads.export.scheme import LAYOUTS, readers_of, refuse_unservable, write_head
from headstart.heads.layer_head import LayerHead
from headstart.heads.paths import trained_on
from headstart.heads.shipped import INDEX, tensor_files
from headstart.heads.store import MANIFEST, MANIFEST_SCHEMA, hash_file, read_json, versions, write_json
from headstart.heads.target import Target
from headstart.trainer.checkpoint import checkpoint_folder

STAGES = ("prompts", "traffic", "features")
TAP_CONVENTION = "tap L is the residual stream after L decoder layers (0: the embedding; before the final norm)"


def export_head(
    run: Path,
    engine: str,
    target: Target,
    eval_settings: EvalSettings,
    export_settings: ExportSettings,
    checkpoint: str = "best",
    out: Path | None = None,
    untested: bool = False,
) -> Path:
    """Write a run's checkpoint (`best`, `last` or a step's folder name) for an engine, with its card.

    Raises:
        WrongInput: not measured, the target itself, or the engine cannot serve this head.
        GateFailed: measured, and a value does not pass.
    """
    folder = checkpoint_folder(run, checkpoint)
    identity = checkpoint_identity(folder)
    if not untested:
        require_gate(run, folder, identity, eval_settings)
    head = load_head(folder, target).to("cpu").eval()
    head.refuse_own_target(target)
    refuse_unservable(head, engine)
    dtype = export_dtype(export_settings.dtype, target.dtype)
    out = out or run / "export" / engine
    evals, source = read_evals(run / "eval"), resolve_model(target.facts.name)
    # Figures of another checkpoint never reach the card.
    measured = of_checkpoint(evals, identity)
    problems = [*unmeasured(evals, identity, eval_settings), *failures(measured, eval_settings)]
    record = {
        "schema": RECORD_SCHEMA,
        "kind": head.kind,
        "engine": engine,
        "readable_by": [],
        "untested": untested,
        "gate": problems,
        "checkpoint": identity,
        "target": {
            "name": target.facts.shown_name,
            "folder": os.path.relpath(source, out.resolve()),
            "dtype": stored_dtype(source),
            "fingerprint": target.facts.fingerprint,
        },
        "data": {
            name: read_json(file, MANIFEST_SCHEMA)["key"] for name in STAGES if (file := run / name / MANIFEST).exists()
        },
        "trained_on": trained_on(run),
        "taps": head.taps,
        "tap_convention": TAP_CONVENTION,
        "context": target.facts.max_position,
        "trained_length": trained_length(run),
        "draft_length": recommended_draft_length(measured, engine, eval_settings.draft_length),
        "dtype": "as in the target" if head.kind == "mtp" else dtype,
        "tensors": {},
        "files": {},
        "loaded_in": [],
        "made_by": {"versions": versions(), "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
    }

    def describe(written: Path, tensors: dict[str, Tensor]) -> None:
        record.update(contents(written, head, tensors))
        write_json(written / RECORD, record)
        write_card(written, measured)

    write_head(head, out, engine, dtype, describe, target)
    if isinstance(head, LayerHead) and (rope := head.rotary.facts.rope_parameters) != head.facts.rope_parameters:
        print(f"note: rotary positions are written as trained, {rope}; the target's are {head.facts.rope_parameters}")
    if note := misleading_path(out, head.kind):
        print(f"note: {note}")
    state = "UNTESTED head" if untested else "head"
    print(f"{state} for {engine}: {out} (its README.md has the command that serves it)")
    return out


def contents(written: Path, head: Head, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What a folder holds of a head: who reads it, the head's own tensors, and the hashes of the files they are in."""
    places = tensor_files(written)
    files = {places[name].name for name in tensors} | {name for name in (INDEX,) if (written / name).exists()}
    readers = readers_of(written, head)
    return {
        **({"form": "shipped" if head.settings.shipped else "mimo"} if head.kind == "mtp" else {}),
        "readable_by": readers,
        "rules": {engine: LAYOUTS[head.kind].versions[engine] for engine in readers},
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "files": {name: hash_file(written / name) for name in ["config.json", *sorted(files)]},
    }


def stored_dtype(target: Path) -> str | None:
    """The precision that a target's config says its files have; it may be loaded in another."""
    config = read_json(target / "config.json")
    dtype: str | None = config.get("dtype") or config.get("torch_dtype")
    return dtype


def trained_length(run: Path) -> int | None:
    """Tokens of the longest text that a head can have seen in training, by the settings of its traffic."""
    if not (file := run / "traffic" / MANIFEST).exists():
        return None
    settings = read_json(file, MANIFEST_SCHEMA)["inputs"]["settings"]
    return int(settings["max_prompt_tokens"] + settings["max_new_tokens"])


def recommended_draft_length(evals: dict[str, Any], engine: str, default: int) -> int:
    """Draft length of the launch command: what was measured fastest for this engine, else at all, else the setting."""
    recommended = (evals["speed"] or {}).get("recommended", [])
    own = [entry for entry in recommended if entry["engine"] == engine]
    lengths = [entry["draft_length"] for entry in own or recommended if entry.get("draft_length")]
    return int(lengths[0]) if lengths else default
