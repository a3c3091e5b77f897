"""A model made without weights, and its weights read from its files part by part: for models that no process holds whole."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from headstart.heads.errors import WrongInput
from headstart.heads.made_targets import quiet_transformers
from headstart.heads.model_files import read_config
from headstart.heads.shipped import stored_pieces, tensor_files

Part = tuple[Tensor, int]  # rows of a weight, and the number of the first of them


def empty_model(name: str, folder: Path, **options: Any) -> Any:
    """The causal language model of a folder, in evaluation mode; its parameters have shapes and no values.

    Raises:
        WrongInput: quantised weights, whose packing decides what a row is.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = read_config(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise WrongInput(
            f"target {name}: found quantised weights, expected plain ones: quantised ones cannot be read in parts.\n"
            "Use the model's unquantised files, or a device that holds it: target.sharded=false."
        )
    # Buffers that no file holds (rotary frequencies) are computed here.
    with quiet_transformers(), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    model.tie_weights()
    return model.eval().requires_grad_(False)


class WeightFiles:
    """The safetensors files of a model folder, one or many with an index."""

    def __init__(self, name: str, folder: Path, model: nn.Module) -> None:
        """Find every weight of `model`.

        Raises:
            WrongInput: files that cannot be read, or weights that are missing or misshapen.
        """
        self.name, self.folder = name, folder
        try:
            self._places = tensor_files(folder)
            problems = list(self._problems(model))
        except (OSError, ValueError, SafetensorError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise WrongInput(f"target {name}: the weights in {folder} cannot be read: {reason}") from None
        if problems:
            shown = ", ".join(problems[:4]) + (f" and {len(problems) - 4} more" if len(problems) > 4 else "")
            raise WrongInput(
                f"target {name}: {folder} lacks {len(problems)} weights, or has them under other names or in another shape "
                f"than its config says: {shown}.\nCopy the model again; if it is whole, its family cannot be read in parts."
            )

    def fill(self, parts: Mapping[str, Part]) -> None:
        """Read rows of weights, by the model's own names; files are open for as long as this takes.

        What was read of an open file counts as memory of the process, so a large model is filled a few weights at a time.
        """
        wanted: dict[Path, list[tuple[str, Tensor, int]]] = defaultdict(list)
        for name, (tensor, first) in parts.items():
            for path, piece, row in self._pieces(name, tensor, first):
                wanted[self._places[path]].append((path, piece, row))
        for file, pieces in wanted.items():
            with safe_open(file, framework="pt") as handle, torch.no_grad():
                for path, piece, row in pieces:
                    if piece.numel():
                        piece.copy_(handle.get_slice(path)[row : row + len(piece)])

    def _pieces(self, name: str, tensor: Tensor, first: int) -> Iterator[tuple[str, Tensor, int]]:
        """The stored tensors that rows of a weight come from: names, where they go, and the first row that is read."""
        if name in self._places:
            yield name, tensor, first
            return
        for path, piece in stored_pieces(name, tensor, first):
            yield path, piece, 0

    def _problems(self, model: nn.Module) -> Iterator[str]:
        expected: dict[Path, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, weight in weights(model).items():
            for path, piece, _ in self._pieces(name, weight, 0):
                if path in self._places:
                    expected[self._places[path]].append((path, piece))
                else:
                    yield path
        for file, pieces in expected.items():
            with safe_open(file, framework="pt") as handle:
                yield from (path for path, piece in pieces if handle.get_slice(path).get_shape() != list(piece.shape))


def check_parts(name: str, folder: Path) -> None:
    """Find every weight of a model folder, and read none.

    Raises:
        WrongInput: weights that are missing, misshapen or quantised.
    """
    WeightFiles(name, folder, empty_model(name, folder))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What files of a model hold: parameters, of tied ones the first, and buffers that are saved."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


def fill_ends(model: Any, layers: nn.ModuleList, files: WeightFiles, device: torch.device) -> None:
    """Give everything outside the decoder layers its weights, on a device: embedding, final norm, output head."""
    inside = {id(tensor) for tensor in (*layers.parameters(), *layers.buffers())}
    for name, weight in weights(model).items():
        if id(weight) not in inside:
            tensor = torch.empty_like(weight, device=device)
            files.fill({name: (tensor, 0)})
            owner, _, leaf = name.rpartition(".")
            if isinstance(weight, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            setattr(model.get_submodule(owner), leaf, tensor)
    model.tie_weights()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def layer_weights(model: Any, layers: nn.ModuleList, index: int) -> dict[str, tuple[str, Tensor]]:
    """The weights of a decoder layer by their names inside it: the name inside the model, and the tensor."""
    prefix = next(name for name, module in model.named_modules() if module is layers[index])
    return {name: (f"{prefix}.{name}", tensor) for name, tensor in weights(layers[index]).items()}
