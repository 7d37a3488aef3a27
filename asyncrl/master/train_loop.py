"""The master's loop: wait for a batch, train on it, publish the new version, keep the books.

The loop holds metadata only and asks everything of its peers, so the tests run it whole against peers in one process.

What runs beside it: the collector (metadata of rollouts arrives while a step trains) and an evaluation
(`VersionAnnouncer`). What ends it: the last step, a stop request (between steps, or while it waits for data), a peer's
failure, or a stall (`asyncrl.master.stall`).

Exactly once. A prompt is used from the moment its step is complete, or from when the master hears that it was dropped
for good (`SampleBuffer`). A checkpoint holds the model, the used prompts and what was dropped, of one and the same
version, in one folder that appears at once, so after a restart all forget the same steps.

Where the run stands at the beginning is found by `asyncrl.master.standing`: with the ranks, in the last step, in a
checkpoint. Where steps are kept, the state of each is there before anyone outside the trainer's side hears of it
(`asyncrl.master.saving`): the checkpoint's content, and what was about to be told (`_KeptStep`).

The books come with each report of a step (`asyncrl.master.reports`) and are written down, so that every end can tell
them: `summary.json` where the run ended well, else `books.json` as of the last report.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from asyncrl.comm.awake import AwakeClock
from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.config.evaluation_sets import evaluation_sets
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.client import ManagerClient
from asyncrl.master import standing
from asyncrl.master.batches import Batches
from asyncrl.master.buffer import SampleBuffer, TrainBatch
from asyncrl.master.collector import Collector
from asyncrl.master.connections import GRACE_S, Evaluates, NameBoard, evaluate
from asyncrl.master.filtered import FilteredOut, watch_filters
from asyncrl.master.graph.executor import Executor, column_moves
from asyncrl.master.graph.types import Graph
from asyncrl.master.journal import Journal
from asyncrl.master.ledger import Ledger, ToldSince
from asyncrl.master.metric_rows import Row
from asyncrl.master.publishing import Publishing
from asyncrl.master.ranks import Ranks
from asyncrl.master.replay import OfflineGate
from asyncrl.master.reports import Known, Reports
from asyncrl.master.run_files import checkpoint_root, write_books, write_summary
from asyncrl.master.saving import Checkpoints, KeptSteps, Progress
from asyncrl.master.stall import LOOK_S, StallWatch
from asyncrl.master.standing import Source
from asyncrl.master.step_plan import plan_batch
from asyncrl.master.version_announcer import VersionAnnouncer
from asyncrl.rollout.messages import EvaluationResult
from asyncrl.runtime.last_step import LastStep
from asyncrl.runtime.remarks import remark
from asyncrl.runtime.starting import LONGEST_STARTS
from asyncrl.runtime.waiting import StopRequested, cancel, or_stop
from asyncrl.runtime.worker import RestartTogether
from asyncrl.trainer.messages import EndStep
from asyncrl.trainer.placement import Placement, worker_grid
from asyncrl.weights.transports.base import weight_transport

_log = logging.getLogger(__name__)


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


class _KeptStep(msgspec.Struct, frozen=True):
    """What the state of the last step has besides a checkpoint's: what the others and the metrics are told of it next.

    `known`: the last of what the manager told that is in this state; the ledger then had `ledger_line` lines.
    """

    batch: TrainBatch
    measured: Row
    trained: list[str]
    known: Known
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
        self._begun = begun
        self._clock = clock or AwakeClock()
        self.config, self.run_dir, self.peers, self.stop = config, run_dir, peers, stop
        self.version = 0
        self.buffer = SampleBuffer(config.train_batch_size, config.max_head_offpolicyness, config.on_stale)
        self._limit_s = config.system.stall_timeout_s
        load_s = max(self._limit_s, LONGEST_STARTS * config.system.start_timeout_s)
        self._ranks = Ranks(peers.workers, worker_grid(config).publisher, self._limit_s, incarnation, load_s)
        routes, grids = peers.placement.routing_table(), peers.placement.grids
        moves = column_moves(graph, {role: peers.placement.grid(role) for role in graph.roles()})
        self._executor = Executor(graph, routes.placement, peers.workers, self._limit_s, moves)
        heads = [peers.workers[worker] for worker in routes.data_workers]
        actors = [peers.workers[worker] for worker in grids[ACTOR].members]
        self._collector = Collector(heads, self.buffer)
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
            peers.board.producers_start,
        )
        self._checkpoints = Checkpoints(
            config.checkpoint, run_dir, self._ranks, self._journal, check=self._collector.check
        )
        self._steps = KeptSteps(last_step, self._ranks)
        self._reports = Reports(config, run_dir, peers.manager, heads, self.buffer, self._ledger, self._steps, stop)
        self._batches = Batches(config, self.buffer, self._collector, peers.manager, self._stall, self._reports.report)
        self._publishing = Publishing(self._ranks, actors, self._announcer)
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
        filtered = FilteredOut(self.config.train_batch_size, self._limit_s)
        tell = partial(remark, self.run_dir)
        filters = watch_filters(filtered, self.peers.manager, lambda: self.version, lambda: len(self.buffer), tell)
        watching = asyncio.create_task(filters)
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
            write_books(self.run_dir, self.version, self._reports.books)
            raise
        finally:
            await self._collector.close()
            await self._announcer.close()
            self._checkpoints.close()
            self._journal.close()
            self._ledger.close()
            await cancel(ticking, watching)

    async def _begin(self) -> None:
        """From where the ranks stand, the last step, a checkpoint or the base model; the RolloutWorkers begin once they
        see the data state.
        """
        state = await self._restore()
        kept = state.get("step") if state else None
        step = None if kept is None else msgspec.convert(kept, _KeptStep, str_keys=True)
        self._announcer.announced = self.version if step is None else self.peers.board.announced_version()
        journal = state["journal"] if state else None
        dropped = self._reports.books.dropped
        if step is not None:
            await self._reports.look()
        begun = perf_counter(), dropped, journal, self._announcer.announced, self._reports.status.idle_s
        self._journal.open(self.run_dir, self.version, *begun)
        write_books(self.run_dir, self.version, self._reports.books)
        if step is None:
            self._ledger.begin(self.version, state.get("ledger") if state else None, self._reports.books)
        else:
            self._take_up(step, self._ledger.go_on(step.ledger_line))
        if not self._reports.unreported:
            await self._publishing.forget_others(self.version)
        path = await self._publish(to_disk=True) if self.version else ""
        evaluating = self._journal.awaits_evaluation()
        cut_off = evaluating is not None and evaluating < self.version
        if self.version and not cut_off:  # before the RolloutWorkers begin: it tells the gate where the run stands
            self._announcer.announce(self.version, path)
        if step is not None:
            self._checkpoints.make_up(self.version)
        self.peers.board.announce_data_state(self._reports.write_data_state(), dropped)
        self._collector.start()
        self._stall.progressed()
        self._begun()
        if evaluating is not None:
            self._announcer.evaluate_if_due()
        if cut_off:  # the servers still have the version whose evaluation was cut off
            await or_stop(self._announcer.published(self.version, path), self.stop, math.inf)

    def _take_up(self, step: _KeptStep, told: ToldSince) -> None:
        """Be where the loop before this one was after its last step, of which the ledger was `told`."""
        self._reports.take_up(step.trained, step.known, told.rollouts, None if told.step else step.batch)
        self._journal.step_again(self.version, step.batch, step.measured, self._reports.status, perf_counter())
        _log.info("going on after step %d, which was complete", self.version)

    async def _step(self) -> None:
        """From version v to v + 1."""
        if self.stop.is_set():
            raise StopRequested
        begun = perf_counter()
        batch = await self._batches.next(self.version)
        await self._checkpoints.look()  # no step is trained after a checkpoint that could not be written
        has_data = perf_counter()
        stats = await self._train(batch)
        trained = perf_counter()
        self._reports.unreported += [record.rollout_id for record in batch.records]
        times = {"time/wait_data_s": has_data - begun, "time/train_s": trained - has_data}
        if self.config.buffer.order.path:
            stats["rollout/order_failed"] = float(self._batches.order_failures)
        await self._begin_keeping(batch, stats | times)
        path = await self._publish(to_disk=self._complete or self._wants_folder)
        times["time/publish_s"] = perf_counter() - trained
        await self._finish_keeping()
        published = perf_counter()
        times["time/keep_s"] = published - trained - times["time/publish_s"]
        try:  # a version that is to be evaluated waits for the evaluation before it, which has a limit of its own
            await or_stop(self._announcer.published(self.version, path), self.stop, math.inf)
            times["time/wait_eval_s"] = perf_counter() - published
            await self._reports.report(self.version)
        finally:  # the step is complete, so its row is written, whatever kept it from being reported
            self._journal.step(self.version, batch, stats | times, self._reports.status, perf_counter())
            self._ledger.step(batch, self._reports.reported_books)
            write_books(self.run_dir, self.version, self._reports.books)
            self._stall.progressed()
        if self._checkpoints.is_due(self.version):
            await self._save()

    async def _train(self, batch: TrainBatch) -> Row:
        minibatches, seed = self.config.trainer.ppo_minibatches, self.config.seed
        steps = plan_batch(batch, self.peers.placement, minibatches=minibatches, seed=seed, master=self._ranks.master)
        self._model_in_step = True
        await self._ranks.each(steps)
        stats = await self._executor.run()
        await self._ranks.all(EndStep())
        self.buffer.mark_trained(batch)
        self.version += 1
        self._model_in_step = False
        return stats

    async def _publish(self, *, to_disk: bool) -> str:
        """Make the actor's weights available as the current version; returns its folder."""
        return await self._publishing.publish(self.version, self._reports.status.versions_in_use, to_disk=to_disk)

    async def _begin_keeping(self, batch: TrainBatch, measured: Row) -> None:
        """Have the state of the step that is complete kept on the host."""
        if self._steps.on:
            reports = self._reports
            step = _KeptStep(batch, measured, reports.unreported, reports.known, self._ledger.lines_written())
            await self._steps.begin(self.version, self._state() | {"step": msgspec.to_builtins(step, str_keys=True)})

    async def _finish_keeping(self) -> None:
        """Return once that state is whole; from then on others may hear of the step."""
        if await self._steps.finish():
            self._reports.step_kept(self.version)

    async def _evaluate(self, name: str, version: int) -> EvaluationResult:
        while self.peers.board.producers_start():  # noqa: ASYNC110 - the resolver's thread has no event of this loop
            await asyncio.sleep(LOOK_S)
        return await evaluate(self.peers.rollouts, name, version, self.config.eval.timeout_s)

    async def _finish(self) -> None:
        if self._complete:
            await or_stop(self.peers.manager.close_gate(), self.stop, self._limit_s)
        else:
            await self._announcer.close()
        if self._publishing.on_disk != self.version:
            await self._publish(to_disk=True)  # the policy that the run leaves behind
        await self._reports.last(self.version)
        await self._checkpoints.finish()
        if self._unsaved:
            await self._save()
            await self._checkpoints.finish()
        if self._complete:  # saved before: the last evaluation may take long, and a process die meanwhile
            await self._last_evaluation()
        await self._reports.close_books(self.version, complete=self._complete)
        self._ledger.end(self.version, self._reports.books)
        write_summary(self.run_dir, self.version, self.config.total_train_steps, self._reports.books, self._journal)
        self._reports.check_books()

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
        state, source = await standing.find(self._ranks, self._steps, checkpoints, announced)
        if state is None:
            return None
        self.version = state["version"]
        self.buffer.restore(state["buffer"])
        if source is Source.ranks:
            await self._steps.take_up(self.version)
        self._checkpoints.saved = self._progress if source is Source.checkpoint else None
        self._reports.restore(self.version, state)
        _log.info("continuing at version %d with %d prompts used", self.version, len(self.buffer.used))
        return state

    async def _save(self) -> None:
        """Begin a checkpoint of the current version, once the one before it is there."""
        await self._checkpoints.finish()
        progress = self._progress
        state = self._state() | {"ledger": self._ledger.saved(self.version, self._reports.reported_books)}
        await self._checkpoints.begin(progress, state)

    def _state(self) -> dict[str, Any]:
        """The master's part of a checkpoint."""
        return {
            "version": self.version,
            "buffer": self.buffer.state(),
            "journal": self._journal.state(),
            **self._reports.state(),
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
        if not self._reports.may_tell_of(self.version):
            return  # whoever goes on from the kept step makes this one again, and the ledger must not have it before
        await self._reports.last(self.version)
        if not self._unsaved:
            return
        try:
            await self._save()
            await self._checkpoints.finish()
            _log.info("saved version %d", self.version)
        except Exception as error:
            _log.warning("version %d could not be saved: %s", self.version, error)

    @property
    def _progress(self) -> Progress:
        return Progress(self.version, len(self.buffer.used))

    @property
    def _unsaved(self) -> bool:
        """Whether anything is trained or dropped for good since the last checkpoint."""
        return self._checkpoints.saved != self._progress

    @property
    def _wants_folder(self) -> bool:
        """Whether servers read this version's weights from disk, or a user may: one goes with each checkpoint."""
        return weight_transport(self.config.manager.weight_transport).needs_folders or self._checkpoints.is_due(
            self.version
        )

    @property
    def _complete(self) -> bool:
        return self.version >= self.config.total_train_steps
