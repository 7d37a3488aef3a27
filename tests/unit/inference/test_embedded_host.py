"""The embedded engine's host, with an engine that ends late."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.embedded import host as host_module
from asyncrl.inference.embedded.host import EmbeddedHost


class LateEngine:
    def start(self) -> None:
        pass

    def close(self) -> None:
        raise TimeoutError("the engine's thread did not end within 10.0 s")


class OpenServer:
    url = "http://127.0.0.1:1"
    closed = False

    async def close(self) -> None:
        self.closed = True


async def test_the_http_server_is_closed_if_the_engine_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OpenServer()

    async def serve(*_: Any, **__: Any) -> OpenServer:
        return server

    monkeypatch.setattr(host_module, "load_engine", lambda *_, **__: LateEngine())
    monkeypatch.setattr(host_module, "serve", serve)
    host = EmbeddedHost(ExperimentConfig(), security=None)
    await host.start()
    with pytest.raises(TimeoutError):
        await host.stop()
    assert server.closed
