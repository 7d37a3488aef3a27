from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing

import numpy as np
import pytest
import zmq

from asyncrl.comm.codec import CodecError, Message
from asyncrl.comm.request_reply import PeerGone, RemoteError, RequestClient, RequestServer, RequestTimeout
from asyncrl.comm.security import RunSecret, SocketSecurity

HOST = "127.0.0.1"
PATIENCE_S = 20.0
SECURITY = RunSecret(b"s" * 32).sockets()


async def echo(request: Message) -> Message:
    return Message("reply", request.meta, request.arrays)


async def never(request: Message) -> Message:
    await asyncio.Event().wait()
    return request


def double(request: Message) -> Message:
    return Message("reply", {}, {name: 2 * array for name, array in request.arrays.items()})


def fail(request: Message) -> Message:
    raise KeyError(request.meta["what"])


@pytest.fixture
def server() -> Iterator[RequestServer]:
    queued = {"double": double, "fail": fail}
    with closing(RequestServer(HOST, None, immediate={"echo": echo, "never": never}, queued=queued)) as server:
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
async def test_calls_carry_meta_and_arrays_both_ways(security: SocketSecurity | None) -> None:
    arrays = {"small": np.arange(6).reshape(2, 3), "large": np.random.default_rng(0).random(100_000)}
    with closing(RequestServer(HOST, security, immediate={"echo": echo})) as server:
        async with connected(server, security) as client:
            reply = await client.call("echo", {"step": 3, "ids": ["a"]}, arrays, timeout_s=PATIENCE_S)
    assert reply.meta == {"step": 3, "ids": ["a"]}
    for name, array in arrays.items():
        np.testing.assert_array_equal(reply.arrays[name], array, strict=True)


async def test_queued_calls_run_in_the_thread_that_serves_them_in_order(server: RequestServer) -> None:
    seen: list[tuple[int, str]] = []

    def note(request: Message) -> Message:
        seen.append((request.meta["i"], threading.current_thread().name))
        return Message("reply")

    with closing(RequestServer(HOST, None, queued={"note": note})) as server:
        async with connected(server) as client:
            calls = [asyncio.create_task(client.call("note", {"i": i}, timeout_s=PATIENCE_S)) for i in range(50)]
            worker = threading.Thread(
                target=lambda: [server.serve_one(PATIENCE_S) for _ in range(50)], name="main-thread"
            )
            worker.start()
            await asyncio.gather(*calls)
            worker.join(PATIENCE_S)
    assert seen == [(i, "main-thread") for i in range(50)]


async def test_immediate_calls_are_answered_while_queued_ones_wait(server: RequestServer) -> None:
    async with connected(server) as client:
        waiting = asyncio.create_task(client.call("double", {}, {"a": np.arange(3)}, timeout_s=PATIENCE_S))
        await client.call("echo", timeout_s=PATIENCE_S)
        assert not waiting.done()
        await serve(server)
        np.testing.assert_array_equal((await waiting).arrays["a"], [0, 2, 4])


async def test_what_a_method_raises_comes_back_with_its_traceback(server: RequestServer) -> None:
    async with connected(server) as client:
        failing = asyncio.create_task(client.call("fail", {"what": "weights"}, timeout_s=PATIENCE_S))
        await serve(server)
        with pytest.raises(RemoteError, match=r"fail at model_worker/0 .* raised KeyError") as caught:
            await failing
        assert 'raise KeyError(request.meta["what"])' in caught.value.remote_traceback
        assert (caught.value.kind, caught.value.message) == ("KeyError", "'weights'")


async def test_an_exit_in_a_method_is_answered_and_goes_on_in_its_thread() -> None:
    def leave(request: Message) -> Message:
        raise SystemExit(3)

    with closing(RequestServer(HOST, None, queued={"leave": leave})) as server:
        async with connected(server) as client:
            leaving = asyncio.create_task(client.call("leave", timeout_s=PATIENCE_S))
            with pytest.raises(SystemExit):
                await serve(server)
            with pytest.raises(RemoteError, match="SystemExit"):
                await leaving


async def test_an_unknown_method_is_named_with_the_known_ones(server: RequestServer) -> None:
    async with connected(server) as client:
        with pytest.raises(RemoteError, match=r"UnknownMethod.*'eco'.*double, echo, fail, never"):
            await client.call("eco", timeout_s=PATIENCE_S)


async def test_a_reply_that_cannot_be_encoded_is_an_error_of_the_method() -> None:
    async def bad(request: Message) -> Message:
        return Message("reply", {"object": object()})

    with closing(RequestServer(HOST, None, immediate={"bad": bad})) as server:
        async with connected(server) as client:
            with pytest.raises(RemoteError, match=r"CodecError.*not plain data"):
                await client.call("bad", timeout_s=PATIENCE_S)


