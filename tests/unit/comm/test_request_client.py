"""Calls of a client whose connection does not take them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncrl.comm.request_reply import Done, PeerGone, Request, RequestClient


class Ask(Request[Done], frozen=True):
    number: int = 0


class Link:
    """In place of a PeerRouter and its PeerLink: takes messages while it is `open`."""

    def __init__(self) -> None:
        self.open = False
        self.sent: list[Sequence[bytes]] = []

    def connect(
        self, address: str, *, on_writable: Callable[[], None], on_lost: Callable[[], None], **_callbacks: object
    ) -> Link:
        self.on_writable, self.on_lost = on_writable, on_lost
        return self

    def send(self, frames: Sequence[bytes]) -> bool:
        if self.open:
            self.sent.append(frames)
        return self.open

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def link() -> Link:
    return Link()


def client_of(link: Any) -> RequestClient:
    return RequestClient("tcp://127.0.0.1:9", link)


async def test_a_call_that_ended_before_it_was_sent_is_never_sent(link: Link) -> None:
    client = client_of(link)
    with pytest.raises(PeerGone, match="no connection within"):
        await client.call(Ask(), timeout_s=0.01)
    link.open = True
    link.on_writable()
    assert link.sent == []


async def test_a_lost_connection_ends_the_calls_that_were_sent_and_closing_the_others(link: Link) -> None:
    client = client_of(link)
    link.open = True
    sent = asyncio.create_task(client.call(Ask(1), timeout_s=600.0))
    await asyncio.sleep(0)
    link.open = False
    unsent = [asyncio.create_task(client.call(Ask(number), timeout_s=600.0)) for number in (2, 3)]
    await asyncio.sleep(0)
    link.on_lost()
    with pytest.raises(PeerGone, match="the connection broke"):
        await sent
    unsent[0].cancel()
    await asyncio.wait([unsent[0]])
    link.open = True
    link.on_writable()
    assert [frames[1] for frames in link.sent] == [b"\x81\xa6number\x01", b"\x81\xa6number\x03"]
    link.open = False
    late = asyncio.create_task(client.call(Ask(4), timeout_s=600.0))
    await asyncio.sleep(0)
    client.close()
    for ended in (unsent[1], late):
        with pytest.raises(PeerGone, match="the client was closed"):
            await ended
