"""The MasterWorker's peers: request-reply to workers, patience with ranks, name resolution for announcements.

Calls to the ranks may take any time, as long as the ranks show signs of life. A rank's I/O thread answers questions
even while the rank computes or waits in a collective. So a rank that does not answer is frozen, cut off, or held up by
its own code. Ranks that answer are at work if one of them begins a micro-batch or reads or writes data; CPU time alone,
or neither, is believed for some limits' time only: a deadlock or an endless loop looks like that.

While the run continues, the MasterWorker waits for a rank that does not respond, since it may recover. After a stop
request it waits only briefly (`await_while_responsive`): the current step and a checkpoint need all ranks. Ranks that
wait for a silent one answer, so only the silent one is named.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, Self, TypeVar

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameEntryNotFound, NameResolver
from asyncrl.comm.request_reply import PeerGone, R, Request, RequestClient, RequestTimeout
from asyncrl.comm.sockets import DESCRIPTORS_PER_CONNECTION, PeerRouter
from asyncrl.comm.waits import ASK_S, LOOK_S
from asyncrl.runtime.process.hardware import allow_connections
from asyncrl.runtime.process.starting import BUSY_SHARE
from asyncrl.runtime.process.waiting import cancel
from asyncrl.runtime.process.worker import AsyncWorker, CannotContinue
from asyncrl.trainer.messages import AskPulse, RankPulse

_T = TypeVar("_T")

IDLE_LIMITS = 5
"""Limits of silence for which ranks may answer and do nothing: user code may wait for something outside."""
BUSY_LIMITS = 15
"""Limits of silence for which ranks may use CPU time without a micro-batch, or data read or written."""


class ReplaceableWorker:
    """Calls a worker whose process may die and be replaced: the call is then repeated, to the new process.

    So only calls that may be made twice are allowed. If a connection breaks while the process lives, it is made again.

    Args:
        key: the key of the worker's `WorkerAddress`.
        registered: the first entry.
    """

    def __init__(self, resolver: NameResolver, key: str, registered: str, router: PeerRouter) -> None:
        self._resolver, self._key, self._router = resolver, key, router
        self._follow(registered)

    @classmethod
    async def connect(cls, worker: AsyncWorker, kind: str, index: int, router: PeerRouter) -> Self:
        """Return the worker `index` of `kind`, once it has registered."""
        key = names.worker_key(kind, index)
        return cls(worker.resolver, key, await worker.registered(key, kind), router)

    async def call(self, request: Request[R], *, timeout_s: float) -> R:
        """Call the worker's current process, and return its reply."""
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
        self._client = RequestClient(endpoint, self._router, name=self._key)

    async def _moved(self) -> str:
        """Wait until another process is registered; return its entry."""
        kind = await asyncio.to_thread(self._resolver.follow, self._key.rpartition("/")[0])
        while True:
            registered = kind.get(self._key)
            if registered not in (None, self._registered):  # None: its lease has run out, and there is no other yet
                return registered
            await asyncio.sleep(LOOK_S)


async def connect(worker: AsyncWorker, kind: str, count: int, router: PeerRouter) -> list[RequestClient]:
    """Return clients of the `count` workers of `kind`, by index, once all have registered. They share `router`."""
    keys = [names.worker_key(kind, index) for index in range(count)]
    found = [names.WorkerAddress.decode(await worker.registered(key, kind)) for key in keys]
    return [RequestClient(at.endpoint, router, name=key) for at, key in zip(found, keys, strict=True)]


def router_of_peers(worker: AsyncWorker, peers: int) -> PeerRouter:
    """Return a router for the clients of `peers` processes; this process's limit of open files is raised for it."""
    allow_connections(DESCRIPTORS_PER_CONNECTION * peers, f"{peers} other processes")
    return PeerRouter(worker.security)


class NameBoard:
    """Announces versions in name resolution, where they outlive this process, and looks up other processes."""

    def __init__(self, resolver: NameResolver) -> None:
        self._resolver = resolver

    def producers_start(self) -> bool:
        """True while all generation servers, or all RolloutWorkers, are starting, so that no rollout can be made."""
        for kind in (names.GENERATION_SERVER, names.ROLLOUT_WORKER):
            entries = self._resolver.follow(f"{names.STATUSES}/{kind}").entries()
            states = {names.WorkerStatus.decode(value).state for value in entries.values()}
            if "starting" in states and "ready" not in states:
                return True
        return False

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


class Stalled(CannotContinue):
    """No sign of life for too long; the message says which stage waits, for what, and which counter shows it."""


async def while_ranks_work(
    working: Awaitable[_T], workers: Sequence[RequestClient], limit_s: float, what: Callable[[], str]
) -> _T:
    """Await `working`, in which ranks compute or write, however long it takes while the ranks show signs of life.

    Args:
        limit_s: longest silence, in seconds in which this process ran.
        what: describes the work, for the message.

    Raises:
        Stalled: a rank is silent, or none of them makes progress.
    """

    async def watch() -> NoReturn:
        stall = await _stall(workers, limit_s)
        raise Stalled(f"{what()} waits: {stall}; its log, and py-spy dump, show where it is")

    return await _unless(watch(), working)


class RanksUnresponsive(CannotContinue):
    """Ranks do not answer, so nothing can be finished or saved; the message names them."""