async def test_a_call_without_answer_times_out_and_its_late_reply_disturbs_nobody(server: RequestServer) -> None:
    async with connected(server) as client:
        with pytest.raises(RequestTimeout, match=r"double at model_worker/0 .* no answer within 0\.1 s"):
            await client.call("double", timeout_s=0.1)
        await serve(server)
        assert (await client.call("echo", {"a": 1}, timeout_s=PATIENCE_S)).meta == {"a": 1}


async def test_calls_beyond_the_inbox_or_the_immediate_limit_are_told_so() -> None:
    immediate = {"never": never}
    with closing(
        RequestServer(HOST, None, immediate=immediate, queued={"double": double}, inbox_capacity=1, max_immediate=1)
    ) as server:
        async with connected(server) as client:
            for method in ("double", "never"):
                first = asyncio.create_task(client.call(method, timeout_s=PATIENCE_S))
                await asyncio.sleep(0)  # it is sent before the next
                with pytest.raises(RemoteError, match="ServerBusy"):
                    await client.call(method, timeout_s=PATIENCE_S)
                first.cancel()


async def test_a_request_over_the_servers_limit_is_refused(server: RequestServer) -> None:
    with closing(RequestServer(HOST, None, immediate={"echo": echo}, max_bytes=1000)) as server:
        async with connected(server) as client:
            with pytest.raises(RemoteError, match="limit of 1000"):
                await client.call("echo", {}, {"a": np.zeros(1200, np.uint8)}, timeout_s=PATIENCE_S)
            assert server.malformed == 1
            await client.call("echo", timeout_s=PATIENCE_S)


async def test_a_reply_over_the_clients_limit_is_a_codec_error(server: RequestServer) -> None:
    client = RequestClient(server.endpoint, None, max_bytes=100)
    with pytest.raises(CodecError, match="reply to echo"):
        await client.call("echo", {"a": "x" * 200}, timeout_s=PATIENCE_S)
    client.close()


async def test_garbage_is_counted_and_survived(server: RequestServer) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(server.endpoint)
        for frames in ([b""], [b"x" * 50], [b"12345678"], [b"12345678", b"no header"]):
            socket.send_multipart(frames)
        async with connected(server) as client:
            while server.malformed < 4:
                await client.call("echo", timeout_s=PATIENCE_S)


async def test_closing_the_server_breaks_outstanding_calls_and_sends_given_replies_first(server: RequestServer) -> None:
    async with connected(server) as client:
        hanging = asyncio.create_task(client.call("never", timeout_s=PATIENCE_S))
        queued = asyncio.create_task(client.call("double", {}, {"a": np.ones(50_000)}, timeout_s=PATIENCE_S))
        await serve(server)
        await asyncio.to_thread(server.close)
        assert (await queued).arrays["a"].sum() == 100_000
        with pytest.raises(PeerGone, match="connection broke"):
            await hanging


async def test_closing_the_client_fails_its_calls(server: RequestServer) -> None:
    async with connected(server) as client:
        hanging = asyncio.create_task(client.call("never", timeout_s=PATIENCE_S))
        await client.call("echo", timeout_s=PATIENCE_S)
    with pytest.raises(PeerGone, match="client was closed"):
        await hanging
    with pytest.raises(PeerGone, match="client is closed"):
        await client.call("echo", timeout_s=PATIENCE_S)


async def test_a_server_that_is_not_there_is_gone_after_the_time_limit() -> None:
    with closing(RequestServer(HOST, None)) as server:
        address = server.endpoint
    client = RequestClient(address, None)
    with pytest.raises(PeerGone, match=r"no connection within 0\.1 s"):
        await client.call("echo", timeout_s=0.1)
    client.close()


_SERVER_PROCESS = """
import asyncio, sys
from asyncrl.comm.request_reply import RequestServer
async def never(request):
    await asyncio.Event().wait()
server = RequestServer("127.0.0.1", None, immediate={"never": never})
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
            hanging = asyncio.create_task(client.call("never", timeout_s=3600.0))
            with pytest.raises(RemoteError, match=r"UnknownMethod"):
                await client.call("ready?", timeout_s=PATIENCE_S)
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


def test_a_method_of_both_kinds_is_refused() -> None:
    methods: dict[str, Callable[[Message], Message]] = {"double": double}
    with pytest.raises(ValueError, match="'double' is both"):
        RequestServer(HOST, None, immediate={"double": echo}, queued=methods)
