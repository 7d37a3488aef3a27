"""The server's end of its connections: a bound socket, and a thread with the event loop that serves it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence

import zmq

from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import MESSAGES_PER_TURN, Context, Frame, LoopSocket, bind, receive, send

_SOCKET_HIGH_WATER = 1000  # requests, and replies, in libzmq's own buffer per client
_CLOSE_LINGER_MS = 500  # for replies given just before `close`


class IoThread:
    """Receives and sends messages in a thread. Everything but `start`, `close` and the attributes is for its loop.

    Args:
        bind_host: address of the interface to listen on.
        security: the run's keys, or None for plaintext.
        on_message: called on the loop with the frames of each message.
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
        max_frame_bytes: int,
    ) -> None:
        self._on_message = on_message
        self._context = Context()
        self._socket, self.endpoint, self._gate = bind(
            self._context,
            bind_host,
            security,
            requests_high_water=_SOCKET_HIGH_WATER,
            replies_high_water=_SOCKET_HIGH_WATER,
            max_frame_bytes=max_frame_bytes,
        )
        self.loop = asyncio.new_event_loop()
        self.tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="request-server", daemon=True)

    @property
    def unauthenticated(self) -> int:
        """Connections that failed the handshake."""
        return self._gate.refused

    def start(self) -> None:
        """Receive messages from now on."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop the thread and wait up to `timeout_s` seconds for its end; given replies are sent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)

    def run_task(self, work: Coroutine[object, object, None]) -> None:
        """Run `work` as a task of the loop."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send one message; the socket drops messages to clients that have gone."""
        send(self._socket, frames)
        self._link.recheck()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._link = LoopSocket(self._socket, self.loop, self._on_ready)
        try:
            self.loop.run_forever()
        finally:
            for task in self.tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*self.tasks, return_exceptions=True))
            self._link.close(linger_ms=_CLOSE_LINGER_MS)
            self.loop.close()
            self._context.term()

    def _on_ready(self, events: int) -> None:
        if not events & zmq.POLLIN:
            return
        for _ in range(MESSAGES_PER_TURN):
            if (frames := receive(self._socket)) is None:
                return
            self._on_message(frames)
        self._link.recheck()
