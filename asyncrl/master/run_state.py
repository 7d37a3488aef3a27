"""The run's state at one policy version, its checkpoints (of each step in memory, and of some on disk), and the files
that a run leaves besides the metrics: rollout counts and summary.

The state has all that the brain knows. What a run continues with, and who else has it:

    fact                                 kept by, besides its owner            read by
    -----------------------------------  ------------------------------------  ----------------------------------------
    weights, moments, random states      the state of the last step            the new ranks
    used prompts, counters, tries of     the state of the last step            the new GserverManager
      prompts, the ledger's line
    metrics, win rates, the order        the state of the last step            the new MasterWorker
    trajectories that wait               inboxes, as files                     the new ranks
    running rollouts                     their RolloutWorkers                  the new GserverManager
    the announced version                name resolution                       everybody

The state is that of the last step in the hosts' memory. If that is lost (a lost host, `checkpoint.in_memory=false`), it
is the newest checkpoint on disk, and the whole run begins again with it.

Both are written in the same way. The ranks copy their state, so the next step may change it, and each writes its files
meanwhile: in memory while weights are published, to disk while the next steps run. Once all have written, the
checkpoint becomes visible at once. Only when that in the hosts' memory is complete may other processes see the step.

`asyncrl.runtime.trials.memory_checkpoint` describes the folder in the host's memory, which the launcher makes and
removes. `asyncrl.weights.checkpoints` decides which state ranks on several hosts load, and
`asyncrl.trainer.rank.inbox` keeps trajectories.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.comm.ended_rollouts import RolloutCounts
from asyncrl.comm.files import retry_write_blocking
from asyncrl.comm.request_reply import RemoteError
from asyncrl.comm.typed import convert
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import (
    CHECKPOINTS_DIR,
    COUNTS_FILE,
    LOGS_DIR,
    METRICS_FILE,
    SUMMARY_FILE,
    WEIGHTS_DIR,
    versions_in,
)
from asyncrl.manager.messages import GateCheckpoint
from asyncrl.master.data.sample_buffer import Collector, Reports, SampleBuffer, TrainBatch
from asyncrl.master.evaluations import Evaluations, Row
from asyncrl.master.metrics_log import MetricsLog
from asyncrl.master.peers import RankClients
from asyncrl.observe import observer
from asyncrl.runtime.process.worker import StateLost
from asyncrl.runtime.run_log import count_restarts
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import (
    MEMORY_CHECKPOINT_LOST,
    CommitCheckpoint,
    FinishShare,
    LoadMemoryCheckpoint,
    SaveCheckpoint,
    WrittenShare,
)
from asyncrl.trainer.settings import BestDirection, CheckpointConfig
from asyncrl.weights.manifest import FileEntry

if TYPE_CHECKING:  # optional, see `asyncrl.runtime.plan`
    from asyncrl.master.data.order import ConfiguredOrder
    from asyncrl.master.win_rates import WinRates

_log = logging.getLogger(__name__)


class RunState:
    """The state that a checkpoint holds. All of it is of one version: `trained` moves it by one step.

    Args:
        order: the user's order (`buffer.order.path`), if there is one.
        win_rates: of prioritised pools, if there are any.
        data_record: checksum of the record of the training data; None if the trial has none.
        metrics_log: its part is read when it is opened.

    Attributes:
        version: version of the policy: number of complete steps.
        recorded: newest version whose step is in the metrics and the ledger.
        used_up: fewer prompts of the run's epochs are left than make a step.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        buffer: SampleBuffer,
        order: ConfiguredOrder | None,
        reports: Reports,
        metrics_log: MetricsLog,
        win_rates: WinRates | None,
        data_record: str | None = None,
    ) -> None:
        self.version = self.recorded = 0
        self.used_up = False
        self.buffer = buffer
        self._config, self._order, self._reports = config, order, reports
        self._metrics_log, self._win_rates, self._data_record = metrics_log, win_rates, data_record

    def trained(self, batch: TrainBatch) -> None:
        """Count the complete step of `batch`."""
        self.buffer.mark_trained(batch)
        self.version += 1
        if self._win_rates is not None:
            self._win_rates.trained(self.version, batch.records)

    def state(self, row: Row | None = None) -> dict[str, Any]:
        """Return the state as JSON values; `row`: metrics of the newest step, if they are not in the log yet."""
        return {
            "version": self.version,
            "gate": msgspec.to_builtins(self._reports.checkpoint),
            "metrics_log": self._metrics_log.state(self.version, row),
            "buffer_order": None if self._order is None else self._order.state(),
            "win_rates": None if self._win_rates is None else self._win_rates.state(),
            "data_record": self._data_record,
        }

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.version = self.recorded = state["version"]
        self.buffer.expire(self.version)
        if self._order is not None:
            await self._order.restore(state.get("buffer_order"))
        if self._win_rates is not None:
            self._win_rates.restore(state.get("win_rates"))
        self._reports.restore(self.version * self._config.train_batch_size, convert(state["gate"], GateCheckpoint))

    @property
    def complete(self) -> bool:
        """True if all steps are trained, or no prompt is left for another one."""
        return self.used_up or self.version >= self._config.total_train_steps


