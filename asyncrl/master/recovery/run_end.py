"""The end of a run: after its last step, at a stop request, or after a failure.

The manager's reply to each report has the books (`asyncrl.master.peers.reports`). They are written to a file however
the run ends: `summary.json` if it ended well, else `books.json` as of the last step.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress

from asyncrl.master.parts import Parts
from asyncrl.master.recovery.run_files import check_books, write_books, write_summary
from asyncrl.runtime.process.waiting import StopRequested, or_stop

_log = logging.getLogger(__name__)


class RunEnd:
    """Ends a run so that its files have all complete steps."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def finish(self) -> None:
        """Publish, save, check the books and write the summary, after the last step or a stop request.

        Raises:
            BooksError: a rollout is unaccounted for.
            Exception: another process failed.
        """
        parts = self._parts
        parts.collector.start()  # a stop request may come before the beginning has started it; reports need its polls
        if parts.run.complete:
            with suppress(StopRequested):  # all steps are trained: the end is the same, and the books close the gate
                await or_stop(parts.reports.close_gate(), parts.stop, parts.config.system.stall_timeout_s)
        else:
            await parts.announcer.close()
            await parts.turns.take_to_end(parts.config.system.stop_timeout_s / 2)
        if parts.publishing.on_disk != parts.run.version:
            in_use = parts.reports.status.versions_in_use
            await parts.publishing.publish(parts.run.version, in_use, to_disk=True)  # the run leaves this policy behind
        await parts.checkpoints.finish()
        if parts.checkpoints.unsaved:
            await parts.checkpoints.begin()
            await parts.checkpoints.finish()
        if parts.run.complete:  # saved before: the last evaluation may take long, and a process die meanwhile
            parts.turns.give()
            await self._last_evaluation()
        await parts.reports.end(parts.run.version)
        books = parts.reports.counts
        total = parts.run.version if parts.run.used_up else parts.config.total_train_steps
        write_summary(parts.run_dir, parts.run.version, total, books, parts.metrics_log)
        check_books(books, parts.run.version * parts.config.train_batch_size)

    async def _last_evaluation(self) -> None:
        try:
            await or_stop(self._parts.announcer.evaluation_ended(), self._parts.stop, math.inf)
        except StopRequested:
            await self._parts.announcer.close()

    async def save_what_is_complete(self, *, model_in_step: bool) -> None:
        """Save the last complete step after a failure, unless a failed step has changed the model since.

        Args:
            model_in_step: True if a step that did not complete may have changed the model.
        """
        parts = self._parts
        if parts.memory_checkpointer.on:
            await parts.announcer.abandon()
        try:
            await self._save_last_step(model_in_step=model_in_step)
        except Exception as error:
            _log.warning("version %d could not be saved: %s", parts.run.version, error)
        write_books(parts.run_dir, parts.run.recorded, parts.reports.counts)

    async def _save_last_step(self, *, model_in_step: bool) -> None:
        """Save the last complete step; wait for a checkpoint in progress, which is always of a complete step."""
        parts = self._parts
        try:
            await parts.checkpoints.finish()
        except Exception as error:
            _log.warning("the checkpoint in progress could not be written: %s", error)
        if model_in_step or parts.run.recorded != parts.run.version:
            return  # the successor trains this step again
        if parts.checkpoints.unsaved:
            await parts.checkpoints.begin()
            await parts.checkpoints.finish()
            _log.info("saved version %d", parts.run.version)

    async def close(self) -> None:
        """Stop the tasks that run beside the loop, and close the run's files."""
        parts = self._parts
        await parts.collector.close()
        await parts.announcer.close()
        parts.checkpoints.close()
        parts.metrics_log.close()
