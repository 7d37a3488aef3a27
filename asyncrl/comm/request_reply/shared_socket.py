"""The connections of many clients to their servers, over one socket.

The socket is a ROUTER that connects instead of binding. It names each connection itself and routes messages both ways
by these names, so no server can use another's. A connection takes one descriptor, the minimum for TCP. With 1,256
connections, the master's limit of open files must be above 1,256.

The servers bind, not the master. A ROUTER that binds cannot see whose connection broke, so a dead process would be
noticed only by its silence. If it connects, its monitor reports the address.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import sys
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import MESSAGES_PER_TURN, RECONNECT_MS, Context, Frame, LoopSocket, connecting, receive, send

DESCRIPTORS_PER_CONNECTION = 1
_REPLIES_HIGH_WATER = 1000  # in libzmq's own buffer per connection
_EVENTS = int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
_ENDPOINT = re.compile(r"tcp://([\d.]+|\[[\da-f:.]+\]):\d+")
"""Form of a bound socket's endpoint, and of the address that the monitor reports. Host names do not match."""


class Connection:
    """One of a router's connections. It accepts messages only while connected, so nothing is queued to a dead peer.

    When it breaks, received messages are delivered, unsent ones are dropped, and it reconnects after a moment.
    """

    def __init__(
        self,
        router: CallRouter,
        address: str,
        on_connected: Callable[[], None],
        on_message: Callable[[list[memoryview]], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.address, self.connected = address, False
        self.on_connected, self.on_message, self.on_lost = on_connected, on_message, on_lost
        self._router = router

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send `frames`; return False while not connected."""
        return self._router.send(self, frames)

    def close(self) -> None:
        """Disconnect; messages that libzmq has not sent are discarded."""
        self._router.drop(self)


class CallRouter:
    """Connections to bound sockets, each at a different address. Create and use it in one running asyncio loop.

    Args:
        security: the run's keys, or None for plaintext.
    """

    def __init__(self, security: SocketSecurity | None) -> None:
        self.security = security
        self._loop = asyncio.get_running_loop()
        self._context = Context()
        socket = connecting(self._context, zmq.ROUTER, security, high_water=_REPLIES_HIGH_WATER)
        socket.sndhwm = 0  # no limit: calls would else wait in their clients, and each has a caller with a time limit
        socket.router_mandatory = True
        self._monitor = LoopSocket(_monitor(self._context, socket), self._loop, self._observe)
        self._main = LoopSocket(socket, self._loop, self._serve)
        self._by_address: dict[str, Connection] = {}
        self._by_name: dict[bytes, Connection] = {}
        self._names: dict[Connection, bytes] = {}  # of connections that exist or are being made
        self._made = 0
        self._again: dict[Connection, asyncio.TimerHandle] = {}

    def connect(
        self,
        address: str,
        *,
        on_connected: Callable[[], None],
        on_message: Callable[[list[memoryview]], None],
        on_lost: Callable[[], None],
    ) -> Connection:
        """Return a connection to `address`. It reconnects whenever it breaks, until it is closed.

        Args:
            on_connected: called when it accepts messages.
            on_message: called with each message that arrives; its buffers live as long as they are referred to.
            on_lost: called when it breaks: unanswered messages may be lost.

        Raises:
            ValueError: `address` is not an endpoint, or has a connection already.
        """
        if not _ENDPOINT.fullmatch(address):
            raise ValueError(f"address {address!r} is not an endpoint: use tcp://<IP address>:<port>")
        if address in self._by_address:
            raise ValueError(f"address {address!r} has a connection: close it first")
        connection = self._by_address[address] = Connection(self, address, on_connected, on_message, on_lost)
        self._open(connection)
        return connection

    def send(self, connection: Connection, frames: Sequence[Frame]) -> bool:
        """See `Connection.send`."""
        if not connection.connected:
            return False
        try:
            return send(self._main.socket, [self._names[connection], *frames])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:  # it broke; its monitor is about to report this
                raise
            return False
        finally:
            self._main.recheck()

    def drop(self, connection: Connection) -> None:
        """See `Connection.close`."""
        if self._by_address.get(connection.address) is connection:
            del self._by_address[connection.address]
            if (again := self._again.pop(connection, None)) is not None:
                again.cancel()
            self._disconnect(connection)

    def close(self) -> None:
        """Disconnect all."""
        for connection in [*self._by_address.values()]:
            self.drop(connection)
        if not self._main.socket.closed:
            self._main.socket.disable_monitor()
            self._monitor.close()
            self._main.close()
            self._context.term()

    def _open(self, connection: Connection) -> None:
        self._again.pop(connection, None)
        self._observe(0)  # events until now belong to an earlier connection to this address
        self._made += 1
        # A name is never used twice: replies to an earlier connection must not answer this one's calls.
        name = self._names[connection] = b"%d" % self._made
        self._by_name[name] = connection
        self._main.socket.setsockopt(zmq.CONNECT_ROUTING_ID, name)
        self._main.socket.ipv6 = "[" in connection.address
        self._main.socket.connect(connection.address)
        self._main.recheck()

    def _disconnect(self, connection: Connection) -> None:
        connection.connected = False
        if (name := self._names.pop(connection, None)) is not None:
            del self._by_name[name]
            with contextlib.suppress(zmq.ZMQError):  # libzmq has already dropped it: the peer does not speak ZMTP
                self._main.socket.disconnect(connection.address)
            self._main.recheck()

    def _serve(self, events: int) -> None:
        if events & zmq.POLLIN:
            self._deliver(MESSAGES_PER_TURN)
            self._main.recheck()  # there may be more

    def _deliver(self, limit: int) -> None:
        """Deliver up to `limit` messages that have arrived."""
        for _ in range(limit):
            if self._main.socket.closed or (frames := receive(self._main.socket)) is None:  # closed by a receiver
                return
            name, *rest = frames
            if (connection := self._by_name.get(name.bytes)) is not None:
                connection.on_message([frame.buffer for frame in rest])

    def _observe(self, events: int) -> None:
        while not self._monitor.socket.closed and self._monitor.socket.poll(0):
            event = parse_monitor_message(self._monitor.socket.recv_multipart())
            connection = self._by_address.get(event["endpoint"].decode())
            if connection is None or connection not in self._names:
                continue
            if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                connection.connected = True
                connection.on_connected()
            elif event["event"] == zmq.Event.DISCONNECTED and connection.connected:
                self._lose(connection)

    def _lose(self, connection: Connection) -> None:
        """Deliver the messages that have arrived, disconnect, and reconnect after a moment."""
        self._deliver(sys.maxsize)
        if connection.connected:  # the receiver of a message may have closed it
            self._disconnect(connection)
            self._again[connection] = self._loop.call_later(RECONNECT_MS / 1000, self._open, connection)
            connection.on_lost()


def _monitor(context: Context, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Return the socket that receives the events of `socket`. It has no high-water mark, which would block libzmq's I/O
    thread.
    """
    address = f"inproc://monitor-{id(socket)}"
    socket.monitor(address, _EVENTS)
    monitor = context.socket(zmq.PAIR)
    monitor.rcvhwm = 0
    monitor.connect(address)
    return monitor
