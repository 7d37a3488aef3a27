"""Calls from one process to another, for example from the master to its workers.

A client holds one connection to one server and may have many calls outstanding; requests arrive in the order of the
calls. A call is never sent twice: on a broken connection every outstanding one raises PeerGone, and the caller decides
whether to repeat it. The server's I/O runs in a separate thread, and its handlers are of two kinds:

- `immediate`: an async function on the I/O thread's loop. It answers while the main thread computes (heartbeats,
  metadata), and may wait (long polls). They start in order of arrival and may end in any order.
- `queued`: a plain function that the main thread runs with `serve_one`, strictly in order of arrival over all clients:
  work on the device.

A package defines the types of the calls that it serves, and its callers use the same types:

    class PublishedWeights(Reply, frozen=True):
        path: str

    class Publish(Request[PublishedWeights], frozen=True):
        version: int

The name on the wire, the method, is the class's in snake case (`publish`). A body is msgpack and must be of its type
exactly: a missing, unknown or wrong field is refused with its path where it arrives. No arrays and no pickle; free-form
parts are annotated `dict[str, Any]`.

    client ─▶ server    [ id + method, request ]                        id: the call's number, uint64, little-endian
    server ─▶ client    [ id + method, reply ]  or  [ id, failure ]     `Failure`
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import struct
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, cast, get_args

import msgspec
import zmq

from asyncrl.comm.security import SocketSecurity, SourceLog
from asyncrl.comm.sockets import PeerRouter, SocketThread, peer_address
from asyncrl.comm.typed import msgpack_decoder
from asyncrl.comm.waits import RunningTimeout

_log = logging.getLogger(__name__)

_ID = struct.Struct("<Q")
_MAX_TEXT = 32_000  # characters of a traceback: enough for any, bounded for a hostile exception
MAX_BYTES = 64 << 20
"""Limit of one body: the master's metadata of a very large batch."""
MOST_QUEUED = MOST_IMMEDIATE = 1024
"""Outstanding calls of a server, of either kind; further ones are answered with ServerBusy."""
_SOCKET_HIGH_WATER = 1000  # requests, and replies, in libzmq's own buffer per client


# Messages.


class MessageError(ValueError):
    """A body is not of its type, cannot be encoded or is too large; or frames are neither a request nor a reply."""


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the replies' types."""


class Done(Reply, frozen=True):
    """Reply of a call that returns nothing."""


class Failure(Reply, frozen=True):
    """An exception as the client receives it: its type's name, message and traceback as text."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return `error` as a failure."""
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error)[:_MAX_TEXT], text[-_MAX_TEXT:])


R = TypeVar("R", bound=Reply)
_B = TypeVar("_B", bound=msgspec.Struct)


