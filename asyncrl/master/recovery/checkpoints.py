"""The run's checkpoints on disk, written while the next steps run.

The ranks copy their state, so the next step may change it, and each writes its files while training continues. Once all
are written, one rank makes the whole checkpoint visible at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config.run_dir import versions_in
from asyncrl.master.books.run_files import checkpoint_root
from asyncrl.master.metrics.evaluations import Evaluations
from asyncrl.master.metrics.metric_rows import Row
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.master.recovery.memory_checkpointer import files_of
from asyncrl.models.weights.checkpoints.folder import which_to_keep
from asyncrl.observe import observer
from asyncrl.trainer.messages import (
    CommitCheckpoint,
    FinishShare,
    SaveCheckpoint,
)
from asyncrl.trainer.settings import BestDirection, CheckpointConfig


class Progress(NamedTuple):
    """Progress of the run that a checkpoint holds."""

    version: int
    used_prompts: int
    """Number of used prompts."""


class Checkpoints:
    """Writes the run's checkpoints, one after the other.

    Args:
        check: raises if a rank that would be waited for is gone.
        clock: monotonic time in s.
    """

    def __init__(
        self,
        keeping: CheckpointConfig,
        run_dir: Path,
        ranks: RankClients,
        evaluations: Evaluations,
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.saved: Progress | None = None
        """Progress of the newest checkpoint that is complete on disk."""
        self._figures: Row = {}
        self._keeping, self._root = keeping, checkpoint_root(run_dir)
        self._ranks, self._evaluations, self._check = ranks, evaluations, check
        self._under_way: asyncio.Task[None] | None = None
        self._asked, self._due = -1, False
        self._clock, self._begun_s = clock, clock()  # a process that begins counts from then
        self._owed = False  # a checkpoint was due when a master before this one died

    def make_up(self, version: int) -> None:
        """Continue at `version` without a checkpoint of it; one that is overdue is written after the next step."""
        interval = self._keeping.interval
        self._owed = bool(interval) and self.newest() < version - version % interval

    def is_due(self, version: int) -> bool:
        """True if a checkpoint is due after the step that made `version`; repeated calls give the same answer."""
        if version != self._asked:
            interval, minutes = self._keeping.interval, self._keeping.interval_minutes
            by_time = bool(minutes) and self._clock() - self._begun_s >= 60 * minutes
            self._asked, self._due = version, by_time or (bool(interval) and (version % interval == 0 or self._owed))
        return self._due

    async def begin(self, progress: Progress, state: dict[str, Any]) -> None:
        """Begin a checkpoint of `progress`, with the master's `state`, once the previous one is complete.

        When this returns, the ranks have copied their state, and the next step may change it.
        """
        await self.finish()
        path = str(self._root / f"v{progress.version}")
        self._check()  # there may be little time
        self._begun_s = self._clock()
        await self._ranks.all(SaveCheckpoint(path, progress.version, state, master=self._ranks.master))
        self._owed = False
        self._under_way = asyncio.create_task(self._complete(path, progress))

    async def finish(self) -> None:
        """Wait until a checkpoint in progress is complete on disk; raise its error."""
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

    def newest(self) -> int:
        """Return the version of the newest checkpoint on disk, 0 if there is none."""
        return max(versions_in(self._root), default=0)

    def close(self) -> None:
        """Cancel a checkpoint in progress."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _complete(self, path: str, progress: Progress) -> None:
        began = time.time()
        shares = await self._ranks.all(FinishShare(path))
        protected = self._protected(progress.version)
        files = files_of(shares)
        await self._ranks.publisher(CommitCheckpoint(path, files, self._keeping.keep, protected))
        observer.span("checkpoint", began, time.time(), version=progress.version)
        self._figures = {
            "checkpoint/seconds": self._clock() - self._begun_s,
            "checkpoint/bytes": sum(entry.bytes for entry in files.values()),
        }
        self.saved = progress

    def _protected(self, version: int) -> tuple[int, ...]:
        """Return the versions whose checkpoints are kept by the settings of `checkpoint`, including that of
        `version`.
        """
        keeping = self._keeping
        versions = [*versions_in(self._root), version]
        scores, undecided = {}, set[int]()
        if keeping.keep_best is not None:
            sign = 1.0 if keeping.keep_best_direction == BestDirection.highest else -1.0
            scores = {key: sign * value for key, value in self._evaluations.scores(keeping.keep_best).items()}
            undecided = self._evaluations.awaited(versions)
        return tuple(sorted(which_to_keep(versions, keeping.keep, keeping.keep_every, scores, undecided)))
