"""The answering end of request-reply: I/O in a separate thread, queued handlers in the thread of `serve_one`."""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import zmq

from asyncrl.comm.request_reply import messages
from asyncrl.comm.request_reply.messages import Failure, MessageError, Reply, Request
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import SocketThread, peer_address

_log = logging.getLogger(__name__)

_SOCKET_HIGH_WATER = 1000  # requests, and replies, in libzmq's own buffer per client
ImmediateHandler: TypeAlias = Callable[[Any], Awaitable[Reply]]
QueuedHandler: TypeAlias = Callable[[Any], Reply]
"""A function from a request of the registered type to that type's reply."""


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
        inbox_capacity: largest number of waiting queued calls; further calls are answered with ServerBusy.
        max_immediate: largest number of outstanding immediate calls; further calls are answered with ServerBusy.
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
        self._log = SourceLog("request")
        self.malformed = 0
        self._io = SocketThread(
            bind_host,
            security,
            self._on_request,
            name="request-server",
            requests_high_water=_SOCKET_HIGH_WATER,
            replies_high_water=_SOCKET_HIGH_WATER,
            max_frame_bytes=2 * max_bytes,
        )
        self._io.start()

    @property
    def endpoint(self) -> str:
        """Address for clients."""
        return self._io.endpoint

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The I/O thread's loop: immediate handlers run here. Other threads reach it with `call_soon_threadsafe`."""
        return self._io.loop

    @property
    def unauthenticated(self) -> int:
        """Connections that failed the handshake."""
        return self._io.unauthenticated

    def serve_one(self, timeout_s: float) -> bool:
        """Run the oldest queued call in this thread and answer it; return False if no call came within `timeout_s`
        seconds.

        The client receives an exception of the handler as RemoteError. An exit or interrupt is also raised here.
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
        """Stop serving. Finished replies are sent; for outstanding calls the connection breaks."""
        self._io.close(timeout_s)

    def _on_request(self, frames: list[zmq.Frame]) -> None:
        client = frames[0].bytes
        try:
            number, verb, body = messages.unpack([frame.buffer for frame in frames[1:]])
        except MessageError as error:
            self._count_malformed(frames, error)
            return
        if (request_type := self._types.get(verb)) is None:
            unknown = UnknownCall(f"there is no call {verb!r:.80}; the calls are: {', '.join(sorted(self._types))}")
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
        elif len(self._io.tasks) < self._max_immediate:
            self._io.run_task(self._run_immediate(call))
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
        self._io.send(self._pack(call, reply))

    def _answer_from_thread(self, call: _Call, reply: Reply) -> None:
        """Answer from the thread of `serve_one`, which also encodes the reply."""
        frames = self._pack(call, reply)
        try:
            self._io.loop.call_soon_threadsafe(self._io.send, frames)
        except RuntimeError:
            _log.warning("the server was closed while %s ran: its answer is lost", call.request.verb)

    def _fail(self, client: bytes, number: int, error: Exception) -> None:
        self._io.send([client, *messages.pack(number, "", Failure.of(error))])

    def _pack(self, call: _Call, reply: Reply) -> list[bytes]:
        """Return the frames of the message that answers `call`."""
        verb = call.request.verb
        try:
            frames = messages.pack(call.number, "" if isinstance(reply, Failure) else verb, reply)
        except MessageError as error:
            _log.error("the reply to %s cannot be encoded: %s", verb, error)
            frames = messages.pack(call.number, "", Failure.of(error))
        return [call.client, *frames]

    def _count_malformed(self, frames: list[zmq.Frame], error: MessageError | UnknownCall) -> None:
        self.malformed += 1
        self._log.note(peer_address(frames), str(error))
