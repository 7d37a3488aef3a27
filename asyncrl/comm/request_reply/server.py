"""The answering end of request-reply: I/O in a thread of its own, queued methods in the caller's."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq

from asyncrl.comm.request_reply import messages
from asyncrl.comm.request_reply.messages import Failure, MessageError, Reply, Request
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import MESSAGES_PER_TURN, Context, LoopSocket, bind, peer_address, receive, send

_log = logging.getLogger(__name__)

ImmediateHandler: TypeAlias = Callable[[Any], Awaitable[Reply]]
QueuedHandler: TypeAlias = Callable[[Any], Reply]
"""Takes a request of the type under which it is registered and returns that type's reply."""

_SOCKET_HIGH_WATER = 1000  # requests, and replies, in libzmq's own buffer per client
_CLOSE_LINGER_MS = 500  # for replies given just before `close`


class UnknownCall(Exception):
    """A call that this server does not serve."""


class ServerBusy(Exception):
    """The inbox is full, or too many immediate calls are outstanding."""


@dataclass(frozen=True, slots=True)
class _Call:
    client: bytes
    number: int
    request: Request[Any]


class RequestServer:
    """Serves calls at `endpoint`, with one handler per type of request, immediate or queued.

    Args:
        bind_host: address of the interface to listen on; also the host that `endpoint` names.
        security: the run's keys, or None for plaintext.
        immediate: async handlers, run on the I/O thread's loop.
        queued: handlers that `serve_one` runs, in order of arrival.
        inbox_capacity: queued calls waiting at most; more are answered with ServerBusy.
        max_immediate: immediate calls outstanding at most; more are answered with ServerBusy.
        max_bytes: limit of one request.

    Raises:
        ValueError: two requests have the same verb.
    """

    def __init__(
        self,
        bind_host: str,
        security: SocketSecurity | None,
        *,
        immediate: Mapping[type[Request[Any]], ImmediateHandler] | None = None,
        queued: Mapping[type[Request[Any]], QueuedHandler] | None = None,
        inbox_capacity: int = 1024,
        max_immediate: int = 1024,
        max_bytes: int = messages.DEFAULT_MAX_BYTES,
    ) -> None:
        self._immediate = dict(immediate or {})
        self._queued = dict(queued or {})
        self._types: dict[str, type[Request[Any]]] = {}
        for request_type in (*self._immediate, *self._queued):
            if request_type.verb in self._types:
                raise ValueError(f"{request_type.verb!r} is served twice: choose one handler")
            self._types[request_type.verb] = request_type
        self._inbox: queue.Queue[_Call] = queue.Queue(inbox_capacity)
        self._max_immediate = max_immediate
        self._max_bytes = max_bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = SourceLog("request")
        self.malformed = 0
        self._context = Context()
        self._socket, self.endpoint, self._gate = bind(
            self._context,
            bind_host,
            security,
            requests_high_water=_SOCKET_HIGH_WATER,
            replies_high_water=_SOCKET_HIGH_WATER,
            max_frame_bytes=2 * max_bytes,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="request-server", daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The I/O thread's loop: immediate handlers run here. Other threads reach it with `call_soon_threadsafe`."""
        return self._loop

    @property
    def unauthenticated(self) -> int:
        """Connections that failed the handshake."""
        return self._gate.refused

    def serve_one(self, timeout_s: float) -> bool:
        """Run the oldest queued call in this thread and answer it; False if none came within `timeout_s` seconds.

        An exception of the handler reaches the client as RemoteError; an exit or interrupt is raised here as well.
        """
        try:
            call = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return False
        try:
            reply = self._queued[type(call.request)](call.request)
        except Exception as error:
            _log.exception("%s failed", call.request.verb)
            reply = Failure.of(error)
        except BaseException as error:
            self._answer_from_thread(call, Failure.of(error))
            raise
        self._answer_from_thread(call, reply)
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop serving. Replies given so far are sent; for outstanding calls the connection breaks."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._link = LoopSocket(self._socket, self._loop, self._on_ready)
        try:
            self._loop.run_forever()
        finally:
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._link.close(linger_ms=_CLOSE_LINGER_MS)
            self._loop.close()
            self._context.term()

    def _on_ready(self, events: int) -> None:
        if not events & zmq.POLLIN:
            return
        for _ in range(MESSAGES_PER_TURN):
            if (frames := receive(self._socket)) is None:
                return
            self._on_request(frames)
        self._link.recheck()

    def _on_request(self, frames: list[zmq.Frame]) -> None:
        client = frames[0].bytes
        try:
            number, verb, body = messages.unpack([frame.buffer for frame in frames[1:]])
        except MessageError as error:
            self._count_malformed(frames, error)
            return
        if (request_type := self._types.get(verb)) is None:
            unknown = UnknownCall(f"there is no call {verb!r:.80}; there are: {', '.join(sorted(self._types))}")
            self._count_malformed(frames, unknown)
            self._fail(client, number, unknown)
            return
        try:
            request = messages.decode(body, request_type, self._max_bytes)
        except MessageError as error:
            self._count_malformed(frames, error)
            self._fail(client, number, error)
            return
        self._dispatch(_Call(client, number, request))

    def _dispatch(self, call: _Call) -> None:
        busy = None
        if type(call.request) in self._queued:
            try:
                self._inbox.put_nowait(call)
            except queue.Full:
                busy = f"{self._inbox.maxsize} calls wait in the inbox"
        elif len(self._tasks) < self._max_immediate:
            task = self._loop.create_task(self._run_immediate(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            busy = f"{self._max_immediate} immediate calls are outstanding"
        if busy:
            self._fail(call.client, call.number, ServerBusy(f"{busy}: call again later"))

    async def _run_immediate(self, call: _Call) -> None:
        try:
            reply = await self._immediate[type(call.request)](call.request)
        except Exception as error:
            _log.exception("%s failed", call.request.verb)
            reply = Failure.of(error)
        self._send_frames(call.client, self._pack(call, reply))

    def _answer_from_thread(self, call: _Call, reply: Reply) -> None:
        """Answer from the thread of `serve_one`, which also encodes the reply."""
        frames = self._pack(call, reply)
        try:
            self._loop.call_soon_threadsafe(self._send_frames, call.client, frames)
        except RuntimeError:
            _log.warning("the server was closed while %s ran: its answer is lost", call.request.verb)

    def _fail(self, client: bytes, number: int, error: Exception) -> None:
        self._send_frames(client, messages.pack(number, "", Failure.of(error)))

    def _pack(self, call: _Call, reply: Reply) -> list[bytes]:
        verb = call.request.verb
        try:
            return messages.pack(call.number, "" if isinstance(reply, Failure) else verb, reply)
        except MessageError as error:
            _log.error("the reply to %s cannot be encoded: %s", verb, error)
            return messages.pack(call.number, "", Failure.of(error))

    def _send_frames(self, client: bytes, frames: list[bytes]) -> None:
        send(self._socket, [client, *frames])  # a ROUTER drops what is for a client that has gone
        self._link.recheck()

    def _count_malformed(self, frames: list[zmq.Frame], error: MessageError | UnknownCall) -> None:
        self.malformed += 1
        self._log.note(peer_address(frames), str(error))
