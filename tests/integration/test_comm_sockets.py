"""A bound socket outlives whatever its peers do."""

from __future__ import annotations

import subprocess
import sys

import zmq

from asyncrl.comm.sockets import Context, connecting, send

BOUND = """
import sys, time
from asyncrl.comm.sockets import Context, bind, receive

context = Context()
socket, endpoint, gate = bind(
    context, "127.0.0.1", None, requests_high_water=4, replies_high_water=4, max_frame_bytes=1 << 20
)
print(endpoint, flush=True)
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
