"""How the master reaches the other processes: request-reply to workers, name resolution for what is announced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.name_resolve.errors import NameResolveTimeout
from asyncrl.comm.request_reply.client import RequestClient, RequestTimeout
from asyncrl.master.graph.types import Graph
from asyncrl.master.peers import EvaluationResult
from asyncrl.runtime.waiting import StopRequested
from asyncrl.runtime.worker import AsyncWorker
from asyncrl.trainer.worker_grid import WorkerGrid

EVALUATION_GRACE_S = 5.0
"""Beyond the limit of an evaluation, so that it is the evaluation's own limit that ends it."""
WAIT_S = 0.5
"""Longest uninterruptible wait for a name."""


class WorkerClients:
    """Request-reply clients of all workers of one kind, by index."""

    def __init__(self, clients: Sequence[RequestClient]) -> None:
        self._clients = clients

    @classmethod
    async def connect(cls, worker: AsyncWorker, kind: str, count: int) -> Self:
        """Clients of `count` workers of `kind`, once all have registered.

        Raises:
            NameResolveTimeout: one did not within `system.start_timeout_s`.
            StopRequested: see `registered`.
        """
        security = worker.secret.sockets() if worker.secret is not None else None
        keys = [names.worker_key(kind, index) for index in range(count)]
        found = [await registered(worker, key) for key in keys]
        endpoints = [json.loads(address)["endpoint"] for address in found]
        return cls([RequestClient(end, security, name=key) for end, key in zip(endpoints, keys, strict=True)])

    @property
    def count(self) -> int:
        """Number of workers."""
        return len(self._clients)

    async def request(self, worker: int, method: str, meta: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The metadata that `worker` replies to `method`.

        Raises:
            TimeoutError: no reply within `timeout_s`.
            RemoteError: the method raised there.
            PeerGone: the worker is gone.
        """
        try:
            return dict((await self._clients[worker].call(method, meta, timeout_s=timeout_s)).meta)
        except RequestTimeout as error:
            raise TimeoutError(str(error)) from error

    def close(self) -> None:
        """Disconnect."""
        for client in self._clients:
            client.close()


class Evaluators:
    """The RolloutWorkers, each of which evaluates its share of the held-out set."""

    def __init__(self, workers: WorkerClients) -> None:
        self._workers = workers

    async def evaluate(self, version: int, timeout_s: float) -> EvaluationResult:
        """Evaluate `version` on the whole set.

        Raises:
            Exception: a worker failed, or is late.
        """
        meta, limit_s = {"version": version}, timeout_s + EVALUATION_GRACE_S
        requests = (self._workers.request(index, "evaluate", meta, limit_s) for index in range(self._workers.count))
        shares = [share for share in await asyncio.gather(*requests) if share["rewards"]]
        return EvaluationResult(
            rewards=[reward for share in shares for reward in share["rewards"]],
            lengths=[length for share in shares for length in share["lengths"]],
            min_version=min(share["min_version"] for share in shares),
            max_version=max(share["max_version"] for share in shares),
        )


class NameBoard:
    """Announces versions and the data state in name resolution; the entries outlive this process."""

    def __init__(self, resolver: NameResolver) -> None:
        self._resolver = resolver

    def announce_version(self, version: int, path: str) -> None:
        """The actor's newest weights are in `path`."""
        value = json.dumps({"version": version, "path": path})
        self._resolver.add(names.model_version_key("actor"), value, replace=True)

    def announce_data_state(self, path: Path, epoch: int) -> None:
        """The RolloutWorkers may begin; the used prompts are in `path`."""
        self._resolver.add(names.data_state_key(), json.dumps({"path": str(path), "epoch": epoch}), replace=True)


def placement_of(graph: Graph, ranks: int) -> dict[str, list[int]]:
    """For every role of `graph` the ModelWorkers that host it.

    Raises:
        RoutingError: a role's name is no identifier.
    """
    table = WorkerGrid(data=ranks).routing_table(graph.roles())
    return {role: sorted(set(table.shards_of(role).values())) for role in graph.roles()}


async def registered(worker: AsyncWorker, key: str) -> str:
    """The value under `key`, once it is there.

    Raises:
        NameResolveTimeout: it is not within `system.start_timeout_s`.
        StopRequested: `worker` was asked to stop.
    """
    return await await_name(worker.resolver, key, worker.config.system.start_timeout_s, worker.stop)


async def await_name(resolver: NameResolver, key: str, limit_s: float, stop: asyncio.Event) -> str:
    """The value under `key`, once it is there.

    Raises:
        NameResolveTimeout: it is not within `limit_s`.
        StopRequested: `stop` was set.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not stop.is_set():
        try:  # a thread cannot be interrupted: short waits, so that a stop request need not outwait a long one
            return await asyncio.to_thread(resolver.wait, key, max(0.0, min(WAIT_S, deadline - loop.time())))
        except NameResolveTimeout as error:
            if loop.time() >= deadline:
                raise NameResolveTimeout(key, resolver.root, limit_s, "appear") from error
    raise StopRequested
