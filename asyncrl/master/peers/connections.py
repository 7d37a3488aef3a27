"""Connections of the MasterWorker: request-reply to workers, name resolution for announcements."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol, Self

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameEntryNotFound, NameResolver
from asyncrl.comm.request_reply import PeerGone, RequestClient
from asyncrl.comm.request_reply.client import RequestTimeout
from asyncrl.comm.request_reply.messages import R, Request
from asyncrl.comm.sockets import DESCRIPTORS_PER_CONNECTION, PeerRouter
from asyncrl.comm.waits.limits import ASK_S, LOOK_S
from asyncrl.comm.waits.running_time import running_wait
from asyncrl.rollout.messages import Evaluate, EvaluationResult, StillThere
from asyncrl.runtime.process.descriptors import allow_connections
from asyncrl.runtime.process.waiting import cancel
from asyncrl.runtime.process.worker import AsyncWorker

_log = logging.getLogger(__name__)


class Evaluates(Protocol):
    """A RolloutWorker, seen from the process that asks it for a share of an evaluation."""

    async def call(self, request: Request[R], *, timeout_s: float) -> R:
        """Make the call and return its reply."""


class ReplaceableWorker:
    """Calls a worker whose process may die and be replaced: the call is then repeated, to the new process.

    So only calls that may be made twice are allowed. If a connection breaks while the process lives, it is made again.

    Args:
        resolver: name resolution, where the new process registers.
        key: the key of the worker's `WorkerAddress`.
        registered: the first entry.
        router: see `RequestClient`.
    """

    def __init__(
        self,
        resolver: NameResolver,
        key: str,
        registered: str,
        router: PeerRouter,
    ) -> None:
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


class NothingEvaluated(RuntimeError):
    """No prompt of a set was answered."""


async def evaluate(workers: Sequence[Evaluates], name: str, version: int, limit_s: float) -> EvaluationResult:
    """Evaluate `version` on the whole set `name`; each RolloutWorker does a share. It may take any time: each episode
    has a limit of its own.

    Args:
        limit_s: longest silence of a worker, in seconds in which this process ran.

    Raises:
        NothingEvaluated: the agent answered not a single prompt of the set.
        TimeoutError: a worker is silent.
        Exception: a worker failed.
    """
    request = Evaluate(name, version)
    replies = await asyncio.gather(*(_share(worker, at, request, limit_s) for at, worker in enumerate(workers)))
    shares = [share for share in replies if share.answers]
    left_out = sum(share.left_out for share in replies)
    if not shares:
        raise NothingEvaluated(f"none of the {left_out} rows of {name!r} was answered: they make no prompt")
    return EvaluationResult(
        answers=tuple(sorted((answer for share in shares for answer in share.answers), key=attrgetter("row"))),
        left_out=left_out,
        min_version=min(share.min_version for share in shares),
        max_version=max(share.max_version for share in shares),
    )


async def _share(worker: Evaluates, number: int, request: Evaluate, limit_s: float) -> EvaluationResult:
    """Return the worker's share of an evaluation."""
    evaluating = asyncio.ensure_future(worker.call(request, timeout_s=math.inf))
    try:
        while True:
            await running_wait(evaluating, limit_s=min(ASK_S, limit_s / 4))
            if evaluating.done():
                return evaluating.result()
            await worker.call(StillThere(), timeout_s=limit_s)
    except RequestTimeout as error:
        raise TimeoutError(
            f"RolloutWorker {number} showed no sign of life for {limit_s:g} s (system.stall_timeout_s)"
        ) from error
    finally:
        await cancel(evaluating)


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
