"""Which versions of the actor's weights there are: the ranks publish each, and remove those that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from asyncrl.comm.names import ACTOR
from asyncrl.comm.request_reply.client import RequestClient
from asyncrl.master.ranks import Ranks
from asyncrl.master.version_announcer import VersionAnnouncer
from asyncrl.trainer.messages import CollectWeights, Publish


class Publishing:
    """See the module's docstring.

    Args:
        actors: the ranks that hold the actor.
        announcer: knows which versions servers have, or are to have next.
    """

    def __init__(self, ranks: Ranks, actors: Sequence[RequestClient], announcer: VersionAnnouncer) -> None:
        self.on_disk = 0
        """The newest version whose weights are in a folder; 0 is the base model."""
        self._ranks, self._actors, self._announcer = ranks, actors, announcer

    async def publish(self, version: int, in_use: Collection[int], *, to_disk: bool) -> str:
        """Make the weights available as `version`, the current one; returns its folder, which holds the weights
        themselves if `to_disk`. Versions nobody reads are removed, but for the newest on disk.

        Args:
            in_use: versions that servers read.
        """
        if to_disk:
            self.on_disk = version
        kept = {version, version - 1, self.on_disk, self._announcer.announced, *self._announcer.put_off, *in_use}
        published, _ = await asyncio.gather(
            self._ranks.some(self._actors, Publish(ACTOR, version, to_disk, self._ranks.master)),
            self._ranks.all(CollectWeights(ACTOR, tuple(sorted(kept)))),
        )
        return published[0].path

    async def forget_others(self, version: int) -> None:
        """Remove the weights of all versions but this one: a restart has forgotten their steps, and makes others."""
        await self._ranks.all(CollectWeights(ACTOR, (version,)))
