"""The other processes, as far as the master's loop needs them: what it asks for and what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.manager.client import GateStatus
from asyncrl.manager.messages import DroppedRollout, GateBooks


class ModelWorkers(Protocol):
    """The ModelWorkers, by index."""

    @property
    def count(self) -> int:
        """Number of workers; rank and index are the same."""
        ...

    async def request(self, worker: int, method: str, meta: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send `method` to one worker and return the reply; requests arrive in the order in which they were made.

        Raises:
            TimeoutError: no reply within `timeout_s`.
            Exception: the worker failed, or is gone.
        """
        ...


class Manager(Protocol):
    """The GserverManager."""

    async def report_consumed(self, version: int, trained: Sequence[str], dropped: Sequence[DroppedRollout]) -> None:
        """Tell the gate what was trained and what was dropped; the trainer is at `version` now."""
        ...

    async def wait_expiring(self, version: int, timeout_s: float) -> Sequence[str]:
        """Wait until the step at `version` may be taken without making a running rollout expire.

        Returns:
            The rollouts still waited for after `timeout_s`; none: the way is clear.
        """
        ...

    async def close_gate(self) -> None:
        """No rollout starts from now on."""
        ...

    async def abandon(self) -> GateBooks:
        """Give up whatever runs or waits; the final books."""
        ...

    async def status(self) -> GateStatus:
        """The manager's state."""
        ...


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation: per prompt the reward and the answer's length, and the versions that really answered."""

    rewards: Sequence[float]
    lengths: Sequence[int]
    min_version: int
    max_version: int


class RolloutWorkers(Protocol):
    """The RolloutWorkers, which also evaluate."""

    async def evaluate(self, version: int, timeout_s: float) -> EvaluationResult:
        """Answer the held-out set greedily under policy `version`; every worker does its shard."""
        ...
