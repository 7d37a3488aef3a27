"""Reports to the GserverManager about trained and dropped rollouts; its replies have the books and ledger lines.

The manager keeps the books (`staleness_gate`). Each reply has them, with lines about rollouts, which are written to the
ledger's file before any report that follows from them. MasterWorker and manager begin together: the manager first
receives everything that the trainer's side knows (`asyncrl.manager.rollouts.rebuild`), and only then reports.

If steps are kept, no report about a step is sent before its state is complete: otherwise a process that replaces this
one would not know of the step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from msgspec import structs

from asyncrl.comm.ended_rollouts.ledger_lines import Admitted, Dropped, PromptGoes, RolloutLine
from asyncrl.manager.client import GateStatus, ManagerClient
from asyncrl.manager.messages import ConsumedReply, ConsumedReport, GateBooks, ReceivedRollout, RunReport
from asyncrl.master.books.ledger import Ledger
from asyncrl.master.books.run_files import BooksError
from asyncrl.master.data.collector import Collector, received
from asyncrl.master.data.sample_buffer import Drop, SampleBuffer, TrainBatch
from asyncrl.master.offline.replay import OfflineGate
from asyncrl.master.recovery.memory_checkpointer import MemoryCheckpointer
from asyncrl.master.recovery.recorded import Recorded
from asyncrl.plugins.datasets.queue.curriculum import Curriculum
from asyncrl.runtime.process.waiting import or_stop

_log = logging.getLogger(__name__)

BOOKS_LIMIT_S = 5.0
"""Limit of closing the books after a stop request; the manager answers in milliseconds unless it has failed itself."""
LAST_REPORT_LIMIT_S = 1.0
"""Limit of the report before the last checkpoint, which must not wait for a dead manager."""


class LastReply(NamedTuple):
    """The manager's last reply: the books, gate and servers, and the number of the last measured success rate."""

    books: GateBooks = GateBooks(submitted=0, trained=0, dropped={}, abandoned=0)
    status: GateStatus = GateStatus()
    measured: int = 0


@dataclass
class Due:
    """The content of the next report: rollouts of complete steps, and dropped ones."""

    trained: list[ReceivedRollout] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.trained or self.drops)


class ReportState:
    """State of the reports: the manager's last reply, the content of the next report, and the effects of its replies.

    No calls are made here. A `version` argument is always the model's current version.

    Attributes:
        memory_checkpointer: where the state of each step is kept.
        last_reply: the manager's last reply.
        due: the content of the next report.
        curriculum: has the success rates that the manager reported.
    """

    def __init__(
        self, buffer: SampleBuffer, ledger: Ledger, curriculum: Curriculum, memory: MemoryCheckpointer
    ) -> None:
        self._buffer, self._ledger = buffer, ledger
        self.memory_checkpointer, self.curriculum = memory, curriculum
        self.last_reply, self.due = LastReply(), Due()

    def restore(self, trained: int, dropped: Mapping[str, int], curriculum: Curriculum) -> None:
        """Continue with the books as the gate counts them: B per version, even if B was different at the time."""
        self.last_reply = LastReply(GateBooks(trained + sum(dropped.values()), trained, dict(dropped), abandoned=0))
        self.curriculum = curriculum

    def continue_after(self, recorded: Recorded) -> None:
        """Continue with the books that the ledger's lines add up to. Prompts dropped for good after the state from
        which the run continues count as used.
        """
        self.last_reply = self.last_reply._replace(books=GateBooks(**structs.asdict(recorded.books())))
        self._buffer.used.update(recorded.used)

    def take_up(self, trained: Sequence[ReceivedRollout]) -> None:
        """Continue after the last step of the previous MasterWorker: its rollouts are reported again before another
        step begins.
        """
        self.due.trained = list(trained)
        self._buffer.know_trained(each.rollout_id for each in trained)

    def trained(self, batch: TrainBatch) -> None:
        """Add the complete step of `batch` to the next report."""
        self.due.trained += map(received, batch.records)

    @property
    def reported_books(self) -> GateBooks | None:
        """Return the books; None while a trained rollout has not been reported."""
        return None if self.due.trained else self.last_reply.books

    def saved(self, version: int) -> dict[str, Any]:
        """Write the ledger's line of a checkpoint of `version`; return the ledger's part of the checkpoint."""
        return self._ledger.saved(version, self.reported_books)

    def take_drops(self) -> list[Drop]:
        """Add the rollouts that the buffer dropped to the next report; return all drops in it."""
        self.due.drops += self._buffer.pop_drops()
        return self.due.drops

    def next_report(self, version: int) -> ConsumedReport:
        """Return the next report."""
        heard, measured = self._ledger.recorded.heard, self.last_reply.measured
        drops = [drop.message for drop in self.take_drops()]
        trained = [each.rollout_id for each in self.due.trained]
        return ConsumedReport(version, trained, drops, events_after=heard, measured_after=measured)

    def run_report(self, version: int) -> RunReport:
        """Return all that the trainer's side knows of the run, for a new manager."""
        self.take_drops()
        return run_report(self._ledger.recorded, self._buffer, self.curriculum, self.due, version)

    def introduced(self, manager: int) -> None:
        """Record that the manager with this number has received `run_report`."""
        self._ledger.begin_manager(manager)

    def take(self, reply: ConsumedReply) -> None:
        """Process the reply to `next_report`: its lines, measured success rates and books."""
        self.due.trained, self.due.drops = [], []
        for prompt in given_up(self._ledger.recorded, reply.events):
            self._buffer.used.add(prompt)
        self._ledger.take(reply.events)
        for prompt_id, success in reply.measured:
            self.curriculum.measured(prompt_id, success)
        status = GateStatus(reply.idle_s, frozenset(reply.versions_in_use), reply.books.dropped)
        self.last_reply = LastReply(reply.books, status, reply.measured_seq)


