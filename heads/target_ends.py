"""A target without its layers: embedding, final norm and output head, which is what a head needs of it to be trained.

Layers that a head begins with are read from the files when it asks for them. So heads of a target that no device holds are
trained, and measured on stored states, with the memory that a head takes.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from headstart.heads.errors import WrongInput
from headstart.heads.model_files import decoder_layers
from headstart.heads.precision import DTYPES
from headstart.heads.target import Target, TargetLoader, choose_device
from headstart.heads.weight_files import WeightFiles, empty_model, fill_ends, layer_weights


class TargetEnds(Target):
    """What lies around the layers; whatever would run them is refused."""

    def __init__(self, model: Any, files: WeightFiles, loader: TargetLoader) -> None:
        super().__init__(model, loader.tokenizer, loader.facts, loader.taps, direct=False)
        self._files = files

    def layer(self, index: int) -> dict[str, Tensor]:
        index %= len(self._layers)
        names = {name: inside for name, (inside, _) in layer_weights(self.model, self._layers, index).items()}
        empty = self._layers[index].named_parameters()
        tensors = {name: torch.empty_like(tensor, device=self.device) for name, tensor in empty}
        self._files.fill({names[name]: (tensor, 0) for name, tensor in tensors.items()})
        return tensors

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def _read_batch(self, tokens_BT: Tensor) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise WrongInput(
            f"target.sharded: this runs the layers of {self.facts.name}, and here are its ends only.\n"
            "Run it on a device that holds the whole target: target.sharded=false"
        )


def load_ends(loader: TargetLoader, dtype: str) -> Target:
    """The ends of a target in a named precision.

    Raises:
        WrongInput: weights that are missing, misshapen or quantised.
    """
    model = empty_model(loader.facts.name, loader.folder, dtype=DTYPES[dtype])
    files = WeightFiles(loader.facts.name, loader.folder, model)
    fill_ends(
        model, decoder_layers(model.base_model, loader.facts.num_layers), files, choose_device(loader.settings.device)
    )
    return TargetEnds(model, files, loader)
