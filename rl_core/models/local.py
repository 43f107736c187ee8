"""This rank's part of tensors that may be sharded."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor (a view: writing to it writes to the DTensor); another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
