"""Hostile callers of the run's HTTP servers, with and without the token: refused, counted, and the servers go on."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from asyncrl.comm import http_server
from asyncrl.comm.http_server import HttpServer
from asyncrl.comm.security import HttpSecurity
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.server import MAX_PROMPTS_BYTES, serve
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.process import manager_registry
from asyncrl.manager.service import MAX_BODY_BYTES, ManagerHttp, ManagerService
from asyncrl.models.folder_checks import INDEX_FILE

ORDER = DataOrder(9, 0)

LIMIT_S = 60.0
VOCABULARY = 40
ENDLESS = 32 << 20


class Target:
    """A server, and raw requests to it. `post` is a path that takes the largest bodies."""

    def __init__(self, kind: str, security: HttpSecurity) -> None:
        self.kind, self.security = kind, security
        self.post, self.max_bytes = ("/generate", MAX_PROMPTS_BYTES), 0
        self.http: HttpServer
        self.port = 0

    def head(self, path: str, *headers: str, token: bytes | None = None) -> bytes:
        shown = self.security.token.encode() if token is None else token
        lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
        return "\r\n".join(lines).encode() + b"\r\nAuthorization: Bearer " + shown + b"\r\n\r\n"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.security.client_context())

    async def answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        async with asyncio.timeout(LIMIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            return int(head.split()[1]), await reader.readexactly(length)

    async def say(self, raw: bytes) -> tuple[int, bytes]:
        """The answer to these bytes on a connection of their own."""
        reader, writer = await self.connect()
        try:
            writer.write(raw)
            return await self.answer(reader)
        finally:
            writer.close()

    async def send(self, path: str, body: bytes) -> tuple[int, bytes]:
        return await self.say(self.head(path, f"Content-Length: {len(body)}") + body)

    async def is_healthy(self) -> bool:
        return (await self.say(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200


@pytest.fixture(scope="module")
def engine() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=2,
    )
    engine = GenerationEngine(Qwen2ForCausalLM(config).eval(), max_running_requests=4)
    engine.start()
    yield engine
    engine.close()


@pytest_asyncio.fixture(params=["manager", "embedded"])
async def target(request: pytest.FixtureRequest, http_security: HttpSecurity) -> AsyncIterator[Target]:
    target = Target(request.param, http_security)
    if target.kind == "manager":
        service = ManagerService(
            batch_size=2, max_staleness=1, routing="least_requests", lease_s=30.0, order=DataOrder(9, 0)
        )
        registry = manager_registry(service, FleetDecisions("interrupt", 1.0))
        target.http = ManagerHttp(service.methods(), security=http_security, registry=registry)
        url = await target.http.start("127.0.0.1")
        target.post, target.max_bytes = "/allocate_rollout", MAX_BODY_BYTES
    else:
        engine, tls = request.getfixturevalue("engine"), http_security.server_context()
        server = await serve(engine, token=http_security.token, tls=tls)
        target.http, url = server.http, server.url
        target.post, target.max_bytes = "/generate", MAX_PROMPTS_BYTES
    target.port = int(url.rpartition(":")[2])
    assert url.startswith("https://")
    yield target
    assert await target.is_healthy()
    await target.http.close()


@pytest.fixture(autouse=True)
def _no_tracebacks(caplog: pytest.LogCaptureFixture) -> Any:
    yield
    assert not [record for record in caplog.get_records("call") if record.exc_info and record.levelno >= logging.ERROR]


@pytest.mark.parametrize("token", [b"", b"wrong", b"\xff\xed\xa0\x80", b"\xc3\xa9" * 2000, bytes(range(128, 256))])
async def test_whatever_the_header_says_a_stranger_gets_401(target: Target, token: bytes) -> None:
    status, _ = await target.say(target.head(target.post, "Content-Length: 2", token=token) + b"{}")
    assert status == 401
    assert target.http.refused == {"unauthorized": 1}


async def test_a_body_that_is_declared_too_large_is_refused_unread(target: Target) -> None:
    status, body = await target.say(target.head(target.post, f"Content-Length: {1 << 30}"))
    assert status == 413
    assert str(target.max_bytes).encode() in body
    assert target.http.refused == {"too_large": 1}


async def test_a_strangers_body_is_not_read(target: Target) -> None:
    status, _ = await target.say(target.head(target.post, f"Content-Length: {1 << 30}", token=b"wrong"))
    assert status == 401


async def test_a_body_without_a_length_is_refused_while_it_comes(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small route: what comes beyond the limit is never gathered."""
    path = "/close_gate" if target.kind == "manager" else "/abort_request"
    limit = MAX_BODY_BYTES if target.kind == "manager" else 1 << 16
    reader, writer = await target.connect()
    writer.write(target.head(path, "Transfer-Encoding: chunked"))
    chunk = b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n"
    answer = asyncio.create_task(target.answer(reader))
    sent = 0
    with contextlib.suppress(ConnectionError):
        while not answer.done() and sent < 4 * MAX_BODY_BYTES:
            writer.write(chunk)
            sent += 1 << 16
            await writer.drain()
            await asyncio.sleep(0)
    assert (await answer)[0] == 413
    assert sent <= limit + (8 << 20)  # what the sockets and TLS hold
    writer.close()


