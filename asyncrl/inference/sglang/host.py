"""An SGLang server: its command line and environment, its start as a child process, its checks before it gets requests.

Command
-------
Besides the config only the model's folder is read, and this process's PYTHONPATH for a server that takes pictures.

`build_command` sets the flags that asyncrl depends on, and on a CPU those that SGLang needs to start.
`generation.sglang.args` and `generation.sglang.env` override them, except for the few flags that the process around the
server owns.

Checks
------
`check_server` checks that answers of the server may span a weight update, and that it looks at pictures. Two prompts of
the same token ids with different pictures have to get different log-probabilities. Each weight update checks that they
are the trainer's (`asyncrl.manager.fleet.fleet_runner`). The embedded engine proves more at load.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.api.picture import Picture, PlacedPicture
from asyncrl.comm.http_client import HttpError
from asyncrl.comm.names import url_host
from asyncrl.comm.security import HttpSecurity
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.memory import context_length, in_order, is_out_of_memory
from asyncrl.config.setting import Device
from asyncrl.inference.client import GenerationServerClient, connect
from asyncrl.inference.process import BASE_VERSION, EngineStartError
from asyncrl.inference.program_host import ChildHost, PortBlock, ServerCommand
from asyncrl.manager.settings import UpdateMode
from asyncrl.models.model_config import placeholder_id, read_model_config
from asyncrl.models.picture_rules import PictureRules, PictureRulesError
from asyncrl.runtime.plan import ALLOCATOR_VARIABLES
from asyncrl.trainer.settings import VisionMode
from asyncrl.weights.logprob_probe import PICTURE_SIDE, probe_picture, with_picture

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
    colocated: bool = False,
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
        colocated: it gives its memory back while the trainer needs the device. SGLang's memory saver does that on GPUs;
            on a CPU it takes the calls and keeps the memory.

    Raises:
        ValueError: `generation.sglang.args` holds a flag that asyncrl sets.
    """
    generation = config.generation
    check_args(generation.sglang.args)
    model_config = read_model_config(model_dir)
    flags: dict[str, Any] = {
        "model_path": str(model_dir),
        "host": config.system.host,
        "port": ports.base,
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
    if colocated and device == Device.cuda:
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
    env = _environment(device, generation.threads, scratch, colocated=colocated)
    user_env = dict(generation.sglang.env)
    if pictures:
        env |= _pictures_environment(config)
        path = [env["PYTHONPATH"], user_env.pop("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    env |= user_env
    scheme = "http" if secrets_file is None else "https"
    return ServerCommand(tuple(argv), env, f"{scheme}://{url_host(config.system.host)}:{ports.base}")


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


def _environment(device: Device, threads: int, scratch: Path, *, colocated: bool) -> dict[str, str]:
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
    elif colocated:
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


_CACHE_DOES_NOT_FIT = "not enough memory. please try to increase --mem-fraction-static"


class SGLangHost(ChildHost):
    """Its schedulers and its detokenizer are processes of their own."""

    label, child_title = "SGLang", "sglang::"

    def command(self, ports: PortBlock, scratch: Path) -> ServerCommand:
        return build_command(
            self.config,
            model_dir=Path(str(self.config.model.path)),
            ports=ports,
            device=self.device,
            secrets_file=_write_secrets(scratch, self.security),
            scratch=scratch,
            colocated=self.colocated,
        )

    @staticmethod
    def advice(lines: Sequence[str]) -> str:
        log = "\n".join(lines)
        if _CACHE_DOES_NOT_FIT in log.lower():
            return (
                "its part of the GPU's memory holds the weights but no KV cache: raise "
                "generation.sglang.args.mem_fraction_static, or set a larger generation.sglang.tensor_parallel"
            )
        if is_out_of_memory(log):
            return in_order(
                [
                    "lower generation.sglang.args.mem_fraction_static, the part for weights and KV cache",
                    "lower generation.sglang.args.chunked_prefill_size",
                    "set a larger generation.sglang.tensor_parallel",
                    "give the server a GPU of its own",
                ]
            )
        return ""


def _write_secrets(scratch: Path, security: HttpSecurity | None) -> Path | None:
    """Write API key and TLS as a config file for SGLang, and return it. Only this user can read it; all users can read
    a command line.
    """
    if security is None:
        return None
    file = scratch / "secrets.yaml"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        pem = str(security.file)
        json.dump({"api-key": security.token, "ssl-keyfile": pem, "ssl-certfile": pem}, stream)  # JSON is YAML
    return file


LEAST_DIFFERENCE = 1e-6
"""In nats: log-probabilities of two pictures that differ by less are taken for equal."""


async def check_server(url: str, config: ExperimentConfig, security: HttpSecurity | None) -> None:
    """Check that the server at `url` can do what the run needs.

    Raises:
        EngineStartError: it cannot, or it does not answer.
    """
    try:
        async with connect(url, security, inline_pictures=True) as client:
            setting, fault = await _fault(client, config)
    except (HttpError, PictureRulesError) as error:
        raise EngineStartError(f"server {url} does not answer what it is asked before it serves: {error}") from error
    if fault:
        raise EngineStartError(f"{setting}: server {url} {fault}")


async def _fault(client: GenerationServerClient, config: ExperimentConfig) -> tuple[str, str]:
    """Return a setting that the server does not go with, and why; two empty texts if there is none."""
    mode, generation = config.manager.update_mode, config.generation
    if fault := await _fault_in_keeping(client, mode, generation.start_timeout_s):
        return f"manager.update_mode={str(mode)!r}", fault
    asked = config.model.float32_head and generation.engine.urls
    if asked and (await client.server_info()).get("enable_fp32_lm_head") is not True:
        fault = "computes logits in the type of its weights; start it with --enable-fp32-lm-head, or use false"
        return "model.float32_head=true", fault
    folder = Path(str(config.model.path))
    described = read_model_config(folder)
    if not pictures_served(config, described):
        return "", ""
    fault = await fault_in_pictures(
        client,
        folder,
        vocabulary=int(described.get("text_config", described)["vocab_size"]),
        context=context_length(config, described),
        timeout_s=generation.start_timeout_s,
    )
    return "generation.backend='sglang'", fault


async def _fault_in_keeping(client: GenerationServerClient, mode: UpdateMode, timeout_s: float) -> str:
    """Return why answers of this server may not span a weight update of this mode; empty if they may, or never do."""
    if mode not in (UpdateMode.retract, UpdateMode.in_place):
        return ""
    if not await client.tells_token_versions(timeout_s=timeout_s):
        return (
            "does not say which weights each token of its answers is of (no weight_versions); use SGLang 0.5.20 or "
            "newer, or update_mode=interrupt"
        )
    if mode == UpdateMode.retract:
        return ""
    info = await client.server_info()
    if not (info.get("disable_radix_cache") or info.get("prefix_cache_by_version")):
        return (
            "shares cached prefixes among requests, and would give new ones keys and values of ever older weights; "
            "start it with --disable-radix-cache, or use update_mode=retract"
        )
    return ""


async def fault_in_pictures(
    client: GenerationServerClient, folder: Path, *, vocabulary: int, context: int, timeout_s: float
) -> str:
    """Return why the server's pictures cannot be trusted; empty if they can, or if no probe fits in `context`.

    Args:
        folder: the model.

    Raises:
        HttpError: the server refused the pictures, or did not answer.
        PictureRulesError: the folder lacks files that pictures need.
    """
    noise, grey = probe_picture(), np.full((PICTURE_SIDE, PICTURE_SIDE, 3), 128, np.uint8)
    rules = PictureRules(folder)
    with closing(rules):
        token_id = await asyncio.to_thread(lambda: rules.token_id)
        rows = await asyncio.to_thread(rules.rows, noise)
    shown = with_picture(vocabulary, context, [token_id] * rows, noise)
    if shown is None:
        return ""
    ids, placed = shown
    other = PlacedPicture(placed.position, placed.length, Picture.from_array(grey))
    first, second = [
        await client.prompt_logprobs(ids, placed.end, timeout_s=timeout_s, pictures=[each]) for each in (placed, other)
    ]
    most = max(abs(one - two) for one, two in zip(first, second, strict=True))
    if most >= LEAST_DIFFERENCE:
        return ""
    return (
        f"gives {len(first)} tokens after either of two pictures the same log-probabilities (to {most:.1e} nats): it "
        "does not look at pictures; use generation.backend=embedded, or model.vision=none"
    )
