"""Reports to the GserverManager of what was trained and dropped; its replies bring the books and the fate of rollouts.

The manager keeps the books (`staleness_gate`), from those of the checkpoint on. Each reply brings them here, with lines
about rollouts. These lines go to the ledger's file before any report that follows from them.

If steps are kept, no report about a step is sent before its state is whole: the process that replaces this one would
not know of the step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from asyncrl.comm.ledger_lines import Dropped, PromptGoes, RolloutLine
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.manager.client import GateStatus, ManagerClient
from asyncrl.manager.messages import ConsumedReply, GateBooks, GivenUp
from asyncrl.master.books.ledger import Ledger
from asyncrl.master.books.run_files import BooksError, DataState
from asyncrl.master.data.buffer import Drop, SampleBuffer, TrainBatch
from asyncrl.master.offline.replay import OfflineGate
from asyncrl.master.recovery.memory_checkpointer import Known, MemoryCheckpointer
from asyncrl.runtime.process.waiting import or_stop
from asyncrl.trainer.messages import Discard

_log = logging.getLogger(__name__)

BOOKS_LIMIT_S = 5.0
"""Limit of closing the books; the manager answers in milliseconds unless it is what failed."""
LAST_BOOKS_LIMIT_S = 30.0
"""The same at the end of a complete run: a manager that died is started again."""
LAST_REPORT_LIMIT_S = 1.0
"""Limit of the report before the last checkpoint, which must not wait for a manager that is gone."""


class Told(NamedTuple):
    """The manager's last report: the books, the numbers of its lines, gate and servers."""

    books: GateBooks = GateBooks(submitted=0, trained=0, dropped={}, abandoned=0)
    known: Known = Known()
    status: GateStatus = GateStatus()


class Reports:
    """Reports to the manager. Each method takes the version that the model has now.

    Args:
        heads: the ModelWorkers that receive trajectories, by data index.
        steps: where the state of each step is kept.
        stop: ends the wait for a report.
        limit_s: of each call.

    Attributes:
        told: the manager's last report.
        unreported: trained rollouts that are not reported to the manager yet.
        told_already: number of lines, among those that the manager reports next, that the ledger has already.
    """

    def __init__(
        self,
        manager: ManagerClient | OfflineGate,
        heads: Sequence[RequestClient],
        buffer: SampleBuffer,
        ledger: Ledger,
        data_state: DataState,
        steps: MemoryCheckpointer,
        stop: asyncio.Event,
        limit_s: float,
    ) -> None:
        self._manager, self._heads, self._stop, self._limit_s = manager, heads, stop, limit_s
        self._buffer, self._ledger, self._data_state, self._steps = buffer, ledger, data_state, steps
        self.told = Told()
        self.unreported: list[str] = []
        self.told_already = 0
        self._drops: list[Drop] = []

    def restore(self, trained: int, dropped: Mapping[str, int]) -> None:
        """Continue with the books as the gate has them: B per version, whatever B was when they were trained."""
        self.told = Told(GateBooks(trained + sum(dropped.values()), trained, dict(dropped), abandoned=0))

    def take_up(self, unreported: Sequence[str], known: Known) -> None:
        """Continue after the last step of the loop before this one.

        Its rollouts are reported again before another step begins. So the reply has all prompts dropped for good, also
        those that the loop before this one has written into the ledger.
        """
        self.unreported = list(unreported)
        self._buffer.know_trained(unreported)
        self.told = self.told._replace(known=known)

    def trained(self, batch: TrainBatch) -> None:
        """Add the complete step of `batch` to the next report."""
        self.unreported += [record.rollout_id for record in batch.records]

    @property
    def reported_books(self) -> GateBooks | None:
        """The books; None while a trained rollout is not reported."""
        return None if self.unreported else self.told.books

    async def look(self) -> None:
        """Ask for the manager's status without a report."""
        status = await or_stop(self._manager.status(), self._stop, self._limit_s)
        self.told = self.told._replace(status=status)

    async def report(self, version: int) -> None:
        """Report what was trained and dropped, and have the ranks free the tensors of dropped rollouts.

        The reply may drop received rollouts for good. They are reported at once, since they take up room at the gate.
        A stop request ends the wait: the manager may have failed, and the checkpoint must not wait for it. The `last`
        report has what is missing then.
        """
        while self._steps.may_tell_of(version):
            self._drops += self._buffer.pop_drops()
            drops = self._drops
            if not self.unreported and not drops:
                return
            await or_stop(self._report(version), self._stop, self._limit_s)
            await self._discard(drops)

    async def last(self, version: int) -> None:
        """Report once more, so that the last checkpoint has the prompts that are dropped for good by now."""
        try:
            async with asyncio.timeout(LAST_REPORT_LIMIT_S):
                await self._report(version)
        except Exception as error:
            _log.warning("the GserverManager was not heard before the last checkpoint: %r", error)

    async def close_books(self, version: int, *, complete: bool) -> None:
        """Close the gate and account for every rollout; `complete`: all steps are trained.

        Raises:
            BooksError: the manager does not answer.
        """
        limit_s = LAST_BOOKS_LIMIT_S if complete else BOOKS_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                await self._manager.close_gate()
                await self._manager.abandon()
                await self._report(version)
        except TimeoutError as error:
            raise BooksError(f"the GserverManager did not close the books within {limit_s:g} s") from error

    async def _report(self, version: int) -> None:
        """Make one report and process the reply."""
        if not self._steps.may_tell_of(version):
            return
        self._data_state.write()
        self._drops += self._buffer.pop_drops()
        dropped = [drop.message for drop in self._drops]
        recorded = self._steps.recorded(self.told.known)
        reply = await self._manager.report_consumed(version, self.unreported, dropped, *recorded)
        self.unreported, self._drops = [], []
        self._ledger.take(decide(self._buffer, reply.given_up, self._new_lines(reply)))
        self._data_state.measured(reply.measured)
        known = Known(reply.seq, reply.events_seq, reply.measured_seq)
        status = GateStatus(reply.idle_s, frozenset(reply.versions_in_use), reply.books.dropped)
        self.told = Told(reply.books, known, status)

    def _new_lines(self, reply: ConsumedReply) -> list[RolloutLine]:
        """Return the lines of `reply` that the ledger lacks."""
        first = reply.events_seq - len(reply.events)  # the manager may know that more of them are recorded
        known = (self.told.known.events or first) + self.told_already
        self.told_already = 0
        return reply.events[max(0, known - first) :]

    async def _discard(self, drops: Sequence[Drop]) -> None:
        for head in sorted({drop.record.head for drop in drops}):
            discard = Discard(tuple(drop.record.rollout_id for drop in drops if drop.record.head == head))
            await self._heads[head].call(discard, timeout_s=self._limit_s)


def decide(buffer: SampleBuffer, given_up: Iterable[GivenUp], lines: Sequence[RolloutLine]) -> list[RolloutLine]:
    """Drop the prompts `given_up` for good, except trained ones; return the manager's `lines` for the ledger.

    The manager cannot know which prompts are trained, so its line always says `given_up`. The ledger's line says `used`
    if the prompt was used before; it comes before the line of the step that trained the prompt.
    """
    used = {each.rollout_id for each in given_up if not buffer.give_up(each.prompt_id)}
    return [
        structs.replace(line, prompt=PromptGoes.used) if isinstance(line, Dropped) and line.rollout in used else line
        for line in lines
    ]
