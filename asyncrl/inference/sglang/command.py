"""The command line and environment of an SGLang server, from the config.

Besides the config only the model's folder is read, and this process's PYTHONPATH for a server that takes pictures.

This module sets the flags that asyncrl depends on, and on a CPU those that SGLang needs to start.
`generation.sglang.args` and `generation.sglang.env` override them, except for the few flags that the process around the
server owns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.comm.names import url_host
from asyncrl.config.context import context_length
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import Device
from asyncrl.inference.child.ports import PortBlock
from asyncrl.inference.child.process_tree import ServerCommand
from asyncrl.inference.engine_host import BASE_VERSION
from asyncrl.manager.settings import UpdateMode
from asyncrl.models.model_config import read_model_config
from asyncrl.models.pictures.picture_rules import placeholder_id
from asyncrl.runtime.planning.plan_workers import ALLOCATOR_VARIABLES
from asyncrl.trainer.settings import VisionMode

_INPUT_MARGIN = 8
"""Tokens added to the context length: SGLang refuses inputs within 6 tokens of it (`max_req_input_len`). An interrupted
answer that is nearly complete is such an input, and so is the last turn of a conversation."""
_PLUGIN = Path(__file__).parent / "plugin"
_KEEP_ALIVE_S = 600  # longer than any client keeps an idle connection


OWNED_FLAGS: Mapping[str, str] = {
    "model_path": "set model.path",
    "host": "set system.host",
    "port": "ports are reserved so that they never collide",
    "nccl_port": "ports are reserved so that they never collide",
    "tp_size": "set generation.sglang.tensor_parallel",
    "tensor_parallel_size": "set generation.sglang.tensor_parallel",
    "context_length": "set generation.context_length",
    "dtype": "set generation.dtype",
    "device": "set generation.device",
    "api_key": "the run's own token is used; system.encrypt=false turns it off",
    "admin_api_key": "the run's own token is used; system.encrypt=false turns it off",
    "ssl_keyfile": "the run's own certificate is used; system.encrypt=false turns it off",
    "ssl_certfile": "the run's own certificate is used; system.encrypt=false turns it off",
    "config": "give its entries in generation.sglang.args",
    "weight_version": "policy versions are the run's",
    "enable_fp32_lm_head": "set model.float32_head, which the training ranks follow too",
}
"""Flags that `generation.sglang.args` may not hold, and what to do instead."""
DROPPED_FLAGS: Mapping[str, str] = {"torchao_config": "use quantization (fp8, w8a8_int8)"}
"""Flags that SGLang had, and what to use instead."""


def check_args(args: Mapping[str, Any]) -> None:
    """Check `generation.sglang.args`.

    Raises:
        ValueError: it holds a flag that another setting owns, or that SGLang dropped; the message names the flag and
            what to use instead.
    """
    for key, value in args.items():
        name = key.lstrip("-").replace("-", "_")
        for flags, why in ((OWNED_FLAGS, "this flag is set by asyncrl"), (DROPPED_FLAGS, "SGLang dropped this flag")):
            if name in flags:
                raise ValueError(f"generation.sglang.args.{key}={value!r}: {why}; {flags[name]}")


def build_command(
    config: ExperimentConfig,
    *,
    model_dir: Path,
    ports: PortBlock,
    device: Device,
    secrets_file: Path | None,
    scratch: Path,
    guest: bool = False,
) -> ServerCommand:
    """Return the command of one server.

    Args:
        config: the experiment; `generation`, `dataset`, `rollout.sampling` and `system.host` are used.
        model_dir: folder with the initial model.
        ports: where it listens.
        device: what it runs on. On `cuda` it takes the GPUs of `CUDA_VISIBLE_DEVICES`, which the launcher sets.
        secrets_file: YAML file with the API key and where the run's certificate is: every user of the machine can read
            a command line.
        scratch: folder for SGLang's temporary files and Unix sockets; a short path.
        guest: it gives its memory back while the trainer needs the device. SGLang's memory saver does that on GPUs; on
            a CPU it takes the calls and keeps the memory.

    Raises:
        ValueError: `generation.sglang.args` holds a flag that asyncrl sets.
    """
    generation = config.generation
    check_args(generation.sglang.args)
    model_config = read_model_config(model_dir)
    flags: dict[str, Any] = {
        "model_path": str(model_dir),
        "host": config.system.host,
        "port": ports.http,
        "nccl_port": ports.base + 1,
        "tp_size": generation.sglang.tensor_parallel,
        "dtype": generation.dtype.on(device),
        "context_length": _served_context(config, model_config),
        "weight_version": BASE_VERSION,
        "skip_tokenizer_init": True,  # token ids go in and come out; detokenizing them would cost a process its CPU
        "random_seed": config.seed,
        "enable_metrics": True,
        "log_level": "warning",  # info is a line per batch; generation.sglang.args.log_level=info brings them back
        "sleep_on_idle": True,
        "enable_fp32_lm_head": config.model.float32_head,
        "max_running_requests": generation.max_running_requests or None,
        "max_total_tokens": generation.max_total_tokens or None,
    }
    if config.manager.update_mode == UpdateMode.in_place:
        flags["disable_radix_cache"] = True  # it would never be emptied, and return keys of ever older weights
        flags["disable_overlap_schedule"] = True  # a running step would be reported as one of the new weights
    if guest and device == Device.cuda:
        flags["enable_memory_saver"] = True
    if device == Device.cpu:
        flags |= _cpu_flags(config)
    pictures = pictures_served(config, model_config)
    if pictures and model_config["model_type"] == "qwen3_vl":
        flags["enable_precise_embedding_interpolation"] = True  # else some paths place patches differently
    user = generation.engine.flags
    if user.get("enable_dp_attention") or int(user.get("nnodes", 1)) > 1:
        # SGLang counts six more ports up from this one
        flags["dist_init_addr"] = f"{url_host(config.system.host)}:{ports.base + 2}"
    argv = [generation.sglang.python or sys.executable, "-m", "sglang.launch_server"]
    if secrets_file is not None:
        argv += ["--config", str(secrets_file)]
    argv += render_flags(flags | user)
    env = _environment(device, generation.threads, scratch, guest=guest)
    user_env = dict(generation.sglang.env)
    if pictures:
        env |= _pictures_environment(config)
        path = [env["PYTHONPATH"], user_env.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    env |= user_env
    scheme = "http" if secrets_file is None else "https"
    return ServerCommand(tuple(argv), env, f"{scheme}://{url_host(config.system.host)}:{ports.http}")


def _served_context(config: ExperimentConfig, model_config: Mapping[str, Any]) -> int:
    """Return the context length, plus the positions that SGLang reserves for itself if the model has them."""
    text_config = model_config.get("text_config", model_config)
    context = context_length(config, model_config)
    return min(context + _INPUT_MARGIN, int(text_config.get("max_position_embeddings", context + _INPUT_MARGIN)))


def render_flags(flags: Mapping[str, Any]) -> list[str]:
    """Convert flags to argv: true gives the bare flag, false and null omit the flag, a list gives several values, a
    mapping gives JSON.
    """
    argv: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        argv.append(f"--{key.replace('_', '-')}")
        if value is True:
            continue
        if isinstance(value, Mapping):
            argv.append(json.dumps(value))
        elif isinstance(value, (list, tuple)):
            argv += [str(item) for item in value]
        else:
            argv.append(str(value))
    return argv


def _cpu_flags(config: ExperimentConfig) -> dict[str, Any]:
    """Torch kernels in place of CUDA ones, and the KV cache bounded by count: a share of memory would be all of it."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_server_warmup": True,
        "max_total_tokens": config.generation.cache_tokens,
        "max_running_requests": config.generation.running_limit,
    }


