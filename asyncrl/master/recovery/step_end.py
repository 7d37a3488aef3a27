"""Actions of the MasterWorker once a step is complete.

1. The gate records what the step trained, in its counters and in the ledger, and returns its part of the state.
2. The ranks copy the state, and begin to write it into their hosts' memory.
3. They publish the weights, and remove versions that no process reads. Nothing is announced yet.
4. The state is complete. From here on others may see the step, and a new brain begins after it.
5. The version is announced: servers load it. A version that is due for evaluation waits for the previous evaluation.
6. The step's row of metrics is written, and `books.json`.
7. A checkpoint is begun if one is due.

The end of a run after a failure saves only steps that 6 has recorded (`RunState.recorded`). Without an in-memory
checkpoint a step is recorded if 1 has succeeded, whichever of 2 to 5 fails.

A death before 4 is complete costs the step, which no process outside the brain has seen: the next lineage of the ledger
begins before it. A death after it costs no step: the state has the row of metrics, and a version that is announced
twice is recognised (`asyncrl.master.recovery.beginning`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import perf_counter

from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.metrics.metric_rows import Row
from asyncrl.master.parts import Parts
from asyncrl.master.recovery.run_files import write_books
from asyncrl.models.weights.transports.base import weight_transport
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.waiting import or_stop


@dataclass
class CompleteStep:
    """A complete step.

    Attributes:
        version: version that it made.
        batch: batch that it was trained on.
        measured: its statistics and times.
        path: folder of its weights.
    """

    version: int
    batch: TrainBatch
    measured: Row
    ended_at: float = field(default_factory=perf_counter)
    path: str = ""

    def lap(self, name: str) -> None:
        """Record, as `name`, the time since the last call or since the step was complete."""
        now = perf_counter()
        self.measured[f"time/{name}_s"], self.ended_at = now - self.ended_at, now


class StepEnd:
    """Reports, publishes and saves a complete step, in the order of the module's list."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def run(self, step: CompleteStep) -> None:
        """Report, publish and save a complete step."""
        await self._parts.reports.trained(step.batch)
        try:
            await self.begin_keeping(step)
            await self.publish(step)
            await self.finish_keeping(step)
            await self.announce(step)
        finally:
            # If 2 to 5 fail, the end of the run saves the step, unless its state had to be complete in memory first.
            if self._parts.memory_checkpointer.has(step.version):
                self.write_down(step)
        await self.save(step)

    async def begin_keeping(self, step: CompleteStep) -> None:
        """2. Have the ranks copy the state, and begin to write it."""
        parts = self._parts
        if parts.memory_checkpointer.on:
            row = parts.metrics_log.row(step.version, step.batch, step.measured, parts.reports.status, perf_counter())
            await parts.memory_checkpointer.begin(step.version, parts.run.state(row))

    async def publish(self, step: CompleteStep) -> None:
        """3. Have the ranks publish the weights."""
        parts = self._parts
        in_use, to_disk = parts.reports.status.versions_in_use, self._wants_folder(step.version)
        with observer.doing(f"publishes version {step.version}", "publish", step=step.version):
            step.path = await parts.publishing.publish(step.version, in_use, to_disk=to_disk)
        step.lap("publish")

    async def finish_keeping(self, step: CompleteStep) -> None:
        """4. Wait until the state is complete."""
        with observer.doing(f"keeps step {step.version}", "memory_checkpoint", step=step.version):
            await self._parts.memory_checkpointer.finish()
        step.lap("memory_checkpoint")

    async def announce(self, step: CompleteStep) -> None:
        """5. Announce the version. The evaluation that it may wait for has its own limit."""
        with observer.doing(
            f"waits to announce version {step.version}", "wait_eval", Activity.waits, step=step.version
        ):
            await or_stop(self._parts.announcer.published(step.version, step.path), self._parts.stop, math.inf)
        step.lap("wait_eval")

    def write_down(self, step: CompleteStep) -> None:
        """6. Record the step."""
        parts, reports = self._parts, self._parts.reports
        measured = step.measured | parts.checkpoints.figures()
        parts.metrics_log.step(step.version, step.batch, measured, reports.status, perf_counter())
        write_books(parts.run_dir, step.version, reports.counts)
        parts.run.recorded = step.version
        parts.stall.progressed()

    async def save(self, step: CompleteStep) -> None:
        """7. Begin a checkpoint if one is due."""
        if self._parts.checkpoints.schedule.is_due(step.version):
            await self._parts.checkpoints.begin()

    def _wants_folder(self, version: int) -> bool:
        """Return True if servers read the weights of `version` from disk, or a user may.

        Each checkpoint comes with weights, and so does the end of the run.
        """
        parts = self._parts
        needs_folders = weight_transport(parts.config.manager.weight_transport).needs_folders
        return parts.run.complete or needs_folders or parts.checkpoints.schedule.is_due(version)
