"""Servers that tests talk to: etcd itself, and a generation server without a model, with SGLang's contract and its
pitfalls on command.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ..etcd_cluster import EtcdCluster, needs_etcd
from ..ports import reserved_port

VOCABULARY = 97


class FakeGenerationServer:
    """Speaks SGLang's native HTTP API. Token t of a sample depends on its seed and the tokens before it alone.

    What it does is set by its fields, at any time:

    - `hold_after`: samples stop after so many tokens of a call until `release()`, an abort or a pause.
    - `early_stop_after`: samples with stop strings end after so many tokens of a call, as if one were there.
    - `busy`: new requests wait in the queue instead of running; those for scores are aborted there.
    - `update`: "ok", "refuse" (400, although the weights are replaced), "lie" (200 with the old label), "hang".
    - `hang`: nothing is answered any more. `deaf`: an abort changes nothing.
    - `flushed`: whether each update emptied the cache. `at_pause`: mode and running requests of each pause.
    - `computes`: at each look at its metrics it has generated more; None: it has no metrics.
    - `has_ready`, `has_loads`: it has these routes, as newer servers do. `loads`: what it reports of its requests.
    - `logprobs`: by version those of every prompt's tokens; `stale`: those of that version are given instead.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.version = "0"
        self.model_info_version: str | None = None
        self.spans = True
        self.has_ready = self.has_loads = True
        self.hold_after: int | None = None
        self.early_stop_after: int | None = None
        self.busy = False
        self.update = "ok"
        self.hang = self.deaf = False
        self.computes: bool | None = None
        self.logprobs: dict[str, list[float]] = {}
        self.stale: str | None = None
        self.paused = False
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.flushed: list[bool] = []
        self.loads: dict[str, int] | None = None
        self.at_pause: list[tuple[str, int]] = []
        self.generated_tokens = 0
        self.running: dict[str, asyncio.Event] = {}
        self._aborted: set[str] = set()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._port: socket.socket | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{name:.+}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        self._port = reserved_port()
        host, port = self._port.getsockname()
        await web.TCPSite(self._runner, host, port, reuse_address=True).start()
        self.url = f"http://{host}:{port}"

    async def kill(self) -> None:
        """The process is gone: connections break, the port refuses."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def end(self) -> None:
        """Others may have the port."""
        await self.kill()
        if self._port is not None:
            self._port.close()

    async def release(self) -> None:
        self.hold_after = None
        await self._notify()

    async def interrupt(self) -> None:
        """Answer running requests with what they have, and hold new ones until `resume`."""
        self.paused = True
        await self.abort_running()

    async def abort_running(self) -> None:
        self._aborted |= set(self.running)
        await self._notify()

    async def resume(self, version: str) -> None:
        """Serve what is held, under `version`."""
        self.version, self.paused = version, False
        await self.release()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at after every change of this server's state."""
        async with asyncio.timeout(300), self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.calls.append(name)
        await self._notify()
        if self.hang:
            await asyncio.get_running_loop().create_future()
        if (
            self.token
            and name not in ("ready", "health")
            and request.headers.get("Authorization") != f"Bearer {self.token}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        match name:
            case "health":
                async with self._changed:
                    await self._changed.wait_for(lambda: not self.paused)
                return web.Response()
            case "ready":
                return web.Response(status=404 if not self.has_ready else 503 if self.paused else 200)
            case "model_info":
                return web.json_response({"weight_version": self.model_info_version or self.version})
            case "pause_generation":
                mode = (await request.json())["mode"]
                self.at_pause.append((mode, len(self.running)))
                if mode == "abort":
                    await self.interrupt()
                else:
                    self.paused = True
                return web.json_response({"status": "ok", "message": "Generation paused successfully."})
            case "continue_generation":
                self.paused = False
                await self._notify()
                return web.json_response({"status": "ok", "message": "Generation continued successfully."})
            case "abort_request":
                prefix = (await request.json()).get("rid", "")
                self._aborted |= {rid for rid in self.running if rid.startswith(prefix) and not self.deaf}
                await self._notify()
                return web.Response()
            case "flush_cache":
                return web.Response(text="Cache flushed.")
            case "v1/loads" if self.has_loads:
                load = self.loads or {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
                return web.json_response({"loads": [load]})
            case "metrics" if self.computes is not None:
                tokens = self.calls.count("metrics") if self.computes else 0
                return web.Response(
                    text=f"sglang:generation_tokens_total {tokens}\nsglang:num_queue_reqs {len(self.calls)}\n"
                )
            case "update_weights_from_disk":
                return await self._update(await request.json())
            case "generate":
                return await self._generate(await request.json())
        return web.Response(status=404)

    async def _update(self, body: dict[str, Any]) -> web.Response:
        if self.update == "hang":
            await asyncio.get_running_loop().create_future()
        old = self.version
        self.version = body["weight_version"]
        self.flushed.append(body["flush_cache"])
        self.model_info_version = old if self.update in ("refuse", "lie") else None
        success = self.update != "refuse"
        await self._notify()
        return web.json_response(
            {"success": success, "message": "", "num_paused_requests": 0}, status=200 if success else 400
        )

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        if body.get("logprob_start_len") is not None:
            return await self._score(body)
        self.requests.append(body)
        await self._notify()
        items = zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True)
        return web.json_response(await asyncio.gather(*(self._sample(*item) for item in items)))

    async def _score(self, body: dict[str, Any]) -> web.Response:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.paused)
        if self.busy:
            finish = {"type": "abort", "message": "Abort in waiting queue"}
            return web.json_response({"output_ids": [], "meta_info": {"finish_reason": finish}})
        prompt, start = body["input_ids"], body["logprob_start_len"]
        logprobs = self.logprobs[self.stale or self.version]
        triples = [[logprob, token, None] for logprob, token in zip(logprobs, prompt, strict=True)][start:]
        triples[0][0] = None
        return web.json_response({"output_ids": [0], "meta_info": {"input_token_logprobs": triples}})

    async def _sample(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.paused)
        self.running[rid] = asyncio.Event()
        await self._notify()
        try:
            return await self._decode(rid, prompt, params)
        finally:
            del self.running[rid]
            self._aborted.discard(rid)
            await self._notify()

    async def _decode(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        output: list[int] = []
        versions: list[str] = []
        finish: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        if self.busy:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.busy or rid in self._aborted)
            if rid in self._aborted:
                meta = {"id": rid, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
                return {"output_ids": [], "meta_info": meta | {"weight_version": self.version, "completion_tokens": 0}}
        while len(output) < params["max_new_tokens"]:
            if self.hold_after is not None and len(output) >= self.hold_after:
                async with self._changed:
                    await self._changed.wait_for(
                        lambda: self.hold_after is None or len(output) < self.hold_after or rid in self._aborted
                    )
            if self.paused:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self.paused or rid in self._aborted)
            if rid in self._aborted:
                finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            output.append(next_token([*prompt, *output], params.get("sampling_seed", 0)))
            versions.append(self.version)
            self.generated_tokens += 1
            if self.hold_after is not None:
                await self._notify()
            if params.get("stop") and self.early_stop_after == len(output):
                finish = {"type": "stop", "matched": params["stop"][0]}
                break
            if output[-1] in params.get("stop_token_ids", ()):
                finish = {"type": "stop", "matched": output[-1]}
                break
        return {"output_ids": output, "meta_info": self._meta(rid, prompt, output, versions, finish)}

    def _meta(
        self, rid: str, prompt: list[int], output: list[int], versions: list[str], finish: dict[str, Any]
    ) -> dict[str, Any]:
        meta = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "completion_tokens": len(output),
            "output_token_logprobs": [[-(token + 1) / 100, token, None] for token in output],
        }
        if self.spans:
            starts = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
            ends = [*starts[1:], len(versions)]
            meta["weight_versions"] = [
                {"version": versions[start], "start": start, "end": end}
                for start, end in zip(starts, ends, strict=False)
            ]
        return meta