async def await_while_responsive(
    running: Coroutine[Any, Any, None], workers: Sequence[RequestClient], stop: asyncio.Event, limit_s: float
) -> None:
    """Await `running`, after `stop` is set only as long as all `workers`, the ranks by index, answer."""

    async def watch() -> NoReturn:
        await stop.wait()
        pulses = Pulses(workers)
        while not (silent := await pulses.ask(limit_s)):  # noqa: ASYNC110  # what is waited for is in other processes
            await asyncio.sleep(LOOK_S)
        raise RanksUnresponsive(
            f"no answer from {silent} for {limit_s:g} s (system.stop_timeout_s) after the request to stop: the current "
            f"step cannot be finished and no checkpoint can be written. The same command continues from the newest one"
        )

    await _unless(watch(), running)


async def _unless(watching: Coroutine[Any, Any, NoReturn], working: Awaitable[_T]) -> _T:
    """Await `working`, unless `watching` raises first; `working` is cancelled then."""
    task, watch = asyncio.ensure_future(working), asyncio.ensure_future(watching)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else watch.result()
    finally:
        await cancel(task, watch)


class Pulses:
    """The answers of the ranks `workers` to questions for signs of life, by worker index.

    Attributes:
        seen: the newest answers.
    """

    def __init__(self, workers: Sequence[RequestClient]) -> None:
        self.seen: dict[int, RankPulse] = {}
        self._workers = workers
        self._lost: set[int] = set()

    async def ask(self, limit_s: float) -> str:
        """Ask every rank; return the names of those that did not answer within `limit_s`, in which this process ran, or
        whose connections broke and could not be made again; empty if all are there.
        """
        asked = (worker.call(AskPulse(), timeout_s=limit_s) for worker in self._workers)
        answers = list(enumerate(await asyncio.gather(*asked, return_exceptions=True)))
        silent = {index for index, answer in answers if isinstance(answer, RequestTimeout)}
        lost_before, self._lost = self._lost, {index for index, answer in answers if isinstance(answer, PeerGone)}
        silent |= self._lost & lost_before  # a broken connection is opened again; the caller gets the error too
        self.seen = {index: answer for index, answer in answers if isinstance(answer, RankPulse)}
        return ", ".join(f"model_worker/{rank}" for rank in sorted(silent))


async def _stall(workers: Sequence[RequestClient], limit_s: float) -> str:
    """Wait until a rank is silent, or no rank makes progress; return a description."""
    ask_s = min(ASK_S, limit_s / 4)
    idle_s = busy_s = 0.0
    pulses = Pulses(workers)
    while True:
        await asyncio.sleep(ask_s)
        before = pulses.seen
        if silent := await pulses.ask(limit_s):
            return f"no sign of life from {silent} for {limit_s:g} s (system.stall_timeout_s)"
        grown = [(now, before[index]) for index, now in pulses.seen.items() if index in before]
        idle_s, busy_s = idle_s + ask_s, busy_s + ask_s
        if any(now.pieces > then.pieces for now, then in grown):
            idle_s = busy_s = 0.0
        elif any(now.cpu_s - then.cpu_s > BUSY_SHARE * ask_s for now, then in grown):
            idle_s = 0.0
        counters = ", ".join(
            f"model_worker/{index}: {each.pieces} pieces of work, {each.cpu_s:.0f} s of CPU time"
            for index, each in pulses.seen.items()
        )
        if idle_s >= IDLE_LIMITS * limit_s:
            return (
                f"the ranks answer, but none has computed for {idle_s:g} s ({IDLE_LIMITS} times "
                f"system.stall_timeout_s): they wait for each other, or for something outside ({counters})"
            )
        if busy_s >= BUSY_LIMITS * limit_s:
            return (
                f"the ranks use CPU time, but no micro-batch has begun and no data was read or written for "
                f"{busy_s:g} s ({BUSY_LIMITS} times system.stall_timeout_s) ({counters})"
            )


class RankClients:
    """The ModelWorkers. Each call raises `Stalled` if they show no signs of life (`while_ranks_work`).

    Args:
        publisher: index of the rank that publishes the actor, and commits checkpoints.
    """

    def __init__(self, workers: Sequence[RequestClient], publisher: int, limit_s: float) -> None:
        self._workers, self._publisher, self._limit_s = workers, publisher, limit_s

    async def all(self, request: Request[R]) -> list[R]:
        """Make the call to every rank; return the replies by worker index."""
        return await self.some(self._workers, request)

    async def each(self, requests: Sequence[Request[R]]) -> list[R]:
        """Make a different call to each rank; calls and replies are by worker index."""
        return await self._answers(list(zip(self._workers, requests, strict=True)))

    async def some(self, workers: Sequence[RequestClient], request: Request[R]) -> list[R]:
        """Make the call to `workers`; return the replies in the same order."""
        return await self._answers([(worker, request) for worker in workers])

    async def publisher(self, request: Request[R]) -> R:
        """Make the call to the rank that publishes the actor and commits checkpoints."""
        return (await self.some([self._workers[self._publisher]], request))[0]

    async def _answers(self, calls: Sequence[tuple[RequestClient, Request[R]]]) -> list[R]:
        answers = asyncio.gather(*(worker.call(request, timeout_s=math.inf) for worker, request in calls))
        return await while_ranks_work(answers, self._workers, self._limit_s, lambda: calls[0][1].method)
