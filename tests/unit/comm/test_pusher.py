"""The pusher over a connection that takes one message at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.api import Sample, Trajectory
from asyncrl.comm import push_pull
from asyncrl.comm.push_pull import (
    BATCH_TRAJECTORIES,
    Accepted,
    Outbox,
    Push,
    PushTimeout,
    TrajectoryPusher,
    decode_numbers,
    encode,
)
from asyncrl.comm.sockets import Frame

COUNT = 4 * BATCH_TRAJECTORIES


class NarrowLink:
    """In place of a PeerRouter and its PeerLink: takes one message, then nothing until it was acknowledged.

    That at "full" takes none at all, that at "wide" always takes another.
    """

    connected = True

    def __init__(self, *_arguments: object, **_settings: object) -> None:
        self.router = self
        self.writable = False
        self.messages: list[list[int]] = []
        self._loop = asyncio.get_running_loop()

    def connect(
        self,
        address: str,
        *,
        on_writable: Callable[[], None],
        on_message: Callable[[list[memoryview]], None],
        **_settings: object,
    ) -> NarrowLink:
        self.address = address
        self._on_writable, self._on_message = on_writable, on_message
        self._loop.call_soon(self._open)
        return self

    def send(self, frames: Sequence[Frame]) -> bool:
        self.writable = self.address == "wide"
        if self.address == "full":
            return False
        self.messages.append(decode_numbers(frames[0]))
        self._loop.call_soon(self._acknowledge)
        return True

    def close(self) -> None:
        """Nothing to close."""

    def _open(self) -> None:
        self.writable = True
        self._on_writable()

    def _acknowledge(self) -> None:
        self._on_message([memoryview(encode(Accepted(self.messages[-1])))])
        if not self.writable:
            self._open()


def trajectory(number: int) -> Trajectory:
    tokens = np.arange(3, dtype=np.int32)
    sample = Sample(tokens, np.ones(3, np.uint8), np.zeros(3, np.float32), tokens, 1.0)
    return Trajectory(f"rollout-{number}", "prompt", number, (sample,))


async def test_a_message_is_filled_only_when_the_connection_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = 0
    take = Outbox.take

    def counted(outbox: Outbox, *arguments: Any) -> tuple[Push, str] | None:
        nonlocal takes
        takes += 1
        return take(outbox, *arguments)

    monkeypatch.setattr(Outbox, "take", counted)
    monkeypatch.setattr(push_pull, "PeerRouter", NarrowLink)
    sender = TrajectoryPusher(["narrow"], None, identity="test", high_water=COUNT, resend_after_s=3600.0)
    (link,) = sender._links.values()
    assert isinstance(link, NarrowLink)
    await asyncio.gather(*(sender.push(trajectory(number)) for number in range(COUNT)))
    assert await sender.close(60.0) == []
    assert [seq for message in link.messages for seq in message] == list(range(COUNT))
    assert [len(message) for message in link.messages] == [BATCH_TRAJECTORIES] * 4
    assert takes <= COUNT + 4 * len(link.messages) + 2, "what waits was taken and given back again and again"
    assert sender.resent == 0


async def test_what_one_connection_does_not_take_goes_over_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_pull, "PeerRouter", NarrowLink)
    sender = TrajectoryPusher(["wide", "full"], None, identity="test")
    async with asyncio.timeout(300):
        await asyncio.gather(*(sender.push(trajectory(number)) for number in range(2)))
    assert await sender.close(60.0) == []


async def test_calls_end_at_their_deadlines_and_only_what_had_a_place_is_still_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push_pull, "PeerRouter", NarrowLink)
    sender = TrajectoryPusher([], None, identity="test", high_water=1, resend_after_s=3600.0)
    limits = {0: 0.01, 1: 0.02, 2: 3600.0, 3: 3600.0}
    held, queued, cancelled, later = (
        asyncio.create_task(sender.push(trajectory(number), limit)) for number, limit in limits.items()
    )
    with pytest.raises(PushTimeout, match=r"'rollout-0' .* an acknowledgement"):
        await held
    with pytest.raises(PushTimeout, match=r"'rollout-1' .* a slot among those held: 1 are held"):
        await queued
    cancelled.cancel()
    assert sender.unacked_ids == ["rollout-0"]
    sender.set_addresses(["narrow"])
    (link,) = sender._links.values()
    assert isinstance(link, NarrowLink)
    await later
    assert link.messages == [[0], [1]], "the first, whose call had ended, and the last"
    assert await sender.close(60.0) == []


async def test_nothing_of_an_acknowledged_trajectory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_pull, "PeerRouter", NarrowLink)
    sender = TrajectoryPusher(["narrow"], None, identity="test")
    sent = trajectory(0)
    tokens = weakref.ref(sent.samples[0].tokens)
    await sender.push(sent, 3600.0)
    del sent
    assert tokens() is None
    assert await sender.close(60.0) == []
