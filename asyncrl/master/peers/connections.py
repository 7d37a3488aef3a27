"""Connections of the MasterWorker: request-reply to workers, name resolution for announcements."""

from __future__ import annotations

import asyncio
from typing import Self

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameEntryNotFound, NameResolver
from asyncrl.comm.request_reply import PeerGone, R, Request, RequestClient
from asyncrl.comm.sockets import DESCRIPTORS_PER_CONNECTION, PeerRouter
from asyncrl.comm.waits import LOOK_S
from asyncrl.runtime.process.open_files import allow_connections
from asyncrl.runtime.process.waiting import cancel
from asyncrl.runtime.process.worker import AsyncWorker


class ReplaceableWorker:
    """Calls a worker whose process may die and be replaced: the call is then repeated, to the new process.

    So only calls that may be made twice are allowed. If a connection breaks while the process lives, it is made again.

    Args:
        resolver: name resolution, where the new process registers.
        key: the key of the worker's `WorkerAddress`.
        registered: the first entry.
        router: see `RequestClient`.
    """

    def __init__(self, resolver: NameResolver, key: str, registered: str, router: PeerRouter) -> None:
        self._resolver, self._key, self._router = resolver, key, router
        self._follow(registered)

    @classmethod
    async def connect(cls, worker: AsyncWorker, kind: str, index: int, router: PeerRouter) -> Self:
        """Return the worker `index` of `kind`, once it has registered.

        Raises:
            NotStarted, StopRequested: see `connect`.
        """
        key = names.worker_key(kind, index)
        return cls(worker.resolver, key, await worker.registered(key, kind), router)

    async def call(self, request: Request[R], *, timeout_s: float) -> R:
        """Call the worker's current process, and return its reply.

        Raises:
            RemoteError, RequestTimeout, PeerGone, MessageError: see `RequestClient.call`.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        while True:
            left_s = max(0.0, deadline - now())
            calling = asyncio.ensure_future(self._client.call(request, timeout_s=left_s))
            moving = asyncio.ensure_future(self._moved())
            try:
                await asyncio.wait({calling, moving}, return_when=asyncio.FIRST_COMPLETED)
                if calling.done():
                    return calling.result()
                registered = moving.result()
            except PeerGone:
                if now() >= deadline:
                    raise
                continue
            finally:
                await cancel(calling, moving)
            self._client.close()
            self._follow(registered)

    def close(self) -> None:
        """Disconnect; outstanding calls raise PeerGone."""
        self._client.close()

    def _follow(self, registered: str) -> None:
        self._registered = registered
        endpoint = names.WorkerAddress.decode(registered).endpoint
        self._client = RequestClient(endpoint, self._router.security, name=self._key, router=self._router)

    async def _moved(self) -> str:
        """Wait until another process is registered; return its entry."""
        kind = await asyncio.to_thread(self._resolver.follow, self._key.rpartition("/")[0])
        while True:
            registered = kind.get(self._key)
            if registered not in (None, self._registered):  # None: its lease has run out, and there is no other yet
                return registered
            await asyncio.sleep(LOOK_S)


async def connect(worker: AsyncWorker, kind: str, count: int, router: PeerRouter) -> list[RequestClient]:
    """Return clients of the `count` workers of `kind`, by index, once all have registered. They share `router`.

    Raises:
        NotStarted: one has not registered, and none made progress for `system.start_timeout_s`.
        StopRequested: `worker` was asked to stop.
    """
    keys = [names.worker_key(kind, index) for index in range(count)]
    found = [names.WorkerAddress.decode(await worker.registered(key, kind)) for key in keys]
    return [
        RequestClient(at.endpoint, worker.security, name=key, router=router)
        for at, key in zip(found, keys, strict=True)
    ]


def router_of_peers(worker: AsyncWorker, peers: int) -> PeerRouter:
    """Return a router for the clients of `peers` processes; this process's limit of open files is raised for it.

    Raises:
        OSError: the limit cannot be raised far enough.
    """
    allow_connections(DESCRIPTORS_PER_CONNECTION * peers, f"{peers} other processes")
    return PeerRouter(worker.security)


class NameBoard:
    """Announces versions in name resolution, where they outlive this process, and looks up other processes."""

    def __init__(self, resolver: NameResolver) -> None:
        self._resolver = resolver

    def producers_start(self) -> bool:
        """True while all generation servers, or all RolloutWorkers, are starting, so that no rollout can be made."""
        return any(self._all_start(kind) for kind in (names.GENERATION_SERVER, names.ROLLOUT_WORKER))

    def _all_start(self, kind: str) -> bool:
        entries = self._resolver.follow(f"{names.STATUSES}/{kind}").entries()
        states = {names.WorkerStatus.decode(value).state for value in entries.values()}
        return "starting" in states and "ready" not in states

    def announce_version(self, version: int, path: str, win_rates: names.WinRatesOfPools | None = None) -> None:
        """Announce that the actor's newest weights, `version`, are in `path`; `win_rates` are those of pools then."""
        rates = {pool: dict(of_members) for pool, of_members in (win_rates or {}).items()}
        published = names.PublishedVersion(version, path, rates)
        self._resolver.add(names.model_version_key(names.ACTOR), published.encode(), replace=True)

    def announced_version(self) -> int:
        """Return the version that was announced last; 0, the initial model, if none was."""
        try:
            return names.PublishedVersion.decode(self._resolver.get(names.model_version_key(names.ACTOR))).version
        except NameEntryNotFound:
            return 0

    def trainer_turn(self) -> names.TrainerTurn | None:
        """Return the last announced turn on the devices that the trainer shares with servers; None if none was
        announced.
        """
        try:
            return names.TrainerTurn.decode(self._resolver.get(names.TRAINER_TURN_KEY))
        except NameEntryNotFound:
            return None

    def announce_turn(self, turn: names.TrainerTurn) -> None:
        """Announce `turn`, which begins now."""
        self._resolver.add(names.TRAINER_TURN_KEY, turn.encode(), replace=True)
