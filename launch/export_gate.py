"""Export behind the gate: no unmeasured or failed checkpoint leaves the run, unless told so on the card's first line."""

import time
from pathlib import Path
from typing import Any

from safetensors import safe_open

from headstart.eval.gate import failures, of_checkpoint, read_evals, require_gate, unmeasured
from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.heads.builtin import resolve_model
from headstart.heads.checkpoint import checkpoint_identity, load_head
from headstart.heads.contract import Head
from headstart.heads.draft import DraftModel
from headstart.heads.errors import WrongInput
from headstart.heads.export.card import RECORD, RECORD_SCHEMA, write_card
from headstart.heads.export.draft import write_draft
from headstart.heads.export.folder import export_dtype, misleading_path
from headstart.heads.export.limits import ENGINES, WRITERS, refuse_unservable
from headstart.heads.export.mimo import trained_layer, write_mimo
from headstart.heads.export.mtp import published_tensors, write_merged
from headstart.heads.export.scheme import read_served, write_head
from headstart.heads.layer_head import LayerHead
from headstart.heads.mtp import MTP
from headstart.heads.mtp_shipped import MTPShipped
from headstart.heads.paths import trained_on
from headstart.heads.shipped import tensor_files
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
        WrongInput: not measured, or the engine cannot serve this head.
        GateFailed: measured, and a value does not pass.
    """
    folder = checkpoint_folder(run, checkpoint)
    identity = checkpoint_identity(folder)
    if not untested:
        require_gate(run, folder, identity, eval_settings)
    head = load_head(folder, target).to("cpu").eval()
    refuse_unservable(head, engine)
    dtype = export_dtype(export_settings.dtype, target.dtype)
    out = out or run / "export" / engine
    evals = read_evals(run / "eval")
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
            "name": target.facts.name,
            "folder": str(resolve_model(target.facts.name)),
            "fingerprint": target.facts.fingerprint,
        },
        "data": {
            name: read_json(file, MANIFEST_SCHEMA)["key"] for name in STAGES if (file := run / name / MANIFEST).exists()
        },
        "trained_on": trained_on(run),
        "folder": str(out.resolve()),
        "taps": head.taps,
        "tap_convention": TAP_CONVENTION,
        "draft_length": recommended_draft_length(measured, engine, eval_settings.draft_length),
        "dtype": "as in the target" if head.kind == "mtp" else dtype,
        "tensors": {},
        "files": {},
        "loaded_in": [],
        "made_by": {"versions": versions(), "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
    }

    def describe(written: Path) -> None:
        record.update(
            merged_contents(written, head) if isinstance(head, (MTPShipped, MTP)) else head_contents(written, head)
        )
        write_json(written / RECORD, record)
        write_card(written, measured)

    if isinstance(head, MTPShipped):
        write_merged(head, resolve_model(target.facts.name), out, engine, describe)
    elif isinstance(head, MTP):
        write_mimo(head, resolve_model(target.facts.name), out, engine, describe)
    elif isinstance(head, DraftModel):
        write_draft(head, target, out, engine, dtype, describe)
    else:
        write_head(head, out, engine, dtype, describe)
        if isinstance(head, LayerHead) and (rope := head.rotary.facts.rope_parameters) != head.facts.rope_parameters:
            print(
                f"note: rotary positions are written as trained, {rope}; the target's are {head.facts.rope_parameters}"
            )
    if note := misleading_path(out, head.kind):
        print(f"note: {note}")
    state = "UNTESTED head" if untested else "head"
    print(f"{state} for {engine}: {out} (its README.md has the command that serves it)")
    return out


def head_contents(written: Path, head: Head) -> dict[str, Any]:
    """Of a folder that holds a head alone: who reads it, its tensors, and the hashes of its files."""
    with safe_open(written / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    return {
        "readable_by": [name for name in ENGINES if serves(written, name, head)],
        "tensors": tensors,
        "files": {name: hash_file(written / name) for name in ("config.json", "model.safetensors")},
    }


def merged_contents(written: Path, head: MTPShipped | MTP) -> dict[str, Any]:
    """The same of a folder that is target and head: of the MTP layer's tensors, and the files that hold them."""
    layer = published_tensors(head) if isinstance(head, MTPShipped) else trained_layer(head)
    places = tensor_files(written)
    files = sorted({places[path].name for path in layer})
    return {
        "form": "shipped" if isinstance(head, MTPShipped) else "mimo",
        "readable_by": list(WRITERS[head.kind]),
        "tensors": {path: list(tensor.shape) for path, tensor in layer.items()},
        "files": {name: hash_file(written / name) for name in ("config.json", *files)},
    }


def serves(folder: Path, engine: str, head: Head) -> bool:
    """Whether an engine would read this folder as trained."""
    try:
        refuse_unservable(head, engine)
        if isinstance(head, DraftModel):  # one form for all of them, which was read before it got its name
            return True
        read_served(folder, engine, head)
    except WrongInput:
        return False
    return True


def recommended_draft_length(evals: dict[str, Any], engine: str, default: int) -> int:
    """Draft length of the launch command: what was measured fastest for this engine, else at all, else the setting."""
    recommended = (evals["speed"] or {}).get("recommended", [])
    own = [entry for entry in recommended if entry["engine"] == engine]
    lengths = [entry["draft_length"] for entry in own or recommended if entry.get("draft_length")]
    return int(lengths[0]) if lengths else default