class Reports:
    """Sends the reports. A `version` argument is always the model's current version.

    Args:
        collector: polls the ranks, and has them free dropped rollouts.
        state: makes the reports and processes the replies.
        stop: ends the wait for a report.
        limit_s: time limit of each call.
    """

    def __init__(
        self,
        manager: ManagerClient | OfflineGate,
        collector: Collector,
        state: ReportState,
        stop: asyncio.Event,
        *,
        limit_s: float,
    ) -> None:
        self.state = state
        self._manager, self._collector, self._stop = manager, collector, stop
        self._limit_s, self._introduced = limit_s, False

    async def look(self) -> None:
        """Ask for the manager's status without a report."""
        status = await or_stop(self._manager.status(), self._stop, self._limit_s)
        self.state.last_reply = self.state.last_reply._replace(status=status)

    async def introduce(self, version: int) -> None:
        """Send the manager all that the trainer's side knows, unless that is done; then it opens its gate.

        The ranks are polled first, as the manager may have no other report of the rollouts that they hold.

        Raises:
            HttpRefused: the manager refuses the report, so that it would admit no rollout.
        """
        if self._introduced:
            return
        await self._collector.refresh()
        self.state.introduced(await self._manager.report_run(self.state.run_report(version)))
        self._introduced = True
        await self._collector.confirm()

    async def report(self, version: int) -> None:
        """Report trained and dropped rollouts, and have the ranks free the tensors of the dropped ones.

        What the buffer drops meanwhile is reported at once too, since it takes up room at the gate.
        A stop request ends the wait: the manager may have failed, and the checkpoint must not wait for it. The `last`
        report then has the missing ones.
        """
        while self.state.memory_checkpointer.may_report(version):
            drops = self.state.take_drops()  # the report may add to it
            if not self.state.due:
                return
            await or_stop(self._report(version), self._stop, self._limit_s)
            await self._collector.discard([drop.record for drop in drops], self._limit_s)

    async def last(self, version: int) -> None:
        """Report once more, so that the last checkpoint has all prompts dropped for good so far."""
        try:
            async with asyncio.timeout(LAST_REPORT_LIMIT_S):
                await self._report(version)
        except Exception as error:
            _log.warning("the GserverManager did not take the report before the last checkpoint: %r", error)

    async def close_gate(self) -> None:
        """Have the gate admit no more rollouts."""
        await self._manager.close_gate()

    async def close_books(self, version: int, *, complete: bool) -> None:
        """Close the gate and account for every rollout; `complete` is true if all steps are trained.

        Raises:
            BooksError: the manager does not answer.
        """
        limit_s = self._limit_s if complete else BOOKS_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                await self.introduce(version)  # a stop request may have come before the beginning had done it
                await self.close_gate()
                await self._manager.abandon()
                await self._report(version)
        except TimeoutError as error:
            raise BooksError(f"the GserverManager did not close the books within {limit_s:g} s") from error

    async def _report(self, version: int) -> None:
        """Send one report and process the reply."""
        state = self.state
        if not state.memory_checkpointer.may_report(version):
            return
        await self.introduce(version)
        report = state.next_report(version)
        state.take(
            await self._manager.report_consumed(
                version, report.trained, report.dropped, report.events_after, report.measured_after
            )
        )


def given_up(recorded: Recorded, lines: Sequence[RolloutLine]) -> Iterator[str]:
    """Yield the prompts that the manager's `lines`, which are not recorded yet, drop for good."""
    admitted = {line.rollout: line for line in lines if isinstance(line, Admitted)}
    for line in lines:
        if isinstance(line, Dropped) and line.prompt is PromptGoes.given_up:
            yield (recorded.open.get(line.rollout) or admitted[line.rollout]).prompt


def run_report(recorded: Recorded, buffer: SampleBuffer, curriculum: Curriculum, due: Due, version: int) -> RunReport:
    """Return all that the trainer's side knows of the run at policy version `version`."""
    ended = list(recorded.ended.items())
    return RunReport(
        version=recorded.version,
        dropped=dict(+recorded.dropped),
        abandoned=recorded.abandoned,
        open=list(recorded.open.values()),
        finished=list(recorded.finished),
        ended=[(how, [key for key, _ in group]) for how, group in groupby(ended, lambda item: item[1])],
        retries=list(recorded.retries.values()),
        used=buffer.used.to_json(),
        received=[received(record) for record in [*buffer.live(), *(drop.record for drop in due.drops)]],
        trained=due.trained,
        trained_version=version,
        curriculum=curriculum.state(),
    )