class MemoryCheckpointer:
    """Keeps the state of each step, and decides which steps other processes may see.

    Attributes:
        whole: version whose state is complete.
    """

    def __init__(self, memory_checkpoint: MemoryCheckpoint | None, ranks: RankClients) -> None:
        self._memory_checkpoint, self._ranks = memory_checkpoint, ranks
        self._begun = self.whole = 0

    @property
    def on(self) -> bool:
        """True if steps are kept. After a step that could not be kept, none is."""
        return self._memory_checkpoint is not None

    def has(self, version: int) -> bool:
        """True if a process that replaces this one would know of the step that made `version`, or none would know of
        any.
        """
        return not self.on or self.whole == version

    async def begin(self, version: int, state: dict[str, Any]) -> None:
        """Have the ranks copy the state of the step that made `version`, and begin to write it."""
        if self._memory_checkpoint is None:
            return
        self._begun = version
        try:
            await self._ranks.all(SaveCheckpoint(f"v{version}", version, state, in_memory=True))
        except RemoteError as error:
            self._keep_no_more(error)

    async def finish(self) -> None:
        """Wait until the state being written is complete, so that others may see the step."""
        if self._memory_checkpoint is None:
            return
        path = f"v{self._begun}"
        try:
            shares = await self._ranks.all(FinishShare(path, in_memory=True))
            await self._ranks.all(CommitCheckpoint(path, files_of(shares), keep=1, in_memory=True))
        except RemoteError as error:
            self._keep_no_more(error)
        else:
            self.whole = self._begun

    async def load(self, announced: int) -> dict[str, Any] | None:
        """Have the ranks restore the kept state; return the master's part; None without a kept state.

        Raises:
            StateLost: the state of a step that others have seen is lost, so only a checkpoint is left.
        """
        if self._memory_checkpoint is None:
            return None
        try:
            state = (await self._ranks.all(LoadMemoryCheckpoint()))[0].master_state
            version = 0 if state is None else state["version"]
            if version >= announced:
                return state
            lost = f"version {announced} was announced, version {version} is what is kept"
        except RemoteError as error:
            if error.kind != MEMORY_CHECKPOINT_LOST:
                raise
            lost = error.message
        self._memory_checkpoint.invalidate()
        raise StateLost(f"the last step is lost, only a checkpoint is left to continue from: {lost}")

    def _keep_no_more(self, error: RemoteError) -> None:
        """Stop in-memory checkpoints. The existing one will be older than the step others see, so no run may resume
        from it.
        """
        assert self._memory_checkpoint is not None
        self._memory_checkpoint.warn_of_end(error.message)
        self._memory_checkpoint = None


