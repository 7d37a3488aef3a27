"""GenerationServer: one inference engine behind SGLang's HTTP API, found by name resolution.

    embedded    the torch engine in this process
    a child     a program of its own, such as `python -m sglang.launch_server`
    adopted     server i of a list that already runs

In all cases the process starts the engine with the initial model, registers its address under a lease, and waits. When
the engine dies the registration is removed at once, so that no request is routed to it. A child is started again and
registers its new address, and the GserverManager brings it to the newest version before it gets requests.
"""

from __future__ import annotations

import asyncio
import math
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Never, Protocol

from asyncrl.comm import names
from asyncrl.comm.http_client import HttpError
from asyncrl.inference.client import GenerationServerClient, connect
from asyncrl.inference.settings import colocated_servers
from asyncrl.observe import observer
from asyncrl.observe.observer import EVERY_S, Activity
from asyncrl.runtime.plan import COLOCATED_SERVER, MODEL
from asyncrl.runtime.process.waiting import StopRequested, cancel, or_stop
from asyncrl.runtime.process.worker import AsyncWorker, CannotContinue, WorkerSpec, lasting_imports
from asyncrl.runtime.run_log import RestartBudget, notice

BASE_VERSION: Final = "0"
"""Label of the weights that an engine starts with: policy version 0 is the initial model."""
ADOPTED_HOST: Final = "asyncrl.inference.program_host:AdoptedHost"
"""What stands for a server that already runs; other servers do not load it."""
TIMEOUT_S = 5.0
"""Limit of a question for the engine's figures."""


class EngineStartError(RuntimeError):
    """An engine did not become ready."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine that takes requests. `pid` is None if this process did not start it."""

    url: str
    pid: int | None


class EngineHost(Protocol):
    """An engine behind SGLang's HTTP API: its start, failure and end.

    Attributes:
        shortage: what happened and the settings to lower, if the engine failed for lack of memory.
    """

    shortage: tuple[str, str] | None

    async def start(self) -> ServedEngine:
        """Start it with the initial model under label `BASE_VERSION`; may be called again after `failed`.

        Raises:
            EngineStartError: it did not start; the message has the reason.
        """

    async def failed(self) -> str:
        """Wait until the engine is gone; return the reason."""

    async def stop(self) -> None:
        """Release the engine, and end it if it was started here. May be repeated."""


class EngineFailed(CannotContinue):
    """The engine ended and was not started again."""


