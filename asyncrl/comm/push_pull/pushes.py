"""The calls of `TrajectoryPusher.push` that have not returned: pure state, without sockets or clocks.

Life of a call:

    queue ─▶ queued ─next─▶ (its trajectory enters the outbox) ─hold─▶ held ─settle─▶ returned
               └──────────────── expire / fail / cancelled ─────────────┘

A call ends at its deadline, but a held trajectory stays in the outbox and is delivered later.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncrl.comm.trajectory_codec import Prepared


class PushTimeout(Exception):
    """No acknowledgement came within the time limit; the trajectory is kept and will be sent again."""


@dataclass(slots=True)
class Push:
    """A call of `push` that waits until `deadline`, in seconds of the loop's clock."""

    rollout_id: str
    content: Prepared
    deadline: float
    accepted: asyncio.Future[None]


class Pushes:
    """The waiting calls: queued for a place in the outbox, or held until their trajectory is acknowledged."""

    def __init__(self) -> None:
        self._queued: deque[Push] = deque()
        self._held: dict[int, Push] = {}  # by the trajectory's number in the outbox

    @property
    def any_queued(self) -> bool:
        """True while a call waits for a place in the outbox."""
        return bool(self._queued)

    def queue(self, push: Push) -> None:
        """Let `push` wait for a place in the outbox."""
        self._queued.append(push)

    def next(self) -> Push | None:
        """Remove and return the first queued call that was not cancelled; None if there is none."""
        while self._queued:
            push = self._queued.popleft()
            if not push.accepted.done():
                return push
        return None

    def hold(self, seq: int, push: Push) -> None:
        """Let `push` wait for the acknowledgement of entry `seq` of the outbox."""
        self._held[seq] = push

    def settle(self, seq: int, error: Exception | None) -> None:
        """Make the held call `seq` return, or raise `error` from it."""
        accepted = self._held.pop(seq).accepted
        if accepted.done():
            return
        if error is None:
            accepted.set_result(None)
        else:
            accepted.set_exception(error)

    def expire(self, now: float, timeout: Callable[[Push, str], PushTimeout]) -> float:
        """End the calls past their deadline and return the earliest deadline of the others; infinity if none is left.

        Args:
            timeout: builds the error from a call and the thing that it waited for.
        """
        due = math.inf
        awaited = ((self._held.values(), "an acknowledgement"), (self._queued, "a place among those held"))
        for pushes, what in awaited:
            for push in pushes:
                if push.accepted.done():
                    continue
                if push.deadline <= now:
                    push.accepted.set_exception(timeout(push, what))
                else:
                    due = min(due, push.deadline)
        self._queued = deque(push for push in self._queued if not push.accepted.done())
        return due

    def fail_queued(self, reason: str) -> None:
        """Raise PushTimeout from the calls without a place in the outbox."""
        _fail(self._queued, reason)
        self._queued.clear()

    def fail_held(self, reason: str) -> None:
        """Raise PushTimeout from the calls that wait for an acknowledgement."""
        _fail(self._held.values(), reason)


def _fail(pushes: Iterable[Push], reason: str) -> None:
    for push in pushes:
        if not push.accepted.done():
            push.accepted.set_exception(PushTimeout(reason))