def _environment(device: Device, threads: int, scratch: Path, *, guest: bool) -> dict[str, str]:
    env = {
        "TMPDIR": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        # /health would otherwise generate a token, which takes a second and fails while generation is paused
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # log-probabilities would be at temperature 1, whatever the request's, so ratios on policy would not be 1
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # idle connections are closed after 5 s by default, at times just as a client sends on one
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(_KEEP_ALIVE_S),
    }
    if device == Device.cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["TORCHDYNAMO_DISABLE"] = "1"  # a vision tower's rotary embedding would be compiled at the first picture
    elif guest:
        # the memory saver refuses segments that grow, which a user may have chosen for all processes
        env |= {name: "" for name in ALLOCATOR_VARIABLES if "expandable_segments:True" in os.environ.get(name, "")}
    return env


def pictures_served(config: ExperimentConfig, model_config: Mapping[str, Any]) -> bool:
    """Return whether servers of the model that `model_config` describes are shown pictures."""
    if config.model.vision == VisionMode.none or placeholder_id(model_config) is None:
        return False
    kind, transport = str(model_config.get("model_type")), config.manager.weight_transport
    return config.generation.engine.takes_pictures(transport, kind)


def missing_for_pictures(model_config: Mapping[str, Any]) -> str:
    """Return the first field that SGLang reads of the `config.json` of a model with pictures and that is not there.

    Published folders have them; transformers by itself does not write them. Empty if all are there.
    """
    text = model_config.get("text_config", model_config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    needed = {"qwen2_vl": ("vision_config.in_chans", model_config.get("vision_config", {}), "in_chans")}
    needed["qwen3_vl"] = ("text_config.rope_parameters.mrope_interleaved", rope, "mrope_interleaved")
    name, fields, key = needed.get(str(model_config.get("model_type")), ("", {"": None}, ""))
    return "" if key in fields else name


def _pictures_environment(config: ExperimentConfig) -> dict[str, str]:
    """Return environment variables that select the processor of pictures, and those that its correctness depends on."""
    env = {
        "PYTHONPATH": str(_PLUGIN),
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "asyncrl_pictures",
        "ASYNCRL_PICTURE_BYTES": str(int(config.generation.picture_memory * 2**30)),
    }
    if config.model.vision == VisionMode.train:
        # SGLang keeps the vision tower's results, by a picture's content, through weight updates and flushes
        env["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    return env
