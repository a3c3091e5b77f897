"""A head on disk: `head.safetensors` (trained tensors and the vocabulary map) and `head.json` (how to build it again).

The frozen target's weights are never part of it; `head.json` names the target by fingerprint instead.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headstart.heads.contract import Head
from headstart.heads.description import DAMAGED, DESCRIPTION, HEAD_SCHEMA, WEIGHTS, check_weights, read_description
from headstart.heads.draft import DraftModel
from headstart.heads.eagle1 import Eagle1
from headstart.heads.eagle3 import Eagle3
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.hydra import Hydra
from headstart.heads.medusa import Medusa
from headstart.heads.mlp import MLP
from headstart.heads.mtp import MTP
from headstart.heads.settings import HEADS, HeadSettings
from headstart.heads.store import atomic_path, hash_file, hash_json, write_json
from headstart.heads.vocabulary import hash_ids

# Every kind of head there is; `settings.HEADS` has their settings under the same names.
KINDS: dict[str, type[Head]] = {
    "eagle3": Eagle3,
    "eagle1": Eagle1,
    "medusa": Medusa,
    "hydra": Hydra,
    "mlp": MLP,
    "draft": DraftModel,
    "mtp": MTP,
}


def build_head(settings: HeadSettings, facts: TargetFacts, draft_ids_V: torch.Tensor) -> Head:
    """A new head of `settings.kind` with random weights."""
    return KINDS[settings.kind].form(settings)(settings, facts, draft_ids_V)


def save_head(folder: Path, head: Head, step: int) -> None:
    """Write the head into an existing folder; each file whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.trained_tensors().items()}
    tensors["draft_ids"] = head.draft_ids_V.cpu()
    with atomic_path(folder / WEIGHTS) as temporary:
        write_tensors(temporary, tensors)
    write_json(
        folder / DESCRIPTION,
        {
            "schema": HEAD_SCHEMA,
            "kind": head.kind,
            "step": step,
            "settings": asdict(head.settings),
            "target": head.facts.to_dict(),
            **({"base": head.base.to_dict()} if head.base else {}),
            "taps": head.taps,
            "draft_ids_sha256": hash_ids(head.draft_ids_V.cpu().numpy()),
            "weights_sha256": head_hash(folder),
        },
    )


def load_head(folder: Path, target: Any) -> Head:
    """Rebuild a saved head and attach it to its target.

    Raises:
        WrongInput: no head there, an unknown kind, tensors missing or left over, a vocabulary map or weights that are not
            the recorded ones, or a target other than the one the head was trained for.
    """
    description = read_description(folder)
    check_target(folder, target.facts)
    facts = TargetFacts.from_dict(description["target"])
    tensors = read_tensors(folder / WEIGHTS)
    draft_ids_V = tensors.pop("draft_ids", torch.empty(0, dtype=torch.int64))
    if hash_ids(draft_ids_V.numpy()) != description["draft_ids_sha256"]:
        raise WrongInput(f"{folder}: the vocabulary map in {WEIGHTS} is not the one {DESCRIPTION} names.\n{DAMAGED}")
    head = build_head(HEADS[description["kind"]](**description["settings"]), facts, draft_ids_V)
    if head.base and (differing := _differing(TargetFacts.from_dict(description["base"]), head.base)):
        raise WrongInput(
            f"{folder}: trained with frozen tensors of {head.base.name!r}, which now differs in {', '.join(differing)}. "
            "Put the model back as it was, or train again."
        )
    expected = head.trained_tensors()
    missing, left_over = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    misshapen = sorted(k for k in expected.keys() & tensors.keys() if expected[k].shape != tensors[k].shape)
    if missing or left_over or misshapen:
        raise WrongInput(
            f"{folder}: tensors missing {missing}, unexpected {left_over}, of another shape {misshapen}.\n{DAMAGED}"
        )
    check_weights(folder, description)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(tensors[name])
    head.load_target(target, initialise=False)
    return head


def check_target(folder: Path, facts: TargetFacts) -> None:
    """Refuse a saved head that was trained for another target; no tensor is read.

    Raises:
        WrongInput: naming what differs; also as `read_description`.
    """
    trained = TargetFacts.from_dict(read_description(folder)["target"])
    if differing := _differing(trained, facts):
        raise WrongInput(
            f"{folder}: trained for target {trained.name!r}, but {facts.name!r} differs in {', '.join(differing)}. "
            "A head accepts well only on the target it was trained for: load that one, or train again."
        )


def _differing(old: TargetFacts, new: TargetFacts) -> list[str]:
    """Parts of the fingerprint that two models differ in."""
    ours, theirs = old.fingerprint, new.fingerprint
    return [k for k in sorted({*ours, *theirs}) if ours.get(k) != theirs.get(k)]


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file.

    Raises:
        WrongInput: it is missing or damaged.
    """
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise WrongInput(f"{file}: found no whole safetensors file ({error}).\n{DAMAGED}") from None


def write_tensors(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file that others may read, who serve the head under another user; the library writes 0600."""
    save_file(tensors, file, metadata=metadata or {"format": "pt"})
    file.chmod(0o644)


def head_hash(folder: Path) -> str:
    """The sha256 of a saved head's weights file."""
    return hash_file(folder / WEIGHTS)


def checkpoint_identity(folder: Path) -> dict[str, Any]:
    """What a measurement speaks of: a saved head's weights, and the settings that say what they compute.

    Raises:
        WrongInput: the weights are not those that were saved; also as `read_description`.
    """
    description = read_description(folder)
    meaning = {name: description[name] for name in ("kind", "settings", "taps", "draft_ids_sha256")}
    if "base" in description:
        meaning["base"] = description["base"]["fingerprint"]
    return {
        "kind": description["kind"],
        "step": description.get("step"),
        "sha256": check_weights(folder, description),
        "settings_sha256": hash_json(meaning),
    }
