"""Which ModelWorker is which, without torch: what each hosts, which take trajectories, which publishes.

ModelWorkers form a grid of pipeline stages x data-parallel copies x tensor slices, numbered row by row: the pipeline is
the outermost axis, the tensor slices of one layer are neighbours, as `torch.distributed.init_device_mesh` numbers its
ranks. With 2 stages, 2 copies and 2 slices:

                      data 0              data 1
                  tensor 0  tensor 1  tensor 0  tensor 1
    pipeline 0        0         1         2         3
    pipeline 1        4         5         6         7

A worker's index is its rank in the world of all. Its data index, by which trajectories are dealt, is another number as
soon as there is more than one slice or stage: workers 0 and 2 above are the data heads of copies 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.comm.shards import ModelShardID, RoutingTable


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A worker's place on each axis, from 0."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True, slots=True)
class WorkerGrid:
    """The sizes of the axes; every role is spread over the whole grid.

    Raises:
        ValueError: an axis is not positive.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline) < 1:
            raise ValueError(f"{self} has an axis below 1; set trainer.parallel to a layout like d2")

    @property
    def workers(self) -> int:
        """Number of ModelWorkers."""
        return self.pipeline * self.data * self.tensor

    def worker_at(self, coordinates: Coordinates) -> int:
        """Index of the worker at `coordinates`."""
        return (coordinates.pipeline * self.data + coordinates.data) * self.tensor + coordinates.tensor

    def coordinates(self, worker: int) -> Coordinates:
        """Where `worker` is.

        Raises:
            ValueError: there is no such worker.
        """
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker {worker} is not one of the {self.workers} of {self}")
        rest, tensor = divmod(worker, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline, data, tensor)

    @property
    def data_heads(self) -> tuple[int, ...]:
        """The workers that take trajectories: the first of each data-parallel copy, by data index."""
        return tuple(self.worker_at(Coordinates(0, data, 0)) for data in range(self.data))

    @property
    def publisher(self) -> int:
        """The worker that completes published weights and checkpoints, and sends weights from its memory."""
        return self.worker_at(Coordinates(0, 0, 0))

    def routing_table(self, roles: Iterable[str]) -> RoutingTable:
        """Where the shards of `roles` and the data slots are.

        Raises:
            RoutingError: a role's name is no identifier.
        """
        places = [self.coordinates(worker) for worker in range(self.workers)]
        shards = {
            ModelShardID(role, place.data, place.tensor, place.pipeline): worker
            for role in roles
            for worker, place in enumerate(places)
        }
        return RoutingTable(shards, self.data_heads)
