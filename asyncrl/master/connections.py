"""How the master reaches the other processes: request-reply to workers, name resolution for what is announced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.request_reply import RequestClient
from asyncrl.comm.shards import ModelShardID, RoutingTable
from asyncrl.master.graph.types import Graph
from asyncrl.runtime.worker import AsyncWorker


async def connect(worker: AsyncWorker, kind: str, count: int) -> list[RequestClient]:
    """Clients of the `count` workers of `kind`, by index, once all have registered.

    Raises:
        NameResolveTimeout: one did not within `system.start_timeout_s`.
        StopRequested: `worker` was asked to stop.
    """
    security = worker.secret.sockets() if worker.secret is not None else None
    keys = [names.worker_key(kind, index) for index in range(count)]
    found = [names.WorkerAddress.decode(await worker.registered(key)) for key in keys]
    return [RequestClient(at.endpoint, security, name=key) for at, key in zip(found, keys, strict=True)]


class NameBoard:
    """Announces versions and the data state in name resolution; the entries outlive this process."""

    def __init__(self, resolver: NameResolver) -> None:
        self._resolver = resolver

    def announce_version(self, version: int, path: str) -> None:
        """The actor's newest weights are in `path`."""
        published = names.PublishedVersion(version, path)
        self._resolver.add(names.model_version_key("actor"), published.encode(), replace=True)

    def announce_data_state(self, path: Path) -> None:
        """The RolloutWorkers may begin; the used prompts are in `path`."""
        self._resolver.add(names.data_state_key(), names.DataState(str(path)).encode(), replace=True)


def placement_of(graph: Graph, layout: Sequence[tuple[int, int, int]]) -> RoutingTable:
    """Which ModelWorkers host the roles of `graph`, and which take in trajectories.

    Args:
        layout: coordinates (dp, tp, pp) of each ModelWorker, in order of their indices. Each worker hosts a shard of
            every role; those at tp 0, pp 0 are the data-parallel heads.
    """
    shards = {ModelShardID(role, *at): worker for role in graph.roles() for worker, at in enumerate(layout)}
    heads = {dp: worker for worker, (dp, tp, pp) in enumerate(layout) if (tp, pp) == (0, 0)}
    return RoutingTable(shards, [heads[dp] for dp in sorted(heads)])
