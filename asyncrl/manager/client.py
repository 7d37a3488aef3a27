"""The GserverManager's HTTP interface, from the side of RolloutWorkers and the master.

Every call is idempotent (ids are the client's), so a call whose reply was lost is simply made again: `ManagerClient`
does so with back-off until `retry_s` is over. Requests to schedule made in the same turn of the event loop travel in
one HTTP call; what ended (rollouts and requests) travels with the worker's next call, whatever that is about, or on its
own where none comes within `NEWS_DELAY_S`. On busy cores the number of calls is what the manager costs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.comm import names
from asyncrl.comm.http import HttpError, HttpRefused, JsonHttp
from asyncrl.manager.returned_prompts import ReturnedPrompt
from asyncrl.master.peers import GateBooks, GateStatus
from asyncrl.master.records import Drop
from asyncrl.rollout.scheduling import RequestSize, Route, ScheduleRequest, SchedulerGone
from asyncrl.runtime.worker import Worker

CALL_TIMEOUT_S = 10.0
"""Limit of one HTTP call beyond the time the manager was asked to hold it."""
RETRY_S = 60.0
NEWS_DELAY_S = 0.01
"""How long news waits for a call to travel with; where a rollout ends, the call for the next one follows at once."""
ROUTE_LIFE_S = 0.2
"""How long the server that came with an admission may be used unasked: an agent that begins at once needs less."""
CLOSE_LIMIT_S = 1.0
"""How long `close` waits for what is still to be told; a manager that is gone must not hold up its clients' end."""
_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 2.0

_log = logging.getLogger(__name__)


class ManagerGone(SchedulerGone):
    """The GserverManager did not answer for as long as calls are repeated."""


@dataclass(frozen=True, slots=True)
class WantedRollout:
    """A rollout that waits at the gate; `rollout_id` is new for every attempt at a prompt.

    `first`: its first request, where it is known; the grant then has a server for it.
    """

    rollout_id: str
    prompt_id: str
    order: int
    first: RequestSize | None = None


@dataclass(frozen=True, slots=True)
class GrantedRollout:
    """A rollout that may run; every token of it will be of `version` or newer.

    `route`: where its first request goes, placed under the rollout's id; None where that was not asked for, or no
    server takes requests now.
    """

    rollout_id: str
    version: int
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """The gate's answer: a prefix of the wanted rollouts, prompts to try again, the served version.

    `closed`: no rollout will start any more.
    """

    granted: tuple[GrantedRollout, ...]
    returned: tuple[ReturnedPrompt, ...]
    version: int
    closed: bool


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """The end of a rollout: `accepted` once the trainer has acknowledged it, else dropped for `reason`."""

    rollout_id: str
    accepted: bool
    reason: str = ""
    return_prompt: bool = False
    tokens: int = 0


@dataclass(slots=True)
class _News:
    """What ended and the manager does not know yet: request ids, and rollouts as it wants them told."""

    released: list[str] = field(default_factory=list)
    finished: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.released or self.finished)


