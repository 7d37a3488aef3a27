"""Load the embedded engine: the model of a folder, its tokenizer and its pictures, with the limits of the settings."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Dtype
from asyncrl.inference.embedded.decoding.batch import Detokenize
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.engine_host import BASE_VERSION
from asyncrl.inference.settings import Quantization
from asyncrl.models.parity import UnsupportedModelError
from asyncrl.models.pictures.picture_processor import PictureModelError
from asyncrl.models.pictures.picture_rows import Pictures
from asyncrl.models.transformers_internals import compute_head_in_float32, language_model
from asyncrl.models.weights.model_files.whole_folder import check_whole
from asyncrl.plugins.datasets.tokenizers import CONFIG_FILE, TOKENIZER_FILE, load_tokenizer
from asyncrl.runtime.process.torch_device import attention_kernel, choose_device, device_line
from asyncrl.trainer.settings import VisionMode

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


def _detokenizer(folder: Path) -> Detokenize | None:
    """Return the function from token ids to text, with special tokens, of the tokenizer in `folder`; None if there is
    no tokenizer.
    """
    if not any((folder / name).is_file() for name in (CONFIG_FILE, TOKENIZER_FILE)):
        return None
    return load_tokenizer(folder).decode_all


def load_engine(config: ExperimentConfig, *, guest: bool) -> GenerationEngine:
    """Return an engine, not started, for the model in `config.model.path`.

    Args:
        guest: it releases its memory while the trainer needs the device.

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
    try:
        pictures = None if config.model.vision == VisionMode.none else Pictures.of(model, path)
    except PictureModelError as error:
        raise UnsupportedModelError(f"{error}. Use model.vision=none for text alone, or another model") from error
    return GenerationEngine(
        model,
        max_running_requests=generation.max_running_requests,
        max_model_len=context_length(config, model.config.to_dict()),
        max_total_tokens=generation.max_total_tokens,
        weight_version=BASE_VERSION,
        model_path=str(path),
        detokenize=_detokenizer(path),
        record_routing=config.moe.replay_routing,
        pictures=pictures,
        chunked_prefill_size=generation.chunked_prefill_size,
        saves_memory=guest,
        int8=generation.quantization == Quantization.int8,
    )
