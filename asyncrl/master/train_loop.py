"""The master's loop: wait for a batch, train on it, publish the new version, report, save.

The loop has only metadata and does everything through calls to its peers, so the tests run all of it against peers in
one process.

The collector (which brings metadata of rollouts while a step trains) and an evaluation (`VersionAnnouncer`) run beside
it. It ends with the last step, a stop request (between steps, or while it waits for data), a peer's failure, or a stall
(`asyncrl.master.data.stall`).

Exactly once. A checkpoint has the model, the used prompts and the counts of one version, in one folder that appears at
once. So after a restart all parts go back to the same step. `asyncrl.master.recovery` describes what happens when a
process dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from time import perf_counter

from asyncrl.master.data.sample_buffer import TrainBatch
from asyncrl.master.data.stall import PromptsUsedUp
from asyncrl.master.data.step_plan import Dealing, plan_batch
from asyncrl.master.metrics.filtered import FilteredOut, watch_filters
from asyncrl.master.metrics.metric_rows import Row, buffered_s, of_ranks
from asyncrl.master.parts import Parts
from asyncrl.master.recovery.beginning import Beginning
from asyncrl.master.recovery.run_end import RunEnd
from asyncrl.master.recovery.step_end import CompleteStep, StepEnd
from asyncrl.observe import observer
from asyncrl.observe.observer import Activity
from asyncrl.runtime.process.remarks import remark
from asyncrl.runtime.process.stacks import profiled
from asyncrl.runtime.process.waiting import StopRequested, cancel
from asyncrl.runtime.process.worker import StateLost
from asyncrl.trainer.messages import EndStep

_log = logging.getLogger(__name__)


class TrainLoop:
    """Trains a run to its end. `run` is the whole life cycle; set `parts.stop` to end it early with a checkpoint.

    Args:
        ready: called once it is clear from which state the run continues, before its next step.
    """

    def __init__(self, parts: Parts, ready: Callable[[], None] = lambda: None) -> None:
        self.parts = parts
        self._beginning, self._step_end, self._run_end = Beginning(parts, ready), StepEnd(parts), RunEnd(parts)
        self._model_in_step = False
        self._filtered = FilteredOut(parts.config.train_batch_size)
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
        beside = asyncio.create_task(self.parts.stall.clock.keep()), asyncio.create_task(self._watch_filters())
        try:
            try:
                await self._beginning.run()
                while not self.parts.run.complete:
                    await self.step()
            except StopRequested:
                _log.info("asked to stop: ending at version %d", self.parts.run.version)
            except PromptsUsedUp:
                self._end_early()
            await self._run_end.finish()
        except StateLost:
            raise
        except Exception:
            await self._run_end.save_what_is_complete(model_in_step=self._model_in_step)
            raise
        finally:
            await self._run_end.close()
            await cancel(*beside)

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

    async def step(self) -> None:
        """Run one step, from version v to v + 1."""
        batch, waited_s = await self._wait_for_batch()
        switched_s = await self.parts.turns.take(self.parts.run.version)
        step = await self._train(batch, waited_s)
        if self.parts.turns.guests:
            step.measured["time/switch_s"] = switched_s
        await self._step_end.run(step)  # publish, report, save

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

    async def _train(self, batch: TrainBatch, waited_s: float) -> CompleteStep:
        """Run the graph's calls on the ranks: by default proximal and reference log-probabilities, values, advantages,
        update (`asyncrl.master.graph.builtin`).
        """
        parts, began = self.parts, perf_counter()
        times = buffered_s(batch, time.time())
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
        times |= {"time/wait_for_batch_s": waited_s, "time/train_s": perf_counter() - began}
        times |= parts.batches.pop_metrics(batch) | of_ranks(ended)
        return CompleteStep(parts.run.version, batch, stats | times)

    async def _watch_filters(self) -> None:
        """Warn on the terminal if filters drop nearly every group."""
        parts, run = self.parts, self.parts.run
        tell = partial(remark, parts.run_dir)
        await watch_filters(self._filtered, parts.peers.manager, lambda: run.version, lambda: len(run.buffer), tell)
