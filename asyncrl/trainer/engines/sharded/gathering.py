"""Bringing a tensor that is spread over ranks whole to the one that wants it, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.trainer.parallel import Place
from asyncrl.trainer.worker_grid import Coordinates
from asyncrl.weights.published import TensorSpec


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank of its mesh; a collective of these. A plain one is whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Gathering:
    """The published tensors of one role.

    Attributes:
        specs: of the whole model, in its order.
        stages: by name, the pipeline stage that has the tensor.
        mine: those of this rank's stage; parts of them.
    """

    specs: Sequence[TensorSpec]
    stages: Mapping[str, int]
    mine: Mapping[str, Tensor]
    place: Place
    device: torch.device

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `asyncrl.trainer.engines.base.PolicyEngine.gather`."""
        here, grid = self.place.coordinates.pipeline, self.place.grid
        for spec in self.specs:
            if spec.name not in owners:
                continue
            owner, stage = owners[spec.name], self.stages[spec.name]
            tensor = None
            if stage == here:
                tensor = whole(self.mine[spec.name].detach()).to(spec.dtype)
            sender = grid.worker_at(Coordinates(stage, 0, 0))
            if grid.coordinates(owner).pipeline != stage:
                if self.place.worker == sender:
                    assert tensor is not None
                    dist.send(tensor.contiguous(), owner)
                elif self.place.worker == owner:
                    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                    dist.recv(tensor, sender)
            if self.place.worker == owner:
                assert tensor is not None
                yield spec.name, tensor