class ManagerClient:
    """See the module's docstring. Use it from one event loop.

    Args:
        url: of the manager.
        worker: `<kind>/<index>` of the caller.
        token: bearer token; None where the run has no secret.
        retry_s: how long a call is repeated while the manager does not answer.
    """

    def __init__(self, url: str, worker: str, token: str | None, *, retry_s: float = RETRY_S) -> None:
        self._url = url.rstrip("/")
        self._worker = worker
        self._http = JsonHttp(token)
        self._retry_s = retry_s
        self._to_schedule: list[tuple[ScheduleRequest, asyncio.Future[Route | None]]] = []
        self._news = _News()
        self._news_timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._flushes: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(cls, worker: Worker) -> ManagerClient:
        """A client for `worker`, once the manager has registered.

        Raises:
            NameResolveTimeout: it did not within `system.start_timeout_s`.
        """
        limit_s = worker.config.system.start_timeout_s
        url = await asyncio.to_thread(worker.resolver.wait, names.manager_key(), limit_s)
        return cls(url, worker.spec.name, None if worker.secret is None else worker.secret.token)

    async def allocate(self, wanted: Sequence[WantedRollout], *, timeout_s: float, returned_ack: int = 0) -> Allocation:
        """Ask the gate for `wanted`, in this order; waits up to `timeout_s` for there to be anything to tell.

        `returned_ack` is the highest `seq` of a returned prompt seen so far. What is not granted is simply asked for
        again.

        Raises:
            ManagerGone: see there.
        """
        rollouts = [asdict(rollout) for rollout in wanted]
        body = {"rollouts": rollouts, "timeout_s": timeout_s, "returned_ack": returned_ack}
        reply = await self._tell("/allocate_rollout", body, hold_s=timeout_s)
        expires_at = asyncio.get_running_loop().time() + ROUTE_LIFE_S
        return Allocation(
            granted=tuple(
                GrantedRollout(
                    item["rollout_id"],
                    item["version"],
                    item["route"] and Route(**item["route"], expires_at=expires_at),
                )
                for item in reply["granted"]
            ),
            returned=tuple(ReturnedPrompt(item["seq"], item["prompt_id"], item["order"]) for item in reply["returned"]),
            version=reply["version"],
            closed=reply["closed"],
        )

    def finish(self, rollouts: Sequence[FinishedRollout]) -> None:
        """`rollouts` ended; call it after the trainer's acknowledgement. Their requests are over too."""
        self._news.finished += [
            {
                "rollout_id": r.rollout_id,
                "accepted": r.accepted,
                "reason": r.reason,
                "return_prompt": r.return_prompt,
                "tokens": r.tokens,
            }
            for r in rollouts
        ]
        self._tell_soon()

    async def schedule(self, request: ScheduleRequest, timeout_s: float) -> Route | None:
        """A server for `request`; None where there was none for `timeout_s`. The same id again moves the request."""
        answer: asyncio.Future[Route | None] = asyncio.get_running_loop().create_future()
        if not self._to_schedule:
            self._spawn(self._flush_schedules(timeout_s), self._calls)
        self._to_schedule.append((request, answer))
        return await answer

    def release(self, request_id: str) -> None:
        """The request is over."""
        self._news.released.append(request_id)
        self._tell_soon()

    async def flush(self) -> None:
        """Tell now what ended.

        Raises:
            ManagerGone: see there.
        """
        if self._news:
            await self._tell("/finish_rollout", {})

    async def lost_servers(self, after: int, timeout_s: float) -> tuple[int, list[str]]:
        """URLs of servers that left service unexpectedly since loss number `after`, and the number of the last one.

        Waits up to `timeout_s` for one. `after` -1: only tells the number. Also the sign of life of a worker that has
        nothing else to say.
        """
        reply = await self._tell("/lost_servers", {"after": after, "timeout_s": timeout_s}, hold_s=timeout_s)
        return reply["seq"], reply["urls"]

    async def report_consumed(self, version: int, trained: Sequence[str], drops: Sequence[Drop]) -> None:
        """The optimizer consumed `trained` and is at `version`; `drops` were received and will not be trained."""
        dropped = [
            {"rollout_id": drop.record.rollout_id, "reason": drop.reason, "return_prompt": drop.return_prompt}
            for drop in drops
        ]
        await self._call("/report_consumed", {"version": version, "trained": list(trained), "dropped": dropped})

    async def wait_expiring(self, version: int, timeout_s: float) -> list[str]:
        """Wait until the step at policy version `version` can be taken without making a running rollout expire.

        Returns:
            The rollouts still waited for after `timeout_s`; none: the way is clear.
        """
        reply = await self._call("/wait_expiring", {"version": version, "timeout_s": timeout_s}, hold_s=timeout_s)
        running: list[str] = reply["running"]
        return running

    async def close_gate(self) -> None:
        """No rollout starts from now on."""
        await self._call("/close_gate", {})

    async def abandon(self) -> GateBooks:
        """Give up whatever runs or waits to be trained; the final books."""
        return _books(await self._call("/abandon", {}))

    async def books(self) -> GateBooks:
        """The gate's ledger now."""
        return _books(await self._call("/books", None))

    async def status(self) -> GateStatus:
        """The manager's state."""
        reply = await self._call("/status", None)
        gate, servers = reply["gate"], reply["servers"]
        shown = ", ".join(f"{s['index']} {s['state']} v{s['version']} ({s['sequences']} running)" for s in servers)
        description = (
            f"gate: trained {gate['trained']} + finished {gate['finished_untrained']} + running {gate['running']} of "
            f"{gate['limit']} allowed at served version {gate['version']}; servers: {shown or 'none'}"
        )
        in_use = {s["version"] for s in servers} | {s["goal"] for s in servers}
        return GateStatus(gate["closed_s"], frozenset(v for v in in_use if v is not None), description, gate["dropped"])

    async def close(self) -> None:
        """Tell what ended and is not told yet, then close the connections."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._news_timer is not None:
            self._news_timer.cancel()
        self._tell_alone()
        if self._flushes:
            await asyncio.wait(self._flushes, timeout=CLOSE_LIMIT_S)
        for flush in self._flushes:
            flush.cancel()
        await asyncio.gather(*self._flushes, return_exceptions=True)
        await self._http.close()

    async def _tell(self, path: str, body: dict[str, Any], *, hold_s: float = 0.0) -> Any:
        """A call in the worker's name, which also tells what ended."""
        news, self._news = self._news, _News()
        told = {"worker": self._worker, "released": news.released, "finished": news.finished}
        try:
            return await self._call(path, told | body, hold_s=hold_s)
        except BaseException:  # perhaps told, perhaps not: telling it again does no harm
            self._news = _News(news.released + self._news.released, news.finished + self._news.finished)
            raise

    async def _call(self, path: str, body: Any, *, hold_s: float = 0.0) -> Any:
        """POST `body` (GET where it is None), again and again while the manager does not answer."""
        method = "GET" if body is None else "POST"
        deadline = asyncio.get_running_loop().time() + self._retry_s + hold_s
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return await self._http.call(method, self._url + path, body, timeout_s=hold_s + CALL_TIMEOUT_S)
            except HttpRefused as error:
                if error.status < 500:
                    raise
                last: HttpError = error
            except HttpError as error:
                last = error
            if asyncio.get_running_loop().time() + backoff_s > deadline:
                raise ManagerGone(f"GserverManager {path}: {last}; given up after {self._retry_s:g} s") from last
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    def _spawn(self, call: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        """Start `call`, which begins in the loop's next turn: what this turn still adds travels with it."""
        task = asyncio.get_running_loop().create_task(call)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _flush_schedules(self, timeout_s: float) -> None:
        batch, self._to_schedule = self._to_schedule, []
        answers = {request.request_id: answer for request, answer in batch}
        body = {
            "requests": [
                {
                    "request_id": r.request_id,
                    "rollout_id": r.rollout_id,
                    "prompt_tokens": r.prompt_tokens,
                    "max_new_tokens": r.max_new_tokens,
                    "n": r.n,
                    "affinity": r.affinity,
                    "min_version": r.min_version,
                }
                for r, _ in batch
            ],
            "timeout_s": timeout_s,
        }
        try:
            reply = await self._tell("/schedule_request", body, hold_s=timeout_s)
            for item in reply["scheduled"]:
                answer = answers.pop(item["request_id"])
                if not answer.done():
                    answer.set_result(Route(item["url"], item["version"]))
            for answer in answers.values():
                if not answer.done():
                    answer.set_result(None)
        except asyncio.CancelledError:
            for answer in answers.values():
                answer.cancel()
            raise
        except (HttpError, ManagerGone) as error:
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(error)

    def _tell_soon(self) -> None:
        if self._news_timer is None:
            self._news_timer = asyncio.get_running_loop().call_later(NEWS_DELAY_S, self._tell_alone)

    def _tell_alone(self) -> None:
        """No call came that could have taken the news along."""
        self._news_timer = None
        if self._news:
            self._spawn(self._flush_in_background(), self._flushes)

    async def _flush_in_background(self) -> None:
        try:
            await self.flush()
        except (HttpError, ManagerGone) as error:  # kept for the next call, and whoever makes that hears of it
            _log.warning("the manager was not told what ended: %s", error)


def _books(reply: Any) -> GateBooks:
    return GateBooks(
        submitted=reply["submitted"],
        trained=reply["trained"],
        dropped=reply["dropped"],
        abandoned=reply["abandoned"],
        running=reply["running"],
        finished_untrained=reply["finished_untrained"],
    )
