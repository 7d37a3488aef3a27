"""Tensors of which this rank may hold a part."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; shares its memory. A plain one is all its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zeros_on_host(like: Tensor) -> Tensor:
    """Zeros of the type and shape of `like`, spread as it is, in host memory: pinned where `like` is on a GPU."""
    mine = local(like)
    zeros = torch.zeros(mine.shape, dtype=like.dtype, device="cpu", pin_memory=mine.device.type == "cuda")
    if not isinstance(like, DTensor):
        return zeros
    # As FSDP2 makes the parameters that it off-loads; DTensor.from_local would move them to the mesh's device.
    return DTensor(zeros, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]
