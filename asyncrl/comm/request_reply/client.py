"""The calling end of request-reply, for an asyncio loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from asyncrl.comm.request_reply import messages
from asyncrl.comm.request_reply.messages import Failure, MessageError, R, Reply, Request
from asyncrl.comm.request_reply.shared_socket import CallRouter
from asyncrl.comm.security.peer_gate import SourceLog
from asyncrl.comm.security.run_secret import SocketSecurity
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


class RequestClient:
    """Calls the server at `address`.

    Make and use it in one running asyncio loop.

    Args:
        address: the server's endpoint.
        security: the run's keys, or None for plaintext.
        name: the server's name in errors, e.g. `model_worker/0`; the address by default.
        max_bytes: limit of one reply.
        router: shared with other clients; its owner closes it after them. None: the client makes its own.

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
        router: CallRouter | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer = f"{name} ({address})" if name else address
        self._max_bytes = max_bytes
        self._calls: dict[int, tuple[asyncio.Future[Reply], type[Request[Any]]]] = {}
        self._unsent: deque[tuple[int, list[bytes]]] = deque()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._next_call = 0
        self._closed = False
        self._log = SourceLog("reply")
        if router is not None and router.security != security:
            raise ValueError(f"the router to {self._peer} has other keys than this client: give both the run's")
        self._router, self._shares_router = router or CallRouter(security), router is not None
        try:
            self._connection = self._router.connect(
                address, on_connected=self._flush, on_message=self._on_message, on_lost=self._on_lost
            )
        except ValueError:
            if not self._shares_router:
                self._router.close()
            raise

    async def call(self, request: Request[R], *, timeout_s: float) -> R:
        """Make the call and return its reply. Requests reach the server in the order of the calls.

        Raises:
            RemoteError: the handler raised, the server does not know the call, or it found a field wrong.
            RequestTimeout: no answer within `timeout_s` seconds in which this process ran, while the connection
                stayed open.
            PeerGone: the connection broke, could not be made within `timeout_s`, or the client was closed.
            MessageError: the request cannot be encoded, or the reply is not of its type.
        """
        if self._closed:
            raise PeerGone(f"call of {request.verb} at {self._peer}: the client is closed")
        call = self._next_call
        self._unsent.append((call, messages.pack(call, request.verb, request)))
        self._next_call += 1
        answer: asyncio.Future[Reply] = self._loop.create_future()
        self._calls[call] = answer, type(request)
        self._flush()
        self._set_timer(call, timeout_s, timeout_s)
        try:
            return cast(R, await answer)
        finally:
            if (timer := self._timers.pop(call, None)) is not None:
                timer.cancel()
            self._forget(call)

    def close(self) -> None:
        """Disconnect; outstanding calls raise PeerGone."""
        if not self._closed:
            self._closed = True
            self._fail_all("the client was closed")
            self._connection.close()
            if not self._shares_router:
                self._router.close()

    def _flush(self) -> None:
        while self._unsent and self._connection.send(self._unsent[0][1]):
            self._unsent.popleft()

    def _on_lost(self) -> None:
        self._fail_all("the connection broke: the process died, or the network did")

    def _on_message(self, frames: list[memoryview]) -> None:
        try:
            call, verb, body = messages.unpack(frames)
        except MessageError as error:
            self._log.note(self._peer, str(error))
            return
        answer, request = self._calls.get(call, (None, None))
        if answer is None or request is None or answer.done():
            return  # its caller has given up
        try:
            reply = messages.decode(body, request.reply_type if verb else Failure, self._max_bytes)
        except MessageError as error:
            answer.set_exception(MessageError(f"reply to {request.verb} from {self._peer}: {error}"))
            return
        if isinstance(reply, Failure):
            answer.set_exception(RemoteError(self._peer, request.verb, reply))
        else:
            answer.set_result(reply)

    def _set_timer(self, call: int, left_s: float, timeout_s: float) -> None:
        """Arm the timer in slices, so that a pause of this process does not look like silence of the server."""
        if left_s <= 0:
            self._time_out(call, timeout_s)
            return
        slice_s = min(left_s, running_time.SLICE_S)
        self._timers[call] = self._loop.call_later(slice_s, self._set_timer, call, left_s - slice_s, timeout_s)

    def _time_out(self, call: int, timeout_s: float) -> None:
        answer, request = self._calls[call]
        if answer.done():
            return
        what = f"call of {request.verb} at {self._peer}"
        if any(unsent == call for unsent, _ in self._unsent):
            answer.set_exception(PeerGone(f"{what}: no connection within {timeout_s:g} s"))
        else:
            answer.set_exception(RequestTimeout(f"{what}: no answer within {timeout_s:g} s"))

    def _fail_all(self, reason: str) -> None:
        sent = self._calls.keys() - {call for call, _ in self._unsent}
        for call in self._calls if self._closed else sent:
            answer, request = self._calls[call]
            if not answer.done():
                answer.set_exception(PeerGone(f"call of {request.verb} at {self._peer}: {reason}"))

    def _forget(self, call: int) -> None:
        del self._calls[call]
        if any(unsent == call for unsent, _ in self._unsent):
            self._unsent = deque(item for item in self._unsent if item[0] != call)
