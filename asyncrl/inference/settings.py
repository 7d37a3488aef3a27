"""Settings of the GenerationServers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

from asyncrl.config.setting import Device, Dtype, setting
from asyncrl.inference.backends import BACKENDS, Backend

NO_GUESTS, ALL_GUESTS = "none", "all"


class GenerationBackend(StrEnum):
    """The engine behind the HTTP contract; `asyncrl.inference.backends` has what each can do."""

    embedded = auto()
    """The torch engine in the GenerationServer's own process."""
    sglang = auto()
    """An SGLang server, started as a child or adopted."""


class Quantization(StrEnum):
    """Values of the embedded engine's weights."""

    none = auto()
    """As they were published."""
    int8 = auto()
    """Those of linear layers as in int8, by output channel."""


@dataclass
class SGLangConfig:
    """SGLang servers."""

    python: str = setting("", "interpreter with sglang installed; empty: this one")
    urls: list[str] = setting(help="URLs of running servers, used in place of `servers`, never stopped", factory=list)
    args: dict[str, Any] = setting(help="flags of sglang.launch_server, e.g. {mem_fraction_static: 0.8}", factory=dict)
    env: dict[str, str] = setting(help="environment variables of the servers that the run starts", factory=dict)
    tensor_parallel: int = setting(1, "GPUs of each server, over which each layer is cut", unit="GPUs", minimum=1)


@dataclass
class GenerationConfig:
    """GenerationServers."""

    backend: GenerationBackend = setting(
        GenerationBackend.embedded,
        "inference engine of each server: embedded, torch in the server's own process; sglang",
    )
    servers: int = setting(1, "number of GenerationServers, each with a copy of the model", minimum=1)
    guests: str = setting(
        NO_GUESTS,
        "servers on the trainer's own devices, which give their memory back while a step is trained: none, all, or the "
        "number of the last ones",
    )
    device: Device = setting(Device.auto, "cpu, cuda, or auto: cuda if there is a GPU")
    dtype: Dtype = setting(Dtype.auto, "type of weights and KV cache; auto: bfloat16 on GPUs, float32 on CPUs")
    quantization: Quantization = setting(
        Quantization.none,
        "int8: the embedded engine computes with the values that linear layers have in int8, to see what servers that "
        "quantise would do to a run; memory and speed stay those of generation.dtype. SGLang has its own, "
        "generation.sglang.args={quantization: fp8}",
    )
    max_running_requests: int = setting(256, "most sequences decoded together; more wait (embedded engine)", minimum=1)
    max_total_tokens: int = setting(
        65536, "size of the KV cache; requests beyond it wait (embedded engine)", unit="tokens", minimum=16
    )
    chunked_prefill_size: int = setting(
        512,
        "most tokens of one prompt that are computed between two decode steps, so that a long prompt does not hold up "
        "other samples for its whole length (embedded engine)",
        unit="tokens",
        minimum=16,
    )
    picture_memory: float = setting(
        0.5,
        "host memory for pictures that a server keeps for later requests, as they were sent (SGLang: as its model "
        "reads them); 0.5 holds some 2000 of 448 x 448 as PNG, or 100 as Qwen2-VL reads them",
        unit="GiB",
        minimum=0.0,
    )
    context_length: int = setting(
        0,
        "longest conversation; 0: max_prompt_tokens + max_new_tokens, and for each further turn "
        "(rollout.chat.max_turns, or the agent's own max_turns) max_new_tokens + rollout.chat.feedback_tokens",
        unit="tokens",
        minimum=0,
    )
    start_timeout_s: float = setting(
        300.0,
        "a server that starts may make no progress (use no CPU time, read nothing) for so long; with progress it may "
        "take 15 times as long to become ready",
        unit="s",
        minimum=1.0,
    )
    threads: int = setting(1, "CPU threads of each server", unit="threads", minimum=1)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)

    @property
    def engine(self) -> Backend:
        """What the servers can do."""
        return BACKENDS[self.backend](self)


def guests_of(generation: GenerationConfig) -> range:
    """Return the indices of the servers that take turns with the trainer on its devices: the last ones.

    Raises:
        ValueError: `generation.guests` is neither none, all nor a number of servers; the message says so.
    """
    said, servers = generation.guests, len(generation.engine.urls) or generation.servers
    if said in (NO_GUESTS, ALL_GUESTS):
        count = servers if said == ALL_GUESTS else 0
    elif not said.isdecimal() or not 1 <= int(said) <= servers:
        raise ValueError(
            f"generation.guests={said!r}: none, all, or a number of the {servers} servers (generation.servers); use "
            f"{ALL_GUESTS} or 1 to {servers}"
        )
    else:
        count = int(said)
    return range(servers - count, servers)
