from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.comm import request_reply, sockets
from asyncrl.comm.request_reply import (
    Done,
    MessageError,
    PeerGone,
    RemoteError,
    Reply,
    Request,
    RequestClient,
    RequestServer,
    RequestTimeout,
    decode,
)
from asyncrl.comm.security import RunSecret, SocketSecurity

HOST = "127.0.0.1"
PATIENCE_S = 60.0
SECURITY = RunSecret(b"s" * 32).sockets()


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    sizes: tuple[int, ...] = ()


class Echoed(Reply, frozen=True):
    items: tuple[Item, ...]
    extra: dict[str, Any]


class Echo(Request[Echoed], frozen=True):
    items: tuple[Item, ...] = ()
    extra: dict[str, Any] = msgspec.field(default_factory=dict)


class Never(Request[Done], frozen=True):
    pass


class Doubled(Reply, frozen=True):
    numbers: tuple[int, ...]


class DoubleThem(Request[Doubled], frozen=True):
    numbers: tuple[int, ...] = ()


class Fail(Request[Done], frozen=True):
    what: str


class Unserved(Request[Done], frozen=True):
    pass


async def echo(request: Echo) -> Echoed:
    return Echoed(request.items, request.extra)


async def never(request: Never) -> Done:
    await asyncio.Event().wait()
    return Done()


def double(request: DoubleThem) -> Doubled:
    return Doubled(tuple(2 * number for number in request.numbers))


def fail(request: Fail) -> Done:
    raise KeyError(request.what)


@pytest.fixture
def server() -> Iterator[RequestServer]:
    queued = {DoubleThem: double, Fail: fail}
    with closing(RequestServer(HOST, None, immediate={Echo: echo, Never: never}, queued=queued)) as server:
        yield server


@asynccontextmanager
async def connected(server: RequestServer, security: SocketSecurity | None = None) -> AsyncIterator[RequestClient]:
    client = RequestClient(server.endpoint, security, name="model_worker/0")
    try:
        yield client
    finally:
        client.close()


async def serve(server: RequestServer, count: int = 1) -> None:
    """Serve queued calls in another thread, as a ModelWorker's main thread would."""
    for _ in range(count):
        assert await asyncio.to_thread(server.serve_one, PATIENCE_S)


@pytest.mark.parametrize("security", [None, SECURITY], ids=["plain", "curve"])
@pytest.mark.parametrize("host", [HOST, "::1"])
async def test_calls_carry_their_types_both_ways(security: SocketSecurity | None, host: str) -> None:
    items = (Item("small", (1, 2)), Item("large", tuple(range(100_000))))
    extra = {"step": 3, "ids": ["a", None], "mean": np.float64(0.5)}
    with closing(RequestServer(host, security, immediate={Echo: echo})) as server:
        async with connected(server, security) as client:
            reply = await client.call(Echo(items, extra), timeout_s=PATIENCE_S)
    assert reply == Echoed(items, extra)


async def test_queued_calls_run_in_the_thread_that_serves_them_in_order() -> None:
    seen: list[tuple[int, str]] = []

    def note(request: DoubleThem) -> Doubled:
        seen.append((request.numbers[0], threading.current_thread().name))
        return Doubled(())

    with closing(RequestServer(HOST, None, queued={DoubleThem: note})) as server:
        async with connected(server) as client:
            calls = [asyncio.create_task(client.call(DoubleThem((i,)), timeout_s=PATIENCE_S)) for i in range(50)]
            worker = threading.Thread(
                target=lambda: [server.serve_one(PATIENCE_S) for _ in range(50)], name="main-thread"
            )
            worker.start()
            await asyncio.gather(*calls)
            worker.join(PATIENCE_S)
    assert seen == [(i, "main-thread") for i in range(50)]


async def test_immediate_calls_are_answered_while_queued_ones_wait(server: RequestServer) -> None:
    async with connected(server) as client:
        waiting = asyncio.create_task(client.call(DoubleThem((1, 2)), timeout_s=PATIENCE_S))
        await client.call(Echo(), timeout_s=PATIENCE_S)
        assert not waiting.done()
        await serve(server)
        assert (await waiting).numbers == (2, 4)


async def test_what_a_handler_raises_comes_back_with_its_traceback(server: RequestServer) -> None:
    async with connected(server) as client:
        failing = asyncio.create_task(client.call(Fail("weights"), timeout_s=PATIENCE_S))
        await serve(server)
        with pytest.raises(RemoteError, match=r"fail at model_worker/0 .* raised KeyError") as caught:
            await failing
        assert "raise KeyError(request.what)" in caught.value.remote_traceback
        assert (caught.value.kind, caught.value.message) == ("KeyError", "'weights'")