async def test_a_compressed_body_is_not_unpacked(target: Target) -> None:
    body = gzip.compress(bytes(64 << 20))
    headers = ("Content-Encoding: gzip", f"Content-Length: {len(body)}")
    status, _ = await target.say(target.head(target.post, *headers) + body)
    assert status == 400


async def test_a_strangers_endless_body_ends_with_its_connection(target: Target) -> None:
    """Nothing is read of it after the header; what fits into the kernel's buffers may have been sent."""
    _reader, writer = await target.connect()
    writer.write(target.head(target.post, "Transfer-Encoding: chunked", token=b"wrong"))
    chunk, sent = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n", 0
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        async with asyncio.timeout(LIMIT_S):
            while sent < ENDLESS:
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
    writer.transport.abort()
    assert sent < ENDLESS
    assert target.http.refused == {"unauthorized": 1}


async def test_who_is_refused_amid_a_body_reads_why_and_that_the_connection_closes(target: Target) -> None:
    reader, writer = await target.connect()
    writer.write(target.head(target.post, "Content-Length: 1000000", token=b"wrong") + b"x" * 1000)
    async with asyncio.timeout(LIMIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 401 " in head
        assert b"connection: close" in head.lower()
        assert b"bearer token" in await reader.read()
    writer.close()


@pytest.mark.parametrize("stage", ["handshake", "header", "body", "second header"])
async def test_slow_connections_are_closed(
    target: Target, stage: str, monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    """Within limits that pass only once all have come so far; the real ones are constants beside these."""
    for name in ("HEADER_LIMIT_S", "BODY_LIMIT_S"):
        monkeypatch.setattr(http_server, name, LIMIT_S / 3)
    slow = asyncio.Barrier(9)
    await target.http.close()
    target.port = int((await target.http.start("127.0.0.1")).rpartition(":")[2])

    async def dawdle() -> None:
        if stage == "handshake":
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        else:
            reader, writer = await target.connect()
        if stage == "second header":
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await target.answer(reader))[0] == 200
        if "header" in stage:
            writer.write(b"GET /health HTT")
        if stage == "body":
            writer.write(target.head(target.post, "Content-Length: 10") + b"{")
        await slow.wait()
        if stage == "body":
            assert (await target.answer(reader))[0] == 408
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert await reader.read() == b""
        writer.close()

    dawdling = asyncio.gather(*(dawdle() for _ in range(8)))
    await asyncio.wait({dawdling, asyncio.ensure_future(slow.wait())}, return_when=asyncio.FIRST_COMPLETED)
    while not dawdling.done():
        clock.forward(1.0)
        await asyncio.sleep(0.01)
    await dawdling


DEEP = b"[" * 100_000 + b"]" * 100_000


async def test_what_is_no_request_is_refused_and_counted(target: Target) -> None:
    rng = random.Random(0)
    bodies = [
        DEEP,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        b"nul",
        b"1e999",
        b"[]",
        b"",
        b'{"worker": NaN}',
    ]
    bodies += [bytes(rng.choices(b'{}[]":,0129.eE-tfn\\u\xff', k=40)) for _ in range(200)]
    for body in bodies:
        status, _ = await target.send(target.post, body)
        assert status == 400, body
    assert target.http.refused == {"malformed": len(bodies)}


@pytest.fixture
def embedded(target: Target) -> Target:
    if target.kind != "embedded":
        pytest.skip("of the generation server alone")
    return target


async def test_weights_that_are_no_files_do_not_freeze_the_server(embedded: Target, tmp_path: Path) -> None:
    paths = {}
    for name in ("fifo", "fifo_index", "deep", "odd", "named_fifo", "outside"):
        (tmp_path / name).mkdir()
        paths[name] = str(tmp_path / name)
    os.mkfifo(tmp_path / "fifo" / "model.safetensors")
    os.mkfifo(tmp_path / "fifo_index" / INDEX_FILE)
    os.mkfifo(tmp_path / "named_fifo" / "a.safetensors")
    (tmp_path / "deep" / INDEX_FILE).write_bytes(b'{"weight_map":' + DEEP + b"}")
    (tmp_path / "odd" / INDEX_FILE).write_text('{"weight_map": {"a": 5}}')
    (tmp_path / "named_fifo" / INDEX_FILE).write_text('{"weight_map": {"a": "a.safetensors"}}')
    (tmp_path / "outside" / INDEX_FILE).write_text('{"weight_map": {"a": "/dev/zero"}}')
    paths |= {"long": "/x" * 5000, "null": "/a\0b", "file": "/etc/hostname", "device": "/dev/zero", "none": ""}
    for name, path in paths.items():
        status, body = await embedded.send("/update_weights_from_disk", json.dumps({"model_path": path}).encode())
        assert (status, json.loads(body)["success"]) == (400, False), name
        assert await embedded.is_healthy()
    assert embedded.http.refused == {"weight_update": len(paths)}


BIG = 1 << 70
FORGERIES: list[dict[str, Any]] = [
    {"input_ids": [VOCABULARY]},
    {"input_ids": [-1]},
    {"input_ids": [BIG]},
    {"input_ids": [1.5]},
    {"input_ids": [[1], 2]},
    {"input_ids": []},
    {"input_ids": [1] * 65},
    {"sampling_params": {"max_new_tokens": BIG}},
    {"sampling_params": {"max_new_tokens": -1}},
    {"sampling_params": {"temperature": -0.1}},
    {"sampling_params": {"top_p": 0.0}},
    {"sampling_params": {"top_k": -7}},
    {"sampling_params": {"top_k": BIG}},
    {"sampling_params": {"n": 1 << 40}},
    {"sampling_params": {"sampling_seed": BIG}},
    {"sampling_params": {"sampling_seed": -BIG}},
    {"sampling_params": {"custom_params": {"seed_offset": BIG}}},
    {"sampling_params": {"custom_params": {"seed_offset": -1}}},
    {"sampling_params": {"stop_token_ids": [BIG]}},
    {"sampling_params": {"stop": ["x"]}},
    {"sampling_params": [{}, {}]},
    {"rid": ""},
    {"rid": ["a", "b"]},
    {"return_logprob": True, "logprob_start_len": BIG},
    {"return_logprob": True, "logprob_start_len": -5},
]


async def test_plausible_generation_requests_with_wrong_values_are_refused(embedded: Target) -> None:
    for forgery in FORGERIES:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}} | forgery
        status, answer = await embedded.send("/generate", json.dumps(body).encode())
        assert status == 400, (forgery, answer)
    assert embedded.http.refused == {"malformed": len(FORGERIES)}
    status, _ = await embedded.send("/generate", b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}')
    assert status == 200
