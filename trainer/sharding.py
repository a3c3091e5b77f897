"""Tensors of which each rank holds a part: the part, the whole, and how one is made of the other."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def own_part(tensor: Tensor) -> Tensor:
    """What lies on this rank, without a message; all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, known to every rank, as `like` lies on them; as it is where that is not sharded."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor.to(like.device, copy=True)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def num_bytes(tensors: list[Tensor]) -> int:
    """Bytes that lie on this rank."""
    return sum(own_part(tensor).untyped_storage().nbytes() for tensor in tensors)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
