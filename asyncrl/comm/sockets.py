"""ZMQ sockets with the options that asyncrl needs, in an asyncio loop. One end binds, the other connects.

The connecting end has a `PeerLink` for each peer, of a `PeerRouter`: pushers to pullers, callers to servers. The bound
end is a `SocketThread`.

zmq.asyncio is not used: for every message it creates a future, reads the socket's events and takes a turn of the event
loop. Its rate of trajectories per second relative to this module, for one and for eight samples (medians of 7 rounds):

- 16k tokens: 0.73 and 0.88, at 1.33 and 1.15 times the CPU; encrypted 0.78 and 0.92.

- 1k tokens: 1.08 and 1.12; encrypted 1.05 and 0.98.

Answers are long, so the first line decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.comm.names import url_host
from asyncrl.comm.security import PeerGate, SocketSecurity

Frame: TypeAlias = bytes | bytearray | memoryview
"""One part of a message."""
Socket: TypeAlias = zmq.Socket[bytes]

HOST_GONE_S = 90
"""After which a host that vanished without a reset is noticed, even if nothing was sent to it. A killed process is
noticed at once. The kernel of a suspended process still acknowledges, so no connection breaks.

ZMTP's own heartbeats are not used. The process answers them instead of its kernel, so a suspended process would look
dead. And libzmq 4.3.5 aborts the process (`!_io_error`) if a peer disconnects while a socket that sends heartbeats has
a full inbox of its messages. So the death of a RolloutWorker could kill a ModelWorker.
"""
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1_000
MESSAGES_PER_TURN = 256  # read from one socket before the loop's other tasks get their turn
DESCRIPTORS_PER_CONNECTION = 1  # of a `PeerRouter`
_REPLIES_HIGH_WATER = 1000  # in libzmq's own buffer per connection of a `PeerRouter`
_CLOSE_LINGER_MS = 500  # for replies given just before a `SocketThread` is closed
_ENDPOINT = re.compile(r"tcp://([\d.]+|\[[\da-f:.]+\]):\d+")
"""Form of a bound socket's endpoint, and of the address that a monitor reports. Host names do not match."""
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
    socket.tcp_keepalive_idle = HOST_GONE_S // 3
    socket.tcp_keepalive_intvl = HOST_GONE_S // 9
    socket.tcp_keepalive_cnt = 6
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * HOST_GONE_S)


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
    """The connection to one bound socket, made by `PeerRouter.connect`.

    It accepts messages only while connected, so nothing is queued to a dead peer. When it breaks, the messages that
    have arrived are delivered, unsent ones are dropped, and it reconnects after a moment, until it is closed.
    (ZMQ_IMMEDIATE would do the same, but drops messages that have arrived and are not read yet.)

    Attributes:
        address: endpoint of the bound socket.
        connected: True from the handshake until the connection breaks.
        writable: True if it accepts a message now.
    """

    def __init__(
        self,
        router: PeerRouter,
        address: str,
        on_writable: Callable[[], None],
        on_message: Callable[[list[memoryview]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.router, self.address = router, address
        self.connected = self.writable = False
        self.on_writable, self.on_message, self.on_lost = on_writable, on_message, on_lost
        self.name = b""  # of the present connection; empty if there is none
        self.reopening: asyncio.TimerHandle | None = None

    def send(self, frames: Sequence[Frame]) -> bool:
        """Pass `frames` to the connection; return False if it accepts no message now.

        `writable` is True afterwards if it accepts another message. Otherwise `on_writable` is called once it does.
        """
        return self.connected and self.router.send(self, frames)

    def close(self) -> None:
        """Disconnect; messages that libzmq has not sent are discarded."""
        self.router.drop(self)


class PeerRouter:
    """Links to bound sockets, each at a different address. Create and use it in one running asyncio loop.

    The socket is a ROUTER that connects instead of binding. It names each connection itself and routes messages both
    ways by these names, so no peer can use another's. A connection takes one descriptor, the minimum for TCP. With
    1,256 connections, the master's limit of open files must be above 1,256.

    The peers bind, not this end: a ROUTER that binds cannot see whose connection broke, so a dead process would be
    noticed only by its silence. If it connects, its monitor reports the address.

    Args:
        high_water: messages in libzmq's buffer; the link is not writable while it is full, so a router with a limit has
            one link. 0: no limit, for messages that each have a caller with a time limit.
    """

    def __init__(self, security: SocketSecurity | None, *, high_water: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = Context()
        socket = connecting(self._context, zmq.ROUTER, security, high_water=_REPLIES_HIGH_WATER)
        socket.sndhwm = high_water
        socket.router_mandatory = True
        self._monitor = LoopSocket(_monitor(self._context, socket), self._loop, self._observe)
        self._main = LoopSocket(socket, self._loop, self._serve)
        self._limited = high_water > 0
        self._full: PeerLink | None = None
        self._by_address: dict[str, PeerLink] = {}
        self._by_name: dict[bytes, PeerLink] = {}
        self._made = 0

    def connect(
        self,
        address: str,
        *,
        on_writable: Callable[[], None],
        on_message: Callable[[list[memoryview]], None],
        on_lost: Callable[[], None],
    ) -> PeerLink:
        """Return a link to `address`.

        Args:
            on_writable: called when it is connected, and when it accepts messages again.
            on_message: called with each message that arrives; its buffers live as long as they are referred to.
            on_lost: called when it breaks: unanswered messages may be lost.

        Raises:
            ValueError: `address` is not an endpoint, or has a link already; or the router has a limit and a link.
        """
        if not _ENDPOINT.fullmatch(address):
            raise ValueError(f"address {address!r} is not an endpoint: use tcp://<IP address>:<port>")
        if address in self._by_address or (self._limited and self._by_address):
            raise ValueError(f"address {address!r} or its router has a connection: close it first")
        link = self._by_address[address] = PeerLink(self, address, on_writable, on_message, on_lost)
        self._open(link)
        return link

    def send(self, link: PeerLink, frames: Sequence[Frame]) -> bool:
        """See `PeerLink.send`; `link` is connected."""
        try:
            sent = send(self._main.socket, [link.name, *frames])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:  # it broke; its monitor is about to report this
                raise
            sent = False
        if self._limited:
            link.writable = sent and bool(self._main.events() & zmq.POLLOUT)
            self._full = None if link.writable else link
        self._main.recheck()
        return sent

    def drop(self, link: PeerLink) -> None:
        """See `PeerLink.close`."""
        if self._by_address.get(link.address) is link:
            del self._by_address[link.address]
            if link.reopening is not None:
                link.reopening.cancel()
            self._disconnect(link)

    def close(self) -> None:
        """Close all links and the socket."""
        for link in [*self._by_address.values()]:
            self.drop(link)
        if not self._main.socket.closed:
            self._main.socket.disable_monitor()
            self._monitor.close()
            self._main.close()
            self._context.term()

    def _open(self, link: PeerLink) -> None:
        link.reopening = None
        self._observe(0)  # events until now belong to an earlier connection to this address
        self._made += 1
        # A name is never used twice: replies to an earlier connection must not answer this one's calls.
        link.name = b"%d" % self._made
        self._by_name[link.name] = link
        self._main.socket.setsockopt(zmq.CONNECT_ROUTING_ID, link.name)
        self._main.socket.ipv6 = "[" in link.address
        self._main.socket.connect(link.address)
        self._main.recheck()

    def _disconnect(self, link: PeerLink) -> None:
        link.connected = link.writable = False
        if self._full is link:
            self._full = None
        if link.name:
            del self._by_name[link.name]
            link.name = b""
            with contextlib.suppress(zmq.ZMQError):  # libzmq has already dropped it: the peer does not speak ZMTP
                self._main.socket.disconnect(link.address)
            self._main.recheck()

    def _serve(self, events: int) -> None:
        if events & zmq.POLLOUT and (link := self._full) is not None:
            self._full = None
            link.writable = True
            link.on_writable()
        if events & zmq.POLLIN:
            self._deliver(MESSAGES_PER_TURN)
            self._main.recheck()  # more may have arrived; and receiving may have consumed the edge of POLLOUT

    def _deliver(self, limit: int) -> None:
        """Deliver up to `limit` messages that have arrived."""
        for _ in range(limit):
            if self._main.socket.closed or (frames := receive(self._main.socket)) is None:  # closed by a receiver
                return
            name, *rest = frames
            if (link := self._by_name.get(name.bytes)) is not None:
                link.on_message([frame.buffer for frame in rest])

    def _observe(self, events: int) -> None:
        while not self._monitor.socket.closed and self._monitor.socket.poll(0):
            event = parse_monitor_message(self._monitor.socket.recv_multipart())
            link = self._by_address.get(event["endpoint"].decode())
            if link is None or not link.name:
                continue
            if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                link.connected = link.writable = True
                link.on_writable()
            elif event["event"] == zmq.Event.DISCONNECTED and link.connected:
                self._lose(link)

    def _lose(self, link: PeerLink) -> None:
        """Deliver the messages that have arrived, disconnect, and reconnect after a moment."""
        self._deliver(sys.maxsize)
        if link.connected:  # the receiver of a message may have closed it
            self._disconnect(link)
            link.reopening = self._loop.call_later(RECONNECT_MS / 1000, self._open, link)
            link.on_lost()


def _monitor(context: Context, socket: Socket) -> Socket:
    """Return the socket that receives the events of `socket`. It has no high-water mark, which would block libzmq's I/O
    thread.
    """
    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, _LINK_EVENTS)
    monitor = context.socket(zmq.PAIR)
    monitor.rcvhwm = 0
    monitor.connect(address)
    return monitor


class SocketThread:
    """A bound socket, and a thread with the event loop that serves it.

    Everything but `start`, `close` and the attributes is for its loop.

    Args:
        on_message: called on the loop with the frames of each message, the first of them its sender's name. It may
            block, which holds the senders back.
        requests_high_water: messages of a sender in libzmq's buffer, after which it must wait.
        replies_high_water: messages to a peer in libzmq's buffer, beyond which a ROUTER silently drops them; so it must
            exceed the number of outstanding replies.
        max_frame_bytes: larger frames end their connection.

    Attributes:
        endpoint: address of the socket.
        loop: the thread's loop. Other threads reach it with `call_soon_threadsafe`.
        tasks: the running tasks; `close` cancels them.
    """

    def __init__(
        self,
        bind_host: str,
        security: SocketSecurity | None,
        on_message: Callable[[list[zmq.Frame]], None],
        *,
        name: str,
        requests_high_water: int,
        replies_high_water: int,
        max_frame_bytes: int,
    ) -> None:
        self._on_message = on_message
        self._context = Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, send_high_water=replies_high_water, receive_high_water=requests_high_water)
        self._socket.maxmsgsize = max_frame_bytes
        self._gate = PeerGate(self._context, self._socket, security)
        self._socket.ipv6 = ":" in bind_host
        self._socket.bind(f"tcp://{url_host(bind_host)}:*")
        endpoint: Any = self._socket.last_endpoint
        self.endpoint: str = endpoint.rstrip(b"\0").decode()
        self.loop = asyncio.new_event_loop()
        self.tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def unauthenticated(self) -> int:
        """Connections that failed the handshake."""
        return self._gate.refused

    def start(self) -> None:
        """Receive messages from now on."""
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop the thread and wait for its end, up to `timeout_s` seconds if given; given replies are sent."""
        self._closing = True
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)

    def run_task(self, work: Coroutine[object, object, None]) -> None:
        """Run `work` as a task of the loop."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send one message; the socket drops messages to peers that have gone, or do not read."""
        send(self._socket, frames)
        self._watched.recheck()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._watched = LoopSocket(self._socket, self.loop, self._on_ready)
        try:
            self.loop.run_forever()
        finally:
            for task in self.tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*self.tasks, return_exceptions=True))
            self._watched.close(linger_ms=_CLOSE_LINGER_MS)
            self.loop.close()
            self._context.term()

    def _on_ready(self, events: int) -> None:
        if not events & zmq.POLLIN:
            return
        for _ in range(MESSAGES_PER_TURN):
            if self._closing or (frames := receive(self._socket)) is None:
                return
            self._on_message(frames)
        self._watched.recheck()
