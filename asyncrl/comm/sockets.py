"""ZMQ sockets with the options that asyncrl needs, and their integration into an asyncio loop.

zmq.asyncio is not used: for every message it creates a future, reads the socket's events and takes a turn of the event
loop. Its rate of trajectories per second relative to this module, for one and for eight samples
(`benchmarks/transport.py --asyncio`, medians of 7 rounds):

- 16k tokens: 0.73 and 0.88, at 1.33 and 1.15 times the CPU; encrypted 0.78 and 0.92.

- 1k tokens: 1.08 and 1.12; encrypted 1.05 and 0.98.

Answers are long, so the first line decides.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.comm.names import url_host
from asyncrl.comm.security.peer_gate import PeerGate
from asyncrl.comm.security.run_secret import SocketSecurity

Frame: TypeAlias = bytes | bytearray | memoryview
"""One part of a message."""
Socket: TypeAlias = zmq.Socket[bytes]

KEEP_ALIVE_IDLE_S, KEEP_ALIVE_INTERVAL_S, KEEP_ALIVE_PROBES = 30, 10, 6
UNACKNOWLEDGED_LIMIT_MS = 90_000
"""Time after which a host that vanished without a reset is noticed, even if nothing was sent to it. A killed process is
noticed at once. The kernel of a suspended process still acknowledges, so no connection breaks.

ZMTP's own heartbeats are not used. The process answers them instead of its kernel, so a suspended process would look
dead. And libzmq 4.3.5 aborts the process (`!_io_error`) if a peer disconnects while a socket that sends heartbeats has
a full inbox of its messages. So the death of a RolloutWorker could kill a ModelWorker.
"""
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1_000
MESSAGES_PER_TURN = 256  # read from one socket before the loop's other tasks get their turn
_LINK_EVENTS = int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
_NO_WAIT = int(zmq.NOBLOCK)  # plain integers: pyzmq's flag enum takes a microsecond per "or"
_SEND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
ZERO_COPY_BYTES = 1 << 20
"""From this size on libzmq borrows the buffer. Below it a copy is cheaper: pyzmq's collector thread returns borrowed
buffers, and takes the interpreter's lock for every message.
"""


class Context(zmq.Context[Socket]):
    """A ZMQ context that only `term` ends, never the garbage collector.

    pyzmq's own finaliser terminates the context, which waits for its sockets to be closed. If an owner was dropped
    without `close` (after an error, say), its sockets are collected later, and the process would hang for ever.
    """

    def __del__(self) -> None:
        """Do nothing: a context that was not terminated is left to the end of the process."""


def bind(
    context: Context,
    host: str,
    security: SocketSecurity | None,
    *,
    requests_high_water: int,
    replies_high_water: int,
    max_frame_bytes: int,
) -> tuple[Socket, str, PeerGate]:
    """Return a ROUTER bound to a free port of `host`, its endpoint and its gate. `context` must be the socket's own.

    The high-water marks are messages in libzmq's buffer per peer. At `requests_high_water` the peer must wait. Beyond
    `replies_high_water` a ROUTER silently drops messages, so this must exceed the number of outstanding replies.
    """
    socket = context.socket(zmq.ROUTER)
    _configure(socket, send_high_water=replies_high_water, receive_high_water=requests_high_water)
    socket.maxmsgsize = max_frame_bytes
    gate = PeerGate(context, socket, security)
    socket.ipv6 = ":" in host
    socket.bind(f"tcp://{url_host(host)}:*")
    endpoint: Any = socket.last_endpoint
    return socket, endpoint.rstrip(b"\0").decode(), gate


def connecting(context: Context, kind: int, security: SocketSecurity | None, *, high_water: int) -> Socket:
    """Return a socket of `kind` (DEALER or ROUTER) that can connect. `high_water`: messages in libzmq's buffer per
    peer; 0: no limit.
    """
    socket = context.socket(kind)
    _configure(socket, send_high_water=high_water, receive_high_water=high_water)
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = RECONNECT_MAX_MS
    if security is not None:
        security.secure_client(socket)
    return socket


def _configure(socket: Socket, *, send_high_water: int, receive_high_water: int) -> None:
    socket.linger = 0
    socket.sndhwm = send_high_water
    socket.rcvhwm = receive_high_water
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = KEEP_ALIVE_IDLE_S
    socket.tcp_keepalive_intvl = KEEP_ALIVE_INTERVAL_S
    socket.tcp_keepalive_cnt = KEEP_ALIVE_PROBES
    socket.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_LIMIT_MS)


def send(socket: Socket, frames: Sequence[Frame]) -> bool:
    """Send one message without waiting; return False if the socket accepts no message now."""
    *leading, last = frames
    try:
        for frame in leading:
            socket.send(frame, _SEND_MORE)
        socket.send(last, _NO_WAIT, copy=len(last) < ZERO_COPY_BYTES)
    except zmq.Again:
        return False
    return True


def receive(socket: Socket) -> list[zmq.Frame] | None:
    """Return the next message, without waiting or copying; None if no message has arrived.

    `recv_multipart` asks the socket after every frame whether more follow, which costs more than the frame itself.
    """
    try:
        frame = socket.recv(_NO_WAIT, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = socket.recv(_NO_WAIT, copy=False)
        frames.append(frame)
    return frames


def peer_address(frames: Sequence[zmq.Frame]) -> str:
    """Return the network address of the peer that sent `frames`."""
    try:
        return str(frames[-1].get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"


class LoopSocket:
    """Calls `on_ready(events)` from an asyncio loop while a socket has events (`zmq.POLLIN`, `zmq.POLLOUT`).

    A ZMQ socket's descriptor is edge-triggered, and any send or receive may consume the edge. So call `recheck` after
    every send or receive outside `on_ready`. Several calls cause one check, in the loop's next turn.
    """

    def __init__(self, socket: Socket, loop: asyncio.AbstractEventLoop, on_ready: Callable[[int], None]) -> None:
        self.socket = socket
        self._loop = loop
        self._on_ready = on_ready
        self._descriptor: int = socket.FD
        self._scheduled = False
        loop.add_reader(self._descriptor, self._look)
        self.recheck()

    def recheck(self) -> None:
        """Check the socket's events in the loop's next turn."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._look)

    def events(self) -> int:
        """Return the socket's current events."""
        events: Any = self.socket.get(zmq.EVENTS)  # half the time of the attribute
        return int(events)

    def close(self, linger_ms: int = 0) -> None:
        """Stop watching and close the socket. libzmq has `linger_ms` milliseconds to send pending messages."""
        if not self.socket.closed:
            self._loop.remove_reader(self._descriptor)
            self.socket.close(linger=linger_ms)

    def _look(self) -> None:
        self._scheduled = False
        if self.socket.closed:
            return
        if events := self.events():
            self._on_ready(events)


