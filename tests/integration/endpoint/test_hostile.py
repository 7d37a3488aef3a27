"""Callers that leave, come again, send what they should not, or never close: none leaves anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from asyncrl.api import SamplingParams
from asyncrl.data.chat_template import ChatError
from asyncrl.inference.openai.endpoint import Endpoint, Session

QUESTION: Any = [{"role": "user", "content": "2+2?"}]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def ask(session: Session, **more: Any) -> dict[str, Any]:
    """A raw call of `http.post`."""
    return {
        "url": f"{session.base_url}/chat/completions",
        "headers": {"Authorization": f"Bearer {session.api_key}", **more.pop("headers", {})},
        "json": {"model": "m", "messages": QUESTION, **more},
    }


async def test_a_caller_that_goes_away_ends_its_generation_and_leaves_no_record(
    session: Session, policy: Any, until: Until, http: aiohttp.ClientSession
) -> None:
    policy.gate.clear()
    for stream in (False, True):
        begun = policy.begun
        call = asyncio.create_task(http.post(**ask(session, stream=stream)))
        await until(lambda before=begun: policy.begun > before)  # type: ignore[misc]
        call.cancel()
        await asyncio.wait({call})
    await until(lambda: policy.cancelled == 2)
    policy.gate.set()
    assert policy.recorded == []
    assert session.calls.failure is None


async def test_a_client_that_times_out_and_tries_again_leaves_one_record(
    session: Session, policy: Any, until: Until, clock: Any
) -> None:
    policy.gate.clear()
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, max_retries=2, timeout=600.0
    ) as client:
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=QUESTION))
        await until(lambda: policy.begun == 1)
        clock.forward(600.0)
        await until(lambda: policy.cancelled == 1)
        policy.gate.set()
        assert (await call).choices[0].message.content == "The answer is 4."
    assert len(policy.recorded) == 1


async def test_an_answer_that_cannot_be_sent_is_forgotten(session: Session, policy: Any, until: Until) -> None:
    policy.answer = "x" * 20_000_000  # more than the sockets' buffers hold
    host, port = session.base_url.split("/")[2].split(":")
    for stream in (False, True):
        policy.recorded.clear()
        body = json.dumps({"model": "m", "messages": QUESTION, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        head = (
            f"POST /s/{session.id}/v1/chat/completions HTTP/1.1",
            "Host: a",
            f"Authorization: Bearer {session.api_key}",
            f"Content-Length: {len(body)}",
        )
        writer.write("\r\n".join((*head, "", "")).encode() + body)
        assert await reader.read(100)
        assert len(policy.recorded) == 1
        writer.transport.abort()
        await until(lambda: not policy.recorded)


async def test_an_answer_that_comes_just_as_its_caller_leaves_is_forgotten(
    session: Session, policy: Any, until: Until, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of a comment fails, as the connection is gone; meanwhile the policy has answered."""

    async def leaves(_: Endpoint, work: asyncio.Task[Any], *__: object) -> None:
        await work
        assert len(policy.recorded) == 1
        raise ConnectionResetError("the caller has gone")

    monkeypatch.setattr(Endpoint, "_wait", leaves)
    with contextlib.suppress(aiohttp.ClientError):
        await http.post(**ask(session, stream=True))
    await until(lambda: policy.begun == 1 and not policy.recorded)


async def test_a_repeat_of_an_answered_call_is_given_the_same_answer(
    session: Session, policy: Any, http: aiohttp.ClientSession
) -> None:
    again = {"x-stainless-retry-count": "1"}
    for headers in ({}, again, again):
        async with http.post(**ask(session, headers=headers)) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == "The answer is 4."
    assert len(policy.recorded) == 1, "one answer, sent three times"
    async with http.post(**ask(session)) as answer:
        assert answer.status == 200
    assert len(policy.recorded) == 2, "an agent that asks the same again wants another answer"
    async with http.post(**ask(session, temperature=0.5, headers=again)) as answer:
        assert answer.status == 200
    assert len(policy.recorded) == 3, "another question is no repeat"


