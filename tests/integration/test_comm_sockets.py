"""A bound socket outlives whatever its peers do; a link says when it accepts messages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest
import zmq

from asyncrl.comm.sockets import Context, PeerLink, PeerRouter, SocketThread, connecting, send

BOUND = """
import sys, time
from asyncrl.comm.sockets import SocketThread, receive

bound = SocketThread(  # which is not started: nothing reads
    "127.0.0.1", None, print, name="bound", requests_high_water=4, replies_high_water=4, max_frame_bytes=1 << 20
)
socket = bound._socket
print(bound.endpoint, flush=True)
sys.stdin.readline()  # the peer has gone
time.sleep(5.0)  # longer than the interval of the heartbeats that there were
while socket.poll(200):
    assert receive(socket)
print("alive", flush=True)
"""


def test_a_peer_that_goes_while_its_messages_wait_at_the_high_water_mark_does_not_abort_the_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BOUND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as bound:
        assert bound.stdout is not None
        context = Context()
        socket = connecting(context, zmq.DEALER, None, high_water=1000)
        socket.connect(bound.stdout.readline().strip())
        assert socket.poll(60_000, 2)
        sent = 0
        while socket.poll(500, 2):
            sent += send(socket, [bytes(20_000)])
        assert sent > 4, "the bound end has stopped reading"
        socket.close(linger=0)
        context.term()
        out, error = bound.communicate("gone\n", timeout=300)
        assert (bound.returncode, out) == (0, "alive\n"), error


def connect(router: PeerRouter, address: str, on_writable: Callable[[], None] = lambda: None) -> PeerLink:
    return router.connect(address, on_writable=on_writable, on_message=lambda _: None, on_lost=lambda: None)


async def test_a_full_link_says_when_it_accepts_messages_again_and_a_closed_one_takes_none() -> None:
    arrived: list[int] = []
    bound = SocketThread(
        "127.0.0.1",
        None,
        lambda frames: arrived.append(len(frames[1])),
        name="test",
        requests_high_water=2,
        replies_high_water=2,
        max_frame_bytes=1 << 20,
    )
    bound.start()
    writable, router = asyncio.Event(), PeerRouter(None, high_water=2)
    link = connect(router, bound.endpoint, writable.set)
    assert not link.send([b"too early"])
    sent = 0
    async with asyncio.timeout(300):
        for _ in range(20):
            await writable.wait()
            while link.writable:
                sent += link.send([bytes(100_000)])
            writable.clear()
        await writable.wait()
    link.close()
    assert not link.send([b"too late"])
    router.close()
    await asyncio.to_thread(bound.close)
    assert sent >= 20
    assert len(arrived) <= sent
    assert set(arrived) <= {100_000}


async def test_a_router_with_a_limit_has_one_link() -> None:
    router = PeerRouter(None, high_water=2)
    link = connect(router, "tcp://127.0.0.1:9")
    with pytest.raises(ValueError, match="close it first"):
        connect(router, "tcp://127.0.0.1:10")
    link.close()
    connect(router, "tcp://127.0.0.1:10")
    router.close()


async def test_a_frame_over_the_limit_ends_its_connection_and_is_not_delivered() -> None:
    arrived: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    bound = SocketThread(
        "127.0.0.1",
        None,
        lambda frames: loop.call_soon_threadsafe(arrived.put_nowait, len(frames[1])),
        name="test",
        requests_high_water=2,
        replies_high_water=2,
        max_frame_bytes=1000,
    )
    bound.start()
    writable, lost, router = asyncio.Event(), asyncio.Event(), PeerRouter(None)
    link = router.connect(bound.endpoint, on_writable=writable.set, on_message=lambda _: None, on_lost=lost.set)
    async with asyncio.timeout(300):
        await writable.wait()
        writable.clear()
        assert link.send([bytes(1001)])
        await lost.wait()
        await writable.wait()
        assert link.send([bytes(1000)])
        assert await arrived.get() == 1000
    router.close()
    await asyncio.to_thread(bound.close)
