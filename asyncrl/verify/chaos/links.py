"""Cut and slow connections: proxies between a run's processes and its servers, by changing addresses in name resolution
alone.

A server's entry is replaced by an entry with the address of its proxy as soon as it appears. Its owner then finds that
it no longer owns the entry. This process renews the new entry instead, and removes it once the owner's status is gone.
So a death is noticed as late as without the proxy. A successor enters its own address, and so does an owner that was
only suspended (`NameResolver.fences`). These entries are replaced again.

A process that reads an address in the few milliseconds before the replacement bypasses the proxy until its connection
breaks. The traffic stays encrypted from end to end, so a proxy cannot select messages: a cut loses the messages in
flight, and a delay keeps their order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import msgspec

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameEntryNotFound, NameResolver

_CHUNK_BYTES = 1 << 16
CONNECT_LIMIT_S = 5.0


class LinkProxy:
    """A proxy on a free port of `host`. `upstream` may change when a server restarts."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._server: asyncio.Server | None = None
        self._pairs: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self.upstream: tuple[str, int] | None = None
        """Host and port that bytes go to; None if there is no server."""
        self.delay_s = 0.0
        """Delay in each direction, in s."""
        self.refuses = False
        """True if new connections are closed at once."""

    async def start(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._take, self._host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._pairs)

    def cut(self) -> int:
        """Break all connections at once, dropping bytes in flight; return the number of connections."""
        pairs = list(self._pairs.values())
        for writer in (writer for pair in pairs for writer in pair):
            writer.transport.abort()
        return len(pairs)

    async def close(self) -> None:
        """Break all connections and stop listening."""
        if self._server is not None:
            self._server.close()
        self.cut()
        tasks = list(self._pairs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses or self.upstream is None:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None, "a connection is a task of its own"
        self._pairs[task] = (writer,)
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                far_reader, far_writer = await asyncio.open_connection(*self.upstream)
        except OSError:  # nothing listens there: behave in the same way
            writer.transport.abort()
            del self._pairs[task]
            return
        self._pairs[task] = (writer, far_writer)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, far_writer))
                pumps.create_task(self._pump(far_reader, writer))
        except* OSError:  # one end broke it: break the other end too
            far_writer.transport.abort()
            writer.transport.abort()
        finally:
            for each in (writer, far_writer):
                each.close()
            del self._pairs[task]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):  # it is closed already
            if writer.can_write_eof():
                writer.write_eof()


def through(key: str, value: str, port: int) -> tuple[str, tuple[str, int]]:
    """Return the entry's `value` with another port, and its original host and port."""
    is_server = key.startswith(f"{names.GENERATION_SERVERS}/")
    entry = names.GenerationServerEntry.decode(value) if is_server else None
    parts = urlsplit(value if entry is None else entry.url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"name {key!r} holds {value!r:.200}, which has no host and port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = urlunsplit(parts._replace(netloc=f"{host}:{port}"))
    changed = address if entry is None else msgspec.structs.replace(entry, url=address).encode()
    return changed, (parts.hostname, parts.port)


@dataclass(slots=True)
class _Link:
    """A server behind a proxy."""

    owner: str
    key: str
    proxy: LinkProxy
    port: int
    value: str | None = None
    """The entry as this process wrote it; None if there is no entry."""


class Links:
    """The proxies of a run; call `look` often.

    Args:
        host: address on which the run's processes listen.
        lease_s: lease of the entries.
        keys: for each process behind a proxy, the entry of name resolution to replace.
    """

    def __init__(self, host: str, lease_s: float, keys: Mapping[str, str]) -> None:
        self._host, self._lease_s = host, lease_s
        self._keys = dict(keys)
        self._links: dict[str, _Link] = {}

    async def start(self) -> None:
        """Open the proxies."""
        for owner, key in self._keys.items():
            proxy = LinkProxy(self._host)
            self._links[owner] = _Link(owner, key, proxy, await proxy.start())

    def proxy(self, owner: str) -> LinkProxy:
        """Return the proxy of `owner`."""
        return self._links[owner].proxy

    def look(self, resolver: NameResolver) -> None:
        """Replace new entries, and remove those whose owner is gone."""
        for link in self._links.values():
            value = _value(resolver, link.key)
            if value is None:
                link.value = None
            elif value != link.value:
                link.value, link.proxy.upstream = through(link.key, value, link.port)
                resolver.add(link.key, link.value, lease_s=self._lease_s, replace=True)
            elif _value(resolver, f"{names.STATUSES}/{link.owner}") is None:
                resolver.delete(link.key, own=True)
                link.value = None

    async def close(self) -> None:
        """Close the proxies."""
        for link in self._links.values():
            await link.proxy.close()


def _value(resolver: NameResolver, key: str) -> str | None:
    try:
        return resolver.get(key)
    except NameEntryNotFound:
        return None
