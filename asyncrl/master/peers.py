"""The other processes, as far as the master's loop needs them: what it asks for and what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asyncrl.comm.request_reply.messages import R, Request
from asyncrl.manager.client import GateStatus
from asyncrl.manager.messages import DroppedRollout, GateBooks
from asyncrl.rollout.messages import Evaluate, EvaluationResult

EVALUATION_GRACE_S = 5.0
"""Beyond the limit of an evaluation, so that it is the evaluation's own limit that ends it."""


class CalledWorker(Protocol):
    """A ModelWorker or RolloutWorker, as a `RequestClient` reaches it."""

    async def call(self, request: Request[R], *, timeout_s: float) -> R:
        """Make the call and return its reply; calls arrive in the order in which they were made.

        Raises:
            TimeoutError: no reply within `timeout_s`.
            Exception: the worker failed, or is gone.
        """
        ...


async def evaluate(workers: Sequence[CalledWorker], version: int, timeout_s: float) -> EvaluationResult:
    """Evaluate `version` on the whole held-out set, of which each RolloutWorker does its share.

    Raises:
        Exception: a worker failed, or is late.
    """
    limit_s = timeout_s + EVALUATION_GRACE_S
    replies = await asyncio.gather(*(worker.call(Evaluate(version), timeout_s=limit_s) for worker in workers))
    shares = [share for share in replies if share.rewards]
    return EvaluationResult(
        rewards=tuple(reward for share in shares for reward in share.rewards),
        lengths=tuple(length for share in shares for length in share.lengths),
        min_version=min(share.min_version for share in shares),
        max_version=max(share.max_version for share in shares),
    )


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
