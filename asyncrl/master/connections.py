"""How the master reaches the other processes: request-reply to workers, name resolution for what is announced."""

from __future__ import annotations

from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameResolver
from asyncrl.comm.request_reply import RequestClient
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
