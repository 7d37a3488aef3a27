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
import time
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any

from asyncrl.master.data.collector import check_books
from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.data.stall import PromptsUsedUp
from asyncrl.master.data.step_plan import Dealing, plan_batch
from asyncrl.master.metrics.evaluations import Row
from asyncrl.master.metrics.metrics_log import buffered_s, of_ranks
from asyncrl.master.parts import Parts
from asyncrl.master.run_state import checkpoint_root, write_books, write_summary
from asyncrl.models.weights.transports.base import weight_transport
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.remarks import remark
from asyncrl.runtime.process.stacks import profiled
from asyncrl.runtime.process.waiting import StopRequested, cancel, or_stop
from asyncrl.runtime.process.worker import StateLost
from asyncrl.trainer.messages import EndStep, LoadCheckpoint

_log = logging.getLogger(__name__)


class TrainLoop:
    """Trains a run to its end. `run` is the whole life cycle; set `parts.stop` to end it early with a checkpoint.

    Args:
        ready: called once it is clear from which state the run continues, before its next step.
    """

    def __init__(self, parts: Parts, ready: Callable[[], None] = lambda: None) -> None:
        self.parts, self._ready = parts, ready
        self._model_in_step = False
        """True from the beginning of a step's training to its end: the model may be of no version."""
        observer.gauges(lambda: {"training": float(self._model_in_step)})

    async def run(self) -> None:
        """Train up to `total_train_steps`, or until asked to stop; then checkpoint, check the books and write the
        summary.

        Raises:
            Stalled: no sign of life for `system.stall_timeout_s`.
            BooksError: a rollout is unaccounted for.
            ExecutionError: a model function call failed.
            StateLost: the last step is lost, so the whole run begins again.
            Exception: another process failed. Complete steps are saved first, if possible.
        """
        ticking = asyncio.create_task(self.parts.stall.clock.keep())
        try:
            try:
                await self.begin()
                while not self.parts.run.complete:
                    await self.step()
            except StopRequested:
                _log.info("asked to stop: ending at version %d", self.parts.run.version)
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

        Raises:
            StateLost: the last step is lost.
        """
        parts, reports = self.parts, self.parts.reports
        state, from_memory = await self._load_state()  # 1
        version, announced = parts.run.version, parts.announcer.announced
        try:
            await reports.look()  # 2
        finally:
            dropped, idle_s = reports.counts.dropped, reports.status.idle_s
            parts.metrics_log.open(version, perf_counter(), dropped, state["metrics_log"], announced, idle_s)
            write_books(parts.run_dir, version, reports.counts)
        if not from_memory:
            await parts.publishing.forget_others(version)  # 3
        in_use = {*reports.status.versions_in_use, announced}
        path = await parts.publishing.publish(version, in_use, to_disk=True) if version else ""
        awaited = parts.metrics_log.awaits_evaluation()
        is_cut_off = awaited is not None and awaited < version
        if version and not is_cut_off:
            parts.announcer.announce(version, path)  # 4
        await or_stop(reports.begin(version), parts.stop, parts.config.system.stall_timeout_s)  # 5
        parts.turns.begin()
        parts.stall.progressed()
        self._ready()
        if awaited is not None:
            parts.announcer.evaluate_if_due()  # 6
        if is_cut_off:
            await or_stop(parts.announcer.published(version, path), parts.stop, math.inf)

    async def _load_state(self) -> tuple[dict[str, Any], bool]:
        """Have the ranks load the state from which the run continues, and continue from the master's part of it.

        Returns:
            The master's part; at the run's beginning that of a new loop. True if it is that of the last step, from
            memory: then servers have, or have to load, the version that was announced last.
        """
        parts, fresh = self.parts, self.parts.run.state()
        announced = parts.peers.board.announced_version()
        state = await parts.memory_checkpointer.load(announced)
        if from_memory := state is not None:
            _log.info("going on after step %d, which was complete", state["version"])
        else:
            loaded = await parts.ranks.all(LoadCheckpoint(str(checkpoint_root(parts.run_dir))))
            state = loaded[0].master_state or fresh
        await parts.run.restore(state)
        parts.memory_checkpointer.found(parts.run.version)
        parts.checkpoints.resume(saved=not from_memory)
        parts.announcer.announced = announced if from_memory else parts.run.version
        used = parts.reports.checkpoint.prompts_used
        _log.info("beginning at version %d with %d prompts used", parts.run.version, used)
        return state, from_memory

    async def step(self) -> None:
        """Run one step, from version v to v + 1."""
        batch, waited_s = await self._wait_for_batch()
        switched = await self.parts.turns.take(self.parts.run.version)
        measured = await self._train(batch)
        await self._end_step(batch, measured | switched | {"time/wait_for_batch_s": waited_s})

    async def _wait_for_batch(self) -> tuple[TrainBatch, float]:
        """Return the next batch, and how long the loop waited for it.

        Raises:
            StopRequested: the run was asked to stop.
            Exception: a checkpoint could not be written; no further step is trained.
        """
        if self.parts.stop.is_set():
            raise StopRequested
        began, step = perf_counter(), self.parts.run.version + 1
        with observer.doing(f"waits for the rollouts of step {step}", "wait_for_batch", Activity.waits, step=step):
            batch = await self.parts.batches.next(self.parts.run.version)
        await self.parts.checkpoints.look()
        return batch, perf_counter() - began

    async def _train(self, batch: TrainBatch) -> Row:
        """Run the graph's calls on the ranks: by default proximal and reference log-probabilities, values, advantages,
        update (`asyncrl.master.graph.builtin`). Return the step's statistics and times.
        """
        parts, began = self.parts, perf_counter()
        buffered = buffered_s(batch, time.time())
        self._model_in_step = True
        config = parts.config
        dealing = Dealing.of(config)
        training = observer.doing(f"trains step {parts.run.version + 1}", "train", step=parts.run.version + 1)
        async with profiled(config.profile, parts.run_dir, parts.run.version + 1):
            with training:
                await parts.ranks.each(plan_batch(batch, parts.peers.placement, dealing))
                stats: Row = await parts.executor.run(config.idle_policies(parts.run.version))
                ended = await parts.ranks.all(EndStep())
        parts.run.trained(batch)
        self._model_in_step = False
        took = {"time/train_s": perf_counter() - began}
        return stats | buffered | took | parts.batches.pop_metrics(batch) | of_ranks(ended)

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
        parts, version, since = self.parts, self.parts.run.version, perf_counter()
        reports, memory, is_due = parts.reports, parts.memory_checkpointer, parts.checkpoints.is_due()
        needs_folders = weight_transport(parts.config.manager.weight_transport).needs_folders
        to_disk = parts.run.complete or needs_folders or is_due  # checkpoints and the run's end come with weights
        await reports.trained(batch)  # 1
        try:
            if memory.on:
                row = parts.metrics_log.row(version, batch, measured, reports.status, perf_counter())
                await memory.begin(version, parts.run.state(row))  # 2
            with observer.doing(f"publishes version {version}", "publish", step=version):
                path = await parts.publishing.publish(version, reports.status.versions_in_use, to_disk=to_disk)  # 3
            since = lap(measured, "publish", since)
            with observer.doing(f"keeps step {version}", "memory_checkpoint", step=version):
                await memory.finish()  # 4
            since = lap(measured, "memory_checkpoint", since)
            with observer.doing(f"waits to announce version {version}", "wait_eval", Activity.waits, step=version):
                await or_stop(parts.announcer.published(version, path), parts.stop, math.inf)  # 5
            lap(measured, "wait_eval", since)
        finally:
            # If 2 to 5 fail, the end of the run saves the step, unless its state had to be complete in memory first.
            if memory.has(version):
                self._record(batch, measured)  # 6
        if is_due:
            await parts.checkpoints.begin()  # 7

    def _record(self, batch: TrainBatch, measured: Row) -> None:
        """Write the step's row of metrics, and the books."""
        parts, run, reports = self.parts, self.parts.run, self.parts.reports
        parts.metrics_log.step(
            run.version, batch, measured | parts.checkpoints.figures(), reports.status, perf_counter()
        )
        write_books(parts.run_dir, run.version, reports.counts)
        run.recorded = run.version
        parts.stall.progressed()

    def _end_early(self) -> None:
        """End the run with its last complete step: the prompts of its epochs are used up."""
        parts, run = self.parts, self.parts.run
        dropped = {reason: n for reason, n in parts.reports.counts.dropped.items() if n}
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"
        remark(
            parts.run_dir,
            f"the prompts of total_epochs={parts.config.total_epochs:g} are used up after step {run.version} of "
            f"{parts.config.total_train_steps} (dropped: {reasons}): {len(run.buffer)} are left, fewer than "
            f"train_batch_size={parts.config.train_batch_size}, and are not trained",
        )
        run.used_up = True
        evaluations = parts.metrics_log.evaluations
        evaluations.ends_at(run.version)
        if not parts.announcer.evaluating and run.version not in {each["version"] for each in evaluations.ended}:
            parts.announcer.evaluate_if_due()

    async def finish(self) -> None:
        """Publish, save, check the books and write the summary, after the last step or a stop request.

        Raises:
            BooksError: a rollout is unaccounted for.
            Exception: another process failed.
        """
        parts, run = self.parts, self.parts.run
        if run.complete:
            with suppress(StopRequested):  # all steps are trained: the end is the same, and the books close the gate
                await or_stop(parts.peers.manager.close_gate(), parts.stop, parts.config.system.stall_timeout_s)
        else:
            await parts.announcer.close()
            await parts.turns.take_to_end(parts.config.system.stop_timeout_s / 2)
        if parts.publishing.on_disk != run.version:
            in_use = parts.reports.status.versions_in_use
            await parts.publishing.publish(run.version, in_use, to_disk=True)  # the run leaves this policy behind
        await parts.checkpoints.finish()
        await parts.checkpoints.save_if_unsaved()
        if run.complete:  # saved before: the last evaluation may take long, and a process die meanwhile
            parts.turns.give()
            try:
                await or_stop(parts.announcer.evaluation_ended(), parts.stop, math.inf)
            except StopRequested:
                await parts.announcer.close()
        await parts.reports.end(run.version)
        books = parts.reports.counts
        total = run.version if run.used_up else parts.config.total_train_steps
        write_summary(parts.run_dir, run.version, total, books, parts.metrics_log)
        check_books(books, run.version * parts.config.train_batch_size)

    async def _save_what_is_complete(self) -> None:
        """Save the last complete step after a failure, unless a failed step may have changed the model since. A
        checkpoint in progress is always of a complete step.
        """
        parts, run = self.parts, self.parts.run
        if parts.memory_checkpointer.on:
            await parts.announcer.abandon()
        try:
            await parts.checkpoints.finish()
        except Exception as error:
            _log.warning("the checkpoint in progress could not be written: %s", error)
        if not self._model_in_step and run.recorded == run.version:  # else the successor trains this step again
            try:
                if await parts.checkpoints.save_if_unsaved():
                    _log.info("saved version %d", run.version)
            except Exception as error:
                _log.warning("version %d could not be saved: %s", run.version, error)
        write_books(parts.run_dir, run.recorded, parts.reports.counts)

    async def close(self) -> None:
        """Stop the tasks that run beside the loop, and close the run's files."""
        parts = self.parts
        await parts.collector.close()
        await parts.announcer.close()
        parts.checkpoints.close()
        parts.metrics_log.close()


def lap(measured: Row, name: str, since: float) -> float:
    """Record in `measured`, as `name`, the time since `since`; return the time now."""
    now = perf_counter()
    measured[f"time/{name}_s"] = now - since
    return now
