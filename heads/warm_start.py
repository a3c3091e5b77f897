"""Start a head from another one: its trained tensors and its vocabulary map are taken over, the optimiser begins anew."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from headstart.heads.checkpoint import build_head
from headstart.heads.contract import Head
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.settings import HeadSettings
from headstart.heads.start import Start, StoredTensor, stored_tensors

ROWS_COMPARED = 64
ROUNDING = 2.0**-7  # relative, of a table that was stored in bfloat16 or float16


def start_problems(
    start: Start, settings: HeadSettings, facts: TargetFacts, target_folder: Path
) -> Iterator[tuple[str, str]]:
    """Dotted key and message of everything by which a recipe's head is not the one it is to start from."""
    different = list(start.differences(settings, facts))
    yield from different
    ids_V = start.draft_ids_V
    if ids_V is not None and not (np.diff(ids_V) > 0).all():
        yield "head.init_from", f"found a vocabulary map in {start.folder} that is not ascending, expected each id once"
    elif ids_V is not None and not 0 <= ids_V[0] <= ids_V[-1] < facts.num_tokens:
        text = (
            f"found draft ids {ids_V[0]} to {ids_V[-1]} in {start.folder}, but the target has {facts.num_tokens} tokens"
        )
        yield "head.init_from", text
    if not different and (wrong := shape_problems(start, settings, facts)):
        yield "head.init_from", f"{start.folder} does not hold this head: {'; '.join(wrong)}"
    if start.embedding is not None and not same_embedding(start.embedding, target_folder):
        text = f"found another embedding in {start.folder} than the target's, which heads here share"
        yield "head.init_from", text


def shape_problems(start: Start, settings: HeadSettings, facts: TargetFacts) -> list[str]:
    """Tensors that are missing, left over or of another shape, against the head of these settings."""
    num_ids = facts.num_tokens if start.draft_ids_V is None else len(start.draft_ids_V)
    with torch.device("meta"):
        head = build_head(settings, facts, torch.arange(num_ids))
    expected = head.trained_tensors()
    if start.base and head.base and start.base != head.base.fingerprint:
        return [f"it was trained on frozen tensors of another {head.base.name}"]
    problems = [
        f"tensor {name} is missing" for name in expected if name not in start.tensors and name not in start.optional
    ]
    problems += [f"tensor {name} is not read" for name in start.tensors if name not in expected]
    for name, tensor in start.tensors.items():
        shape = tuple(expected[name].shape) if name in expected else tensor.shape
        # An output layer over the whole table gives the rows that can be drafted.
        whole = start.draft_ids_V is None and tensor.shape == (facts.vocab_size, *shape[1:])
        if shape != tensor.shape and not (whole and shape[0] == facts.num_tokens):
            problems.append(f"found {tensor.name} of shape {list(tensor.shape)}, expected {list(shape)}")
    return problems


def same_embedding(stored: StoredTensor, target_folder: Path) -> bool:
    """Whether some rows are the target's; true where its files call the embedding by no usual name."""
    ours = stored_tensors(sorted(target_folder.glob("*.safetensors")))
    own = next((tensor for name, tensor in ours.items() if name.endswith("embed_tokens.weight")), None)
    if own is None:
        return True
    step = max(1, stored.shape[0] // ROWS_COMPARED)
    if own.shape != stored.shape:
        return False
    return torch.allclose(read(stored, step).float(), read(own, step).float(), rtol=ROUNDING, atol=1e-5)


def read(stored: StoredTensor, step: int = 1) -> Tensor:
    """A tensor, or every step-th row of it."""
    with safe_open(stored.file, framework="pt") as file:
        tensor: Tensor = file.get_slice(stored.name)[::step] if step > 1 else file.get_tensor(stored.name)
    return tensor


@torch.no_grad()
def take_over(head: Head, start: Start) -> None:
    """Copy the tensors of a start into a new head that was built with its settings and its vocabulary map.

    Raises:
        WrongInput: values that are not finite.
    """
    if start.draft_ids_V is not None:
        head.first_values["draft_ids_V"] = start.layout
    for name, parameter in head.trained_tensors().items():
        if name not in start.tensors:
            continue
        tensor = read(start.tensors[name])
        if not bool(tensor.isfinite().all()):
            raise WrongInput(f"{start.folder}: found values in {name} that are not finite; start from another head.")
        if tensor.shape != parameter.shape:
            tensor = tensor[head.draft_ids_V.cpu()]
        parameter.copy_(tensor)
        head.first_values[name] = start.layout
