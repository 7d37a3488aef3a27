"""Map tensors that are spread over ranks to the tensors of a model folder, and back.

`own_parts` yields what a rank reads of a folder. `Gathering` brings each tensor of a folder whole to the rank that owns
it, one parameter at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.models.weights.model_files.folder_tensors import FolderTensor
from asyncrl.models.weights.versions.published import TensorSpec
from asyncrl.trainer.engines.host_offload import local
from asyncrl.trainer.parallel.rank_position import RankPosition
from asyncrl.trainer.parallel.worker_grid import Coordinates


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank of its mesh, whose ranks must all call this.

    A plain tensor is already whole.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    with several_collectives_expected():
        return tensor.full_tensor()


def own_parts(tensor: Tensor, parts: Sequence[FolderTensor]) -> Iterator[tuple[FolderTensor, Tensor]]:
    """Yield those of a parameter's `parts` that this rank holds, each with the tensor to read it into.

    If a part is the whole parameter, that is `tensor` itself, however it is spread. Otherwise it is a view of this
    rank's memory: a parameter of many parts is spread by its first dimension, so a rank has all of a part or nothing of
    it.
    """
    for part in parts:
        if part.is_whole:
            yield part, tensor
            continue
        first = 0
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            first = int(chunk.offsets[0])
        mine = local(tensor)
        if mine.shape[1:] != tensor.shape[1:] or part.size[0] != 1:
            raise NotImplementedError(f"{part.name!r} is cut across its dimensions")
        if first <= part.start[0] < first + mine.shape[0]:
            yield part, replace(part, start=(part.start[0] - first, *part.start[1:])).of(mine)


@dataclass(frozen=True)
class Gathering:
    """The published tensors of one role.

    Attributes:
        specs: tensors of the whole model, in its order.
        stages: by name, the pipeline stage that has the tensor.
        folder: by name, position of the tensor in a parameter; a tensor without an entry is a parameter of that name.
        mine: the parameters and buffers of this rank's stage; parts of them.
    """

    specs: Sequence[TensorSpec]
    stages: Mapping[str, int]
    folder: Mapping[str, FolderTensor]
    mine: Mapping[str, Tensor]
    place: RankPosition
    device: torch.device

    def published_specs(self) -> list[TensorSpec]:
        """See `asyncrl.trainer.engines.base.PolicyEngine.published_specs`."""
        return list(self.specs)

    def gather(self, owners: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        """See `asyncrl.trainer.engines.base.PolicyEngine.gather`."""
        here, grid = self.place.coordinates.pipeline, self.place.grid
        parameter, gathered = "", torch.empty(0)  # the last gathered one: the next tensor may be a part of it too
        for spec in self.specs:
            if spec.name not in owners:
                continue
            owner, stage = owners[spec.name], self.stages[spec.name]
            tensor = None
            if stage == here:
                part = self.folder.get(spec.name)
                name = spec.name if part is None else part.parameter
                if name != parameter:
                    parameter, gathered = name, torch.empty(0)  # freed before the next one needs memory
                    gathered = whole(self.mine[name].detach().to(spec.dtype))
                tensor = (gathered if part is None else part.of(gathered)).contiguous()
            sender = grid.worker_at(Coordinates(stage, 0, 0))
            if grid.coordinates(owner).pipeline != stage:
                if self.place.worker == sender:
                    assert tensor is not None
                    dist.send(tensor, owner)
                elif self.place.worker == owner:
                    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                    dist.recv(tensor, sender)
            if self.place.worker == owner:
                assert tensor is not None
                yield spec.name, tensor


_LOGGER = logging.getLogger("torch.distributed.tensor._redistribute")
_BEGINS = "While redistributing from"


@contextmanager
def several_collectives_expected() -> Iterator[None]:
    """Silence torch's warning that gathering a tensor over two mesh dimensions takes two collectives.

    A single collective would need a flattened mesh. Two are fine here: a norm is one number, and whole tensors are
    gathered when weights are published, not in a step.
    """
    _LOGGER.addFilter(_is_other)
    try:
        yield
    finally:
        _LOGGER.removeFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_BEGINS)