class Request(msgspec.Struct, Generic[R], frozen=True, forbid_unknown_fields=True):
    """Base of the requests' types; subclass `Request[<type of the reply>]`.

    Attributes:
        method: the call's name on the wire and in errors, from the class's name.
        reply_type: the type of the server's answer.
    """

    method: ClassVar[str]
    reply_type: ClassVar[type[Reply]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        (cls.reply_type,) = get_args(cls.__dict__["__orig_bases__"][0])
        cls.method = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def encode(body: msgspec.Struct) -> bytes:
    """Return `body` as bytes.

    Raises:
        MessageError: a free-form part of it is not plain data, or it is larger than MAX_BYTES.
    """
    try:
        encoded = msgspec.msgpack.encode(body, enc_hook=_as_builtin)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(f"{type(body).__name__} is not plain data: {error}") from error
    if len(encoded) > MAX_BYTES:
        raise MessageError(f"{type(body).__name__} takes {len(encoded)} bytes, limit {MAX_BYTES}")
    return encoded


def decode(encoded: memoryview, body_type: type[_B]) -> _B:
    """Return the body in `encoded`, which may be any bytes, as `body_type`.

    Raises:
        MessageError: it is not of that type. The message has the path of the first wrong field and the expected type.
    """
    if encoded.nbytes > MAX_BYTES:
        raise MessageError(f"{body_type.__name__} of {encoded.nbytes} bytes is over the limit of {MAX_BYTES}")
    try:
        body: _B = msgpack_decoder(body_type).decode(encoded)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MessageError(f"{body_type.__name__}: {error}") from error
    return body


def pack(call: int, method: str, body: msgspec.Struct) -> list[bytes]:
    """Return the frames of call number `call`, or of its answer; a failure's method is empty.

    Raises:
        MessageError: see `encode`.
    """
    return [_ID.pack(call) + method.encode(), encode(body)]


def unpack(frames: Sequence[memoryview]) -> tuple[int, str, memoryview]:
    """Return the call's number, its method and the body, still encoded.

    Raises:
        MessageError: this is not a message of request-reply.
    """
    if len(frames) != 2 or len(frames[0]) < _ID.size:
        raise MessageError("message is not a call's number and a body")
    return _ID.unpack_from(frames[0])[0], str(frames[0][_ID.size :], errors="replace"), frames[1]


def _as_builtin(value: Any) -> Any:
    """Return `value` as the built-in number that it derives from. `numpy.float64` is a float, and occurs in users'
    statistics.
    """
    for builtin in (float, int):
        if isinstance(value, builtin):
            return builtin(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


# The calling end, for an asyncio loop.


class RemoteError(Exception):
    """The handler raised. `kind` is the exception's type name, `remote_traceback` the server's traceback as text."""

    def __init__(self, peer: str, method: str, failure: Failure) -> None:
        self.kind, self.message, self.remote_traceback = failure.kind, failure.message, failure.traceback
        super().__init__(
            f"{method} at {peer} raised {self.kind}: {self.message}\n"
            f"--- remote traceback\n{self.remote_traceback.rstrip()}"
        )


class RequestTimeout(TimeoutError):
    """No answer within the time limit; the server may still be working on it."""


class PeerGone(Exception):
    """The connection broke or was never made; the call may or may not have been executed."""


@dataclass(slots=True, eq=False)
class _Outstanding:
    """A call that has not returned; `frames` is its message until it was sent."""

    number: int
    request: Request[Any]
    frames: list[bytes] | None
    answer: asyncio.Future[Reply]

    def fail(self, error: Exception) -> None:
        """Raise `error` from the call, unless it has ended."""
        if not self.answer.done():
            self.answer.set_exception(error)


class RequestClient:
    """Makes calls to the server at `address`.

    Create and use it in one running asyncio loop.

    Args:
        by: the run's keys, None for plaintext; or a router shared with other clients, which has its own keys and which
            its owner closes after them.
        name: the server's name in errors, e.g. `model_worker/0`; the address by default.

    Raises:
        ValueError: `address` is not an endpoint, or another client of `router` has it.
    """

    def __init__(
        self,
        address: str,
        by: SocketSecurity | PeerRouter | None,
        *,
        name: str | None = None,
    ) -> None:
        self._peer = f"{name} ({address})" if name else address
        self._calls: dict[int, _Outstanding] = {}
        self._unsent: deque[_Outstanding] = deque()
        self._next_call = 0
        self._closed = False
        self._log = SourceLog("reply")
        router = PeerRouter(by) if by is None or isinstance(by, SocketSecurity) else by
        self._own_router = None if router is by else router
        try:
            self._link = router.connect(
                address,
                on_writable=self._flush,
                on_message=self._on_message,
                on_lost=lambda: self._fail_all("the connection broke: the process died, or the network failed"),
            )
        except ValueError:
            if self._own_router is not None:
                self._own_router.close()
            raise

    async def call(self, request: Request[R], *, timeout_s: float) -> R:
        """Make the call and return its reply. Requests reach the server in the order of the calls.

        Raises:
            RemoteError: the handler raised, the server does not know the call, or a field was invalid.
            RequestTimeout: no answer within `timeout_s` seconds in which this process ran, while the connection
                stayed open.
            PeerGone: the connection broke, could not be made within `timeout_s`, or the client was closed.
            MessageError: the request cannot be encoded, or the reply is not of its type.
        """
        if self._closed:
            raise PeerGone(f"call of {request.method} at {self._peer}: the client is closed")
        frames = pack(self._next_call, request.method, request)
        call = _Outstanding(self._next_call, request, frames, asyncio.get_running_loop().create_future())
        self._unsent.append(call)
        self._next_call += 1
        self._calls[call.number] = call
        self._flush()
        try:
            async with RunningTimeout(timeout_s):
                return cast(R, await call.answer)
        except TimeoutError as error:
            what = f"call of {request.method} at {self._peer}"
            if call.frames is not None:
                raise PeerGone(f"{what}: no connection within {timeout_s:g} s") from error
            raise RequestTimeout(f"{what}: no answer within {timeout_s:g} s") from error
        finally:
            del self._calls[call.number]
            if call.frames is not None:
                self._unsent.remove(call)

    def close(self) -> None:
        """Disconnect; outstanding calls raise PeerGone."""
        if not self._closed:
            self._closed = True
            self._fail_all("the client was closed")
            self._link.close()
            if self._own_router is not None:
                self._own_router.close()

    def _flush(self) -> None:
        while self._unsent and (frames := self._unsent[0].frames) is not None and self._link.send(frames):
            self._unsent.popleft().frames = None

    def _on_message(self, frames: list[memoryview]) -> None:
        try:
            number, method, body = unpack(frames)
        except MessageError as error:
            self._log.note(self._peer, str(error))
            return
        call = self._calls.get(number)
        if call is None or call.answer.done():
            return  # the call has timed out or was cancelled
        request = call.request
        try:
            reply = decode(body, request.reply_type if method else Failure)
        except MessageError as error:
            call.fail(MessageError(f"reply to {request.method} from {self._peer}: {error}"))
            return
        if isinstance(reply, Failure):
            call.fail(RemoteError(self._peer, request.method, reply))
        else:
            call.answer.set_result(reply)

    def _fail_all(self, reason: str) -> None:
        """Raise PeerGone from the calls that were sent; from all calls once the client is closed."""
        for call in self._calls.values():
            if call.frames is None or self._closed:
                call.fail(PeerGone(f"call of {call.request.method} at {self._peer}: {reason}"))


# The answering end: I/O in a separate thread, queued handlers in the thread of `serve_one`.

ImmediateHandler: TypeAlias = Callable[[Any], Awaitable[Reply]]
QueuedHandler: TypeAlias = Callable[[Any], Reply]
"""A function from a request of the registered type to that type's reply."""


class UnknownCall(Exception):
    """A call that this server does not serve."""


class ServerBusy(Exception):
    """The inbox is full, or too many immediate calls are outstanding."""


@dataclass(frozen=True, slots=True)
class _Received:
    client: bytes
    number: int
    request: Request[Any]


class RequestServer:
    """Serves calls at `endpoint`, with one handler per type of request, immediate or queued.

    Args:
        bind_host: address of the interface to listen on; also the host that `endpoint` names.
        immediate: async handlers, run on the I/O thread's loop.
        queued: handlers that `serve_one` runs, in order of arrival.

    Attributes:
        endpoint: address for clients.
        loop: loop of the I/O thread, on which immediate handlers run. Other threads reach it with
            `call_soon_threadsafe`.

    Raises:
        ValueError: two requests have the same method.
    """

    def __init__(
        self,
        bind_host: str,
        security: SocketSecurity | None,
        *,
        immediate: Mapping[type[Request[Any]], ImmediateHandler] | None = None,
        queued: Mapping[type[Request[Any]], QueuedHandler] | None = None,
    ) -> None:
        self._immediate = dict(immediate or {})
        self._queued = dict(queued or {})
        self._types: dict[str, type[Request[Any]]] = {}
        for request_type in (*self._immediate, *self._queued):
            if request_type.method in self._types:
                raise ValueError(f"{request_type.method!r} is served twice: choose one handler")
            self._types[request_type.method] = request_type
        self._inbox: queue.Queue[_Received] = queue.Queue(MOST_QUEUED)
        self._log = SourceLog("request")
        self.malformed = 0
        self._io = SocketThread(
            bind_host,
            security,
            self._on_request,
            name="request-server",
            requests_high_water=_SOCKET_HIGH_WATER,
            replies_high_water=_SOCKET_HIGH_WATER,
            max_frame_bytes=2 * MAX_BYTES,
        )
        self.endpoint, self.loop = self._io.endpoint, self._io.loop
        self._io.start()

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
            _log.exception("%s failed", call.request.method)
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
            number, method, body = unpack([frame.buffer for frame in frames[1:]])
        except MessageError as error:
            self._count_malformed(frames, error)
            return
        if (request_type := self._types.get(method)) is None:
            unknown = UnknownCall(f"there is no call {method!r:.80}; the calls are: {', '.join(sorted(self._types))}")
            self._count_malformed(frames, unknown)
            self._fail(client, number, unknown)
            return
        try:
            request = decode(body, request_type)
        except MessageError as error:
            self._count_malformed(frames, error)
            self._fail(client, number, error)
            return
        self._dispatch(_Received(client, number, request))

    def _dispatch(self, call: _Received) -> None:
        busy = None
        if type(call.request) in self._queued:
            try:
                self._inbox.put_nowait(call)
            except queue.Full:
                busy = f"{self._inbox.maxsize} calls wait in the inbox"
        elif len(self._io.tasks) < MOST_IMMEDIATE:
            self._io.run_task(self._run_immediate(call))
        else:
            busy = f"{MOST_IMMEDIATE} immediate calls are outstanding"
        if busy:
            self._fail(call.client, call.number, ServerBusy(f"{busy}: call again later"))

    async def _run_immediate(self, call: _Received) -> None:
        try:
            reply = await self._immediate[type(call.request)](call.request)
        except Exception as error:
            _log.exception("%s failed", call.request.method)
            reply = Failure.of(error)
        self._io.send(self._pack(call, reply))

    def _answer_from_thread(self, call: _Received, reply: Reply) -> None:
        """Answer from the thread of `serve_one`, which also encodes the reply."""
        frames = self._pack(call, reply)
        try:
            self._io.loop.call_soon_threadsafe(self._io.send, frames)
        except RuntimeError:
            _log.warning("the server was closed while %s ran: its answer is lost", call.request.method)

    def _fail(self, client: bytes, number: int, error: Exception) -> None:
        self._io.send([client, *pack(number, "", Failure.of(error))])

    def _pack(self, call: _Received, reply: Reply) -> list[bytes]:
        """Return the frames of the message that answers `call`."""
        method = call.request.method
        try:
            frames = pack(call.number, "" if isinstance(reply, Failure) else method, reply)
        except MessageError as error:
            _log.error("the reply to %s cannot be encoded: %s", method, error)
            frames = pack(call.number, "", Failure.of(error))
        return [call.client, *frames]

    def _count_malformed(self, frames: list[zmq.Frame], error: MessageError | UnknownCall) -> None:
        self.malformed += 1
        self._log.note(peer_address(frames), str(error))
