"""Settings of the GenerationServers, and the table of the back ends (`asyncrl.inference.backend`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from asyncrl.config.setting import Device, Dtype, setting
from asyncrl.inference.backend import Backend
from asyncrl.inference.embedded.backend import Embedded
from asyncrl.inference.sglang.backend import SGLang, SGLangConfig

COLOCATE_NONE, COLOCATE_ALL = "none", "all"
BACKENDS: Final[dict[str, type[Backend]]] = {"embedded": Embedded, "sglang": SGLang}
"""By the value of `generation.backend`."""


@dataclass
class GenerationConfig:
    """GenerationServers."""

    backend: str = setting(
        "embedded",
        "inference engine of each server: embedded, torch in the server's own process; sglang",
        choices=tuple(BACKENDS),
    )
    servers: int = setting(1, "number of GenerationServers, each with a copy of the model", minimum=1)
    colocated: str = setting(
        COLOCATE_NONE,
        "servers on the trainer's own devices, which give their memory back while a step is trained: none, all, or the "
        "number of the last ones",
    )
    device: Device = setting(Device.auto, "cpu, cuda, or auto: cuda if there is a GPU")
    dtype: Dtype = setting(Dtype.auto, "type of weights and KV cache; auto: bfloat16 on GPUs, float32 on CPUs")
    max_running_requests: int = setting(
        0,
        "most sequences decoded together; more wait; 0: 256, and with SGLang on a GPU as many as it finds room for",
        minimum=0,
    )
    max_total_tokens: int = setting(
        0,
        "size of the KV cache; requests beyond it wait; 0: 65536, and with SGLang on a GPU what is left of "
        "mem_fraction_static",
        unit="tokens",
        minimum=0,
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
        """The back end with its capabilities."""
        return self.engine_of(self.backend)

    def engine_of(self, backend: str) -> Backend:
        """Return the back end of this name, with its part of the settings if it has one."""
        return BACKENDS[backend](backend, getattr(self, backend, None))

    @property
    def running_limit(self) -> int:
        """`max_running_requests` where an engine does not find its own."""
        return self.max_running_requests or 256

    @property
    def cache_tokens(self) -> int:
        """`max_total_tokens` where an engine does not find its own."""
        return self.max_total_tokens or 65536

    @property
    def cache_limit(self) -> int | None:
        """Tokens that a server's KV cache holds, if the settings bound them; None if the engine finds its own size."""
        return self.cache_tokens if self.engine.fixed_cache or self.max_total_tokens else None


def colocated_servers(generation: GenerationConfig) -> range:
    """Return the indices of the servers that take turns with the trainer on its devices: the last ones.

    Raises:
        ValueError: `generation.colocated` is neither none, all nor a number of servers; the message says so.
    """
    wanted, servers = generation.colocated, len(generation.engine.urls) or generation.servers
    if wanted in (COLOCATE_NONE, COLOCATE_ALL):
        count = servers if wanted == COLOCATE_ALL else 0
    elif not wanted.isdecimal() or not 1 <= int(wanted) <= servers:
        raise ValueError(
            f"generation.colocated={wanted!r}: none, all, or a number of the {servers} servers (generation.servers); "
            f"use {COLOCATE_ALL} or 1 to {servers}"
        )
    else:
        count = int(wanted)
    return range(servers - count, servers)


def backends_that(can: Callable[[type[Backend]], bool]) -> str:
    """Return the values of `generation.backend` whose engines `can`, for messages: `embedded or sglang`."""
    return " or ".join(name for name, kind in BACKENDS.items() if can(kind))
