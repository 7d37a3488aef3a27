"""The calling end of request-reply, for an asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

from asyncrl.comm.request_reply import messages
from asyncrl.comm.request_reply.messages import Failure, MessageError, R, Reply, Request
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
from asyncrl.comm.sockets import PeerRouter
from asyncrl.comm.waits import running_time


class RemoteError(Exception):
    """The handler raised. `kind` is the exception's type name, `remote_traceback` the server's traceback as text."""

    def __init__(self, peer: str, verb: str, failure: Failure) -> None:
        self.kind, self.message, self.remote_traceback = failure.kind, failure.message, failure.traceback
        super().__init__(
            f"{verb} at {peer} raised {self.kind}: {self.message}\n"
            f"--- remote traceback\n{self.remote_traceback.rstrip()}"
        )


class RequestTimeout(TimeoutError):
    """No answer within the time limit; the server may still be working on it."""


class PeerGone(Exception):
    """The connection broke or was never made; the call may or may not have been executed."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that has not returned."""

    number: int
    request: Request[Any]
    timeout_s: float
    answer: asyncio.Future[Reply]
    timer: asyncio.TimerHandle | None = None

    def fail(self, error: Exception) -> None:
        """Raise `error` from the call, unless it has ended."""
        if not self.answer.done():
            self.answer.set_exception(error)


class RequestClient:
    """Makes calls to the server at `address`.

    Create and use it in one running asyncio loop.

    Args:
        address: the server's endpoint.
        security: the run's keys, or None for plaintext.
        name: the server's name in errors, e.g. `model_worker/0`; the address by default.
        max_bytes: limit of one reply.
        router: router shared with other clients; its owner closes it after them. None: the client creates its own.

    Raises:
        ValueError: `address` is not an endpoint, another client of `router` has it, or the router has other keys.
    """

    def __init__(
        self,
        address: str,
        security: SocketSecurity | None,
        *,
        name: str | None = None,
        max_bytes: int = messages.DEFAULT_MAX_BYTES,
        router: PeerRouter | None = None,
    ) -> None:
        self._peer = f"{name} ({address})" if name else address
        self._max_bytes = max_bytes
        self._calls: dict[int, _Call] = {}
        self._unsent: deque[tuple[_Call, list[bytes]]] = deque()
        self._next_call = 0
        self._closed = False
        self._log = SourceLog("reply")
        if router is not None and router.security != security:
            raise ValueError(f"the router to {self._peer} has other keys than this client: give both the run's")
        self._own_router = None
        if router is None:
            router = self._own_router = PeerRouter(security)
        try:
            self._link = router.connect(
                address, on_writable=self._flush, on_message=self._on_message, on_lost=self._on_lost
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
            raise PeerGone(f"call of {request.verb} at {self._peer}: the client is closed")
        call = _Call(self._next_call, request, timeout_s, asyncio.get_running_loop().create_future())
        self._unsent.append((call, messages.pack(call.number, request.verb, request)))
        self._next_call += 1
        self._calls[call.number] = call
        self._flush()
        self._set_timer(call, timeout_s)
        try:
            return cast(R, await call.answer)
        finally:
            if call.timer is not None:
                call.timer.cancel()
            del self._calls[call.number]
            if self._is_unsent(call):
                self._unsent = deque(item for item in self._unsent if item[0] is not call)

    def close(self) -> None:
        """Disconnect; outstanding calls raise PeerGone."""
        if not self._closed:
            self._closed = True
            self._fail_all("the client was closed")
            self._link.close()
            if self._own_router is not None:
                self._own_router.close()

    def _flush(self) -> None:
        while self._unsent and self._link.send(self._unsent[0][1]):
            self._unsent.popleft()

    def _on_lost(self) -> None:
        self._fail_all("the connection broke: the process died, or the network failed")

    def _on_message(self, frames: list[memoryview]) -> None:
        try:
            number, verb, body = messages.unpack(frames)
        except MessageError as error:
            self._log.note(self._peer, str(error))
            return
        call = self._calls.get(number)
        if call is None or call.answer.done():
            return  # the call has timed out or was cancelled
        request = call.request
        try:
            reply = messages.decode(body, request.reply_type if verb else Failure, self._max_bytes)
        except MessageError as error:
            call.fail(MessageError(f"reply to {request.verb} from {self._peer}: {error}"))
            return
        if isinstance(reply, Failure):
            call.fail(RemoteError(self._peer, request.verb, reply))
        else:
            call.answer.set_result(reply)

    def _set_timer(self, call: _Call, left_s: float) -> None:
        """Arm the timer in slices, so that a pause of this process does not look like silence of the server."""
        if left_s <= 0:
            self._time_out(call)
            return
        slice_s = min(left_s, running_time.SLICE_S)
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(slice_s, self._set_timer, call, left_s - slice_s)

    def _time_out(self, call: _Call) -> None:
        what = f"call of {call.request.verb} at {self._peer}"
        if self._is_unsent(call):
            call.fail(PeerGone(f"{what}: no connection within {call.timeout_s:g} s"))
        else:
            call.fail(RequestTimeout(f"{what}: no answer within {call.timeout_s:g} s"))

    def _fail_all(self, reason: str) -> None:
        """Raise PeerGone from the calls that were sent; from all calls once the client is closed."""
        unsent = set() if self._closed else {call.number for call, _ in self._unsent}
        for call in self._calls.values():
            if call.number not in unsent:
                call.fail(PeerGone(f"call of {call.request.verb} at {self._peer}: {reason}"))

    def _is_unsent(self, call: _Call) -> bool:
        return any(unsent is call for unsent, _ in self._unsent)
