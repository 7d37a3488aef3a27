"""The master's loop: begin, wait for a batch, train on it, publish the new version, save, end.

The loop has only metadata and does everything through calls to its peers, so the tests run all of it against peers in
one process. The collector (which brings metadata of rollouts while a step trains) and an evaluation
(`VersionAnnouncer`) run beside it. It ends with the last step, a stop request (between steps, or while it waits for
data), a peer's failure, or a stall (`asyncrl.master.data.stall`).

Recovery. The brain (MasterWorker, GserverManager, all ModelWorkers) restarts as a whole after the death of any of its
processes. A run's beginning, a resume and a death are one path (`TrainLoop.begin`): load the state of a step, ask the
others what they hold, open the gate. The state of a step is complete or not there (`asyncrl.master.run_state` lists
what it has). One rule makes this safe: **no process outside the brain sees a step before its state is complete**
(`TrainLoop._end_step`). So a new brain knows at least as much as the others. It announces the state's version again,
which servers recognise, and the ledger's lines after the state's do not count any more. `docs/faults.md` has the user's
view; `asyncrl.manager.rollouts.workers` has the manager's side.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pkgutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply import RequestClient
from asyncrl.comm.waits import HOLD_S, LOOK_S, RunningClock
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import CHECKPOINTS_DIR, DATA_RECORD_FILE
from asyncrl.data.datasets import DataRecord
from asyncrl.inference.settings import colocated_servers
from asyncrl.manager.client import ManagerClient
from asyncrl.manager.messages import CloseGate, WaitExpiringRequest
from asyncrl.master.data.sample_buffer import Collector, Reports, SampleBuffer, TrainBatch, check_counts
from asyncrl.master.data.stall import PromptsUsedUp, StallWatch
from asyncrl.master.data.while_waiting import AheadScorer, DeviceTurns, frozen_calls
from asyncrl.master.evaluations import Row
from asyncrl.master.graph import Graph
from asyncrl.master.metrics_log import MetricsLog, buffered_s, of_ranks
from asyncrl.master.peers import NameBoard, RankClients, ReplaceableWorker
from asyncrl.master.policy_versions import Publishing, VersionAnnouncer
from asyncrl.master.run_state import (
    Checkpoints,
    MemoryCheckpointer,
    RunState,
    write_counts,
    write_summary,
)
from asyncrl.master.settings import OnStale
from asyncrl.master.step import Dealing, Executor, column_moves, plan_batch
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.plan import BUFFER_ORDER, SHARED_DEVICES, WIN_RATES
from asyncrl.runtime.process.waiting import StopRequested, cancel, or_stop
from asyncrl.runtime.process.worker import StateLost
from asyncrl.runtime.run_log import notice
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import EndStep, LoadCheckpoint
from asyncrl.trainer.parallel.placement import Placement, worker_grid
from asyncrl.weights.transports.base import weight_transport

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peers:
    """The other processes; `workers` are ModelWorkers and `rollouts` RolloutWorkers, by index."""

    workers: Sequence[RequestClient]
    placement: Placement
    manager: ManagerClient
    rollouts: Sequence[ReplaceableWorker]
    board: NameBoard


class TrainLoop:
    """Trains a run to its end. `run` is the whole life cycle; set `stop` to end it early with a checkpoint.

    Args:
        ready: called once it is clear from which state the run continues, before its next step.
        memory_checkpoint: place where the state of each step is kept, and searched for at the start; None: nowhere.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        graph: Graph,
        peers: Peers,
        stop: asyncio.Event,
        ready: Callable[[], None] = lambda: None,
        clock: RunningClock | None = None,
        memory_checkpoint: MemoryCheckpoint | None = None,
    ) -> None:
        self.config, self.run_dir, self.peers, self.stop, self._ready = config, run_dir, peers, stop, ready
        clock = clock or RunningClock()
        limit_s = config.system.stall_timeout_s
        manager, board, placement = peers.manager, peers.board, peers.placement
        heads = [peers.workers[worker] for worker in placement.actor.data_heads]
        roles = [ACTOR, *config.trained_policies]  # of the actors
        actors = {role: [peers.workers[worker] for worker in placement.grid(role).members] for role in roles}
        self.ranks = RankClients(peers.workers, worker_grid(config).publisher, limit_s)

        # The parts, in the order in which a rollout meets them: it arrives, and the manager is told
        self.buffer = buffer = SampleBuffer(config.train_batch_size, config.max_head_offpolicyness, config.on_stale)
        self.collector = Collector(heads, buffer, manager)
        self.reports = Reports(manager, self.collector, buffer, stop, limit_s=limit_s)

        # it waits until there is a batch
        self.metrics_log = MetricsLog(config, run_dir, self.collector, buffer)
        has_prioritised = any(policy.is_prioritised for policy in config.policies)
        win_rates = pkgutil.resolve_name(WIN_RATES).of_run(config) if has_prioritised else None
        self.announcer = VersionAnnouncer(board, peers.rollouts, self.metrics_log, win_rates, clock, limit_s)
        ahead = (config.max_head_offpolicyness + 1) * config.train_batch_size
        self.stall = StallWatch(
            *(limit_s, clock, stop, self.announcer, board, manager, buffer, self.collector, ahead, run_dir),
            online=config.is_online,
        )
        self.turns = DeviceTurns()
        if colocated := colocated_servers(config.generation):
            shared = pkgutil.resolve_name(SHARED_DEVICES)
            self.turns = shared(board, manager, self.stall, self.announcer, stop, len(colocated), colocated.start)
        own_order = config.buffer.order
        self.order = pkgutil.resolve_name(BUFFER_ORDER)(own_order) if own_order.path else None
        """The user's order of a batch; None: there is none."""
        self.scorer = AheadScorer(
            frozen_calls(config, graph, placement), buffer, self.ranks, actors[ACTOR], heads=len(heads)
        )

        # it is trained
        moves = column_moves(graph, {role: placement.grid(role) for role in graph.roles()})
        self.executor = Executor(graph, placement.members, peers.workers, limit_s, moves)

        # its step ends
        record = run_dir / DATA_RECORD_FILE
        data_record = DataRecord.read(record).checksum if record.is_file() else None
        self.run_state = RunState(config, buffer, self.order, self.reports, self.metrics_log, win_rates, data_record)
        self.memory_checkpointer = MemoryCheckpointer(memory_checkpoint, self.ranks)
        self.publishing = Publishing(self.ranks, actors, self.announcer, config.version_pools)
        self.checkpoints = Checkpoints(
            config.checkpoint, run_dir, self.ranks, self.run_state, self.metrics_log.evaluations, self.collector
        )
        self._model_in_step = False
        """True from the beginning of a step's training to its end: the model may be of no version."""
        observer.gauges(lambda: {"training": float(self._model_in_step)})

    async def run(self) -> None:
        """Train up to `total_train_steps`, or until asked to stop; then checkpoint, check the rollout counts and write
        the summary.

        Raises:
            Stalled: no sign of life for `system.stall_timeout_s`.
            CountsError: a rollout is unaccounted for.
            ExecutionError: a model function call failed.
            StateLost: the last step is lost, so the whole run begins again.
            Exception: another process failed. Complete steps are saved first, if possible.
        """
        ticking = asyncio.create_task(self.stall.clock.keep())
        try:
            try:
                await self.begin()
                while not self.run_state.complete:
                    await self.step()
            except StopRequested:
                _log.info("asked to stop: ending at version %d", self.run_state.version)
            except PromptsUsedUp:
                self._end_early()
            await self.finish()
        except StateLost:
            raise
        except Exception:
            await self._save_what_is_complete()
            raise
        finally:
            await self.close()
            await cancel(ticking)

    async def begin(self) -> None:
        """Find the state from which the run continues, then do everything up to the next step.

        1. The ranks load the state: of the last step from their hosts' memory, or else the newest checkpoint.
        2. The manager is asked for its status, and the metrics continue after that step. `books.json` is written.
        3. Weights of later versions than this state are removed, and the current ones are published.
        4. The version is announced, unless an evaluation of an older one was cut off: servers keep that one for now.
        5. The ranks are polled, and the manager gets the gate's part of the state: it begins the ledger after the
           state's line, and opens its gate. Servers on the trainer's devices have them from here on. Trajectories
           arrive, and the process is ready.
        6. The evaluation that was cut off is repeated; then the version is announced.

        A death may cut off any of these; the next MasterWorker does all of them again. A stop request or a failure may
        end any of the waits. The end of the run then saves the state that was found.
        """
        reports = self.reports
        state, from_memory = await self._load_state()  # 1
        version, announced = self.run_state.version, self.announcer.announced
        try:
            await reports.look()  # 2
        finally:
            dropped, idle_s = reports.counts.dropped, reports.idle_s
            self.metrics_log.open(version, perf_counter(), dropped, state["metrics_log"], announced, idle_s)
            write_counts(self.run_dir, version, reports.counts)
        if not from_memory:
            await self.publishing.collect(version, {version})  # 3: later steps are repeated, with other results
        in_use = {*reports.versions_in_use, announced}
        path = await self.publishing.publish(version, in_use, to_disk=True) if version else ""
        awaited = self.metrics_log.awaits_evaluation()
        is_cut_off = awaited is not None and awaited < version
        if version and not is_cut_off:
            self.announcer.announce(version, path)  # 4
        await or_stop(reports.begin(version), self.stop, self.config.system.stall_timeout_s)  # 5
        self.turns.begin()
        self.stall.progressed()
        self._ready()
        if awaited is not None:
            self.announcer.evaluate_if_due()  # 6
        if is_cut_off:
            await or_stop(self.announcer.published(version, path), self.stop, math.inf)

    async def _load_state(self) -> tuple[dict[str, Any], bool]:
        """Have the ranks load the state from which the run continues, and continue from the master's part of it.

        Returns:
            The master's part; at the run's beginning that of a new loop. True if it is that of the last step, from
            memory: then servers have, or have to load, the version that was announced last.
        """
        fresh = self.run_state.state()
        announced = self.peers.board.announced_version()
        state = await self.memory_checkpointer.load(announced)
        if from_memory := state is not None:
            _log.info("going on after step %d, which was complete", state["version"])
        else:
            loaded = await self.ranks.all(LoadCheckpoint(str(self.run_dir / CHECKPOINTS_DIR)))
            state = loaded[0].master_state or fresh
        await self.run_state.restore(state)
        self.memory_checkpointer.whole = self.run_state.version
        self.checkpoints.resume(saved=not from_memory)
        self.announcer.announced = announced if from_memory else self.run_state.version
        used = self.reports.checkpoint.prompts_used
        _log.info("beginning at version %d with %d prompts used", self.run_state.version, used)
        return state, from_memory

    async def step(self) -> None:
        """Run one step, from version v to v + 1."""
        batch, waited_s = await self._wait_for_batch()
        switched = await self.turns.take(self.run_state.version)
        measured = await self._train(batch)
        await self._end_step(batch, measured | switched | {"time/wait_for_batch_s": waited_s})

    async def _wait_for_batch(self) -> tuple[TrainBatch, float]:
        """Return the next batch, and how long the loop waited for it."""
        if self.stop.is_set():
            raise StopRequested
        began, step = perf_counter(), self.run_state.version + 1
        with observer.doing(f"waits for the rollouts of step {step}", "wait_for_batch", Activity.waits, step=step):
            batch = await self.next_batch(self.run_state.version)
        await self.checkpoints.look()
        return batch, perf_counter() - began

    async def next_batch(self, version: int) -> TrainBatch:
        """Wait for the batch of the step from `version` and return it.

        Raises:
            StopRequested, Stalled: see `StallWatch.wait`.
            PromptsUsedUp: fewer rollouts are left than make a batch.
        """
        while True:
            await self._enough_rollouts(version)
            if self.config.on_stale == OnStale.wait:
                await self._nothing_would_expire(version)
            ranks = {} if self.order is None else await self.order.ranks(self.buffer.live(), version)
            if (batch := self.buffer.take(version, ranks)) is not None:
                if self.order is not None:
                    await self.order.trained(batch.records, version)
                return batch

    async def _enough_rollouts(self, version: int) -> None:
        """Wait until the buffer has a batch. Meanwhile the ranks score rollouts, or servers have their devices."""
        used_up_at: int | None = None
        while True:
            self.buffer.expire(version)
            await self.reports.dropped(version)  # expired rollouts make room at the gate for missing ones
            if self.buffer.missing and self.turns.training:  # rollouts at the ranks may spare a switch
                await self._refreshed(version)
            if not (missing := self.buffer.missing):
                return
            woken = await self.turns.wake(missing)
            if await self.scorer.piece(version):
                continue
            more, what = self._more(missing, woken=woken), "trajectories from the RolloutWorkers"
            try:
                await self.stall.wait(more, version, what, rollouts=True)
            except PromptsUsedUp:
                await self._refreshed(version)  # the manager may know of rollouts earlier than this process
                if used_up_at == self.buffer.received:
                    raise
                used_up_at = self.buffer.received

    async def _more(self, missing: int, *, woken: bool) -> None:
        """Wait until rollouts arrive. While the colocated servers sleep, ask again and again whether they are to
        wake.
        """
        arriving = asyncio.ensure_future(self.collector.changed(missing))
        try:
            while True:
                began, before = time.monotonic(), self.buffer.received
                await asyncio.wait({arriving}, timeout=None if woken else LOOK_S)
                self.turns.waited(self.buffer.received - before, time.monotonic() - began)
                if arriving.done():
                    return arriving.result()
                woken = await self.turns.wake(missing)
        finally:
            await cancel(arriving)

    async def _nothing_would_expire(self, version: int) -> None:
        """Hold the step until every rollout that a later step could not train is in the buffer."""
        what = "the end of rollouts that would expire (on_stale=wait)"
        hold_s = min(HOLD_S, self.stall.limit_s / 2)

        while True:
            asked = self.peers.manager.call(WaitExpiringRequest(version, 0.0 if self.turns.training else hold_s))
            if not (running := (await self.stall.wait(asked, version, what, rollouts=True)).running):
                break
            self.turns.give()
            _log.info("step %d is held for %d rollouts that would expire", version, len(running))
        await self._refreshed(version)

    async def _refreshed(self, version: int) -> None:
        await self.stall.wait(self.collector.refresh(), version, "the ModelWorkers to report what they received")

    async def _train(self, batch: TrainBatch) -> Row:
        """Run the graph's calls on the ranks: by default proximal and reference log-probabilities, values, advantages,
        update (`asyncrl.master.graph`). Return the step's statistics and times.
        """
        began = perf_counter()
        buffered = buffered_s(batch, time.time())
        self._model_in_step = True
        config = self.config
        dealing, step = Dealing.of(config), self.run_state.version + 1
        profiling: AbstractAsyncContextManager[None] = nullcontext()
        if step in config.profile.steps:
            from asyncrl.runtime.process.stacks import profiled

            profiling = profiled(config.profile, self.run_dir, step)
        async with profiling:
            with observer.doing(f"trains step {step}", "train", step=step):
                await self.ranks.each(plan_batch(batch, self.peers.placement, dealing))
                stats: Row = await self.executor.run(config.policies_out_of_phase(self.run_state.version))
                ended = await self.ranks.all(EndStep())
        self.run_state.trained(batch)
        self._model_in_step = False
        took = {"time/train_s": perf_counter() - began}
        of_order = {} if self.order is None else self.order.metrics()
        return stats | buffered | took | of_order | self.scorer.pop_metrics(batch) | of_ranks(ended)

    async def _end_step(self, batch: TrainBatch, measured: Row) -> None:
        """Report, publish and save the complete step of `batch`; `measured` are its statistics and times.

        1. The gate records what the step trained, in its counters and in the ledger, and returns its part of the state.
        2. The ranks copy the state, and begin to write it into their hosts' memory.
        3. They publish the weights, and remove versions that no process reads. Nothing is announced yet.
        4. The state is complete. From here on others may see the step, and a new brain begins after it.
        5. The version is announced: servers load it. A version that is due for evaluation waits for the previous
           evaluation, which has its own limit.
        6. The step's row of metrics is written, and `books.json`.
        7. A checkpoint is begun if one is due.

        The end of a run after a failure saves only steps that 6 has recorded (`RunState.recorded`). Without an
        in-memory checkpoint a step is recorded if 1 has succeeded, whichever of 2 to 5 fails.

        A death before 4 is complete costs the step, which no process outside the brain has seen: the next lineage of
        the ledger begins before it. A death after it costs no step: the state has the row of metrics, and a version
        that is announced twice is recognised.
        """
        version, since = self.run_state.version, perf_counter()
        reports, memory, is_due = self.reports, self.memory_checkpointer, self.checkpoints.is_due()
        needs_folders = weight_transport(self.config.manager.weight_transport).needs_folders
        to_disk = self.run_state.complete or needs_folders or is_due  # checkpoints and the run's end come with weights
        await reports.trained(batch)  # 1
        try:
            if memory.on:
                row = self.metrics_log.row(version, batch, measured, reports, perf_counter())
                await memory.begin(version, self.run_state.state(row))  # 2
            with observer.doing(f"publishes version {version}", "publish", step=version):
                path = await self.publishing.publish(version, reports.versions_in_use, to_disk=to_disk)  # 3
            since = lap(measured, "publish", since)
            with observer.doing(f"keeps step {version}", "memory_checkpoint", step=version):
                await memory.finish()  # 4
            since = lap(measured, "memory_checkpoint", since)
            with observer.doing(f"waits to announce version {version}", "wait_eval", Activity.waits, step=version):
                await or_stop(self.announcer.published(version, path), self.stop, math.inf)  # 5
            lap(measured, "wait_eval", since)
        finally:
            # If 2 to 5 fail, the end of the run saves the step, unless its state had to be complete in memory first.
            if memory.has(version):
                self._record(batch, measured)  # 6
        if is_due:
            await self.checkpoints.begin()  # 7

    def _record(self, batch: TrainBatch, measured: Row) -> None:
        """Write the step's row of metrics, and the rollout counts."""
        state, reports = self.run_state, self.reports
        self.metrics_log.step(state.version, batch, measured | self.checkpoints.figures(), reports, perf_counter())
        write_counts(self.run_dir, state.version, reports.counts)
        state.recorded = state.version
        self.stall.progressed()

    def _end_early(self) -> None:
        """End the run with its last complete step: the prompts of its epochs are used up."""
        state = self.run_state
        dropped = {reason: n for reason, n in self.reports.counts.dropped.items() if n}
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"
        notice(
            self.run_dir,
            f"the prompts of total_epochs={self.config.total_epochs:g} are used up after step {state.version} of "
            f"{self.config.total_train_steps} (dropped: {reasons}): {len(state.buffer)} are left, fewer than "
            f"train_batch_size={self.config.train_batch_size}, and are not trained",
        )
        state.used_up = True
        evaluations = self.metrics_log.evaluations
        evaluations.ends_at(state.version)
        if not self.announcer.evaluating and state.version not in {each["version"] for each in evaluations.ended}:
            self.announcer.evaluate_if_due()

    async def finish(self) -> None:
        """Publish, save, check the rollout counts and write the summary, after the last step or a stop request."""
        state = self.run_state
        if state.complete:
            with suppress(StopRequested):  # all steps are trained: the end is the same, and the counts close the gate
                await or_stop(self.peers.manager.call(CloseGate()), self.stop, self.config.system.stall_timeout_s)
        else:
            await self.announcer.close()
            await self.turns.take_to_end(self.config.system.stop_timeout_s / 2)
        if self.publishing.on_disk != state.version:
            in_use = self.reports.versions_in_use
            await self.publishing.publish(state.version, in_use, to_disk=True)  # the run leaves this policy behind
        await self.checkpoints.finish()
        await self.checkpoints.save_if_unsaved()
        if state.complete:  # saved before: the last evaluation may take long, and a process die meanwhile
            self.turns.give()
            try:
                await or_stop(self.announcer.evaluation_ended(), self.stop, math.inf)
            except StopRequested:
                await self.announcer.close()
        await self.reports.end(state.version)
        totals = self.reports.counts
        total = state.version if state.used_up else self.config.total_train_steps
        write_summary(self.run_dir, state.version, total, totals, self.metrics_log)
        check_counts(totals, state.version * self.config.train_batch_size)

    async def _save_what_is_complete(self) -> None:
        """Save the last complete step after a failure, unless a failed step may have changed the model since. A
        checkpoint in progress is always of a complete step.
        """
        state = self.run_state
        if self.memory_checkpointer.on:
            await self.announcer.abandon()
        try:
            await self.checkpoints.finish()
        except Exception as error:
            _log.warning("the checkpoint in progress could not be written: %s", error)
        if not self._model_in_step and state.recorded == state.version:  # else the successor trains this step again
            try:
                if await self.checkpoints.save_if_unsaved():
                    _log.info("saved version %d", state.version)
            except Exception as error:
                _log.warning("version %d could not be saved: %s", state.version, error)
        write_counts(self.run_dir, state.recorded, self.reports.counts)

    async def close(self) -> None:
        """Stop the tasks that run beside the loop, and close the run's files."""
        await self.collector.close()
        await self.announcer.close()
        self.checkpoints.close()
        self.metrics_log.close()


def lap(measured: Row, name: str, since: float) -> float:
    """Record in `measured`, as `name`, the time since `since`; return the time now."""
    now = perf_counter()
    measured[f"time/{name}_s"] = now - since
    return now
