"""A TCP proxy that forwards bytes unchanged, and on request cuts all connections or delays them.

It is between a run's processes and one of its servers. The traffic stays encrypted from end to end, so the proxy cannot
select messages. A cut loses the messages in flight, and a delay keeps their order.
"""

from __future__ import annotations

import asyncio
import contextlib

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
