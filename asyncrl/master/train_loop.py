"""The master's loop: wait for a batch, train on it, publish the new version, keep the books.

The loop holds metadata only and asks everything of its peers, so the tests run it whole against peers in one process.

What runs beside it: the collector (metadata of rollouts arrives while a step trains) and an evaluation
(`VersionAnnouncer`). What ends it: the last step, a stop request (between steps, or while it waits for data), a peer's
failure, or a stall (`asyncrl.master.stall`).

Exactly once. A prompt is used from the moment its step is complete, or from when the master hears that it was dropped
for good (`SampleBuffer`). A checkpoint holds the model, the used prompts and what was dropped, of one and the same
version, in one folder that appears at once, so after a restart all forget the same steps. Used prompts are this loop's
alone: the data state is a copy of them for RolloutWorkers that begin. It is written before each report to the manager,
so that what the manager has forgotten of a worker's prompts stands there (`asyncrl.manager.service`).

Where the run stands at the beginning is found by `asyncrl.master.standing`: with the ranks, in the last step, in a
checkpoint. Where steps are kept, the state of each is there before anyone outside the trainer's side hears of it
(`asyncrl.master.saving`): the checkpoint's content, and what was about to be told (`_KeptStep`).

The books. The manager keeps them (`staleness_gate`), from the checkpoint's on. Each report of a step brings them here
and they are written down, so that every end can tell them: `summary.json` where the run ended well, else `books.json`
as of the last report.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import msgspec

from asyncrl.comm.awake import AwakeClock
from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.datasets.curriculum import Curriculum
from asyncrl.manager.client import GateStatus, ManagerClient
from asyncrl.manager.messages import GateBooks
from asyncrl.master import standing
from asyncrl.master.assignment import assign
from asyncrl.master.buffer import SampleBuffer, TrainBatch
from asyncrl.master.buffer_order import BufferOrder
from asyncrl.master.collector import Collector
from asyncrl.master.connections import GRACE_S, Evaluates, NameBoard, evaluate
from asyncrl.master.graph.executor import Executor, column_moves
from asyncrl.master.graph.types import Graph
from asyncrl.master.journal import Journal
from asyncrl.master.ledger import Ledger, ToldSince
from asyncrl.master.metric_rows import Row
from asyncrl.master.ranks import Ranks
from asyncrl.master.records import Drop
from asyncrl.master.replay import OfflineGate
from asyncrl.master.run_files import (
    BooksError,
    check_books,
    checkpoint_root,
    write_books,
    write_data_state,
    write_summary,
)
from asyncrl.master.saving import Checkpoints, KeptSteps, Progress
from asyncrl.master.settings import OnStale
from asyncrl.master.stall import StallWatch
from asyncrl.master.standing import Source
from asyncrl.master.step_plan import plan_step
from asyncrl.master.version_announcer import VersionAnnouncer
from asyncrl.rollout.messages import EvaluationResult
from asyncrl.rollout.settings import evaluation_sets
from asyncrl.runtime.last_step import LastStep
from asyncrl.runtime.run_dir import DATA_STATE_FILE
from asyncrl.runtime.waiting import StopRequested, cancel, or_stop
from asyncrl.runtime.worker import RestartTogether
from asyncrl.trainer.messages import (
    CollectWeights,
    Discard,
    EndStep,
    Publish,
)
from asyncrl.trainer.settings import Placement, worker_grid
from asyncrl.weights.transports import weight_transport

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

BOOKS_LIMIT_S = 5.0
"""Limit of closing the books; the manager answers in milliseconds unless it is what failed."""
LAST_BOOKS_LIMIT_S = 30.0
"""The same at the end of a complete run: a manager that died is started again."""
LAST_REPORT_LIMIT_S = 1.0
"""Limit of the report before the last checkpoint, which must not wait for a manager that is gone."""
HOLD_S = 10.0
"""How long the manager holds one question about expiring rollouts."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The other processes: ModelWorkers (`workers`) and RolloutWorkers (`rollouts`) by index.

    `placement` says which ModelWorkers host which role, and which take in trajectories.
    """

    workers: Sequence[RequestClient]
    placement: Placement
    manager: ManagerClient | OfflineGate
    rollouts: Sequence[Evaluates]
    board: NameBoard


class _Known(NamedTuple):
    """Numbers of the last that the manager told: of prompts that workers gave up, of what became of rollouts, and of
    measured success rates."""

    given_up: int = 0
    events: int = 0
    measured: int = 0


class _KeptStep(msgspec.Struct, frozen=True):
    """What the state of the last step has besides a checkpoint's: what the others and the metrics are told of it next.

    `known`: the last of what the manager told that is in this state; the ledger then had `ledger_line` lines.
    """

    batch: TrainBatch
    measured: Row
    trained: list[str]
    known: _Known
    ledger_line: int


class TrainLoop:
    """See the module's docstring. `run` is the whole life; set `stop` to end it early with a checkpoint.

    Args:
        last_step: where the state of each step is kept, and looked for at the beginning; None: nowhere.
        incarnation: how many masters before this one died.
        begun: called once it is clear where the run stands, before its next step.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        graph: Graph,
        peers: Peers,
        stop: asyncio.Event,
        clock: AwakeClock | None = None,
        last_step: LastStep | None = None,
        incarnation: int = 0,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._incarnation, self._begun = incarnation, begun
        self._last_step = last_step
        self._clock = clock or AwakeClock()
        self.config, self.run_dir, self.peers, self.stop = config, run_dir, peers, stop
        self.version = 0
        self.buffer = SampleBuffer(
            config.train_batch_size,
            config.max_head_offpolicyness,
            config.on_stale,
        )
        self._order = BufferOrder(config.buffer.order)
        self._limit_s = config.system.stall_timeout_s
        self._ranks = Ranks(peers.workers, worker_grid(config).publisher, self._limit_s, incarnation)
        routes, grids = peers.placement.routing_table(), peers.placement.grids
        moves = column_moves(graph, {role: peers.placement.grid(role) for role in graph.roles()})
        self._executor = Executor(graph, routes.placement, peers.workers, self._limit_s, moves)
        self._heads = [peers.workers[worker] for worker in routes.data_workers]
        self._actors = [peers.workers[worker] for worker in grids[ACTOR].members]
        self._collector = Collector(self._heads, self.buffer)
        self._journal = Journal(config, self._collector, self.buffer)
        self._ledger = Ledger.of_run(run_dir, config)
        self._announcer = VersionAnnouncer(
            peers.board.announce_version,
            self._evaluate,
            self._journal.evaluations_due,
            self._journal.evaluated,
            self._clock,
        )
        self._stall = StallWatch(
            self._limit_s,
            self._clock,
            stop,
            lambda: self._announcer.free_since,
            peers.manager,
            self.buffer,
            self._collector,
        )
        self._status = GateStatus(0.0, frozenset(), "")
        self._unreported_trained: list[str] = []
        self._unreported_drops: list[Drop] = []
        self._known = _Known()
        self._kept_known = _Known()  # by whoever goes on from here
        self._kept_version = 0
        self._untold_step: TrainBatch | None = None  # of a loop before this one, for the ledger
        self._owes_checkpoint = False  # one that was due when a loop before this one died is made up for after a step
        self._told_already = 0  # rollouts' lines that the ledger has after the step that is gone on from
        self._curriculum = self._new_curriculum()
        self._books = GateBooks(submitted=0, trained=0, dropped={}, abandoned=0)
        self._trained_before = 0
        self._in_data_state: tuple[int, int] | None = None  # how many used prompts and measurements it has
        self._checkpoints = Checkpoints(
            config.checkpoint, run_dir, self._ranks, self._journal, check=self._collector.check
        )
        self._steps = KeptSteps(last_step, self._ranks)
        self._on_disk = 0  # the newest version whose weights are in a folder; 0 is the base model
        self._model_in_step = False

    async def run(self) -> None:
        """Train up to `total_train_steps`, or until asked to stop; then checkpoint, balance the books and sum up.

        Raises:
            Stalled, BooksError: see there.
            ExecutionError: a model function call failed.
            RestartTogether: the ranks do not stand between two steps, so nobody can go on with them as they are.
            Exception: another process failed. Steps that were complete are saved first, where that is possible.
        """
        ticking = asyncio.create_task(self._clock.keep())
        try:
            try:
                await self._begin()
                while not self._complete:
                    await self._step()
            except StopRequested:
                _log.info("asked to stop: ending at version %d", self.version)
            await self._finish()
        except RestartTogether:
            raise
        except Exception:
            if self._steps.on:
                await self._announcer.abandon()
            await self._save_what_is_complete()
            write_books(self.run_dir, self.version, self._books)
            raise
        finally:
            await self._collector.close()
            await self._announcer.close()
            self._checkpoints.close()
            self._journal.close()
            self._ledger.close()
            await cancel(ticking)

    async def _begin(self) -> None:
        """From where the ranks stand, the last step, a checkpoint or the base model; the RolloutWorkers begin once they
        see the data state.
        """
        state = await self._restore()
        kept = state.get("step") if state else None
        step = None if kept is None else msgspec.convert(kept, _KeptStep, str_keys=True)
        self._announcer.announced = self.version if step is None else self.peers.board.announced_version()
        journal = state["journal"] if state else None
        dropped = self._books.dropped
        if step is not None:
            self._status = await or_stop(self.peers.manager.status(), self.stop, self._limit_s)
        begun = perf_counter(), dropped, journal, self._announcer.announced, self._status.closed_s
        self._journal.open(self.run_dir, self.version, *begun)
        write_books(self.run_dir, self.version, self._books)
        if step is None:
            self._ledger.begin(self.version, state.get("ledger") if state else None, self._books)
        else:
            self._take_up(step, self._ledger.go_on(step.ledger_line))
        if not self._unreported_trained:
            # Weights of later versions are of steps that a restart has forgotten; the same versions will be others.
            await self._ranks.all(CollectWeights(ACTOR, (self.version,)))
        path = await self._publish(to_disk=True) if self.version else ""
        evaluating = self._journal.awaits_evaluation()
        cut_off = evaluating is not None and evaluating < self.version
        if self.version and not cut_off:  # before the RolloutWorkers begin: it tells the gate where the run stands
            self._announcer.announce(self.version, path)
        interval = self.config.checkpoint.interval
        due = self.version - self.version % interval if interval else 0
        self._owes_checkpoint = step is not None and self._checkpoints.newest() < due
        self.peers.board.announce_data_state(self._write_data_state(), self._books.dropped)
        self._collector.start()
        self._stall.progressed()
        self._begun()
        if evaluating is not None:
            self._announcer.evaluate_if_due()
        if cut_off:  # the servers still have the version whose evaluation was cut off
            await or_stop(self._announcer.published(self.version, path), self.stop, math.inf)

    def _take_up(self, step: _KeptStep, told: ToldSince) -> None:
        """Be where the loop before this one was after its last step, of which the ledger was `told`."""
        self._unreported_trained = list(step.trained)
        self.buffer.know_trained(step.trained)
        self._known = self._kept_known = step.known
        self._told_already = told.rollouts
        self._untold_step = None if told.step else step.batch
        self._journal.step_again(self.version, step.batch, step.measured, self._status, perf_counter())
        _log.info("going on after step %d, which was complete", self.version)

    async def _step(self) -> None:
        """From version v to v + 1."""
        if self.stop.is_set():
            raise StopRequested
        begun = perf_counter()
        batch = await self._next_batch()
        await self._checkpoints.look()  # no step is trained after a checkpoint that could not be written
        has_data = perf_counter()
        stats = await self._train(batch)
        trained = perf_counter()
        self._unreported_trained += [record.rollout_id for record in batch.records]
        times = {"time/wait_data_s": has_data - begun, "time/train_s": trained - has_data}
        if self.config.buffer.order.path:
            stats["rollout/order_failed"] = float(self._order.failures)
        await self._begin_keeping(batch, stats | times)
        path = await self._publish(to_disk=self._complete or self._wants_folder)
        times["time/publish_s"] = perf_counter() - trained
        await self._finish_keeping()
        published = perf_counter()
        times["time/keep_s"] = published - trained - times["time/publish_s"]
        try:  # a version that is to be evaluated waits for the evaluation before it, which has a limit of its own
            await or_stop(self._announcer.published(self.version, path), self.stop, math.inf)
            times["time/wait_eval_s"] = perf_counter() - published
            await self._report()
            self._status = await or_stop(self.peers.manager.status(), self.stop, self._limit_s)
        finally:  # the step is complete, so its row is written, whatever kept it from being reported
            self._journal.step(self.version, batch, stats | times, self._status, perf_counter())
            self._ledger.step(batch, self._reported_books)
            write_books(self.run_dir, self.version, self._books)
            self._stall.progressed()
        if self._checkpoint_is_due:
            await self._save()

    async def _next_batch(self) -> TrainBatch:
        while True:
            await self._enough_rollouts()
            if self.config.on_stale == OnStale.wait:
                await self._nothing_would_expire()
            ranks = await self._order.ranks(self.buffer.live(), self.version)
            batch = self.buffer.take(self.version, ranks)
            if batch is not None:
                return batch

    async def _enough_rollouts(self) -> None:
        while True:
            self.buffer.expire(self.version)
            await self._report()  # what expired leaves the gate's count, which makes room for what the batch lacks
            missing = self.config.train_batch_size - len(self.buffer)
            if missing <= 0:
                return
            more = self._collector.changed(missing)
            await self._stall.wait(more, self.version, "trajectories from the RolloutWorkers")

    async def _nothing_would_expire(self) -> None:
        """Hold the step until every rollout that a later step could not train is in the buffer."""
        what = "the end of rollouts that would expire (on_stale=wait)"
        while running := await self._stall.wait(
            self.peers.manager.wait_expiring(self.version, HOLD_S), self.version, what
        ):
            _log.info("step %d is held for %d rollouts that would expire", self.version, len(running))
        await self._stall.wait(self._collector.refresh(), self.version, "the ModelWorkers to tell what they received")

    async def _train(self, batch: TrainBatch) -> Row:
        minibatches = self.config.trainer.ppo_minibatches
        placement = self.peers.placement
        cuts = [
            assign(batch.records, grid.data, minibatches, self.config.seed, batch.version)
            for grid in placement.distinct
        ]
        steps = plan_step(
            cuts,
            placement,
            version=batch.version,
            min_version=batch.min_version,
            minibatches=minibatches,
            master=self._incarnation,
        )
        self._model_in_step = True
        await self._ranks.each(steps)
        stats = await self._executor.run()
        await self._ranks.all(EndStep())
        self.buffer.mark_trained(batch)
        self.version += 1
        self._model_in_step = False
        return stats

    async def _publish(self, *, to_disk: bool) -> str:
        """Make the actor's weights available as the current version; returns its folder, which holds the weights
        themselves if `to_disk`. Versions nobody reads are removed, but for the newest on disk.
        """
        if to_disk:
            self._on_disk = self.version
        recent = {self.version, self.version - 1, self._on_disk, self._announcer.announced}
        in_use = recent.union(self._announcer.put_off, self._status.versions_in_use)
        published, _ = await asyncio.gather(
            self._ranks.some(self._actors, Publish(ACTOR, self.version, to_disk, self._incarnation)),
            self._ranks.all(CollectWeights(ACTOR, tuple(sorted(in_use)))),
        )
        return published[0].path

    async def _begin_keeping(self, batch: TrainBatch, measured: Row) -> None:
        """Have the state of the step that is complete kept on the host."""
        if self._steps.on:
            step = _KeptStep(batch, measured, self._unreported_trained, self._known, self._ledger.lines_written())
            await self._steps.begin(self.version, self._state() | {"step": msgspec.to_builtins(step, str_keys=True)})

    async def _finish_keeping(self) -> None:
        """Return once that state is whole; from then on others may hear of the step."""
        known = self._known
        if await self._steps.finish():
            self._kept_known, self._kept_version = known, self.version

    async def _report(self) -> None:
        """Tell the gate what was trained and dropped, and free the tensors of what was dropped.

        A stop request ends it: the manager may be what failed, and the checkpoint must not wait for it. What is not
        reported then, `_finish` reports.
        """
        self._unreported_drops += self.buffer.pop_drops()
        drops = self._unreported_drops
        if not self._unreported_trained and not drops:
            return
        await or_stop(self._report_to_manager(), self.stop, self._limit_s)
        for head in sorted({drop.record.head for drop in drops}):
            discard = Discard(tuple(drop.record.rollout_id for drop in drops if drop.record.head == head))
            await self._heads[head].call(discard, timeout_s=self._limit_s)

    async def _report_to_manager(self) -> None:
        """Tell the gate what was trained and dropped; take in its books, and what RolloutWorkers dropped for good."""
        if self._steps.on and self._kept_version != self.version:
            return  # whoever goes on after this process would not know of it
        self._write_data_state()
        self._unreported_drops += self.buffer.pop_drops()
        trained, drops = self._unreported_trained, self._unreported_drops
        dropped = [drop.message for drop in drops]
        recorded = self._kept_known if self._steps.on else self._known
        reply = await self.peers.manager.report_consumed(self.version, trained, dropped, *recorded)
        self._unreported_trained, self._unreported_drops = [], []
        first = reply.events_seq - len(reply.events)  # the manager may have been told that more of them are recorded
        known, self._told_already = (self._known.events or first) + self._told_already, 0
        self._ledger.take(reply.events[max(0, known - first) :])
        self._books, self._known = reply.books, _Known(reply.seq, reply.events_seq, reply.measured_seq)
        self.buffer.give_up(reply.given_up)
        for prompt_id, success in reply.measured:
            self._curriculum.measured(prompt_id, success)
        if (batch := self._untold_step) is not None:
            self._ledger.step(batch, self._reported_books)
            self._untold_step = None

    def _write_data_state(self) -> Path:
        """Write which prompts are used and how well they were answered, where that has changed; returns the file."""
        content = len(self.buffer.used), self._known.measured
        if self._in_data_state == content:
            return self.run_dir / DATA_STATE_FILE
        self._in_data_state = content
        return write_data_state(self.run_dir, self.buffer.used, self._curriculum)

    async def _evaluate(self, name: str, version: int) -> EvaluationResult:
        return await evaluate(self.peers.rollouts, name, version, self.config.eval.timeout_s)

    async def _finish(self) -> None:
        if self._complete:
            await or_stop(self.peers.manager.close_gate(), self.stop, self._limit_s)
        else:
            await self._announcer.close()
        if self._on_disk != self.version:
            await self._publish(to_disk=True)  # the policy that the run leaves behind
        await self._last_report()
        await self._checkpoints.finish()
        if self._unsaved:
            await self._save()
            await self._checkpoints.finish()
        if self._complete:  # saved before: the last evaluation may take long, and a process die meanwhile
            await self._last_evaluation()
        await self._close_books()
        self._ledger.end(self.version, self._books)
        write_summary(self.run_dir, self.version, self.config.total_train_steps, self._books, self._journal)
        check_books(self._books, self._trained_before + self.buffer.trained)

    def _new_curriculum(self, state: Sequence[Sequence[float]] = ()) -> Curriculum:
        settings = self.config.dataset.curriculum
        return Curriculum(settings.low, settings.high, settings.rest, state)

    async def _last_report(self) -> None:
        """What RolloutWorkers dropped for good by now belongs into the last checkpoint, if the manager still tells."""
        try:
            async with asyncio.timeout(LAST_REPORT_LIMIT_S):
                await self._report_to_manager()
        except Exception as error:
            _log.warning("the GserverManager was not heard before the last checkpoint: %r", error)

    async def _close_books(self) -> None:
        limit_s = LAST_BOOKS_LIMIT_S if self._complete else BOOKS_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                await self.peers.manager.close_gate()
                await self.peers.manager.abandon()
                await self._report_to_manager()
        except TimeoutError as error:
            raise BooksError(f"the GserverManager did not close the books within {limit_s:g} s") from error

    async def _last_evaluation(self) -> None:
        try:
            limit_s = len(evaluation_sets(self.config)) * (self.config.eval.timeout_s + GRACE_S)
            await or_stop(self._announcer.evaluation_ended(), self.stop, limit_s)
        except StopRequested:
            await self._announcer.close()

    async def _restore(self) -> dict[str, Any] | None:
        """The master's state as the ranks have it now, and this loop; None at the beginning of the run."""
        announced = self.peers.board.announced_version()
        checkpoints = checkpoint_root(self.run_dir)
        state, source = await standing.find(self._ranks, self._steps, checkpoints, self._incarnation, announced)
        if state is None:
            return None
        self.version = state["version"]
        self.buffer.restore(state["buffer"])
        self._curriculum = self._new_curriculum(state.get("curriculum", ()))  # as for `dropped` below
        if source is Source.ranks:
            await self._steps.take_up(self.version)
        self._checkpoints.saved = self._progress if source is Source.checkpoint else None
        self._kept_version = self.version
        # The gate counts B per version, whatever B was when they were trained.
        trained = self.version * self.config.train_batch_size
        self._trained_before = trained - self.buffer.trained
        dropped = state.get("dropped", {})  # a checkpoint of an earlier version of asyncrl has none
        self._books = GateBooks(trained + sum(dropped.values()), trained, dropped, abandoned=0)
        _log.info("continuing at version %d with %d prompts used", self.version, len(self.buffer.used))
        return state

    async def _save(self) -> None:
        """Begin a checkpoint of the current version, once the one before it is there."""
        await self._checkpoints.finish()
        progress = self._progress
        state = self._state() | {"ledger": self._ledger.saved(self.version, self._reported_books)}
        await self._checkpoints.begin(progress, state)
        self._owes_checkpoint = False

    def _state(self) -> dict[str, Any]:
        """The master's part of a checkpoint."""
        return {
            "version": self.version,
            "buffer": self.buffer.state(),
            "journal": self._journal.state(),
            "dropped": dict(self._books.dropped),
            "curriculum": self._curriculum.state(),
        }

    async def _save_what_is_complete(self) -> None:
        """After a failure: save the last complete step, unless a step that failed has touched the model since.

        A checkpoint under way is of a complete step in any case, and is waited for.
        """
        try:
            await self._checkpoints.finish()
        except Exception as error:
            _log.warning("the checkpoint under way could not be written: %s", error)
        if self._model_in_step or not self.version:
            return
        if self._steps.on and self._kept_version != self.version:
            return  # whoever goes on from the kept step makes this one again, and the ledger must not have it before
        await self._last_report()
        if not self._unsaved:
            return
        try:
            await self._save()
            await self._checkpoints.finish()
            _log.info("saved version %d", self.version)
        except Exception as error:
            _log.warning("version %d could not be saved: %s", self.version, error)

    @property
    def _reported_books(self) -> GateBooks | None:
        """The books, if the gate has heard of all that is trained."""
        return None if self._unreported_trained else self._books

    @property
    def _progress(self) -> Progress:
        return Progress(self.version, len(self.buffer.used))

    @property
    def _unsaved(self) -> bool:
        """Whether anything is trained or dropped for good since the last checkpoint."""
        return self._checkpoints.saved != self._progress

    @property
    def _checkpoint_is_due(self) -> bool:
        interval = self.config.checkpoint.interval
        return bool(interval) and (self.version % interval == 0 or self._owes_checkpoint)

    @property
    def _wants_folder(self) -> bool:
        """Whether servers read this version's weights from disk, or a user may: one goes with each checkpoint."""
        return weight_transport(self.config.manager.weight_transport).needs_folders or self._checkpoint_is_due

    @property
    def _complete(self) -> bool:
        return self.version >= self.config.total_train_steps
