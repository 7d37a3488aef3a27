"""Brings the metadata of received rollouts to the sample buffer while training continues.

One task per data-parallel head keeps a long poll open, which the worker's I/O thread answers even while its main thread
computes. Each poll acknowledges the previous reply by its cursor, so the content of a lost reply is sent again; the
buffer recognises repeats.

Rollouts come in bursts, and a poll for each would cost the master more than everything else it does. So polls are
paced: slowly while no step waits for data, and otherwise too fast for a step to notice. A waiting step says how many
rollouts are missing, and a poll is answered when a head has its share of them, or `GATHER_S` after its first one.

What arrives is reported to the manager, whose gate says which of it counts: a rollout whose worker was given up does
not, as its prompt is played again. Only what counts comes to the buffer. At the beginning the manager first hears what
the ranks have (`Reports.begin`); until then all of it waits in the buffer.

A silent worker is asked again as long as its connection is open: it may be suspended for a while. The launcher decides
whether it died, and the train loop how long a run may make no step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from asyncrl.comm.request_reply.client import RequestClient, RequestTimeout
from asyncrl.comm.request_reply.messages import R, Request
from asyncrl.comm.waits.limits import BURST_S, CALL_S, GATHER_S, HOLD_S
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import ReceivedRollout
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.runtime.process.waiting import cancel
from asyncrl.trainer.messages import Discard, PollBuffer, PolledBuffer, RolloutRecord

_log = logging.getLogger(__name__)


class _Head:
    """Calls to one head, each repeated until it is answered.

    Attributes:
        silent: True if the head has not answered for `CALL_S`.
    """

    def __init__(self, client: RequestClient) -> None:
        self.client = client
        self.silent = False
        self._refreshing: list[asyncio.Future[None]] = []
        self._kick = asyncio.Event()

    def refresh(self) -> asyncio.Future[None]:
        """Have the next poll begin now; return a future that its reply completes."""
        answer = asyncio.get_running_loop().create_future()
        self._refreshing.append(answer)
        self._kick.set()
        return answer

    def take_refreshes(self) -> list[asyncio.Future[None]]:
        """Return the futures of `refresh` that a poll beginning now completes."""
        self._kick.clear()
        refreshing, self._refreshing = self._refreshing, []
        return refreshing

    async def poll(self, request: PollBuffer) -> PolledBuffer | None:
        """Make one poll; None if `refresh` was called meanwhile. An abandoned poll loses nothing, as it is not
        acknowledged.
        """
        call = self.call(request, request.timeout_s)
        if not request.timeout_s:
            return await call
        poll, kick = asyncio.ensure_future(call), asyncio.ensure_future(self._kick.wait())
        try:
            await asyncio.wait({poll, kick}, return_when=asyncio.FIRST_COMPLETED)
            return poll.result() if poll.done() else None
        finally:
            await cancel(poll, kick)

    async def pace(self, awaited: asyncio.Event) -> None:
        """Wait for a burst to gather, unless a step waits (`awaited`) or a refresh is requested."""
        urgent = [asyncio.ensure_future(event.wait()) for event in (awaited, self._kick)]
        try:
            await asyncio.sleep(BURST_S)
            await asyncio.wait(urgent, timeout=GATHER_S - BURST_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(*urgent)

    async def call(self, request: Request[R], hold_s: float = 0.0) -> R:
        """Repeat the call until it is answered; a repeated call does no harm."""
        while True:
            try:
                reply = await self.client.call(request, timeout_s=hold_s + CALL_S)
            except RequestTimeout as error:
                self.silent = True
                _log.warning("%s; asking again", error)
            else:
                self.silent = False
                return reply


class Collector:
    """Polls into `buffer`; counts the received rollouts in `generated_tokens` and `generated_samples`.

    Args:
        heads: the ModelWorkers that receive trajectories, by data index.
        manager: says which rollouts count.
    """

    def __init__(self, heads: Sequence[RequestClient], buffer: SampleBuffer, manager: ManagerClient) -> None:
        self.generated_tokens = 0
        self.generated_samples = 0
        self._heads = [_Head(client) for client in heads]
        self._buffer, self._manager, self._confirms = buffer, manager, False
        self._changed = asyncio.Event()
        self._awaited = asyncio.Event()
        self._missing = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to poll, unless that has begun."""
        self._tasks = self._tasks or [asyncio.create_task(self._follow(head)) for head in self._heads]

    @property
    def silent(self) -> list[int]:
        """Return the heads that have not answered for `CALL_S`, by data index."""
        return [index for index, head in enumerate(self._heads) if head.silent]

    async def close(self) -> None:
        """Stop polling."""
        await cancel(*self._tasks)

    def check(self) -> None:
        """Raise the error that ended a worker's polls, if there is one. Return at once.

        A silent worker is no error (`silent`).

        Raises:
            Exception: the error of the polls.
        """
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def changed(self, missing: int) -> None:
        """Wait until a record arrives after the last call; `missing` is the number that the step still needs.

        Raises:
            Exception: what ended a worker's polls.
        """
        self._missing = missing
        self._awaited.set()
        try:
            await self._unless_failed(self._changed.wait())
        finally:
            self._awaited.clear()
        self._changed.clear()

    async def refresh(self) -> None:
        """Have every worker answer a poll that begins after this call, so that the rollouts they hold now are in the
        buffer.

        Raises:
            Exception: what ended a worker's polls.
        """
        await self._unless_failed(asyncio.gather(*(head.refresh() for head in self._heads)))

    async def confirm(self) -> None:
        """From now on only rollouts that the manager counts are in the buffer; it has been told of the others."""
        self._confirms = True
        records = self._buffer.live()
        await self._free(self._buffer.refuse(await self._refused(records)))

    async def discard(self, records: Iterable[RolloutRecord], limit_s: float) -> None:
        """Have the workers free the tensors of `records`.

        Raises:
            RequestTimeout: one does not answer within `limit_s`.
        """
        for head, rollouts in _by_head(records):
            await self._heads[head].client.call(Discard(rollouts), timeout_s=limit_s)

    async def _follow(self, head: _Head) -> None:
        cursor = 0
        while True:
            refreshing = head.take_refreshes()
            reply = await head.poll(self._next_poll(cursor, refresh=bool(refreshing)))
            if reply is None:
                continue
            cursor = reply.cursor
            await self._take_in(reply.rollouts)
            for answer in refreshing:
                if not answer.done():
                    answer.set_result(None)
            if reply.rollouts:
                await head.pace(self._awaited)

    def _next_poll(self, cursor: int, *, refresh: bool) -> PollBuffer:
        """Return the next poll: for one rollout, or for a head's share if more are missing."""
        if refresh:
            return PollBuffer(cursor, 0.0)
        share = self._missing // len(self._heads) if self._awaited.is_set() else 1
        return PollBuffer(cursor, HOLD_S, share, GATHER_S)

    async def _take_in(self, records: Sequence[RolloutRecord]) -> None:
        before, refused = self._buffer.received, await self._refused(records) if self._confirms else []
        count = [record for record in records if record.rollout_id not in refused]
        copies = self._buffer.add(count)
        if self._buffer.received > before:
            self.generated_tokens += sum(record.generated_tokens for record in count)
            self.generated_samples += sum(len(record.lengths) for record in count)
            self._changed.set()
        await self._free([*copies, *(record for record in records if record.rollout_id in refused)])

    async def _refused(self, records: Sequence[RolloutRecord]) -> list[str]:
        return await self._manager.received(list(map(received, records))) if records else []

    async def _free(self, records: Iterable[RolloutRecord]) -> None:
        for head, rollouts in _by_head(records):
            await self._heads[head].call(Discard(rollouts))

    async def _unless_failed(self, waiting: Awaitable[Any]) -> None:
        """Await `waiting`, or raise the error of a polling task."""
        task = asyncio.ensure_future(waiting)
        try:
            done, _ = await asyncio.wait({task, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {task}:
                ended.result()
        finally:
            await cancel(task)


def _by_head(records: Iterable[RolloutRecord]) -> list[tuple[int, tuple[str, ...]]]:
    """Return the rollouts of `records` by the head that holds them."""
    of_head: dict[int, list[str]] = {}
    for record in records:
        of_head.setdefault(record.head, []).append(record.rollout_id)
    return [(head, tuple(rollouts)) for head, rollouts in sorted(of_head.items())]


def received(record: RolloutRecord) -> ReceivedRollout:
    """Return the rollout of `record` as the manager expects it."""
    oldest = max(0, record.oldest_version)
    return ReceivedRollout(record.rollout_id, record.prompt_id, record.order, oldest, max(1, sum(record.lengths)))
