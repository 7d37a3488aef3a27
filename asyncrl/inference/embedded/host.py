"""The embedded engine in the GenerationServer's own process: the only place where that process imports torch."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrl.comm.security.run_secret import HttpSecurity
from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.decoding.batch import Detokenize
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.serving.server import Server, serve
from asyncrl.inference.engine_host import BASE_VERSION, EngineStartError, ServedEngine
from asyncrl.inference.settings import Quantization
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.pictures.picture_processor import PictureModelError
from asyncrl.models.pictures.picture_rows import Pictures
from asyncrl.models.transformers_internals import language_model
from asyncrl.plugins.datasets.tokenizers import CONFIG_FILE, TOKENIZER_FILE, load_tokenizer
from asyncrl.runtime.process.starting import Effort, NotStarted, StartLimit, await_start
from asyncrl.runtime.process.torch_device import attention_kernel, choose_device, device_line
from asyncrl.trainer.settings import VisionMode

logger = logging.getLogger(__name__)
_HEALTH_POLL_S = 0.25
_THREAD_SWITCH_S = 5e-4
"""Within this time the HTTP thread gives the interpreter back to the engine's; Python's default is ten times it, about
a decode step of a small model."""


def load_model(path: Path, *, device: str, dtype: Dtype, threads: int) -> PreTrainedModel:
    """Load the causal LM in the folder `path` onto its device, and set this process up for `threads` CPU threads."""
    torch.set_num_threads(threads)
    sys.setswitchinterval(_THREAD_SWITCH_S)
    kind: Any = language_model(path)
    model: PreTrainedModel = kind.from_pretrained(path, dtype=str(dtype.on(device)), local_files_only=True)
    torch.nn.Module.to(model, device=torch.device(device))
    return model


def _detokenizer(folder: Path) -> Detokenize | None:
    """Return the function from token ids to text, with special tokens, of the tokenizer in `folder`; None if there is
    no tokenizer.
    """
    if not any((folder / name).is_file() for name in (CONFIG_FILE, TOKENIZER_FILE)):
        return None
    return load_tokenizer(folder).decode_all


class EmbeddedHost:
    """An `asyncrl.inference.engine_host.EngineHost`: the engine on a thread, its HTTP server on the running loop.

    Args:
        config: the experiment, `model.path` resolved.
        security: the token that clients must send, and TLS; None if the run has no secret.
        guest: it releases its memory while the trainer needs the device.
    """

    def __init__(self, config: ExperimentConfig, *, security: HttpSecurity | None, guest: bool = False) -> None:
        self._config, self._security, self._guest = config, security, guest
        self._engine: GenerationEngine | None = None
        self._server: Server | None = None

    async def start(self) -> ServedEngine:
        """Load the model and serve it on a free port.

        Raises:
            EngineStartError: no progress for `generation.start_timeout_s`, or the engine does not serve this model.
        """
        await self.stop()
        limit = StartLimit("generation.start_timeout_s", self._config.generation.start_timeout_s)
        try:
            self._engine = await await_start(asyncio.to_thread(self._load), Effort(), limit)
        except NotStarted as error:
            raise EngineStartError(f"the model was not loaded: {error}") from None
        except UnsupportedModelError as error:
            raise EngineStartError(str(error)) from error
        self._engine.start()
        token, tls = (None, None) if self._security is None else (self._security.token, self._security.server_context())
        picture_bytes = int(self._config.generation.picture_memory * 2**30)
        self._server = await serve(
            self._engine, host=self._config.system.host, token=token, tls=tls, picture_bytes=picture_bytes
        )
        return ServedEngine(self._server.url, os.getpid())

    def _load(self) -> GenerationEngine:
        generation = self._config.generation
        path = Path(str(self._config.model.path))
        device = choose_device("generation.device", generation.device)
        model = load_model(path, device=str(device), dtype=generation.dtype, threads=generation.threads)
        kernel = attention_kernel(model.config.to_dict(), "sdpa", device, model.dtype)
        logger.info("%s", device_line(device, model.dtype, f"over the cached tokens of all samples ({kernel})"))
        return GenerationEngine(
            model,
            max_running_requests=generation.max_running_requests,
            max_model_len=context_length(self._config, model.config.to_dict()),
            max_total_tokens=generation.max_total_tokens,
            weight_version=BASE_VERSION,
            model_path=str(path),
            detokenize=_detokenizer(path),
            record_routing=self._config.moe.replay_routing,
            pictures=self._pictures(model, path),
            chunked_prefill_size=generation.chunked_prefill_size,
            saves_memory=self._guest,
            int8=generation.quantization == Quantization.int8,
        )

    def _pictures(self, model: PreTrainedModel, path: Path) -> Pictures | None:
        """The pictures of `model`, unless it is used for text alone."""
        if self._config.model.vision == VisionMode.none:
            return None
        try:
            return Pictures.of(model, path)
        except PictureModelError as error:
            raise UnsupportedModelError(f"{error}. Use model.vision=none for text alone, or another model") from error

    async def failed(self) -> str:
        """Wait until the engine's thread has failed."""
        assert self._engine is not None, "not started"
        while self._engine.healthy:  # noqa: ASYNC110 - the engine has no event of this loop to set
            await asyncio.sleep(_HEALTH_POLL_S)
        return "the embedded engine failed; its traceback is above"

    async def stop(self) -> None:
        """Stop the engine, which fails unfinished jobs, then the HTTP server, which has nothing to wait for then."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)
            self._engine = None
        if self._server is not None:
            await self._server.close()
            self._server = None