def next_token(prefix: list[int], seed: int) -> int:
    """The token after `prefix` in the stream `seed`."""
    return (sum(prefix) * 31 + len(prefix) * 7 + seed) % VOCABULARY


StartServer = Callable[..., Awaitable[FakeGenerationServer]]


@pytest.fixture
async def start_fake_server() -> AsyncIterator[StartServer]:
    """Starts `FakeGenerationServer`s; they end with the test."""
    servers: list[FakeGenerationServer] = []

    async def start(token: str | None = None) -> FakeGenerationServer:
        server = FakeGenerationServer(token)
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.end()


class LoopClock:
    """The clock of the running event loop, which the test sets forward: a time limit passes when it says so."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._time, self.ahead = self.loop.time, 0.0

    def now(self) -> float:
        return self._time() + self.ahead

    def forward(self, seconds: float) -> None:
        self.ahead += seconds

    async def forward_until(self, condition: Callable[[], bool], by_s: float) -> None:
        """Let time pass, `by_s` at a time, until `condition` holds."""
        while not condition():
            self.forward(by_s)
            await asyncio.wait({self.loop.create_future()}, timeout=0.02)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    """Set forward by the test, or it goes as ever."""
    clock = LoopClock()
    monkeypatch.setattr(clock.loop, "time", clock.now)
    return clock


@pytest.fixture(scope="session")
def etcd_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an etcd server that ends with the tests."""
    needs_etcd()
    cluster = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    try:
        cluster.start()
        yield cluster.address
    finally:
        cluster.kill()


@pytest.fixture
def etcd_server(tmp_path: Path) -> Iterator[EtcdCluster]:
    """An etcd server of the test's own, to be killed and started again."""
    needs_etcd()
    cluster = EtcdCluster(tmp_path / "etcd")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
