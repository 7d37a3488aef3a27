"""Who plays which prompts: the shards of the data order, and the workers that joined, which have none.

A run's own RolloutWorkers have a shard each, `order % count`, and hand its prompts out in order. A worker that joined
while the run goes on has a higher number and no shard: it is lent prompts. Whatever happens to a prompt that was lent,
it comes back to the worker of its shard, its *home*, but for a failure that its player itself wants to try again.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.comm.names import ROLLOUT_WORKER


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of `count` workers; 0: every worker is its own prompts' home, and none joins."""

    count: int = 0

    def joined(self, worker: str) -> bool:
        """Whether `worker` has no shard, as it joined."""
        kind, _, index = worker.rpartition("/")
        return self.count > 0 and kind == ROLLOUT_WORKER and index.isdecimal() and int(index) >= self.count

    def of(self, order: int) -> str:
        """The worker of the shard of the prompt at `order`."""
        return f"{ROLLOUT_WORKER}/{order % self.count}"


NO_SHARDS = Shards()
