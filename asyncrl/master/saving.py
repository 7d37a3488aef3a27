"""What of a run outlives its processes: checkpoints on the disk, and the state of the last step on the host.

Both have the same three parts. The ranks copy what they need, and the next step may change it; each writes its files by
itself, while training goes on; once all have, one rank makes the whole visible at once. A checkpoint is written beside
the steps that follow. The state of a step is waited for before anybody outside the trainer's side hears of the step
(`asyncrl.runtime.last_step`), but not before its weights are published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.comm.request_reply.client import RemoteError
from asyncrl.master.journal import Journal
from asyncrl.master.ranks import Ranks
from asyncrl.master.run_files import checkpoint_root
from asyncrl.runtime.last_step import LastStep
from asyncrl.runtime.run_dir import versions_in
from asyncrl.runtime.worker import RestartTogether
from asyncrl.trainer.messages import (
    KEPT_STEP_LOST,
    CommitCheckpoint,
    FinishShare,
    LoadLastStep,
    SaveCheckpoint,
    WrittenShare,
)
from asyncrl.trainer.settings import BestDirection, CheckpointConfig
from asyncrl.weights.checkpoint_dir import which_to_keep
from asyncrl.weights.manifest import FileEntry

_log = logging.getLogger(__name__)


class Progress(NamedTuple):
    """What a checkpoint is of."""

    version: int
    used_prompts: int
    """How many."""


class Checkpoints:
    """The run's checkpoints, one after the other.

    Args:
        check: raises where a rank is gone, which would be waited for.
    """

    def __init__(
        self, keeping: CheckpointConfig, run_dir: Path, ranks: Ranks, journal: Journal, check: Callable[[], None]
    ) -> None:
        self.saved: Progress | None = None
        """What the newest one that is whole on the disk is of."""
        self._keeping, self._root = keeping, checkpoint_root(run_dir)
        self._ranks, self._journal, self._check = ranks, journal, check
        self._under_way: asyncio.Task[None] | None = None
        self._owed = False  # one that was due when a master before this one died

    def make_up(self, version: int) -> None:
        """The run goes on at `version` without a checkpoint: one that was due by then is made up for after a step."""
        interval = self._keeping.interval
        self._owed = bool(interval) and self.newest() < version - version % interval

    def is_due(self, version: int) -> bool:
        """Whether one is to be begun after the step that made `version`."""
        interval = self._keeping.interval
        return bool(interval) and (version % interval == 0 or self._owed)

    async def begin(self, progress: Progress, state: dict[str, Any]) -> None:
        """Begin one of `progress`, with the master's `state`, once the one before it is there.

        When this returns, the ranks have copied what they need, and the next step may change it.
        """
        await self.finish()
        path = str(self._root / f"v{progress.version}")
        self._check()  # there may be little time
        await self._ranks.all(SaveCheckpoint(path, progress.version, state, master=self._ranks.master))
        self._owed = False
        self._under_way = asyncio.create_task(self._complete(path, progress))

    async def finish(self) -> None:
        """Wait until the one under way, if any, is whole on the disk; raises what it failed with."""
        if (under_way := self._under_way) is not None:
            if not under_way.done():
                self._check()
            await asyncio.gather(under_way, return_exceptions=True)
            self._under_way = None
            under_way.result()

    async def look(self) -> None:
        """Raise what the one under way failed with, if it has ended."""
        if self._under_way is not None and self._under_way.done():
            await self.finish()

    def newest(self) -> int:
        """Version of the newest one on the disk; 0 where there is none."""
        return max(versions_in(self._root), default=0)

    def close(self) -> None:
        """Give up the one under way."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _complete(self, path: str, progress: Progress) -> None:
        shares = await self._ranks.all(FinishShare(path))
        protected = self._protected(progress.version)
        await self._ranks.publisher(CommitCheckpoint(path, _files_of(shares), self._keeping.keep, protected))
        self.saved = progress

    def _protected(self, version: int) -> tuple[int, ...]:
        """Versions whose checkpoints stay, once there is one of `version`, by the settings of `checkpoint`."""
        keeping = self._keeping
        versions = [*versions_in(self._root), version]
        scores, undecided = {}, set[int]()
        if keeping.keep_best is not None:
            sign = 1.0 if keeping.keep_best_direction == BestDirection.highest else -1.0
            scores = {key: sign * value for key, value in self._journal.scores(keeping.keep_best).items()}
            undecided = self._journal.awaited_evaluations(versions)
        return tuple(sorted(which_to_keep(versions, keeping.keep, keeping.keep_every, scores, undecided)))


class KeptSteps:
    """The state of the last step, in the memory of the ranks' hosts.

    Args:
        last_step: None where none is kept.
    """

    def __init__(self, last_step: LastStep | None, ranks: Ranks) -> None:
        self._last_step, self._ranks = last_step, ranks
        self._path = ""

    @property
    def on(self) -> bool:
        """Whether steps are kept. Once one could not be, none is any more."""
        return self._last_step is not None

    async def begin(self, version: int, state: dict[str, Any]) -> None:
        """Have the ranks copy the state of the step that made `version`, and begin to write it."""
        if self._last_step is None:
            return
        self._path = f"v{version}"
        try:
            request = SaveCheckpoint(self._path, version, state, of_last_step=True, master=self._ranks.master)
            await self._ranks.all(request)
        except RemoteError as error:
            self._keep_no_more(error)

    async def take_up(self, version: int) -> bool:
        """As `finish`, of what a master before this one had begun for `version`."""
        self._path = f"v{version}"
        return await self.finish()

    async def load(self, announced: int) -> dict[str, Any] | None:
        """Have the ranks restore what is kept; the master's state in it, None where there is nothing.

        Args:
            announced: the version that others know.

        Raises:
            RestartTogether: what others know of is not there any more, so that only a checkpoint is left to go on from.
        """
        if self._last_step is None:
            return None
        try:
            state = (await self._ranks.load(LoadLastStep()))[0].master_state
            version = 0 if state is None else state["version"]
            if version >= announced:
                return state
            lost = f"version {announced} was announced, version {version} is what is kept"
        except RemoteError as error:
            if error.kind != KEPT_STEP_LOST:
                raise
            lost = error.message
        self._last_step.tear()
        raise RestartTogether(f"the last step is lost, only a checkpoint is left to go on from: {lost}")

    async def finish(self) -> bool:
        """Wait until the state that was begun is whole, so that others may hear of the step; False: it will not be."""
        if self._last_step is None:
            return False
        try:
            shares = await self._ranks.all(FinishShare(self._path, of_last_step=True))
            await self._ranks.all(CommitCheckpoint(self._path, _files_of(shares), keep=1, of_last_step=True))
        except RemoteError as error:
            self._keep_no_more(error)
        return self.on

    def _keep_no_more(self, error: RemoteError) -> None:
        """Keep no step any more. The kept one is older than what others will see, so nothing continues from it."""
        _log.warning("a death on the trainer's side would now cost the steps since the last checkpoint: %s", error)
        self._last_step = None


def _files_of(shares: Sequence[WrittenShare]) -> dict[str, FileEntry]:
    """The files that the ranks have written together, by name."""
    return {name: entry for share in shares for name, entry in share.files.items()}
