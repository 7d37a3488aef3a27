"""GenerationServer: one inference engine behind SGLang's HTTP API, found by name resolution.

    generation.backend=embedded                     the torch engine in this process
    generation.backend=sglang                       `python -m sglang.launch_server` as a child
    generation.backend=sglang, sglang.urls=[...]    server i of a list that already runs

Whatever it is, the process does one thing: bring the engine up with the initial model, register its address under a
lease, and wait. When the engine dies the registration goes at once, so that nobody is routed there; a child is started
again, registers its new address, and the GserverManager brings it to the newest version before it gets requests.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from asyncrl.comm import names
from asyncrl.comm.http import HttpError, JsonHttp
from asyncrl.comm.name_resolve.errors import NameEntryNotFound
from asyncrl.config.setting import Device
from asyncrl.inference.client import GenerationServerClient
from asyncrl.inference.engine_host import BASE_VERSION, EngineHost, EngineStartError, RestartBudget, Served
from asyncrl.inference.settings import GenerationBackend
from asyncrl.inference.sglang.host import AdoptedHost, SGLangHost
from asyncrl.manager.settings import UpdateMode
from asyncrl.runtime.worker import AsyncWorker

MAX_RESTARTS = 3
RESTART_WINDOW_S = 600.0


class EngineFailed(RuntimeError):
    """The engine ended and was not started again."""


class GenerationServer(AsyncWorker):
    """The process around one engine."""

    async def main(self) -> None:
        """Keep the engine up until a stop is requested."""
        budget = RestartBudget(MAX_RESTARTS, RESTART_WINDOW_S)
        host = self._make_host()
        try:
            while not self.stop.is_set():
                reason = await self._serve(host)
                if reason is None:
                    return
                if not budget.spend(time.monotonic()):
                    raise EngineFailed(f"{reason}\ngiven up after {MAX_RESTARTS} restarts in {RESTART_WINDOW_S:g} s")
                self.log.error("%s\nstarting it again", reason)
        finally:
            await host.stop()

    async def _serve(self, host: EngineHost) -> str | None:
        """One life of the engine; returns why it ended, None if a stop was requested."""
        stop = asyncio.ensure_future(self.stop.wait())
        starting = asyncio.ensure_future(host.start())
        tasks: set[asyncio.Future[object]] = {stop, starting}  # type: ignore[arg-type]
        try:
            await asyncio.wait({stop, starting}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return None
            served = starting.result()
            await self._check_kept_requests(served)
            self._register(served)
            failed = asyncio.ensure_future(host.failed())
            tasks.add(failed)  # type: ignore[arg-type]
            await asyncio.wait({stop, failed}, return_when=asyncio.FIRST_COMPLETED)
            self._unregister()
            return None if stop.done() else failed.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_kept_requests(self, served: Served) -> None:
        """Check that answers may span an update, where the run makes such.

        Raises:
            EngineStartError: the server's tokens cannot be told apart by their weights, or in place would spread keys
                and values of old ones; or it does not answer.
        """
        mode = self.config.manager.update_mode
        if (
            mode not in (UpdateMode.retract, UpdateMode.in_place)
            or self.config.generation.backend != GenerationBackend.sglang
        ):
            return
        http = JsonHttp(None if self.secret is None else self.secret.token)
        try:
            client = GenerationServerClient(http, served.url)
            told = await client.tells_token_versions(timeout_s=self.config.generation.start_timeout_s)
            shares = mode == UpdateMode.in_place and await client.shares_prefixes()
        except HttpError as error:
            raise EngineStartError(f"server {served.url} does not generate: {error}") from error
        finally:
            await http.close()
        if not told:
            raise EngineStartError(
                f"manager.update_mode={str(mode)!r}: the answers of server {served.url} do not say which weights each "
                "token is of (no weight_versions); use SGLang 0.5.20 or newer, or update_mode=interrupt"
            )
        if shares:
            raise EngineStartError(
                f"manager.update_mode='in_place': server {served.url} shares cached prefixes among requests, and would "
                "give new ones keys and values of ever older weights; start it with --disable-radix-cache, or use "
                "update_mode=retract"
            )

    def _register(self, served: Served) -> None:
        """Publish the engine's address with a lease, and tell the launcher that it serves."""
        entry = names.GenerationServerEntry(served.url, served.pid, self.config.generation.backend, int(BASE_VERSION))
        key = names.gen_server_key(self.index)
        self.resolver.add(key, entry.encode(), lease_s=self.config.system.heartbeat_s, replace=True)
        self.ready()
        self.log.info("%s serves at %s", self.config.generation.backend, served.url)

    def _unregister(self) -> None:
        try:
            self.resolver.delete(names.gen_server_key(self.index))
        except NameEntryNotFound:  # the manager may have removed it first
            self.log.info("the registration was already gone")

    def _make_host(self) -> EngineHost:
        generation = self.config.generation
        token = None if self.secret is None else self.secret.token
        if generation.backend == GenerationBackend.embedded:
            # torch is imported only here: with SGLang this process stays small
            from asyncrl.inference.embedded.host import EmbeddedHost

            return EmbeddedHost(self.config, token=token)
        if generation.sglang.urls:
            return AdoptedHost(
                generation.sglang.urls[self.index],
                model_dir=Path(str(self.config.model.path)),
                token=token,
                timeout_s=generation.start_timeout_s,
            )
        return SGLangHost(
            self.config, index=self.index, run_dir=self.run_dir, device=self._device(), token=token, log=self.log
        )

    def _device(self) -> Device:
        """The configured device; `auto` is cuda where the launcher gave this process a GPU."""
        if self.config.generation.device != Device.auto:
            return self.config.generation.device
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = any(Path("/proc/driver/nvidia/gpus").glob("*")) if visible is None else bool(visible.strip())
        return Device.cuda if gpus else Device.cpu
