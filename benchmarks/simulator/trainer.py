"""A training step by a model of its time, and the substitute for the ModelWorkers that receive trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.api import Trajectory
from asyncrl.comm.request_reply import Done
from asyncrl.trainer.messages import Discard, PollBuffer
from asyncrl.trainer.trajectories.inbox import Inbox


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """Speed of training. A step takes `fixed_s`, plus `token_s` for each token of its batch including prompts. Then
    publishing its weights takes `publish_s`. If the same devices generate, changing from generation to training and
    back takes `switch_s`. `ahead_share` is the part of `token_s` that does not need the newest weights (a frozen
    reference) and is done while the trainer waits for data, as if all tokens had arrived by then.
    """

    token_s: float
    fixed_s: float
    publish_s: float
    switch_s: float = 0.0
    ahead_share: float = 0.0

    def step_s(self, tokens: float, waited_s: float = 0.0) -> float:
        """Return the seconds of a step on a batch of `tokens` after a wait of `waited_s`, without publishing."""
        ahead_s = min(waited_s, self.ahead_share * self.token_s * tokens)
        return self.fixed_s + self.token_s * tokens - ahead_s + self.switch_s

    def coarse(self, grain: int) -> TrainerModel:
        """Return the model in units of `grain` tokens."""
        return replace(self, token_s=self.token_s * grain)


class DataHead:
    """The ModelWorkers' end for the collector and the pushers: the real inbox, polled in process.

    Args:
        receive: awaited for each trajectory before it is held.
    """

    def __init__(self, capacity: int, receive: Callable[[], Awaitable[None]], *, shares_prefixes: bool = False) -> None:
        self._arrived, self._receive = asyncio.Event(), receive
        self.inbox = Inbox(0, capacity, self._arrived.set, shares_prefixes=shares_prefixes)

    async def push(self, trajectory: Trajectory) -> None:
        """Deliver a trajectory; return once it is held."""
        await self._receive()
        self.inbox.put(trajectory, 0.0)

    async def call(self, request: PollBuffer | Discard, *, timeout_s: float) -> Any:
        """Answer the master's call as a ModelWorker does."""
        if isinstance(request, Discard):
            self.inbox.remove(request.rollout_ids)
            return Done()
        with suppress(TimeoutError):
            async with asyncio.timeout(request.timeout_s):
                await self._wait(request.cursor, 1)
            async with asyncio.timeout(request.gather_s):
                await self._wait(request.cursor, request.at_least)
        return self.inbox.poll(request.cursor)

    async def _wait(self, cursor: int, count: int) -> None:
        while self.inbox.arrived_after(cursor) < count:
            self._arrived.clear()
            await self._arrived.wait()
