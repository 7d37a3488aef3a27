"""The state after each step, kept in the memory of the ranks' hosts (`asyncrl.runtime.trials.memory_checkpoint`).

The ranks copy their state, so the next step may change it, and each writes its files while weights are published. Once
all have written, the state becomes visible at once. Only then may other processes see the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.comm.request_reply.client import RemoteError
from asyncrl.master.peers.rank_clients import RankClients
from asyncrl.models.weights.versions.manifest import FileEntry
from asyncrl.runtime.process.worker import StateLost
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import (
    MEMORY_CHECKPOINT_LOST,
    CommitCheckpoint,
    FinishShare,
    LoadMemoryCheckpoint,
    SaveCheckpoint,
    WrittenShare,
)


class MemoryCheckpointer:
    """Keeps the state of each step, and decides which steps other processes may see.

    Args:
        memory_checkpoint: None if no state is kept.
    """

    def __init__(self, memory_checkpoint: MemoryCheckpoint | None, ranks: RankClients) -> None:
        self._memory_checkpoint, self._ranks = memory_checkpoint, ranks
        self._begun = self._whole = 0

    @property
    def on(self) -> bool:
        """True if steps are kept. After a step that could not be kept, none is."""
        return self._memory_checkpoint is not None

    def has(self, version: int) -> bool:
        """True if a process that replaces this one would know of the step that made `version`, or none would know of
        any.
        """
        return not self.on or self._whole == version

    def found(self, version: int) -> None:
        """Record that the run continues at `version`, whose state is complete."""
        self._whole = version

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
            self._whole = self._begun

    async def load(self, announced: int) -> dict[str, Any] | None:
        """Have the ranks restore the kept state; return the master's part; None without a kept state.

        Args:
            announced: the version that others know.

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


def files_of(shares: Sequence[WrittenShare]) -> dict[str, FileEntry]:
    """Return the files that all ranks together have written, by name."""
    return {name: entry for share in shares for name, entry in share.files.items()}