async def test_an_exit_in_a_handler_is_answered_and_goes_on_in_its_thread() -> None:
    def leave(request: Fail) -> Done:
        raise SystemExit(3)

    with closing(RequestServer(HOST, None, queued={Fail: leave})) as server:
        async with connected(server) as client:
            leaving = asyncio.create_task(client.call(Fail("now"), timeout_s=PATIENCE_S))
            with pytest.raises(SystemExit):
                await serve(server)
            with pytest.raises(RemoteError, match="SystemExit"):
                await leaving


async def test_an_unknown_call_is_named_with_the_known_ones(server: RequestServer) -> None:
    async with connected(server) as client:
        with pytest.raises(RemoteError, match=r"UnknownCall.*'unserved'.*double_them, echo, fail, never"):
            await client.call(Unserved(), timeout_s=PATIENCE_S)


def named(method: str) -> type[Request[Any]]:
    """A request's type of a caller who has other ideas of the fields."""

    class Other(Request[Done], frozen=True):
        items: Any = msgspec.UNSET
        numbers: Any = msgspec.UNSET
        surprise: Any = msgspec.UNSET

    Other.method = method
    return Other


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        (
            "echo",
            {"items": [{"name": "a"}, {"name": "b", "sizes": [1, "2"]}]},
            r"`int`, got `str` - at `\$.items\[1\].sizes",
        ),
        ("echo", {"items": [{"sizes": []}]}, r"missing required field `name` - at `\$.items\[0\]`"),
        ("double_them", {"numbers": "12"}, r"Expected `array`, got `str` - at `\$.numbers`"),
        ("double_them", {"numbers": [1, 1.5]}, r"Expected `int`, got `float` - at `\$.numbers\[1\]`"),
        ("double_them", {"surprise": 1}, r"unknown field `surprise`"),
        ("fail", {}, r"missing required field `what`"),
    ],
)
async def test_a_wrong_field_is_refused_with_its_path_before_a_handler_sees_it(
    server: RequestServer, method: str, fields: dict[str, Any], message: str
) -> None:
    async with connected(server) as client:
        with pytest.raises(RemoteError, match=rf"{method} at model_worker/0.*MessageError.*{message}"):
            await client.call(named(method)(**fields), timeout_s=PATIENCE_S)
        assert server.malformed == 1
        assert not server.serve_one(0.0)
        await client.call(Echo(), timeout_s=PATIENCE_S)


async def test_a_reply_that_is_not_of_its_type_is_refused_with_its_path() -> None:
    async def wrong(request: Echo) -> Echoed:
        return Echoed((Item("a", ("b",)),), {})  # type: ignore[arg-type]

    with closing(RequestServer(HOST, None, immediate={Echo: wrong})) as server:
        async with connected(server) as client:
            with pytest.raises(MessageError, match=r"reply to echo from model_worker/0.*at `\$.items\[0\].sizes\[0\]`"):
                await client.call(Echo(), timeout_s=PATIENCE_S)


async def test_what_is_not_plain_data_is_refused_by_who_sends_it(server: RequestServer) -> None:
    async def bad(request: Echo) -> Echoed:
        return Echoed((), {"object": object()})

    async with connected(server) as client:
        with pytest.raises(MessageError, match=r"Echo is not plain data.*object"):
            await client.call(Echo((), {"object": object()}), timeout_s=PATIENCE_S)
    with closing(RequestServer(HOST, None, immediate={Echo: bad})) as server:
        async with connected(server) as client:
            with pytest.raises(RemoteError, match=r"MessageError.*not plain data"):
                await client.call(Echo(), timeout_s=PATIENCE_S)


async def test_a_call_without_answer_times_out_and_its_late_reply_disturbs_nobody(server: RequestServer) -> None:
    async with connected(server) as client:
        await client.call(Echo(), timeout_s=PATIENCE_S)  # it is connected now, however long that took
        with pytest.raises(RequestTimeout, match=r"double_them at model_worker/0 .* no answer within 0\.1 s"):
            await client.call(DoubleThem(), timeout_s=0.1)
        await serve(server)
        assert (await client.call(Echo((), {"a": 1}), timeout_s=PATIENCE_S)).extra == {"a": 1}