class GenerationServer(AsyncWorker):
    """The process around one engine."""

    always_reports = True  # the GserverManager waits for its weight updates
    _scratch: ClassVar[str] = "server"
    _sharing: Any = None
    """An `asyncrl.colocated.server.ColocatedServer`, if the trainer needs the device from time to time."""

    @property
    def _key(self) -> str:
        """The server's name in name resolution."""
        return names.gen_server_key(self.index)

    async def main(self) -> None:
        """Keep the engine up until a stop is requested."""
        self._figures: dict[str, float] = {}
        observer.gauges(lambda: self._figures)
        if self._is_colocated:
            colocated = pkgutil.resolve_name(COLOCATED_SERVER)
            self._sharing = colocated(self.resolver, self.index, self.name, self.config.system.lease_s)
        try:
            if not self.config.system.shared_filesystem:
                staged = names.staged_key(MODEL, self.config.system.host)
                self.config.model.path = await self.registered(staged, names.STAGING_SERVER)
            host = self._make_host()
            try:
                await or_stop(self._keep_up(host), self.stop, math.inf)
            finally:
                await host.stop()
        except StopRequested:
            self.log.info("asked to stop; the engine is ended")

    async def _keep_up(self, host: EngineHost) -> Never:
        """Start the engine and register it, again after each end.

        Raises:
            EngineStartError: it did not start, or cannot do what the run needs.
            EngineFailed: it ended too often.
        """
        limit, window_s = self.config.system.restarts_per_process, self.config.system.restart_window_s
        budget = RestartBudget(limit, window_s)
        while True:
            if self._sharing is not None:
                await self._sharing.await_turn(self.process_status.others_progressed)  # the ranks have their own limits
            observer.stage("loads the model")
            served = await host.start()
            await self._check(served.url)
            self._register(served)
            if self._sharing is not None:
                self._sharing.loaded()
            try:
                reason = await self._serve(host, served)
            finally:
                self._unregister()
            if host.shortage is not None:
                observer.shortage(*host.shortage)
            if not budget.spend(time.monotonic()):
                raise EngineFailed(f"{reason}\ngiven up after {limit} restarts in {window_s:g} s")
            self.log.error("%s\nstarting it again", reason)
            if host.shortage is not None:
                notice(self.run_dir, f"WARNING: {self.name} starts its engine again: {'; '.join(host.shortage)}")
                host.shortage = None
            self.process_status.set("starting")

    @property
    def _is_colocated(self) -> bool:
        """True if the trainer needs the device from time to time."""
        return self.index in colocated_servers(self.config.generation)

    async def _serve(self, host: EngineHost, served: ServedEngine) -> str:
        """Observe the engine until it is gone; return the reason."""
        observer.stage(observer.SERVES, Activity.serves)
        async with connect(served.url, self.http_security) as client:
            following = [asyncio.create_task(self._follow_figures(client))]
            if self._sharing is not None:
                following.append(asyncio.create_task(self._sharing.follow_sleep(served.url)))
            try:
                return await host.failed()
            finally:
                await cancel(*following)

    async def _follow_figures(self, client: GenerationServerClient) -> Never:
        """Keep the engine's figures up to date until cancelled; there are none while it does not answer."""
        limits: dict[str, float] = {}
        try:
            while True:
                try:
                    limits = limits or await client.limits(timeout_s=TIMEOUT_S)
                    self._figures = limits | await client.figures(timeout_s=TIMEOUT_S)
                except (HttpError, ValueError):
                    self._figures = {"silent": 1.0}
                await asyncio.sleep(EVERY_S)
        finally:
            self._figures = {}

    async def _check(self, url: str) -> None:
        """Check that the server at `url` can do what the run needs.

        Raises:
            EngineStartError: it cannot, or it does not answer.
        """
        if path := self.config.generation.engine.server_check:
            await pkgutil.resolve_name(path)(url, self.config, self.http_security)

    def _register(self, served: ServedEngine) -> None:
        """Publish the engine's address with a lease, and report to the launcher that it serves."""
        entry = names.GenerationServerEntry(served.url, served.pid, int(BASE_VERSION))
        self.resolver.add(self._key, entry.encode(), lease_s=self.config.system.lease_s, replace=True)
        self.ready()
        self.log.info("the engine serves at %s", served.url)

    def _unregister(self) -> None:
        if not self.resolver.delete(self._key, own=True):
            self.log.info("the registration was already gone, or is another's")

    def _make_host(self) -> EngineHost:
        """Return the adopted server, or the engine of the configured back end, whose libraries are loaded only here."""
        generation = self.config.generation
        if urls := generation.engine.urls:
            return self._adopted(urls[self.index], Path(str(self.config.model.path)))
        with lasting_imports():
            make: Callable[..., EngineHost] = pkgutil.resolve_name(generation.engine.host)
        return make(self, scratch=f"{self._scratch}{self.index}", colocated=self._sharing is not None)

    def _adopted(self, url: str, model_dir: Path | None) -> EngineHost:
        adopted: Callable[..., EngineHost] = pkgutil.resolve_name(ADOPTED_HOST)
        limit_s = self.config.generation.start_timeout_s
        return adopted(url, model_dir=model_dir, security=self.http_security, timeout_s=limit_s)


class PolicyServer(GenerationServer):
    """A server of one of `policies`: a further trained policy, a fixed model, or older versions.

    It begins with the folder `path`, or with the run's initial model. The GserverManager drains a server of older
    versions before each update, so an answer is of one version. A server of a trained policy is updated like the run's
    own. A server at `url` is not the run's: nothing is loaded there, and it counts as version 0.
    """

    _scratch = "policy"

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        policy = self.config.policy_of_server[self.index]
        if policy.path is not None:
            self.config.model.path = str(Path(policy.path).expanduser())
        self.config.moe.replay_routing = False  # its tokens are not trained
        self._trained, self._url = policy.trained, policy.url

    _is_colocated = False

    @property
    def _key(self) -> str:
        return f"{names.POLICY_SERVERS}/{self.index}"

    def _make_host(self) -> EngineHost:
        if self._url is None:
            return super()._make_host()
        return self._adopted(self._url, None)

    async def _check(self, url: str) -> None:
        """Check a trained policy only: no answer of the others spans a weight update. All of them read text."""
        if self._trained:
            await super()._check(url)
