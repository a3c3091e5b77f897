"""What a head can start from instead of its target: a saved head, or a folder that others published.

A start is known by its files: a description and the headers of its tensors. No torch here, because settings of a recipe come
from it; `heads/warm_start.py` reads the tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from headstart.heads.description import WEIGHTS, check_weights, read_description
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts, default_taps
from headstart.heads.settings import HeadSettings
from headstart.heads.store import hash_file, hash_json

FREE_SETTINGS = ("kind", "init_from", "init_from_target")  # they say nothing of what a head computes
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
PICKLED_ADVICE = (
    "pickled weights can run code and are never loaded. Where you trust them, write them anew:\n"
    "  python -c \"import torch, safetensors.torch as s; t = torch.load('FILE', weights_only=True); "
    "s.save_file({k: v.clone() for k, v in t.items()}, 'model.safetensors')\""
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, by its header."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file calls it, such as BF16


@dataclass(frozen=True)
class Start:
    """A head on disk, told in our own words whatever the layout it is in."""

    folder: Path
    layout: str
    kind: str
    settings: dict[str, Any]  # those settings of the kind that the layout decides
    target: dict[str, Any]  # what it says of the target it was trained for, as fields of TargetFacts
    tensors: dict[str, StoredTensor]  # by the names that a head of ours gives its trained tensors
    draft_ids_V: np.ndarray | None = None  # int64, ascending target ids; None where the output layer covers them all
    embedding: StoredTensor | None = None  # its copy of the target's embedding, which ours borrows
    base: dict[str, str] | None = None  # fingerprint of the model that frozen tensors are of, where not the target
    optional: tuple[str, ...] = ()  # trained tensors that may be absent: they stay as a new head has them

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that a head takes over."""
        files = sorted({tensor.file for tensor in self.tensors.values()})
        ids = None if self.draft_ids_V is None else self.draft_ids_V.tolist()
        return hash_json([self.kind, self.settings, ids, [hash_file(file) for file in files]])

    def differences(self, settings: HeadSettings, facts: TargetFacts) -> Iterator[tuple[str, str]]:
        """Dotted key and message of every setting and every fact of the target that is not what this head was built for."""
        asked = {name: value for name, value in self.settings.items() if name != "rope_theta"}
        if "taps" in asked:
            taps, ours = (ids or default_taps(facts.num_layers) for ids in (asked.pop("taps"), settings.asked_taps))
            if taps != ours:
                yield "head.taps", self._told("taps", ours, taps)
        for name, value in asked.items():
            if (ours := getattr(settings, name)) != value:
                yield f"head.{name}", self._told(name, ours, value)
        built_for = {name: value for name, value in self.target.items() if name != "rope_parameters"}
        for name, value in built_for.items():
            ours = facts.fingerprint.get("tokenizer") if name == "tokenizer" else getattr(facts, name)
            if ours != value:
                yield "head.init_from", self._told(f"{name} of the target", ours, value)
        theta, rope = self.settings.get("rope_theta"), self.target.get("rope_parameters")
        rope = {"rope_type": "default", "rope_theta": theta} if theta else rope
        ours = settings.rope_parameters(facts.rope_parameters)
        if rope is not None and plain_rope(rope) != plain_rope(ours):
            yield "head.rope_theta", self._told("rotary positions", ours, rope)

    def _told(self, name: str, found: Any, expected: Any) -> str:
        return f"found {name} = {found!r}, expected {expected!r}: the {self.layout} {self.folder} was trained with it"


def plain_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one form: no keys without value, bases and factors as numbers of one type."""
    kept = {k: v for k, v in parameters.items() if v is not None and (k, v) != ("partial_rotary_factor", 1.0)}
    return {k: float(v) if isinstance(v, int) else v for k, v in kept.items()}


def saved_start(folder: Path) -> Start:
    """A checkpoint of ours.

    Raises:
        WrongInput: it is damaged, or of another version.
    """
    description = read_description(folder)
    stored = stored_tensors([folder / WEIGHTS])
    check_weights(folder, description)
    ids = stored.pop("draft_ids", None)
    if ids is None:
        raise WrongInput(
            f"{folder / WEIGHTS}: found no draft_ids; the checkpoint is damaged. Use another one of the run."
        )
    facts = description["target"]
    names = ["hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size"]
    names += ["rms_norm_eps", "rope_parameters"]
    return Start(
        folder=folder,
        layout="checkpoint",
        kind=description["kind"],
        settings={k: v for k, v in description["settings"].items() if k not in FREE_SETTINGS},
        target={**{name: facts[name] for name in names}, "tokenizer": facts["fingerprint"].get("tokenizer")},
        tensors=stored,
        draft_ids_V=read_integers(ids),
        base=description["base"]["fingerprint"] if "base" in description else None,
    )


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Headers of all tensors in some safetensors files.

    Raises:
        WrongInput: a file is damaged, or two of them hold a tensor of one name.
    """
    found: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in found:
                        raise WrongInput(f"{path}: found {name}, which {found[name].file} holds too; expected it once.")
                    told = file.get_slice(name)
                    found[name] = StoredTensor(path, name, tuple(told.get_shape()), told.get_dtype())
        except (OSError, SafetensorError) as error:
            raise WrongInput(f"{path}: found no whole safetensors file ({error}).\nCopy it again.") from None
    return found


def read_integers(stored: StoredTensor) -> np.ndarray:
    """Values of a tensor of integers or booleans."""
    with safe_open(stored.file, framework="np") as file:
        values: np.ndarray = file.get_tensor(stored.name)
    return values


def holds_weights(folder: Path) -> bool:
    """Whether there are weights in a folder, in whatever form."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", *PICKLES))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        WrongInput: there are none; pickled ones are named with the way out.
    """
    files = sorted(folder.glob("*.safetensors"))
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not files and pickled:
        advice = PICKLED_ADVICE.replace("FILE", str(folder / pickled[0]))
        raise WrongInput(f"{folder}: found {', '.join(pickled)}, expected *.safetensors; {advice}")
    if not files:
        raise WrongInput(f"{folder}: found no *.safetensors, expected a head's weights in that form.")
    return files
