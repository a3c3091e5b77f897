"""A target whose decoder layers are spread over several processes, for one that no device holds (torch's `fully_shard`).

Each process holds a part of every layer's weights, and a layer is whole for the time it computes. The ends are whole on
each, as a head there reads them too. Processes have tokens of their own but go through the layers together, because a layer
becomes whole only where all ask for it. So they agree before a pass whether one of them has tokens left, and a process that
has none goes along with a single token of filler: the same layers in the same order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headstart.heads.cache import PositionCache
from headstart.heads.memory import return_freed_memory
from headstart.heads.model_files import decoder_layers
from headstart.heads.precision import DTYPES
from headstart.heads.target import States, Target, TargetLoader, choose_device
from headstart.heads.target_probe import check_probe
from headstart.heads.tree import Tree
from headstart.heads.weight_files import Part, WeightFiles, empty_model, fill_ends, layer_weights

Vote = Callable[[bool], bool]  # whether what one process says holds for any of them


class ShardedTarget(Target):
    """The target on this process and its peers. Outside `together`, all of them have to make the same passes."""

    sharded = True
    pass_tokens = 8 * Target.pass_tokens  # all layers are gathered in every pass, however few its tokens are

    def __init__(self, model: Any, loader: TargetLoader, vote: Vote) -> None:
        super().__init__(model, loader.tokenizer, loader.facts, loader.taps, direct=False)
        self._vote = vote
        self._uneven = False

    @contextmanager
    def together(self) -> Iterator[None]:
        self._uneven = True
        yield
        filler_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._vote(False):
            with torch.inference_mode():  # as all passes are: buffers of gathered weights belong to one mode
                super()._read_batch(filler_11)
        self._uneven = False

    def forward(
        self,
        tokens_BT: Tensor,
        start_B: Tensor,
        cache: PositionCache,
        length_B: Tensor | None = None,
        rows: Tensor | None = None,
        trees: Sequence[Tree] | None = None,
    ) -> States:
        self._announce()
        return super().forward(tokens_BT, start_B, cache, length_B, rows, trees)

    def _read_batch(self, tokens_BT: Tensor) -> States:
        self._announce()
        return super()._read_batch(tokens_BT)

    def _announce(self) -> None:
        if self._uneven:
            self._vote(True)

    def layer(self, index: int) -> dict[str, Tensor]:
        """As a whole; all processes have to ask."""
        return {name: whole(tensor) for name, tensor in super().layer(index).items()}

    def held_bytes(self) -> dict[str, int]:
        """Bytes of weights on this process: of the decoder layers, and of the ends."""
        layers = list(self._layers.parameters())
        inside = {id(parameter) for parameter in layers}
        ends = [parameter for parameter in self.model.parameters() if id(parameter) not in inside]
        return {"layers": sum(map(own_bytes, layers)), "ends": sum(map(own_bytes, ends))}


def load_sharded(loader: TargetLoader, dtype: str, vote: Vote) -> ShardedTarget:
    """Spread a target over the processes that have met; each reads its own rows of every weight, layer by layer.

    Args:
        vote: over the same processes.

    Raises:
        WrongInput: weights that are missing, misshapen or quantised, or a failed probe.
    """
    settings, facts, device = loader.settings, loader.facts, choose_device(loader.settings.device)
    return_freed_memory()  # of layers, after each has computed
    attention = {} if settings.attention == "auto" else {"attn_implementation": settings.attention}
    model = empty_model(facts.name, loader.folder, dtype=DTYPES[dtype], **attention)
    files = WeightFiles(facts.name, loader.folder, model)
    layers = decoder_layers(model.base_model, facts.num_layers)
    fill_ends(model, layers, files, device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    inside = set(layers.parameters())
    ends = {parameter for parameter in model.parameters() if parameter not in inside}
    fully_shard(model.base_model, mesh=mesh, ignored_params=ends)
    for index in range(len(layers)):
        fill_layer(model, layers, index, files, device)
    vote(False)  # whoever reads its part last is waited for without a time limit, unlike in a pass
    target = ShardedTarget(model, loader, vote)
    check_probe(target)
    return target


def fill_layer(model: Any, layers: nn.ModuleList, index: int, files: WeightFiles, device: torch.device) -> None:
    """Give this process its rows of a layer's weights."""
    buffers = {name: buffer.to(device, copy=True) for name, buffer in layers[index].named_buffers()}
    layers[index].to_empty(device=device)
    for name, buffer in layers[index].named_buffers():
        buffer.copy_(buffers[name])
    parts: dict[str, Part] = {}
    for name, tensor in layer_weights(model, layers, index).values():
        parts[name] = own_rows(tensor) if isinstance(tensor, DTensor) else (tensor, 0)
    files.fill(parts)


def own_rows(tensor: DTensor) -> Part:
    """This process's rows of a weight, and the number of the first: rows are dealt as `torch.chunk` does it."""
    most = math.ceil(tensor.shape[0] / tensor.device_mesh.size())
    return tensor.to_local(), min(tensor.device_mesh.get_local_rank() * most, tensor.shape[0])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_bytes(tensor: Tensor) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.numel() * own.element_size()
