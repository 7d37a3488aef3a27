"""The embedded engine's host, with an engine that ends late, and with one that runs out of memory."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.api.generation import SamplingParams
from asyncrl.comm.http_client import HttpError
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.inference.client import GenerateItem, connect
from asyncrl.inference.embedded import engine as engine_module
from asyncrl.inference.embedded import host as host_module
from asyncrl.inference.embedded.host import EmbeddedHost
from asyncrl.runtime.process.worker import OutOfMemory


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


TORCHS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
ADVICE = "to need less memory, in this order: generation.max_total_tokens below 65536"


def too_large(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(TORCHS)


@pytest.fixture
def config(tiny_model: Path) -> ExperimentConfig:
    config = ExperimentConfig()
    config.model.path = str(tiny_model)
    config.dataset.max_prompt_tokens = config.rollout.sampling.max_new_tokens = 16
    return config


async def test_an_engine_that_runs_out_of_memory_fails_its_requests_and_leaves_its_memory_to_the_next(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module.logger, "exception", lambda *_: None)  # pytest keeps records, with the engine
    host = EmbeddedHost(config, security=None)
    served = await host.start()
    assert host._engine is not None
    engine, model = weakref.ref(host._engine), weakref.ref(host._engine.model)
    gc.collect()
    gc.freeze()  # as a process does that is ready
    try:
        host._engine._batch.step = too_large  # type: ignore[method-assign]
        async with connect(served.url, None) as client:
            with pytest.raises(HttpError, match="the engine failed"):
                await client.generate([GenerateItem("a", [1, 2, 3], 4)], SamplingParams(), timeout_s=60.0)
        what, advice = (await host.failed()).splitlines()
        assert what.startswith(
            "out of memory: the embedded engine on the CPU in a step: it tried to allocate 2.00 GiB;"
        )
        assert advice.startswith(ADVICE)
        assert host.shortage == (what, advice)
        await host.start()
        assert engine() is None
        assert model() is None, "there would be two models on the device"
    finally:
        await host.stop()


async def test_a_model_that_does_not_fit_ends_the_process_with_the_settings_to_lower(
    config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "load_engine", too_large)
    with pytest.raises(OutOfMemory, match="out of memory: the embedded engine on the CPU in the load of its model"):
        await EmbeddedHost(config, security=None).start()


def test_parts_for_some_models_and_settings_alone_are_imported_where_these_are_asked_for() -> None:
    folder, own = Path(str(host_module.__file__)).parent, ("experts", "memory", "pictures", "states")
    optional = {f"asyncrl.inference.embedded.{name}" for name in own} | {"asyncrl.models.pictures"}
    files = [file for file in folder.glob("*.py") if file.stem not in (*own, "__main__")]
    assert len(files) > 10
    for file in files:
        imported = {node.module for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)}
        assert not imported & optional, file.name