async def test_of_several_answers_none_stays_where_the_call_fails(session: Session, policy: Any) -> None:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=QUESTION, n=1000)
    assert policy.recorded == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_policy_that_fails_is_no_answer_and_is_not_asked_again(
    session: Session, policy: Any, stream: bool
) -> None:
    policy.error = ConnectionError("no server left")
    async with (
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=2) as client,
        anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key, max_retries=2) as other,
    ):
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: client.chat.completions.create(model="m", messages=QUESTION, stream=stream),
            lambda: client.responses.create(model="m", input="2+2?", stream=stream),
            lambda: other.messages.create(model="m", max_tokens=5, messages=QUESTION, stream=stream),
        ]
        for call in calls:
            with pytest.raises((openai.InternalServerError, anthropic.InternalServerError), match="no server left"):
                await call()
    assert len(policy.asked) == 3
    assert session.calls.failure is policy.error


async def test_a_stream_that_has_begun_ends_with_an_error_not_as_a_short_answer(
    session: Session, policy: Any, until: Until
) -> None:
    policy.error = ConnectionError("no server left")
    async with (
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key, max_retries=0) as other,
    ):
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: client.chat.completions.create(model="m", messages=QUESTION, stream=True),
            lambda: client.responses.create(model="m", input="2+2?", stream=True),
            lambda: other.messages.create(model="m", max_tokens=5, messages=QUESTION, stream=True),
        ]
        for call in calls:
            policy.gate.clear()
            stream = await call()  # headers came with the first sign of life
            policy.gate.set()
            with pytest.raises((openai.APIError, anthropic.APIError), match="no server left"):
                async for _ in stream:
                    pass


async def test_a_stream_that_waits_says_that_it_lives(
    session: Session, policy: Any, http: aiohttp.ClientSession
) -> None:
    policy.gate.clear()
    async with http.post(**ask(session, stream=True)) as answer:
        assert await answer.content.readline() == b": waiting for the policy\n"
        policy.gate.set()
        rest = (await answer.content.read()).decode()
    assert "The" in rest
    assert rest.endswith("data: [DONE]\n\n")


async def test_what_the_conversation_does_not_allow_is_the_callers_fault(session: Session, policy: Any) -> None:
    policy.error = ChatError("the template refuses two system messages")
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=2) as client:
        with pytest.raises(openai.BadRequestError, match="two system messages"):
            await client.chat.completions.create(model="m", messages=QUESTION)
    assert len(policy.asked) == 1
    assert session.calls.failure is None


async def test_strangers_are_refused_before_their_body_is_read(
    endpoint: Endpoint, session: Session, policy: Any, http: aiohttp.ClientSession, make_policy: Any
) -> None:
    other = await endpoint.open(make_policy(), SamplingParams())
    wrong: list[tuple[dict[str, str], str, int]] = [
        ({}, session.base_url, 401),
        ({"Authorization": f"Bearer {other.api_key}"}, session.base_url, 401),
        ({"Authorization": "Bearer \xff"}, session.base_url, 401),
        ({"x-api-key": other.api_key}, session.base_url, 401),
        ({"Authorization": f"Bearer {session.api_key}"}, session.base_url.replace(session.id, "0" * 32), 404),
        ({"Authorization": f"Bearer {session.api_key}"}, session.base_url.replace(f"/s/{session.id}", ""), 404),
    ]
    huge = {"model": "m", "messages": [{"role": "user", "content": "x" * (1 << 20)}]}
    for headers, url, status in wrong:
        async with http.post(f"{url}/chat/completions", json=huge, headers=headers) as answer:
            assert answer.status == status
            assert answer.headers["x-should-retry"] == "false"
            assert (await answer.json())["error"]["message"]
    async with http.post(f"{session.root_url}/v1/messages", json=huge) as answer:
        assert (await answer.json())["error"]["type"] == "authentication_error"
    assert policy.asked == []
    right = {"x-api-key": session.api_key, "X-Session-ID": session.id}
    url = session.base_url.replace(f"/s/{session.id}", "")
    async with http.post(f"{url}/chat/completions", json={"model": "m", "messages": QUESTION}, headers=right) as answer:
        assert answer.status == 200, "a session may be named by a header too"


