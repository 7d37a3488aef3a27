"""JSON over HTTP: what is sent, and what is made of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from asyncrl.comm.http_client import HttpMalformed, HttpRefused, HttpTimeout, JsonHttp

LIMIT_S = 300.0


class Answer(msgspec.Struct):
    values: list[int]


@asynccontextmanager
async def serving(answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """URL of a server that answers every request so."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    """URL of a server that answers `/json` with the body as JSON, `/text` with it as text."""

    async def answer(request: web.BaseRequest) -> web.Response:
        kind = "application/json" if request.path == "/json" else "text/plain"
        return web.Response(body=await request.read(), content_type=kind)

    async with serving(answer) as url:
        yield url


@pytest.fixture
async def http() -> AsyncIterator[JsonHttp]:
    http = JsonHttp(None)
    yield http
    await http.close()


async def test_a_reply_is_decoded_into_the_type_asked_for(echo: str, http: JsonHttp) -> None:
    assert await http.call("POST", f"{echo}/json", {"values": [1]}, timeout_s=LIMIT_S, reply=Answer) == Answer([1])
    assert await http.call("POST", f"{echo}/json", Answer([1]), timeout_s=LIMIT_S) == {"values": [1]}


async def test_a_reply_of_another_type_says_where_and_what_was_expected(echo: str, http: JsonHttp) -> None:
    with pytest.raises(HttpMalformed, match=r"not as expected: Expected `int`, got `str` - at `\$.values\[1\]`"):
        await http.call("POST", f"{echo}/json", {"values": [1, "2"]}, timeout_s=LIMIT_S, reply=Answer)
    with pytest.raises(HttpMalformed, match="truncated"):
        await http.call("GET", f"{echo}/text", timeout_s=LIMIT_S, reply=Answer)


async def test_what_is_no_json_is_none_where_no_type_was_asked_for(echo: str, http: JsonHttp) -> None:
    assert await http.call("POST", f"{echo}/text", "words", timeout_s=LIMIT_S) is None
    assert await http.call("GET", f"{echo}/json", timeout_s=LIMIT_S) is None


async def test_numpy_arrays_are_lists_and_other_objects_are_refused(echo: str, http: JsonHttp) -> None:
    body = {"ids": np.array([1, 2], np.int32), "one": np.int64(3)}
    assert await http.call("POST", f"{echo}/json", body, timeout_s=LIMIT_S) == {"ids": [1, 2], "one": 3}
    with pytest.raises(TypeError, match="JSON has no such thing"):
        await http.call("POST", f"{echo}/json", {"what": object()}, timeout_s=LIMIT_S)


def test_a_malformed_reply_is_not_asked_for_again() -> None:
    """Those who repeat what failed look at the status: below 500 it would fail again."""
    error = HttpMalformed("http://x", 200, b"{}", "Object missing required field `a`")
    assert isinstance(error, HttpRefused)
    assert error.status < 500


async def test_a_connection_that_is_not_made_is_reported_with_its_own_limit(
    http: JsonHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes the connection and never answers the TLS handshake."""
    monkeypatch.setattr("asyncrl.comm.http_client.ANSWER_S", 0.05)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(HttpTimeout, match=r"accepted no connection within 0\.05 s"):
            await http.call("GET", url, timeout_s=LIMIT_S)
        with pytest.raises(HttpTimeout, match=r"accepted no connection within 0\.05 s"):
            await anext(http.pieces(url, silence_s=LIMIT_S))


async def test_a_limit_around_a_call_holds_where_the_calls_own_passes_at_the_same_time(
    http: JsonHttp, clock: Any
) -> None:
    """As after a pause of the process. aiohttp's own limit of a request takes both for its own (3.14.5)."""
    arrived, end = asyncio.Event(), asyncio.Event()

    async def wait(_request: web.BaseRequest) -> web.Response:
        arrived.set()
        await end.wait()
        return web.Response()

    async def pass_time() -> None:
        await arrived.wait()
        clock.forward(2 * LIMIT_S)

    async with serving(wait) as url:
        try:
            passing = asyncio.create_task(pass_time())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(http.call("GET", url, timeout_s=LIMIT_S), LIMIT_S)
            await passing
            with pytest.raises(HttpTimeout, match=r"did not answer within 0\.01 s"):
                await http.call("GET", url, timeout_s=0.01)
        finally:
            end.set()
