"""Tools of an MCP server (Model Context Protocol), over stdio, streamable HTTP or SSE, by the official `mcp` package
(extra `mcp`).

One task owns a connection from start to end, as the package requires. Callers of a tool only pass their call to this
task. All samples of a worker share the connection. Life of a connection:

    starting -> open -> broken (a call found it closed or hung) -> starting -> ... -> closed

A server that died is restarted, and so is one that leaves both a call and the ping after it without an answer. It is
restarted at once, and after growing pauses as long as no call succeeds. The call that found it dead is not repeated,
because the server may already have done it. Other calls wait for the new server, within their own time limit.

The model reads text, embedded text resources and the URIs of links, and sees images. Of audio and other binary
resources it reads that they are there. The offered tools are those that the server lists when the worker starts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any, TextIO
from urllib.parse import urlsplit

from asyncrl.api import Tool, ToolResult, ToolSchema
from asyncrl.api.picture import Picture, PictureError
from asyncrl.comm.waits import RunningTimeout
from asyncrl.plugins.settings import PYTHON, McpServerConfig

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses in s before a restart that follows a failed start, or a start after which no call succeeded: the first one,
doubled each time up to the longest.
"""
PING_LIMIT_S = 5.0
"""Longest time, in s, that a server has to answer a ping after it left a call without an answer."""

_STDERR_BYTES, _STDERR_LINES = 4096, 3

_log = logging.getLogger(__name__)


class McpError(RuntimeError):
    """The server cannot be started, or cannot be reached; the message names it."""


class McpServer:
    """The connection to one server; see the module's docstring. Use it in one event loop.

    Args:
        config: the server's settings, already checked.
        connect: makes the client, an asynchronous context manager; by default `mcp`'s client.
    """

    def __init__(self, config: McpServerConfig, connect: Callable[[AsyncExitStack], Any] | None = None) -> None:
        self.config = config
        self._connect = connect or self._client
        self._stderr = _Stderr()
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._broken = asyncio.Event()
        self._closing = asyncio.Event()
        self._served = False
        """True if a call succeeded since the last start."""
        self.starts = 0
        """Number of starts."""
        self._owner = asyncio.create_task(self._own())

    async def tools(self) -> list[McpTool]:
        """Return the tools to offer.

        Raises:
            McpError: the server does not start, or lacks a tool that the settings name.
        """
        client = await self._open(self.config.start_timeout_s)
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                found, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    if not (cursor := page.next_cursor):
                        break
        except Exception as error:
            raise McpError(f"mcp server {self.config.name!r} does not list its tools: {_why(error)}") from error
        by_name = {tool.name: tool for tool in found}
        wanted = self.config.tools or list(by_name)
        for name in wanted:
            if name not in by_name:
                raise McpError(f"mcp server {self.config.name!r} has no tool {name!r}; it has: {', '.join(by_name)}")
        return [McpTool(self, self.config.prefix, by_name[name]) for name in wanted]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Return the result of the server's tool `name`.

        Raises:
            McpError: the server is not running, closed the connection, or did not answer in time.
        """
        client = await self._open(self.config.timeout_s)
        broken = self._broken
        try:
            async with RunningTimeout(self.config.timeout_s):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            if not await self._answers(client):
                self._give_up(broken)
                raise McpError(
                    f"it did not answer within {self.config.timeout_s:g} s, nor a ping after that; it is started again"
                ) from None
            raise McpError(f"it did not answer within {self.config.timeout_s:g} s") from None
        except Exception as error:
            if _is_closed(error):
                self._give_up(broken)
            raise McpError(_why(error)) from error
        self._served = True
        seen = [_seen(item) for item in result.content]
        pictures = tuple(part for part in seen if isinstance(part, Picture))
        text = "\n".join(part for part in seen if isinstance(part, str))
        if not seen and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        return ToolResult(
            f"Error: {text}" if result.is_error else text, is_error=bool(result.is_error), pictures=pictures
        )

    def _give_up(self, broken: asyncio.Event) -> None:
        """Have the connection that `broken` belongs to replaced; calls wait for the next one from now on."""
        if broken is self._broken and self._opened.done():
            self._opened = asyncio.get_running_loop().create_future()
        broken.set()

    async def _answers(self, client: Any) -> bool:
        """True if the server answers a ping, if only by an error."""
        from mcp import MCPError

        try:
            async with RunningTimeout(min(PING_LIMIT_S, self.config.timeout_s)):
                await client.session.send_ping()
        except TimeoutError:
            return False
        except MCPError as error:
            return not _is_closed(error)
        except Exception as error:
            if _is_closed(error):
                return False
            raise McpError(_why(error)) from error
        return True

    async def close(self, limit_s: float) -> None:
        """End the connection, and the program that was started for it.

        A program that takes longer than `limit_s` seconds is no longer waited for; it ends with this process at the
        latest. Half of the time is for the connection's own end, the other half for that of its task once it is
        cancelled.
        """
        self._closing.set()
        self._broken.set()
        done, _ = await asyncio.wait({self._owner}, timeout=limit_s / 2)
        if not done:
            _log.warning("mcp server %s did not close within %g s", self.config.name, limit_s / 2)
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=limit_s / 2)

    async def _open(self, limit_s: float) -> Any:
        """Wait for a connection, and return its client."""
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(self._opened)
        except TimeoutError:
            raise McpError(f"mcp server {self.config.name!r} was not there within {limit_s:g} s") from None

    async def _own(self) -> None:
        """Hold one connection after the other until `close`."""
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            self._broken = asyncio.Event()
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(self.config.start_timeout_s):
                        client = await self._connect(stack)
                    self.starts += 1
                    self._served = False
                    self._opened.set_result(client)
                    if self._closing.is_set():
                        break
                    await self._broken.wait()
                    self._give_up(self._broken)
                if self._served:
                    pause_s = FIRST_PAUSE_S
                elif not self._closing.is_set():
                    await self._paused(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except Exception as error:  # the package raises groups of any errors of its transports
                if self._closing.is_set():
                    break
                if not self.starts:
                    self._opened.set_exception(
                        McpError(f"mcp server {self.config.name!r} did not start: {_why(error)}{self._stderr.tail()}")
                    )
                    return
                self._give_up(self._broken)
                why = _why(error) + self._stderr.tail()
                _log.warning("mcp server %s: %s; another start in %g s", self.config.name, why, pause_s)
                await self._paused(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _paused(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._closing.wait()
        except TimeoutError:
            return

    async def _client(self, stack: AsyncExitStack) -> Any:
        """Return a client whose session is open, ended by `stack`."""
        from mcp import Client, StdioServerParameters
        from mcp.client.sse import sse_client
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        config = self.config
        if config.command:
            command = sys.executable if config.command == PYTHON else config.command
            parameters = StdioServerParameters(
                command=command, args=list(config.args), env=dict(config.env), cwd=config.cwd or None
            )
            transport: Any = stdio_client(parameters, errlog=stack.enter_context(self._stderr.opened()))
        elif urlsplit(config.url).path.rstrip("/").endswith("/sse"):
            transport = sse_client(config.url, headers=dict(config.headers))
        else:
            http = await stack.enter_async_context(create_mcp_http_client(headers=dict(config.headers)))
            transport = streamable_http_client(config.url, http_client=http)
        return await stack.enter_async_context(Client(transport))


class _Stderr:
    """The last lines of the server program's error output. All of it would fill the worker's log."""

    def __init__(self) -> None:
        self._end = b""

    @contextmanager
    def opened(self) -> Iterator[TextIO]:
        """Yield a file for the program's output, whose last lines `tail` returns."""
        loop, (reading, writing) = asyncio.get_running_loop(), os.pipe()
        os.set_blocking(reading, False)
        self._end = b""
        loop.add_reader(reading, self._read, reading)
        try:
            with os.fdopen(writing, "w") as file:
                yield file
        finally:
            self._read(reading)
            loop.remove_reader(reading)
            os.close(reading)

    def tail(self) -> str:
        """Return the last lines, as the end of a message; empty if there are none."""
        lines = self._end.decode(errors="replace").strip().splitlines()[-_STDERR_LINES:]
        return f"; its stderr ends: {' | '.join(lines)}" if lines else ""

    def _read(self, reading: int) -> None:
        with suppress(BlockingIOError):
            self._end = (self._end + os.read(reading, 1 << 16))[-_STDERR_BYTES:]


