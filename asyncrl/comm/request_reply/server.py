"""The answering end of request-reply: I/O in a thread of its own, queued methods in the caller's."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import zmq

from asyncrl.comm.authentication import SourceLog
from asyncrl.comm.codec import CodecError, Frame, Message, decode, encode
from asyncrl.comm.request_reply import messages
from asyncrl.comm.security import SocketSecurity
from asyncrl.comm.sockets import MESSAGES_PER_TURN, Context, LoopSocket, bind, peer_address, receive, send

_log = logging.getLogger(__name__)

ImmediateMethod = Callable[[Message], Awaitable[Message]]
QueuedMethod = Callable[[Message], Message]

_SOCKET_HIGH_WATER = 1000  # requests, and replies, in libzmq's own buffer per client
_CLOSE_LINGER_MS = 500  # for replies given just before `close`


class UnknownMethod(Exception):
    """A call of a method that this server does not have."""


class ServerBusy(Exception):
    """The inbox is full, or too many immediate calls are outstanding."""


@dataclass(frozen=True, slots=True)
class _Call:
    client: bytes
    number: int
    request: Message


class RequestServer:
    """Serves methods at `endpoint`. A method takes the request and returns the reply, whose `kind` does not matter.

    Args:
        bind_host: address of the interface to listen on; also the host that `endpoint` names.
        security: the run's keys, or None for plaintext.
        immediate: async methods, run on the I/O thread's loop.
        queued: methods that `serve_one` runs, in order of arrival.
        inbox_capacity: queued calls waiting at most; more are answered with ServerBusy.
        max_immediate: immediate calls outstanding at most; more are answered with ServerBusy.
        max_bytes: limit of one request.
    """

    def __init__(
        self,
        bind_host: str,
        security: SocketSecurity | None,
        *,
        immediate: Mapping[str, ImmediateMethod] | None = None,
        queued: Mapping[str, QueuedMethod] | None = None,
        inbox_capacity: int = 1024,
        max_immediate: int = 1024,
        max_bytes: int = messages.DEFAULT_MAX_BYTES,
    ) -> None:
        self._immediate = dict(immediate or {})
        self._queued = dict(queued or {})
        if both := self._immediate.keys() & self._queued.keys():
            raise ValueError(f"method {min(both)!r} is both immediate and queued: choose one")
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
        """The I/O thread's loop: immediate methods run here. Other threads reach it with `call_soon_threadsafe`."""
        return self._loop

    @property
    def unauthenticated(self) -> int:
        """Connections that failed the handshake."""
        return self._gate.refused

    def serve_one(self, timeout_s: float) -> bool:
        """Run the oldest queued call in this thread and answer it; False if none came within `timeout_s` seconds.

        What the method raises goes to the client as RemoteError; an exit or interrupt goes on here as well.
        """
        try:
            call = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return False
        try:
            reply, failed = self._queued[call.request.kind](call.request), False
        except Exception as error:
            _log.exception("method %s failed", call.request.kind)
            reply, failed = messages.error_message(error), True
        except BaseException as error:
            self._answer_from_thread(call, messages.error_message(error), failed=True)
            raise
        self._answer_from_thread(call, reply, failed=failed)
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop serving; outstanding calls see their connection break. Replies given before are sent first."""
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
        try:
            number, encoded = messages.unpack_request([frame.buffer for frame in frames[1:]])
        except CodecError as error:
            self._drop(frames, error)
            return
        try:
            call = _Call(frames[0].bytes, number, decode(encoded, max_bytes=self._max_bytes))
        except CodecError as error:
            self._drop(frames, error)
            self._send(frames[0].bytes, number, messages.error_message(error), failed=True)
            return
        self._dispatch(call)

    def _dispatch(self, call: _Call) -> None:
        method = call.request.kind
        if method in self._immediate and len(self._tasks) < self._max_immediate:
            task = self._loop.create_task(self._run_immediate(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif method in self._immediate:
            self._refuse(call, ServerBusy(f"{self._max_immediate} immediate calls are outstanding: call again later"))
        elif method in self._queued:
            try:
                self._inbox.put_nowait(call)
            except queue.Full:
                self._refuse(call, ServerBusy(f"{self._inbox.maxsize} calls wait in the inbox: call again later"))
        else:
            known = ", ".join(sorted([*self._immediate, *self._queued]))
            self._refuse(call, UnknownMethod(f"there is no method {method!r:.80}; there are: {known}"))

    async def _run_immediate(self, call: _Call) -> None:
        try:
            reply, failed = await self._immediate[call.request.kind](call.request), False
        except Exception as error:
            _log.exception("method %s failed", call.request.kind)
            reply, failed = messages.error_message(error), True
        self._send(call.client, call.number, reply, failed=failed)

    def _refuse(self, call: _Call, error: Exception) -> None:
        self._send(call.client, call.number, messages.error_message(error), failed=True)

    def _answer_from_thread(self, call: _Call, reply: Message, *, failed: bool) -> None:
        """Answer from the thread of `serve_one`; encoding, and its copy, happen here and not on the I/O thread."""
        frames = self._encode(call.number, reply, failed=failed)
        try:
            self._loop.call_soon_threadsafe(self._send_frames, call.client, frames)
        except RuntimeError:
            _log.warning("the server was closed while %s ran: its answer is lost", call.request.kind)

    def _send(self, client: bytes, number: int, reply: Message, *, failed: bool) -> None:
        self._send_frames(client, self._encode(number, reply, failed=failed))

    def _encode(self, number: int, reply: Message, *, failed: bool) -> list[Frame]:
        try:
            return messages.pack_reply(number, encode(reply), failed=failed)
        except CodecError as error:
            _log.error("a reply cannot be encoded: %s", error)
            return messages.pack_reply(number, encode(messages.error_message(error)), failed=True)

    def _send_frames(self, client: bytes, frames: list[Frame]) -> None:
        send(self._socket, [client, *frames])  # a ROUTER drops what is for a client that has gone
        self._link.recheck()

    def _drop(self, frames: list[zmq.Frame], error: CodecError) -> None:
        self.malformed += 1
        self._log.note(peer_address(frames), str(error))