class Checkpoints:
    """Writes the run's checkpoints, one after the other: every `interval` steps, and `interval_minutes` after the last
    one began.

    Args:
        collector: knows if a rank that would be waited for is gone.

    Attributes:
        saved: version of the newest checkpoint that is complete on disk; 0: none.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        ranks: RankClients,
        run: RunState,
        evaluations: Evaluations,
        collector: Collector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.saved = 0
        self._clock, self._begun_s = clock, clock()  # a process that begins counts from then
        self._owed = False  # a checkpoint was due when a master before this one died
        self._figures: Row = {}
        self._config, self._root = config, run_dir / CHECKPOINTS_DIR
        self._ranks, self._run, self._evaluations, self._collector = ranks, run, evaluations, collector
        self._under_way: asyncio.Task[None] | None = None

    def resume(self, *, saved: bool) -> None:
        """Continue at the run's version; an overdue checkpoint is written after the next step.

        Args:
            saved: the newest checkpoint, or none at version 0, has the run's state.
        """
        version, interval = self._run.version, self._config.interval
        self.saved = version if saved else 0
        newest = max(versions_in(self._root), default=0)
        self._owed = bool(interval) and newest < version - version % interval

    def is_due(self) -> bool:
        """True if a checkpoint is due after the newest step."""
        interval, minutes = self._config.interval, self._config.interval_minutes
        by_time = bool(minutes) and self._clock() - self._begun_s >= 60 * minutes
        return by_time or (bool(interval) and (self._run.version % interval == 0 or self._owed))

    async def begin(self) -> None:
        """Begin a checkpoint of the run's state, once the previous one is complete.

        When this returns, the ranks have copied their state, and the next step may change it.
        """
        await self.finish()
        version = self._run.version
        path = str(self._root / f"v{version}")
        self._collector.check()  # a stop leaves little time
        self._begun_s, self._owed = self._clock(), False
        await self._ranks.all(SaveCheckpoint(path, version, self._run.state()))
        self._under_way = asyncio.create_task(self._complete(path, version))

    async def finish(self) -> None:
        """Wait until a checkpoint in progress is complete on disk; raise its error."""
        if (under_way := self._under_way) is not None:
            if not under_way.done():
                self._collector.check()
            await asyncio.gather(under_way, return_exceptions=True)
            self._under_way = None
            under_way.result()

    async def save_if_unsaved(self) -> bool:
        """Write a checkpoint if anything was trained since the last one; return True if so."""
        if self.saved == self._run.version:
            return False
        await self.begin()
        await self.finish()
        return True

    async def look(self) -> None:
        """Raise the error of a checkpoint that has failed."""
        if self._under_way is not None and self._under_way.done():
            await self.finish()

    def figures(self) -> Row:
        """Return the seconds and bytes of a checkpoint that was completed since the last call; empty if none was."""
        figures, self._figures = self._figures, {}
        return figures

    def close(self) -> None:
        """Cancel a checkpoint in progress."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _complete(self, path: str, version: int) -> None:
        began = time.time()
        shares = await self._ranks.all(FinishShare(path))
        protected = self._protected(version)
        files = files_of(shares)
        await self._ranks.publisher(CommitCheckpoint(path, files, self._config.keep, protected))
        observer.span("checkpoint", began, time.time(), version=version)
        self._figures = {
            "checkpoint/seconds": self._clock() - self._begun_s,
            "checkpoint/bytes": sum(entry.bytes for entry in files.values()),
        }
        self.saved = version

    def _protected(self, version: int) -> tuple[int, ...]:
        """Return the versions whose checkpoints `checkpoint`'s settings keep, including `version`."""
        config = self._config
        versions = [*versions_in(self._root), version]
        scores, undecided = {}, set[int]()
        if config.keep_best is not None:
            sign = 1.0 if config.keep_best_direction == BestDirection.highest else -1.0
            scores = {key: sign * value for key, value in self._evaluations.scores(config.keep_best).items()}
            undecided = self._evaluations.awaited(versions)
        return tuple(sorted(which_to_keep(versions, config.keep, config.keep_every, scores, undecided)))


def which_to_keep(
    versions: Collection[int], newest: int, every: int, scores: Mapping[int, float], undecided: Collection[int] = ()
) -> set[int]:
    """Return the versions of the checkpoints to keep.

    Args:
        newest: number of newest checkpoints to keep.
        every: keep versions divisible by this; 0: none.
        scores: by version, higher is better. The best version that still has a checkpoint is kept; the newest if
            several are equal.
        undecided: versions without a score yet, which are kept.
    """
    ordered = sorted(versions)
    kept = set(ordered[-newest:]) | {version for version in ordered if every and version % every == 0}
    scored = [version for version in ordered if version in scores]
    if scored:
        kept.add(max(scored, key=lambda version: (scores[version], version)))
    return kept | {version for version in ordered if version in undecided}


def files_of(shares: Sequence[WrittenShare]) -> dict[str, FileEntry]:
    """Return the files that all ranks together have written, by name."""
    return {name: entry for share in shares for name, entry in share.files.items()}


def write_counts(run_dir: Path, step: int, counts: RolloutCounts) -> None:
    """Write the rollout counts as of `step`, for an end at which the manager does not answer."""
    _write_json(run_dir / COUNTS_FILE, {"step": step, "books": msgspec.to_builtins(counts)})


def write_summary(run_dir: Path, steps: int, total_steps: int, counts: RolloutCounts, metrics_log: MetricsLog) -> None:
    """Write `summary.json` at the end of the run: steps, rollout counts, evaluations, and paths of the run's files."""
    summary = {
        "steps": steps,
        "total_steps": total_steps,
        "books": msgspec.to_builtins(counts),
        "eval": metrics_log.evaluations.newest(),
        "evaluations": metrics_log.evaluations.ended,
        "evaluations_failed": metrics_log.evaluations.failed,
        "restarts": dict(count_restarts(run_dir)),
        "paths": {
            "metrics": str(run_dir / METRICS_FILE),
            "weights": str(run_dir / WEIGHTS_DIR),
            "checkpoints": str(run_dir / CHECKPOINTS_DIR),
            "logs": str(run_dir / LOGS_DIR),
        },
    }
    _write_json(run_dir / SUMMARY_FILE, summary)


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")

    def write() -> None:
        temporary.write_text(json.dumps(value))
        os.replace(temporary, path)

    retry_write_blocking(write, f"{path}", _log)
