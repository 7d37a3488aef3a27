"""The embedded engine in the GenerationServer's own process. Only a process with this engine imports torch."""

from __future__ import annotations

import asyncio
import gc
import os

import torch

from asyncrl.comm.security.run_secret import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory_advice import in_order, is_out_of_memory, server_settings
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.load_engine import load_engine
from asyncrl.inference.embedded.serving.server import Server, serve
from asyncrl.inference.engine_host import EngineHost, EngineStartError, ServedEngine
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.runtime.process.starting import Effort, NotStarted, StartLimit, await_start
from asyncrl.runtime.process.torch_device import choose_device, shortage
from asyncrl.runtime.process.worker import AsyncWorker, OutOfMemory

_HEALTH_POLL_S = 0.25


def _free_memory() -> None:
    """Free the memory of an engine that has ended, so that another one finds room.

    The engine has cycles, and the process has excluded it from garbage collection (`Worker.ready`).
    """
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def make_host(worker: AsyncWorker, *, scratch: str, guest: bool) -> EngineHost:
    """Return the host of the engine of `worker`, which needs no scratch folder; `guest` as of `EmbeddedHost`."""
    return EmbeddedHost(worker.config, security=worker.http_security, guest=guest)


class EmbeddedHost:
    """An `asyncrl.inference.engine_host.EngineHost`: the engine on a thread, its HTTP server on the running loop.

    Args:
        config: the experiment, `model.path` resolved.
        security: the token that clients must send, and TLS; None if the run has no secret.
        guest: the engine releases its memory while the trainer needs the device.
    """

    def __init__(self, config: ExperimentConfig, *, security: HttpSecurity | None, guest: bool = False) -> None:
        self._config, self._security, self._guest = config, security, guest
        self._engine: GenerationEngine | None = None
        self.shortage: tuple[str, str] | None = None
        self._server: Server | None = None

    async def start(self) -> ServedEngine:
        """Load the model and serve it on a free port.

        Raises:
            EngineStartError: no progress for `generation.start_timeout_s`, or the engine does not serve this model.
            OutOfMemory: the model, or the first work with it, does not fit.
        """
        if self._engine is not None:
            await self.stop()
            await asyncio.to_thread(_free_memory)
        limit = StartLimit("generation.start_timeout_s", self._config.generation.start_timeout_s)
        try:
            self._engine = await await_start(
                asyncio.to_thread(load_engine, self._config, guest=self._guest), Effort(), limit
            )
        except NotStarted as error:
            raise EngineStartError(f"the model was not loaded: {error}") from None
        except UnsupportedModelError as error:
            raise EngineStartError(str(error)) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            what = shortage("the embedded engine", "the load of its model", self._device, error)
            raise OutOfMemory.observed(what, self._advice) from error
        self._engine.start()
        token, tls = (None, None) if self._security is None else (self._security.token, self._security.server_context())
        picture_bytes = int(self._config.generation.picture_memory * 2**30)
        self._server = await serve(
            self._engine, host=self._config.system.host, token=token, tls=tls, picture_bytes=picture_bytes
        )
        return ServedEngine(self._server.url, os.getpid())

    async def failed(self) -> str:
        """Wait until the engine's thread has failed; return the reason."""
        assert self._engine is not None, "not started"
        while self._engine.healthy:  # noqa: ASYNC110 - the engine has no event of this loop to set
            await asyncio.sleep(_HEALTH_POLL_S)
        if self._engine.shortage:
            self.shortage = self._engine.shortage, self._advice
            return "\n".join(self.shortage)
        return "the embedded engine failed; its traceback is above"

    @property
    def _device(self) -> torch.device:
        return choose_device("generation.device", self._config.generation.device)

    @property
    def _advice(self) -> str:
        return in_order([*server_settings(self._config, on_gpu=self._device.type == "cuda")])

    async def stop(self) -> None:
        """Stop the engine, which fails unfinished jobs, then the HTTP server, which has no open requests by then."""
        try:
            if self._engine is not None:
                await asyncio.to_thread(self._close_engine)
                self._engine = None
        finally:  # the engine's thread may not end in time
            if self._server is not None:
                await self._server.close()
                self._server = None

    def _close_engine(self) -> None:
        """Close the engine. A thread that calls its method would hold it a moment longer than the call lasts."""
        assert self._engine is not None
        self._engine.close()
