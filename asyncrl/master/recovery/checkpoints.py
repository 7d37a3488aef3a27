"""The run's checkpoints on disk, written while the next steps run.

The ranks copy their state, so the next step may change it, and each writes its files while training continues. Once all
are written, one rank makes the whole checkpoint visible at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.run_dir import versions_in
from asyncrl.master.metrics.evaluations import Evaluations
from asyncrl.master.metrics.metric_rows import Row
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.master.recovery.memory_checkpointer import files_of
from asyncrl.master.recovery.run_files import checkpoint_root
from asyncrl.master.recovery.run_state import RunState
from asyncrl.models.weights.checkpoints.checkpoint_folder import which_to_keep
from asyncrl.observe import observer
from asyncrl.trainer.messages import CommitCheckpoint, FinishShare, SaveCheckpoint
from asyncrl.trainer.settings import BestDirection, CheckpointConfig


class CheckpointSchedule:
    """Decides when a checkpoint is due: every `interval` steps, and `interval_minutes` after the previous one began.

    Args:
        clock: monotonic time in s.
    """

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock, self._begun_s = clock, clock()  # a process that begins counts from then
        self._asked, self._due = -1, False
        self._owed = False  # a checkpoint was due when a master before this one died

    def make_up(self, version: int, newest: int) -> None:
        """Continue at `version` after the checkpoint of `newest`; an overdue one is written after the next step."""
        interval = self._config.interval
        self._owed = bool(interval) and newest < version - version % interval

    def is_due(self, version: int) -> bool:
        """True if a checkpoint is due after the step that made `version`; repeated calls give the same answer."""
        if version != self._asked:
            interval, minutes = self._config.interval, self._config.interval_minutes
            by_time = bool(minutes) and self.seconds() >= 60 * minutes
            self._asked, self._due = version, by_time or (bool(interval) and (version % interval == 0 or self._owed))
        return self._due

    def begun(self) -> None:
        """Count from now on: a checkpoint begins."""
        self._begun_s, self._owed = self._clock(), False

    def seconds(self) -> float:
        """Return the seconds since the newest checkpoint began."""
        return self._clock() - self._begun_s


class Checkpoints:
    """Writes the run's checkpoints, one after the other.

    Args:
        config: when to write a checkpoint, and which to keep.
        run: the state to write.
        check: raises if a rank that would be waited for is gone.

    Attributes:
        saved: version of the newest checkpoint that is complete on disk; 0: none.
        schedule: decides when a checkpoint is due.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        ranks: RankClients,
        run: RunState,
        evaluations: Evaluations,
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.saved = 0
        self.schedule = CheckpointSchedule(config, clock)
        self._figures: Row = {}
        self._config, self._root = config, checkpoint_root(run_dir)
        self._ranks, self._run, self._evaluations, self._check = ranks, run, evaluations, check
        self._under_way: asyncio.Task[None] | None = None

    def resume(self, *, saved: bool) -> None:
        """Continue at the run's version; `saved`: the newest checkpoint, or none at version 0, has the run's state."""
        self.saved = self._run.version if saved else 0
        self.schedule.make_up(self._run.version, max(versions_in(self._root), default=0))

    @property
    def unsaved(self) -> bool:
        """True if anything was trained since the last checkpoint."""
        return self.saved != self._run.version

    async def begin(self) -> None:
        """Begin a checkpoint of the run's state, once the previous one is complete.

        When this returns, the ranks have copied their state, and the next step may change it.
        """
        await self.finish()
        version = self._run.version
        path = str(self._root / f"v{version}")
        self._check()  # a stop leaves little time
        self.schedule.begun()
        await self._ranks.all(SaveCheckpoint(path, version, self._run.state()))
        self._under_way = asyncio.create_task(self._complete(path, version))

    async def finish(self) -> None:
        """Wait until a checkpoint in progress is complete on disk.

        Raises:
            Exception: a rank is gone, or the checkpoint could not be written.
        """
        if (under_way := self._under_way) is not None:
            if not under_way.done():
                self._check()
            await asyncio.gather(under_way, return_exceptions=True)
            self._under_way = None
            under_way.result()

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
            "checkpoint/seconds": self.schedule.seconds(),
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
