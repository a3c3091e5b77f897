"""Write an MTP layer of our own as a target that ships one: MiMo, which is Qwen2 with such a layer.

Engines load MTP layers only as a part of targets that they know. A Llama-like target is a Qwen2, whose biases may be zero,
so target and layer together are a MiMo: the folder holds both, and the target computes what it did. Before it gets its name
it is read back as such a target: the target's tensors bit by bit, and the layer through transformers' own module
(`mtp_shipped.py`), which must draft what the head drafts.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.checkpoint import write_tensors
from headstart.heads.errors import WrongInput
from headstart.heads.export.card import CARD
from headstart.heads.export.comparison import TOLERANCE, rounded
from headstart.heads.export.folder import check_folder_name, fresh_folder
from headstart.heads.export.layer import decoder_config
from headstart.heads.export.limits import refuse_unservable
from headstart.heads.export.mtp import TARGET_CARD
from headstart.heads.facts import TargetFacts
from headstart.heads.model_files import read_config
from headstart.heads.mtp import MTP
from headstart.heads.mtp_shipped import MTPShipped
from headstart.heads.settings import MTPSettings
from headstart.heads.shipped import BIASED, ENDS, INDEX, LAYOUTS, load_pieces, read_shipped, tensor_files
from headstart.heads.store import write_json

MIMO = LAYOUTS["qwen2"]
LAYER_FILE = "model-mtp.safetensors"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_mimo(head: MTP, source: Path, out: Path, engine: str, describe: Callable[[Path], None] | None = None) -> Path:
    """Write `out` from the target's folder, checked; `describe` may add the card before the folder gets its name.

    Raises:
        WrongInput: the engine could not serve this head as trained, `out` cannot be used, or what was written does not
            draft what the head drafts. Nothing is left under `out` then.
    """
    refuse_unservable(head, engine)
    check_folder_name(out, head.kind)
    with fresh_folder(out) as folder:
        layer = trained_layer(head)
        dtype = write_weights(folder, source, layer | missing_biases(layer, layer))
        write_json(folder / "config.json", mimo_config(head.facts, source, str(dtype).removeprefix("torch.")))
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
                shutil.copyfile(path, folder / (TARGET_CARD if path.name == CARD else path.name))
        check_mimo(head, folder, source, dtype)
        if describe is not None:
            describe(folder)
    return out


def write_weights(folder: Path, source: Path, layer: dict[str, Tensor]) -> torch.dtype:
    """Write the target's files with zero biases, the layer, and an output head; returns the precision of the layer.

    One file stays one; of several, an index says what lies where, and the layer has a file of its own.

    Raises:
        WrongInput: tensors under unusual names.
    """
    old = tensor_files(source)
    if EMBEDDING not in old:
        raise WrongInput(f"{source}: found no {EMBEDDING}, expected the target's tensors under their usual names.")
    with safe_open(old[EMBEDDING], framework="pt") as file:
        embedding_VH = file.get_tensor(EMBEDDING)
    own = {name: tensor.to(embedding_VH.dtype) for name, tensor in layer.items()}
    own |= {} if OUTPUT in old else {OUTPUT: embedding_VH}
    places: dict[str, str] = {}
    files = sorted(set(old.values()))
    for path in files:
        tensors = load_file(path)
        tensors |= missing_biases(tensors, old)
        tensors |= own if len(files) == 1 else {}
        write_tensors(folder / path.name, tensors)
        places |= dict.fromkeys(tensors, path.name)
    if len(files) > 1:
        write_tensors(folder / LAYER_FILE, own)
        places |= dict.fromkeys(own, LAYER_FILE)
        size = sum((folder / name).stat().st_size for name in set(places.values()))
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    return embedding_VH.dtype


def mimo_config(facts: TargetFacts, source: Path, dtype: str) -> dict[str, Any]:
    """The whole config.json: Qwen2's fields out of the target's facts, and the number of MTP layers."""
    target = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        **decoder_config(facts, dtype),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        **{name: target[name] for name in KEPT if name in target},
    }


def trained_layer(head: MTP) -> dict[str, Tensor]:
    """The head's tensors by published names; MiMo's projection reads the state first."""
    base, found = MIMO.base(head.facts.num_layers), {}
    for name, tensor in head.layer.named_parameters():
        module, _, leaf = name.partition(".")
        value = tensor.detach().cpu()
        if module == "eh_proj":
            value = torch.cat(value.chunk(2, dim=1)[::-1], dim=1)
        path = f"{MIMO.ends[ENDS.index(module)]}.{leaf}" if module in ENDS else name
        found[base + path] = value.contiguous()
    return found


def missing_biases(tensors: dict[str, Tensor], there: Any) -> dict[str, Tensor]:
    """Zero biases of the projections among `tensors` that Qwen2 has one for and that are not `there`."""
    weights = {name.removesuffix(".weight"): t for name, t in tensors.items() if name.endswith(".weight")}
    biased = {name: t for name, t in weights.items() if name.endswith(BIASED) and f"{name}.bias" not in there}
    return {f"{name}.bias": weight.new_zeros(len(weight)) for name, weight in biased.items()}


def check_mimo(head: MTP, folder: Path, source: Path, dtype: torch.dtype) -> None:
    """Read a written folder back as a target that ships its layer.

    Raises:
        WrongInput: tensors of the target that are not as they were, or a layer that drafts otherwise than the head.
    """
    new = tensor_files(folder)
    for file in sorted(set(tensor_files(source).values())):
        written = load_file(folder / file.name)
        changed = [name for name, t in load_file(file).items() if not torch.equal(t, written.get(name, t.new_zeros(0)))]
        if changed:
            raise WrongInput(
                f"{folder}: {changed[0]} is not the target's. This is a fault of the export: please report it."
            )
    extra = [name for name in new.keys() - tensor_files(source).keys() if name.endswith(".bias")]
    if not all(bool((load_file(new[name])[name] == 0).all()) for name in extra if not name.startswith(MIMO.prefix)):
        raise WrongInput(f"{folder}: a bias that the target has not is not zero. This is a fault of the export.")
    shipped = read_shipped(folder, read_config(folder))
    again = MTPShipped(MTPSettings(shipped=True), replace(head.facts, shipped=shipped), head.draft_ids_V)
    with torch.no_grad():
        load_pieces(folder, MIMO, head.facts.num_layers, again.trained_tensors())
        again.embedding_VH = head.embedding_VH
        again.lm_head.weight.copy_(head.lm_head.weight)
        with rounded(head, dtype):
            difference = draft_difference(head, again.eval())
    if not difference <= TOLERANCE:
        raise WrongInput(
            f"{folder}: the written layer does not draft what the head drafts: largest difference {difference:.2e} of the "
            f"largest logit, allowed {TOLERANCE:.0e}.\nThis is a fault of the export, not of the head: please report it."
        )


def draft_difference(head: MTP, other: MTPShipped, depth: int = 4) -> float:
    """Largest difference of draft logits, relative to the largest, over two blocks of two requests with random states."""
    random, width, lengths_B = torch.Generator().manual_seed(0), head.facts.hidden_size, torch.tensor([9, 1])
    worst, num_slots = 0.0, int(lengths_B.max())
    states = []
    for which in (head, other):
        random.manual_seed(0)
        final_BTH = torch.randn(2, num_slots, width, generator=random)
        token_BT = torch.randint(head.facts.num_tokens, (2, num_slots), generator=random)
        states.append(which.start(final_BTH, token_BT, lengths_B, num_slots + 2 * depth + 2))
    for _ in range(2):
        ours = head.draft(states[0], depth)
        chosen = iter(torch.searchsorted(head.draft_ids_V, ours.tokens_BK).unbind(1))
        theirs = other.draft(states[1], depth, lambda logits_BV, chosen=chosen: next(chosen))  # type: ignore[misc]
        apart = (ours.logits_BKV - theirs.logits_BKV).abs().max() / ours.logits_BKV.abs().max()
        worst = max(worst, float(apart))
        final_BTH = torch.randn(2, depth + 1, width, generator=random)
        for drafter, state in zip((head, other), states, strict=True):
            drafter.accept(state, final_BTH, ours.tokens_BK[:, [*range(depth), 0]], torch.tensor([2, 0]))
    return worst