async def test_bodies_too_large_are_refused(policy: Any, http: aiohttp.ClientSession) -> None:
    endpoint = Endpoint(max_body_bytes=1000)
    session = await endpoint.open(policy, SamplingParams())
    async with http.post(**ask(session, user="x" * 2000)) as answer:
        assert answer.status == 413
        assert "1000 bytes" in (await answer.json())["error"]["message"]
    async with http.post(
        f"{session.root_url}/v1/messages", data=b"x" * 2000, headers={"x-api-key": session.api_key}
    ) as answer:
        assert (await answer.json())["error"]["type"] == "request_too_large"
    assert endpoint.refused["too_large"] == 2
    await endpoint.close()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "not valid JSON"),
        (b"[" * 10_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": []}', "messages"),
        (b'{"model": "m", "messages": "hi"}', "messages"),
        (b'{"model": "m", "messages": [{"role": "user"}], "n": "two"}', "n"),
        (b'{"model": "m", "messages": [{"role": 7}]}', "messages[0].role"),
        (b'{"model": "m", "messages": [{"role": "wizard", "content": ""}]}', "messages[0].role"),
        (b'{"model": "m", "messages": [{"role": "tool", "content": ""}]}', "messages[0].tool_call_id"),
        (b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url"),
        (b'{"model": "m", "messages": [{"role": "user"}], "temperature": -1}', "temperature"),
        (b'{"model": "m", "messages": [{"role": "user"}], "temperature": 1e999}', "not valid JSON"),
        (b'{"model": "m", "messages": [{"role": "user"}], "max_tokens": 0}', "max_tokens"),
        (b'{"model": "m", "messages": [{"role": "user"}], "stop": [""]}', "stop"),
    ],
)
async def test_a_malformed_body_is_refused_by_the_name_of_what_is_wrong(
    session: Session, policy: Any, http: aiohttp.ClientSession, body: bytes, named: str
) -> None:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with http.post(f"{session.base_url}/chat/completions", data=body, headers=headers) as answer:
        assert answer.status == 400
        assert named in (await answer.json())["error"]["message"]
    assert policy.asked == []


async def test_a_closed_session_answers_no_more_also_those_who_wait(
    endpoint: Endpoint, session: Session, policy: Any, until: Until, http: aiohttp.ClientSession
) -> None:
    policy.gate.clear()
    call = asyncio.create_task(http.post(**ask(session)))
    await until(lambda: policy.begun == 1)
    session.close()
    session.close()
    async with await call as answer:
        assert answer.status == 404
        assert "closed" in (await answer.json())["error"]["message"]
    async with http.post(**ask(session)) as answer:
        assert answer.status == 404
    assert policy.recorded == []
    assert session.calls.failure is None
    assert len(endpoint) == 0


async def test_thousands_of_sessions_leave_nothing_behind(endpoint: Endpoint, make_policy: Any) -> None:
    left = weakref.WeakSet[Session]()
    async with aiohttp.ClientSession() as http:

        async def episode(calls: int) -> None:
            session = await endpoint.open(make_policy(), SamplingParams())
            left.add(session)
            with contextlib.closing(session):
                for _ in range(calls):
                    async with http.post(**ask(session)) as answer:
                        assert answer.status == 200

        for number in range(3000):
            await episode(calls=number % 10 == 0)
    assert len(endpoint) == 0
    gc.collect()
    assert not list(left)


async def test_a_strangers_endless_body_ends_with_its_connection(session: Session) -> None:
    """Nothing is read of it after the header; what fits into the kernel's buffers may have been sent."""
    host, port = session.base_url.split("/")[2].split(":")
    _reader, writer = await asyncio.open_connection(host, int(port))
    path = session.base_url.partition(port)[2]
    writer.write(f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    chunk, sent, endless = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n", 0, 64 << 20
    with contextlib.suppress(ConnectionError):
        while sent < endless:
            writer.write(chunk)
            await writer.drain()
            sent += len(chunk)
    writer.transport.abort()
    assert sent < endless
