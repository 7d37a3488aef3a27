"""The proxy between a run's processes and a server of it: bytes as they are, late, or lost with their connection."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from asyncrl.comm import names
from asyncrl.comm.name_files import FileResolver
from asyncrl.verify.chaos import links as proxy_module
from asyncrl.verify.chaos.links import LinkProxy, Links, through

HOST = "127.0.0.1"
LIMIT_S = 300.0
NO_LEASE_ENDS_S = 3600.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_module, "CONNECT_LIMIT_S", LIMIT_S)


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[str, int]]:
    """A server that gives back what it gets."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    async with server:
        yield HOST, server.sockets[0].getsockname()[1]


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[LinkProxy, int]]:
    proxy = LinkProxy(HOST)
    port = await proxy.start()
    async with echo() as proxy.upstream:
        try:
            yield proxy, port
        finally:
            await proxy.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    async with asyncio.timeout(LIMIT_S):
        return await reader.readexactly(len(data))


async def is_refused(port: int) -> bool:
    """True if a new connection gets no answer."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"?")
        async with asyncio.timeout(LIMIT_S):
            refused = not await reader.read(1)
        writer.close()
    except ConnectionError:
        return True
    return refused


async def test_bytes_pass_as_they_are_both_ways_and_the_end_too() -> None:
    async with proxied() as (proxy, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        data = bytes(range(256)) * 4096
        assert await ask(reader, writer, data) == data
        assert proxy.connections == 1
        writer.write_eof()
        async with asyncio.timeout(LIMIT_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_cut_breaks_what_is_open_and_new_connections_pass_again() -> None:
    async with proxied() as (proxy, port):
        first = await asyncio.open_connection(HOST, port)
        assert await ask(*first, b"one") == b"one"
        proxy.refuses = True
        assert proxy.cut() == 1
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await ask(*first, b"two")
        assert await is_refused(port)
        proxy.refuses = False
        second = await asyncio.open_connection(HOST, port)
        assert await ask(*second, b"three") == b"three"
        for _, writer in (first, second):
            writer.close()


async def test_a_delay_holds_bytes_back_and_keeps_their_order() -> None:
    async with proxied() as (proxy, port):
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection(HOST, port)
        proxy.delay_s = 0.1
        began = loop.time()
        assert await ask(reader, writer, b"1234") == b"1234"
        assert loop.time() - began >= 2 * proxy.delay_s
        writer.close()


async def test_where_nobody_listens_behind_it_a_connection_is_broken() -> None:
    proxy = LinkProxy(HOST)
    port = await proxy.start()
    with socket.socket() as silent:
        silent.bind((HOST, 0))  # and does not listen, nor does anybody else there meanwhile
        try:
            assert await is_refused(port), "nobody was ever there"
            proxy.upstream = silent.getsockname()
            assert await is_refused(port), "it is gone"
            assert proxy.connections == 0
        finally:
            await proxy.close()


@pytest.mark.parametrize(
    ("key", "value", "changed"),
    [
        (names.MANAGER_KEY, "https://127.0.0.1:4711", "https://127.0.0.1:99"),
        (names.puller_key(0), "tcp://127.0.0.1:4711", "tcp://127.0.0.1:99"),
        (
            names.gen_server_key(1),
            names.GenerationServerEntry("http://[::1]:4711", 3, 2).encode(),
            names.GenerationServerEntry("http://[::1]:99", 3, 2).encode(),
        ),
    ],
)
def test_an_entry_gets_another_port_and_stays_as_it_is_otherwise(key: str, value: str, changed: str) -> None:
    assert through(key, value, 99) == (changed, ("::1" if "[" in value else "127.0.0.1", 4711))


@pytest.fixture
def resolver(tmp_path: object) -> FileResolver:
    return FileResolver(f"{tmp_path}/names")


async def test_entries_are_replaced_also_those_of_successors_and_go_with_their_owner(resolver: FileResolver) -> None:
    owner, key = "gserver_manager/0", names.MANAGER_KEY
    links = Links(HOST, NO_LEASE_ENDS_S, {owner: key})
    await links.start()
    try:
        links.look(resolver)
        assert resolver.get_subtree() == {}
        with FileResolver(resolver.root) as other:
            for _ in range(2):  # the second one is the successor
                async with echo() as upstream:
                    host, port = upstream
                    other.add(f"status/{owner}", str(port), replace=True)
                    other.add(key, f"https://{host}:{port}", lease_s=NO_LEASE_ENDS_S, replace=True)
                    links.look(resolver)
                    entry = resolver.get(key)
                    parts = urlsplit(entry)
                    assert parts.hostname == host
                    assert parts.port != port
                    assert links.proxy(owner).upstream == upstream
                    reader, writer = await asyncio.open_connection(HOST, parts.port)
                    assert await ask(reader, writer, b"through") == b"through"
                    writer.close()
                    links.look(resolver)
                    assert resolver.get(key) == entry, "the proxy's own address is no new one"
            other.delete(f"status/{owner}")
        links.look(resolver)
        assert resolver.get_subtree() == {}
    finally:
        await links.close()
        resolver.close()


async def test_an_owner_that_was_stopped_for_longer_than_its_lease_is_reached_again(
    resolver: FileResolver,
) -> None:
    owner, puller, status = "model_worker/0", names.puller_key(0), names.status_key(names.MODEL_WORKER, 0)
    links = Links(HOST, NO_LEASE_ENDS_S, {owner: puller})
    await links.start()
    with FileResolver(resolver.root) as rank:
        rank._stop_renewing()  # this test says when it renews
        rank.fences = {names.incarnation_key(names.MODEL_WORKER, 0): "0"}
        rank.add(status, "ready", lease_s=NO_LEASE_ENDS_S)
        rank.add(puller, f"tcp://{HOST}:4711", lease_s=NO_LEASE_ENDS_S)
        try:
            links.look(resolver)
            through_proxy = resolver.get(puller)
            assert rank._renew(puller) == "gone", "it is the proxy's"
            lapse(resolver, status)
            links.look(resolver)
            assert resolver.get_subtree() == {}, "a rank that stands still looks as without a proxy"
            rank._renew_all()
            links.look(resolver)
            assert resolver.get(puller) == through_proxy
        finally:
            await links.close()
            resolver.close()


def lapse(resolver: FileResolver, name: str) -> None:
    """Its owner has not renewed the entry for as long as its lease."""
    file = Path(resolver.root) / (name.replace("/", "+") + ".json")
    past = file.stat().st_mtime - NO_LEASE_ENDS_S - 1
    os.utime(file, (past, past))
