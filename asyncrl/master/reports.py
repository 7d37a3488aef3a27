"""What the master and the GserverManager tell each other: what was trained and dropped, and what became of rollouts.

The data state. Used prompts are the train loop's alone; RolloutWorkers that begin get a copy of them. It is written
before each report to the manager, so that what the manager has forgotten of a worker's prompts stands there
(`asyncrl.manager.service`).

The books. The manager keeps them (`staleness_gate`), from the checkpoint's on. Each report brings them here.

Where steps are kept, nobody is told of a step before its state is whole: whoever goes on after this process would not
know of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from asyncrl.comm.ledger_lines import Dropped, PromptGoes, RolloutLine
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.client import GateStatus, ManagerClient
from asyncrl.manager.messages import GateBooks, GivenUp
from asyncrl.master.buffer import SampleBuffer, TrainBatch
from asyncrl.master.ledger import Ledger
from asyncrl.master.records import Drop
from asyncrl.master.replay import OfflineGate
from asyncrl.master.run_files import BooksError, check_books, write_data_state
from asyncrl.master.saving import KeptSteps
from asyncrl.plugins.datasets.curriculum import Curriculum
from asyncrl.runtime.run_dir import DATA_STATE_FILE
from asyncrl.runtime.waiting import or_stop
from asyncrl.trainer.messages import Discard

_log = logging.getLogger(__name__)

BOOKS_LIMIT_S = 5.0
"""Limit of closing the books; the manager answers in milliseconds unless it is what failed."""
LAST_BOOKS_LIMIT_S = 30.0
"""The same at the end of a complete run: a manager that died is started again."""
LAST_REPORT_LIMIT_S = 1.0
"""Limit of the report before the last checkpoint, which must not wait for a manager that is gone."""


class Known(NamedTuple):
    """Numbers of the last that the manager told: of prompts that workers gave up, of what became of rollouts, and of
    measured success rates."""

    given_up: int = 0
    events: int = 0
    measured: int = 0


class Reports:
    """See the module's docstring. Each takes the version that the model has now.

    Args:
        heads: the ModelWorkers that receive trajectories, by data index.
        steps: where the state of each step is kept.
        stop: ends the wait for a report.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        manager: ManagerClient | OfflineGate,
        heads: Sequence[RequestClient],
        buffer: SampleBuffer,
        ledger: Ledger,
        steps: KeptSteps,
        stop: asyncio.Event,
    ) -> None:
        self._config, self._run_dir, self._stop = config, run_dir, stop
        self._manager, self._heads = manager, heads
        self._buffer, self._ledger, self._steps = buffer, ledger, steps
        self._limit_s = config.system.stall_timeout_s
        self.books = GateBooks(submitted=0, trained=0, dropped={}, abandoned=0)
        """As of the last report."""
        self.known = Known()
        self.status = GateStatus()
        """Of the gate and the servers, as of the last report."""
        self.unreported: list[str] = []
        """Trained rollouts that the manager was not told of."""
        self._drops: list[Drop] = []
        self._kept_known = Known()  # by whoever goes on from here
        self._kept_version = 0
        self._untold_step: TrainBatch | None = None  # of a loop before this one, for the ledger
        self._told_already = 0  # rollouts' lines that the ledger has after the step that is gone on from
        self._curriculum = self._new_curriculum()
        self._trained_before = 0
        self._in_data_state: tuple[int, int] | None = None  # how many used prompts and measurements it has

    def restore(self, version: int, state: Mapping[str, Any]) -> None:
        """Go on from the master's `state` at `version`; the buffer has its part already."""
        self._curriculum = self._new_curriculum(state.get("curriculum", ()))  # as for `dropped` below
        self._kept_version = version
        # The gate counts B per version, whatever B was when they were trained.
        trained = version * self._config.train_batch_size
        self._trained_before = trained - self._buffer.trained
        dropped = state.get("dropped", {})  # a checkpoint of an earlier version of asyncrl has none
        self.books = GateBooks(trained + sum(dropped.values()), trained, dropped, abandoned=0)

    def take_up(self, unreported: Sequence[str], known: Known, told: int, untold_step: TrainBatch | None) -> None:
        """Be where the loop before this one was after its last step.

        Its rollouts are reported again before another step begins. So the reply tells what was dropped for good, also
        what the loop before this one has written into the ledger.

        Args:
            told: rollouts' lines that the ledger has after that step.
            untold_step: the step, unless the ledger has it.
        """
        self.unreported = list(unreported)
        self._buffer.know_trained(unreported)
        self.known = self._kept_known = known
        self._told_already, self._untold_step = told, untold_step

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        return {"dropped": dict(self.books.dropped), "curriculum": self._curriculum.state()}

    def step_kept(self, version: int) -> None:
        """The state of the step that made `version` is whole: from now on others may hear of the step."""
        self._kept_known, self._kept_version = self.known, version

    def may_tell_of(self, version: int) -> bool:
        """Whether whoever goes on after this process would know of the step that made `version`."""
        return not self._steps.on or self._kept_version == version

    @property
    def reported_books(self) -> GateBooks | None:
        """The books, if the gate has heard of all that is trained."""
        return None if self.unreported else self.books

    async def report(self, version: int) -> None:
        """Tell the gate what was trained and dropped, and free the tensors of what was dropped.

        Its reply may drop received rollouts for good, which is told at once, as they take up room at the gate.
        A stop request ends it: the manager may be what failed, and the checkpoint must not wait for it. What is not
        reported then, the `last` report tells.
        """
        while self.may_tell_of(version):
            self._drops += self._buffer.pop_drops()
            drops = self._drops
            if not self.unreported and not drops:
                return
            await or_stop(self._report(version), self._stop, self._limit_s)
            for head in sorted({drop.record.head for drop in drops}):
                discard = Discard(tuple(drop.record.rollout_id for drop in drops if drop.record.head == head))
                await self._heads[head].call(discard, timeout_s=self._limit_s)

    async def look(self) -> None:
        """Ask for the status, where there is nothing to report."""
        self.status = await or_stop(self._manager.status(), self._stop, self._limit_s)

    async def last(self, version: int) -> None:
        """What RolloutWorkers dropped for good by now belongs into the last checkpoint, if the manager still tells."""
        try:
            async with asyncio.timeout(LAST_REPORT_LIMIT_S):
                await self._report(version)
        except Exception as error:
            _log.warning("the GserverManager was not heard before the last checkpoint: %r", error)

    async def close_books(self, version: int, *, complete: bool) -> None:
        """Have every rollout accounted for; `complete`: all steps are trained.

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

    def check_books(self) -> None:
        """Check that every rollout is accounted for.

        Raises:
            BooksError: naming the counters.
        """
        check_books(self.books, self._trained_before + self._buffer.trained)

    def write_data_state(self) -> Path:
        """Write which prompts are used and how well they were answered, where that has changed; returns the file."""
        content = len(self._buffer.used), self.known.measured
        if self._in_data_state == content:
            return self._run_dir / DATA_STATE_FILE
        self._in_data_state = content
        return write_data_state(self._run_dir, self._buffer.used, self._curriculum)

    async def _report(self, version: int) -> None:
        """Tell the gate what was trained and dropped; take in its books, and what RolloutWorkers dropped for good."""
        if not self.may_tell_of(version):
            return
        self.write_data_state()
        self._drops += self._buffer.pop_drops()
        dropped = [drop.message for drop in self._drops]
        recorded = self._kept_known if self._steps.on else self.known
        reply = await self._manager.report_consumed(version, self.unreported, dropped, *recorded)
        self.unreported, self._drops = [], []
        first = reply.events_seq - len(reply.events)  # the manager may have been told that more of them are recorded
        known, self._told_already = (self.known.events or first) + self._told_already, 0
        self._ledger.take(decide(self._buffer, reply.given_up, reply.events[max(0, known - first) :]))
        self.status = GateStatus(reply.idle_s, frozenset(reply.versions_in_use), reply.books.dropped)
        self.books, self.known = reply.books, Known(reply.seq, reply.events_seq, reply.measured_seq)
        for prompt_id, success in reply.measured:
            self._curriculum.measured(prompt_id, success)
        if (batch := self._untold_step) is not None:
            self._ledger.step(batch, self.reported_books)
            self._untold_step = None

    def _new_curriculum(self, state: Sequence[Sequence[float]] = ()) -> Curriculum:
        settings = self._config.dataset.curriculum
        return Curriculum(settings.low, settings.high, settings.rest, state)


def decide(buffer: SampleBuffer, given_up: Iterable[GivenUp], lines: Sequence[RolloutLine]) -> list[RolloutLine]:
    """Drop the prompts `given_up` for good, but for those that are trained, and return the ledger's `lines` about it.

    The manager cannot know what is trained. So its line says `given_up` either way, and the ledger's says `used` where
    the prompt was used before: there it stands before the line of the step that trained it.
    """
    used = {each.rollout_id for each in given_up if not buffer.give_up(each.prompt_id)}
    return [
        structs.replace(line, prompt=PromptGoes.used) if isinstance(line, Dropped) and line.rollout in used else line
        for line in lines
    ]
