"""The trajectories that a rank has received and not trained yet, and what the master knows of them.

Filled by the puller's thread, polled from the request server's loop, emptied by the main thread. It is bounded: `put`
waits for room, which withholds the acknowledgement and so slows the senders down.

A poll names the cursor of the last reply that the caller has processed. Records up to there are forgotten, all later
ones are sent (again), so a lost reply costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from asyncrl.api.trajectory import Trajectory
from asyncrl.trainer.messages import PolledBuffer, RolloutRecord


class InboxFull(RuntimeError):
    """No room became free in time; the sender will offer the trajectory again."""


class Inbox:
    """Received trajectories by rollout id. Thread-safe.

    Args:
        head: data index of the ModelWorker whose inbox this is.
        capacity: rollouts held at most.
        on_arrival: called, from the thread that puts, after a trajectory was added.
    """

    def __init__(self, head: int, capacity: int, on_arrival: Callable[[], None] = lambda: None) -> None:
        self._head = head
        self._capacity = capacity
        self._on_arrival = on_arrival
        self._room = threading.Condition()
        self._held: dict[str, Trajectory] = {}
        self._unacknowledged: list[tuple[int, RolloutRecord]] = []
        self._last = 0

    def put(self, trajectory: Trajectory, timeout_s: float) -> None:
        """Add a trajectory, waiting for room; one that is held already is ignored.

        Raises:
            InboxFull: there was no room for `timeout_s` seconds.
        """
        with self._room:
            if trajectory.rollout_id in self._held:
                return
            if not self._room.wait_for(lambda: len(self._held) < self._capacity, timeout_s):
                raise InboxFull(
                    f"{self._capacity} rollouts wait for training (trainer.buffer_capacity) and none was taken for "
                    f"{timeout_s:g} s"
                )
            self._hold(trajectory)
        self._on_arrival()

    def restore(self, trajectory: Trajectory) -> None:
        """Add one that was held by the process before this one, whether there is room or not."""
        with self._room:
            self._hold(trajectory)

    def _hold(self, trajectory: Trajectory) -> None:
        self._held[trajectory.rollout_id] = trajectory
        self._last += 1
        self._unacknowledged.append((self._last, record_of(trajectory, self._head)))

    def tell_again(self) -> None:
        """Somebody else polls from here on: all that is held is new to them, under new numbers, which a poll of the one
        before cannot acknowledge.
        """
        with self._room:
            held, self._held, self._unacknowledged = self._held, {}, []
            for trajectory in held.values():
                self._hold(trajectory)

    def poll(self, cursor: int) -> PolledBuffer:
        """The records of what came after `cursor`."""
        with self._room:
            self._unacknowledged = [entry for entry in self._unacknowledged if entry[0] > cursor]
            return PolledBuffer(self._last, tuple(record for _, record in self._unacknowledged))

    def get(self, rollout_ids: Iterable[str]) -> dict[str, Trajectory]:
        """The trajectories of those `rollout_ids` that are held."""
        with self._room:
            return {key: self._held[key] for key in rollout_ids if key in self._held}

    def remove(self, rollout_ids: Sequence[str]) -> None:
        """Forget trajectories; unknown ids are ignored, so that a repeated call does no harm."""
        with self._room:
            for rollout_id in rollout_ids:
                self._held.pop(rollout_id, None)
            self._room.notify_all()


def record_of(trajectory: Trajectory, head: int) -> RolloutRecord:
    """What the master gets to know of a trajectory that data-parallel head `head` holds."""
    columns = trajectory.columns
    generated = columns.loss_mask.astype(bool)
    versions, counts = np.unique(columns.versions[generated], return_counts=True)
    return RolloutRecord(
        rollout_id=trajectory.rollout_id,
        prompt_id=trajectory.prompt_id,
        order=trajectory.order,
        head=head,
        oldest_version=int(versions[0]) if len(versions) else -1,
        version_tokens=dict(zip(versions.tolist(), counts.tolist(), strict=True)),
        lengths=tuple(columns.lengths.tolist()),
        generated=tuple(np.add.reduceat(generated, columns.starts, dtype=np.int64).tolist()),
        rewards=tuple(columns.total_rewards.tolist()),
        truncated=tuple(columns.truncated.astype(bool).tolist()),
        episodes=tuple(columns.episodes.tolist()),
        metrics=trajectory.metrics,
    )