class McpTool(Tool):
    """One tool of a server. The server checks the arguments itself."""

    def __init__(self, server: McpServer, prefix: str, described: Any) -> None:
        self.name = prefix + described.name
        self._server, self._remote_name = server, described.name
        function = {
            "name": self.name,
            "description": described.description or "",
            "parameters": dict(described.input_schema),
        }
        self._schema: ToolSchema = {"type": "function", "function": function}

    def schema(self) -> ToolSchema:
        """Return the server's schema."""
        return self._schema

    async def execute(self, instance_id: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the server's tool."""
        return await self._server.call(self._remote_name, arguments)


def installed() -> str | None:
    """Return why MCP is not available; None if it is."""
    try:
        import mcp
    except ImportError:
        return "needs the package mcp: pip install 'asyncrl[mcp]'"
    return None if hasattr(mcp, "Client") else "needs mcp 2.3 or later: pip install -U 'asyncrl[mcp]'"


def _is_closed(error: BaseException) -> bool:
    """True if `error` means that the connection is gone, rather than that the server refused this call."""
    import anyio
    from mcp import MCPError

    if isinstance(error, MCPError):
        return "closed" in str(error).lower()
    gone = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, ConnectionError)
    return isinstance(error, gone) or type(error).__module__.partition(".")[0].startswith("httpx")


def _why(error: BaseException) -> str:
    """Return the first cause of an error that may be a group, in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError) and not str(error):
        return "it took too long"
    return f"{type(error).__name__}: {error}"[:500]


def _seen(item: Any) -> str | Picture:
    """Return what the model sees of a part of a result."""
    if item.type == "image":
        return _picture(item.data, "image")
    if item.type == "audio":
        return f"[audio of the type {item.mime_type}, which is not shown]"
    if item.type == "resource_link":
        about = "".join(f" {part}" for part in (item.mime_type, item.description) if part)
        return f"[{item.title or item.name}: {item.uri}{about}]"
    if item.type == "resource":
        resource = item.resource
        if isinstance(text := getattr(resource, "text", None), str):
            return text
        if (kind := resource.mime_type or "an unknown type").startswith("image/"):
            return _picture(resource.blob, resource.uri)
        return f"[{resource.uri}: data of {kind}, which is not shown]"
    text = getattr(item, "text", None)
    return text if isinstance(text, str) else f"[{item.type}, which is not shown]"


def _picture(data: str, name: Any) -> str | Picture:
    try:
        return Picture.from_base64(data)
    except PictureError as error:
        return f"[{name}: {error}]"