async def test_a_pause_of_the_caller_is_not_the_servers_silence(
    server: RequestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, missed_s = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + missed_s)
    async with connected(server) as client:
        await client.call(Echo(), timeout_s=PATIENCE_S)
        call = asyncio.create_task(client.call(DoubleThem(), timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        missed_s = 2 * PATIENCE_S  # the caller is stopped, longer than its limit
        for _ in range(3):
            await asyncio.sleep(0)
        assert not call.done()
        await serve(server)
        await call


async def test_calls_beyond_the_inbox_or_the_immediate_limit_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reply, "MOST_QUEUED", 1)
    monkeypatch.setattr(request_reply, "MOST_IMMEDIATE", 1)
    with closing(RequestServer(HOST, None, immediate={Never: never}, queued={DoubleThem: double})) as server:
        async with connected(server) as client:
            for request in (DoubleThem(), Never()):
                first = asyncio.create_task(client.call(request, timeout_s=PATIENCE_S))
                await asyncio.sleep(0)  # it is sent before the next
                with pytest.raises(RemoteError, match="ServerBusy"):
                    await client.call(request, timeout_s=PATIENCE_S)
                first.cancel()


async def test_garbage_is_counted_and_survived(server: RequestServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(server.endpoint)
        for frames in ([b""], [b"x" * 50], [b"12345678"], [b"12345678echo", b"no map"]):
            socket.send_multipart(frames)
        async with connected(server) as client:
            while server.malformed < 4:
                await client.call(Echo(), timeout_s=PATIENCE_S)


@given(st.binary(max_size=60))
def test_whatever_bytes_arrive_are_a_request_or_refused(encoded: bytes) -> None:
    for prefix in (b"", b"\x82\xa5items\x90\xa5extra\x81\xa1a"):
        with suppress(MessageError):
            assert isinstance(decode(memoryview(prefix + encoded), Echo), Echo)


async def test_closing_the_server_breaks_outstanding_calls_and_sends_given_replies_first(
    server: RequestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_CLOSE_LINGER_MS", int(1000 * PATIENCE_S))
    async with connected(server) as client:
        hanging = asyncio.create_task(client.call(Never(), timeout_s=PATIENCE_S))
        queued = asyncio.create_task(client.call(DoubleThem((1,) * 100_000), timeout_s=PATIENCE_S))
        await serve(server)
        await asyncio.to_thread(server.close)
        assert (await queued).numbers == (2,) * 100_000
        with pytest.raises(PeerGone, match="connection broke"):
            await hanging


async def test_closing_the_client_fails_its_calls(server: RequestServer) -> None:
    async with connected(server) as client:
        hanging = asyncio.create_task(client.call(Never(), timeout_s=PATIENCE_S))
        await client.call(Echo(), timeout_s=PATIENCE_S)
    with pytest.raises(PeerGone, match="client was closed"):
        await hanging
    with pytest.raises(PeerGone, match="client is closed"):
        await client.call(Echo(), timeout_s=PATIENCE_S)


async def test_a_server_that_is_not_there_is_gone_after_the_time_limit() -> None:
    with socket.socket() as taken:  # which does not listen, and nobody else can there
        taken.bind((HOST, 0))
        client = RequestClient(f"tcp://{HOST}:{taken.getsockname()[1]}", None)
        with pytest.raises(PeerGone, match=r"no connection within 0\.1 s"):
            await client.call(Echo(), timeout_s=0.1)
        client.close()


_SERVER_PROCESS = """
import asyncio, sys
from asyncrl.comm.request_reply import Done, Request, RequestServer
class Never(Request[Done], frozen=True):
    pass
async def never(request):
    await asyncio.Event().wait()
server = RequestServer("127.0.0.1", None, immediate={Never: never})
print(server.endpoint, flush=True)
sys.stdin.read()
"""


def start_server_process() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SERVER_PROCESS]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_a_server_killed_with_sigkill_is_gone_long_before_the_time_limit() -> None:
    with start_server_process() as process:
        try:
            assert process.stdout is not None
            client = RequestClient(process.stdout.readline().strip(), None)
            hanging = asyncio.create_task(client.call(Never(), timeout_s=3600.0))
            with pytest.raises(RemoteError, match=r"UnknownCall"):
                await client.call(Unserved(), timeout_s=PATIENCE_S)
            process.kill()
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(PeerGone, match="connection broke"):
                    await hanging
            client.close()
        finally:
            process.kill()


def test_serving_returns_false_when_no_call_came(server: RequestServer) -> None:
    assert not server.serve_one(0.0)
    assert not server.serve_one(0.01)


def test_a_call_with_two_handlers_is_refused() -> None:
    class Inner:
        class Echo(Request[Done], frozen=True):
            pass

    for queued in (Echo, Inner.Echo):
        with pytest.raises(ValueError, match="'echo' is served twice"):
            RequestServer(HOST, None, immediate={Echo: echo}, queued={queued: double})