class PeerLink:
    """The connection to one bound socket, from an asyncio loop: a DEALER and the monitor of its connection.

    It accepts messages only while connected, so nothing is queued to a dead peer. One socket serves one connection.
    When it breaks, the messages that have arrived are delivered. Then the socket is replaced, and unsent messages are
    dropped. (ZMQ_IMMEDIATE would do the same, but drops messages that have arrived and are not read yet.)

    Args:
        address: endpoint of the bound socket.
        open_socket: creates the DEALER of each connection, with `connecting`.
        on_writable: called when the link accepts messages again.
        on_message: called with each received message; its buffers live as long as they are referred to.
        on_lost: called when the connection breaks: unanswered messages may be lost. The link reconnects by itself.

    Raises:
        ValueError: `address` is not an endpoint.
    """

    def __init__(
        self,
        address: str,
        open_socket: Callable[[], Socket],
        *,
        on_writable: Callable[[PeerLink], None],
        on_message: Callable[[PeerLink, list[memoryview]], None],
        on_lost: Callable[[PeerLink], None],
    ) -> None:
        self.address, self._open_socket = address, open_socket
        self.connected = self.writable = False
        self._on_writable, self._on_message, self._on_lost = on_writable, on_message, on_lost
        self._reopening: asyncio.TimerHandle | None = None
        self._open()

    def send(self, frames: Sequence[Frame]) -> bool:
        """Pass `frames` to the connection; return False if it accepts no message now.

        `writable` is True afterwards if it accepts another message. Otherwise `on_writable` is called once it does.
        """
        sent = self.connected and send(self._main.socket, frames)
        self.writable = sent and bool(self._main.events() & zmq.POLLOUT)
        self._main.recheck()
        return sent

    def close(self) -> None:
        """Disconnect; messages that libzmq has not sent are discarded."""
        if self._reopening is not None:
            self._reopening.cancel()
        self._drop_socket()

    def _drop_socket(self) -> None:
        self.connected = self.writable = False
        if not self._main.socket.closed:
            self._main.socket.disable_monitor()
            self._monitor.close()
            self._main.close()

    def _open(self) -> None:
        self._reopening = None
        socket, loop = self._open_socket(), asyncio.get_running_loop()
        self._monitor = LoopSocket(socket.get_monitor_socket(_LINK_EVENTS), loop, self._observe)
        self._main = LoopSocket(socket, loop, self._serve)
        try:
            socket.ipv6 = "[" in self.address
            socket.connect(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"address {self.address!r} is not an endpoint: use tcp://host:port ({error})") from error

    def _serve(self, events: int) -> None:
        if events & zmq.POLLOUT and self.connected and not self.writable:
            self.writable = True
            self._on_writable(self)
        if events & zmq.POLLIN:
            self._deliver(MESSAGES_PER_TURN)
            self._main.recheck()  # more may have arrived; and receiving may have consumed the edge of POLLOUT

    def _deliver(self, limit: int) -> None:
        """Deliver up to `limit` messages that have arrived."""
        socket = self._main.socket
        for _ in range(limit):
            if socket.closed:  # by the receiver of a message
                return
            if (frames := receive(socket)) is None:
                return
            self._on_message(self, [frame.buffer for frame in frames])

    def _observe(self, events: int) -> None:
        while not self._monitor.socket.closed and self._monitor.socket.poll(0):
            event = parse_monitor_message(self._monitor.socket.recv_multipart())["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.connected = True
                self._main.recheck()
            elif event == zmq.Event.DISCONNECTED and self.connected:
                self._replace()

    def _replace(self) -> None:
        """Deliver the messages that have arrived, drop the broken connection's socket, and reconnect after a moment."""
        self._deliver(sys.maxsize)
        if self.connected:  # a receiver may have closed the link
            self._drop_socket()
            self._reopening = asyncio.get_running_loop().call_later(RECONNECT_MS / 1000, self._open)
            self._on_lost(self)
