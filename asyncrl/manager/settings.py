"""Settings of the GserverManager."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Optional

from asyncrl.config.setting import setting
from asyncrl.manager.router import POLICIES
from asyncrl.weights.transports import TRANSPORTS

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


class UpdateMode(StrEnum):
    """Effect of a weight update on running answers; docs/main_settings.md says when to choose which."""

    interrupt = auto()
    """They are handed back to their clients, which send them again."""
    retract = auto()
    """They go back into the server's own queue."""
    in_place = auto()
    """They go on with the keys and values that they have."""
    finish = auto()
    """The server is drained first."""


@dataclass
class ManagerConfig:
    """GserverManager: router, staleness gate, weight updates."""

    routing: str = setting(
        "least_requests",
        "how a request finds its server",
        choices=tuple(POLICIES),
    )
    update_mode: UpdateMode = setting(
        UpdateMode.interrupt,
        "a weight update aborts running requests, which clients send again with what they have (interrupt), puts them "
        "back into the server's queue, where they continue under the new weights (retract: tens of milliseconds "
        "where SGLang "
        "takes a second to abort; SGLang 0.5.20 or newer), lets them go on at once with the keys and values that the "
        "old weights left in the cache (in_place: cheapest, nothing is computed again; log-probabilities are those of "
        "this mixture), or waits for their end (finish)",
    )
    weight_transport: str = setting(
        "disk",
        "how servers get a version: from its folder (disk), or from the trainer's memory, which keeps a copy of each "
        "version that is in use and writes folders only with checkpoints and at the end; tensor: shared memory, one "
        "machine; distributed: a process group of trainer and server, NCCL between GPUs, else gloo. Other than disk "
        "needs generation.backend=sglang",
        choices=tuple(TRANSPORTS),
    )
    update_fraction: float = setting(
        1.0,
        "share of the servers that may be out of service for an update at the same time, at least one of them; 1: all. "
        "With less some always serve, while new rollouts wait the longer for the gate, which counts by the oldest "
        "version that is served",
        minimum=0.0,
        maximum=1.0,
    )
    update_timeout_s: float = setting(60.0, "a server later than this is quarantined", unit="s", minimum=0.1)
    health_interval_s: float = setting(1.0, "time between two health checks of a server", unit="s", minimum=0.05)
    rollout_lease_s: float = setting(30.0, "rollouts of a worker silent for so long are dropped", unit="s", minimum=1.0)
    logprob_check_tolerance: Optional[float] = setting(
        None,
        "after an update a server must score fixed prompts as the trainer does, each token to within this, or it is "
        "quarantined and updated again; null: 1e-3 where both compute in float32, else 0.5; 0: not checked",
        unit="nats",
        minimum=0.0,
    )
