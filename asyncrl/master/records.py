"""Received rollouts that will not be trained, and why."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.manager.messages import DroppedRollout
from asyncrl.trainer.messages import RolloutRecord


@dataclass(frozen=True, slots=True)
class Drop:
    """A received rollout that will not be trained, and why; `used`: its prompt is trained, or dropped for good."""

    record: RolloutRecord
    reason: str
    used: bool

    @property
    def message(self) -> DroppedRollout:
        """What the manager is told of it."""
        return DroppedRollout(self.record.rollout_id, self.reason, self.used)
