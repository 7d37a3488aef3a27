"""The embedded engine in the GenerationServer's own process, and its load. Only such a process imports torch."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length, in_order, is_out_of_memory, server_settings
from asyncrl.config.setting import Dtype
from asyncrl.data.stop_strings import Decode
from asyncrl.data.tokenizers import CONFIG_FILE, TOKENIZER_FILE, load_tokenizer
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.server import Server, serve
from asyncrl.inference.process import BASE_VERSION, EngineHost, EngineStartError, ServedEngine
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.torch_device import attention_kernel, choose_device, device_line, shortage
from asyncrl.models.transformers_internals import compute_head_in_float32, language_model
from asyncrl.runtime.process.starting import Effort, NotStarted, StartLimit, await_start
from asyncrl.runtime.process.worker import AsyncWorker, OutOfMemory
from asyncrl.trainer.settings import VisionMode
from asyncrl.weights.whole_folder import check_whole

if TYPE_CHECKING:
    from asyncrl.models.pictures import Pictures

logger = logging.getLogger(__name__)
_THREAD_SWITCH_S = 5e-4
"""Longest time, in s, that the HTTP thread keeps the interpreter from the engine's thread. Python's default is ten
times as long, about a decode step of a small model.
"""


def load_model(path: Path, *, device: str, dtype: Dtype, threads: int, float32_head: bool = False) -> PreTrainedModel:
    """Load the causal LM in the folder `path` onto its device, and set this process up for `threads` CPU threads.

    Args:
        float32_head: compute its logits in float32.
    """
    torch.set_num_threads(threads)
    sys.setswitchinterval(_THREAD_SWITCH_S)
    check_whole(path)
    kind: Any = language_model(path)
    model: PreTrainedModel = kind.from_pretrained(path, dtype=str(dtype.on(device)), local_files_only=True)
    torch.nn.Module.to(model, device=torch.device(device))
    if float32_head:
        compute_head_in_float32(model)
    return model


def _detokenizer(folder: Path) -> Decode | None:
    """Return the function from token ids to text, with special tokens, of the tokenizer in `folder`; None if there is
    no tokenizer.
    """
    if not any((folder / name).is_file() for name in (CONFIG_FILE, TOKENIZER_FILE)):
        return None
    return load_tokenizer(folder).decode_all


def load_pictures(model: PreTrainedModel, path: Path) -> Pictures | None:
    """Return the pictures of the model loaded from the folder `path`; None if it takes none.

    Raises:
        UnsupportedModelError: it takes pictures, and its folder lacks files that are needed to prepare them.
    """
    if not hasattr(model.config, "vision_config"):
        return None
    from asyncrl.models.picture_rules import PictureModelError
    from asyncrl.models.pictures import Pictures

    try:
        return Pictures.of(model, path)
    except PictureModelError as error:
        raise UnsupportedModelError(f"{error}. Use model.vision=none for text alone, or another model") from error


def load_engine(config: ExperimentConfig, *, colocated: bool) -> GenerationEngine:
    """Return an engine, not started, for the model in `config.model.path`.

    Args:
        colocated: it releases its memory while the trainer needs the device.

    Raises:
        UnsupportedModelError: the engine does not serve this model.
    """
    generation = config.generation
    path = Path(str(config.model.path))
    device = choose_device("generation.device", generation.device)
    model = load_model(
        path,
        device=str(device),
        dtype=generation.dtype,
        threads=generation.threads,
        float32_head=config.model.float32_head,
    )
    kernel = attention_kernel(model.config.to_dict(), "sdpa", device, model.dtype)
    logger.info("%s", device_line(device, model.dtype, f"over the cached tokens of all samples ({kernel})"))
    return GenerationEngine(
        model,
        max_running_requests=generation.running_limit,
        max_model_len=context_length(config, model.config.to_dict()),
        max_total_tokens=generation.cache_tokens,
        weight_version=BASE_VERSION,
        model_path=str(path),
        detokenize=_detokenizer(path),
        record_routing=config.moe.replay_routing,
        pictures=None if config.model.vision == VisionMode.none else load_pictures(model, path),
        chunked_prefill_size=generation.chunked_prefill_size,
        saves_memory=colocated,
    )


_HEALTH_POLL_S = 0.25


def _free_memory() -> None:
    """Free the memory of an engine that has ended, so that another one finds room.

    The engine has cycles, and the process has excluded it from garbage collection (`Worker.ready`).
    """
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def make_host(worker: AsyncWorker, *, scratch: str, colocated: bool) -> EngineHost:
    """Return the host of the engine of `worker`, which needs no scratch folder; `colocated` as of `EmbeddedHost`."""
    return EmbeddedHost(worker.config, security=worker.http_security, colocated=colocated)


class EmbeddedHost:
    """An `asyncrl.inference.process.EngineHost`: the engine on a thread, its HTTP server on the running loop.

    Args:
        config: the experiment, `model.path` resolved.
        security: the token that clients must send, and TLS; None if the run has no secret.
        colocated: the engine releases its memory while the trainer needs the device.
    """

    def __init__(self, config: ExperimentConfig, *, security: HttpSecurity | None, colocated: bool = False) -> None:
        self._config, self._security, self._sharing = config, security, colocated
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
                asyncio.to_thread(load_engine, self._config, colocated=self._sharing), Effort(), limit
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
