"""State of the engine in the form of SGLang's state endpoints."""

from __future__ import annotations

from typing import Any

from asyncrl import __version__
from asyncrl.inference.embedded.engine import GenerationEngine


def model_info(engine: GenerationEngine, name: str, has_text: bool) -> dict[str, Any]:
    """Return the answer of `/model_info`; `has_text`: the server has a tokenizer."""
    config = engine.model.config
    return {
        "model_path": engine.model_path,
        "served_model_name": name,
        "tokenizer_path": engine.model_path if has_text else None,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": engine.takes_pictures,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": config.architectures or [type(engine.model).__name__],
    }


def server_info(engine: GenerationEngine, name: str, has_text: bool) -> dict[str, Any]:
    """Return the answer of `/server_info`: settings and load."""
    return {
        "model_path": engine.model_path,
        "served_model_name": name,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.model.device),
        "context_length": engine.limits.max_model_len,
        "max_running_requests": engine.limits.max_running_requests,
        "max_total_num_tokens": engine.limits.max_total_tokens,
        "max_req_input_len": engine.limits.max_model_len - 1,
        "skip_tokenizer_init": not has_text,
        "weight_version": engine.weight_version,
        "status": "ready" if engine.healthy else "stopped",
        "version": f"asyncrl-{__version__}",
        "tp_size": 1,
        "dp_size": 1,
        "disable_radix_cache": False,
        "prefix_cache_by_version": True,  # rows of older weights serve only later turns of their own samples
        "internal_states": [_load(engine)],
    }


def _load(engine: GenerationEngine) -> dict[str, Any]:
    stats = engine.stats()
    return {
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_used_tokens": stats.used_tokens,
        "max_total_num_tokens": stats.max_total_tokens,
        "max_running_requests": stats.max_running_requests,
        "token_usage": stats.used_tokens / stats.max_total_tokens,
        "gen_throughput": stats.gen_throughput,
        "cache_hit_rate": stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
        "utilization": stats.running / stats.max_running_requests,
        "queues": {"waiting": stats.waiting, "paused": stats.running if stats.paused else 0},
    }
