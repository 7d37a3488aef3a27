"""No socket serves a stranger: who does not hold the run's secret is refused, counted, logged once, and survived."""

from __future__ import annotations

import dataclasses
import logging
import socket as os_socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import zmq

from asyncrl.api import Sample, Trajectory
from asyncrl.comm.push_pull import TrajectoryPuller, TrajectoryPusher
from asyncrl.comm.request_reply import Done, PeerGone, Request, RequestClient, RequestServer
from asyncrl.comm.security import RunSecret, SocketSecurity

HOST = "127.0.0.1"
PATIENCE_S = 60.0
RUN = RunSecret(b"r" * 32).sockets()
OTHER = RunSecret(b"o" * 32).sockets()
STRANGERS = {
    "plaintext": None,
    "another run's keys": OTHER,
    "the server's key, but another client key": dataclasses.replace(
        RUN, client_public=OTHER.client_public, client_secret=OTHER.client_secret
    ),
}


class Ping(Request[Done], frozen=True):
    pass


@pytest.fixture
def puller() -> Iterator[TrajectoryPuller]:
    with closing(TrajectoryPuller(HOST, RUN, on_message=lambda _: None)) as puller:
        yield puller


@pytest.fixture(params=STRANGERS.values(), ids=STRANGERS.keys())
def stranger(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """Connects with wrong keys and sends, for the length of the test."""
    security: SocketSecurity | None = request.param
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.reconnect_ivl = 10

        def intrude(endpoint: str) -> None:
            if security is not None:
                security.secure_client(socket)
            socket.connect(endpoint)
            socket.send_multipart([b"let me", b"in"])

        yield intrude


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"waited {PATIENCE_S} s in vain")


def make_trajectory() -> Trajectory:
    tokens = np.arange(4, dtype=np.int32)
    return Trajectory("r", "p", 0, (Sample(tokens, np.ones(4, np.uint8), np.zeros(4, np.float32), tokens, 1.0),))


async def test_strangers_are_counted_and_logged_once_and_the_puller_goes_on(
    puller: TrajectoryPuller, stranger: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        stranger(puller.endpoint)
        wait_until(lambda: puller.unauthenticated >= 1)
        pusher = TrajectoryPusher([puller.endpoint], RUN, identity="rollout_worker/0")
        await pusher.push(make_trajectory(), PATIENCE_S)
        assert await pusher.close(PATIENCE_S) == []
    assert puller.counts["received"] == 1
    assert puller.counts["malformed"] == 0
    assert len([record for record in caplog.records if "dropped" in record.getMessage()]) == 1


async def test_a_server_does_not_answer_strangers_and_goes_on(stranger: Callable[[str], None]) -> None:
    async def ping(request: Ping) -> Done:
        return Done()

    with closing(RequestServer(HOST, RUN, immediate={Ping: ping})) as server:
        stranger(server.endpoint)
        wait_until(lambda: server.unauthenticated >= 1)
        client = RequestClient(server.endpoint, RUN)
        await client.call(Ping(), timeout_s=PATIENCE_S)
        assert server.malformed == 0
        client.close()


@pytest.mark.parametrize("keys", [None, OTHER], ids=["plaintext", "another run's keys"])
async def test_a_client_with_wrong_keys_gets_no_connection(keys: SocketSecurity | None) -> None:
    with closing(RequestServer(HOST, RUN)) as server:
        client = RequestClient(server.endpoint, keys)
        with pytest.raises(PeerGone, match="no connection"):
            await client.call(Ping(), timeout_s=0.3)
        client.close()


async def test_a_client_of_the_run_does_not_talk_to_a_plaintext_server() -> None:
    with closing(RequestServer(HOST, None)) as server:
        client = RequestClient(server.endpoint, RUN)
        with pytest.raises(PeerGone, match="no connection"):
            await client.call(Ping(), timeout_s=0.3)
        client.close()


async def test_raw_bytes_on_the_port_are_survived(puller: TrajectoryPuller) -> None:
    host, port = puller.endpoint.removeprefix("tcp://").split(":")
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 200, b""):
        with os_socket.create_connection((host, int(port)), timeout=PATIENCE_S) as intruder:
            intruder.sendall(noise)
    pusher = TrajectoryPusher([puller.endpoint], RUN, identity="rollout_worker/0")
    await pusher.push(make_trajectory(), PATIENCE_S)
    await pusher.close(PATIENCE_S)
