"""The dashboard's server: the page, its data, and figures for Prometheus. It reads files and sends no request to the
run's processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from asyncrl.comm.http.server import HttpRoute, HttpServer, Refused, json_response
from asyncrl.observe.dashboard.page import Decode, html, page_data
from asyncrl.observe.history import History
from asyncrl.observe.metrics.prometheus import CONTENT_TYPE, prometheus_text

SEEN_BYTES = 64


class Dashboard:
    """Serves the page of `histories`.

    Args:
        decoders: for each run, the function from token ids to text; None if unknown.
        token: bearer token of all paths except the page itself, which contains no data.
        host: address to listen on.
    """

    def __init__(
        self, histories: Sequence[History], decoders: Sequence[Decode | None], *, token: str, host: str
    ) -> None:
        self._runs = list(zip(histories, decoders, strict=True))
        self._host = host
        self._reading = asyncio.Lock()
        self._page = html(None).encode()
        self._server = HttpServer(
            {
                "/": HttpRoute(self._answer_page, "GET", open=True),
                "/api/runs": HttpRoute(self._answer_runs, "GET"),
                "/metrics": HttpRoute(self._answer_metrics, "GET"),
            },
            token=token,
            tls=None,
        )

    async def start(self, port: int) -> str:
        """Listen; returns the URL. Port 0 takes a free one."""
        return await self._server.start(self._host, port)

    async def close(self) -> None:
        """Stop listening."""
        await self._server.close()

    async def _answer_page(self, request: web.BaseRequest, body: bytes) -> web.Response:
        headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=headers)

    async def _answer_runs(self, request: web.BaseRequest, body: bytes) -> web.Response:
        """Return all runs if anything has changed since the caller's version."""
        seen = request.query.get("seen", "")
        if len(seen) > SEEN_BYTES:
            raise Refused(400, {"error": "seen is no version"}, "malformed")
        async with self._reading:
            runs = await asyncio.to_thread(self._read)
        version = hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()[:SEEN_BYTES]
        return json_response({"version": version, "runs": None if version == seen else runs})

    async def _answer_metrics(self, request: web.BaseRequest, body: bytes) -> web.Response:
        async with self._reading:
            text = await asyncio.to_thread(self._read_metrics)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    def _read_metrics(self) -> str:
        for history, _ in self._runs:
            history.refresh()
        return prometheus_text(history for history, _ in self._runs)

    def _read(self) -> list[dict[str, Any]]:
        found = []
        for history, decode in self._runs:
            history.refresh()
            found.append(page_data(history, decode))
        return found


Ready = Callable[[str], None]
"""Takes the URL once the dashboard listens."""


async def serve(dashboard: Dashboard, port: int, ready: Ready, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    url = await dashboard.start(port)
    try:
        ready(url)
        await stop.wait()
    finally:
        await dashboard.close()
