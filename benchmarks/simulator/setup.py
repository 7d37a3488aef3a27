"""Setup and outcome of a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from asyncrl.manager.settings import UpdateMode
from asyncrl.master.settings import OnStale
from asyncrl.rollout.settings import Pacing
from simulator.servers.engine_model import EngineModel
from simulator.servers.faults import Faults
from simulator.simulated_code import Turns
from simulator.trainer import TrainerModel

LONG = 16_384
"""Tokens of an answer that counts as long."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host on which everything runs, and the computing time of its processes besides engine and trainer.

    Training has priority on its cores, as in the demo (`cores.FIRST`). Attributes, in CPU-seconds:
        cores: of the host.
        call_s: of a RolloutWorker, for a call to a server; half of it before the call and half after it.
        rollout_s, rollout_token_s: of a RolloutWorker, for a rollout and a token of it, once its answers are complete.
        receive_s: of the ranks' other threads, for a rollout, before it is acknowledged. They have priority too.
        manager_s: of the manager, for a rollout: half as it is admitted, half as it ends; and half for each request
            that it places again.
        master_s: of the master, for a step: half before the ranks' work, half after it.
        check_s: of a server and the manager, for an update, from its new weights until it gets requests.
    """

    cores: int
    call_s: float
    rollout_s: float
    rollout_token_s: float
    receive_s: float
    manager_s: float
    master_s: float
    check_s: float


@dataclass(frozen=True)
class Setup:
    """Setup of a simulation. Lengths are in tokens, times in seconds; settings are named as in an experiment.

    Attributes:
        servers, engine: generation servers and the speed of each.
        trainer: the speed of training.
        devices: devices of generation and of training; the same ones if `colocated`.
        lengths: lengths of answers, at most `max_new_tokens` each.
        batch, group: rollouts per step, answers per rollout.
        guests: servers, the last ones, on the trainer's devices, which take turns with it (`generation.guests`).
        grain: tokens that one simulated token stands for.
        turns: episodes of several turns; None: single answers.
        user_s: seconds of a rollout outside generation, once its answers are complete.
        in_flight: rollouts at a time over all workers; None: as many as the gate can allow.
        steps, warm_up: train steps, and the number of first steps that are not measured. step_limit_s: a step that
        takes longer is a stall.
    """

    name: str
    servers: int
    engine: EngineModel
    trainer: TrainerModel
    devices: tuple[int, int]
    lengths: Any
    eta: int
    batch: int
    group: int
    max_new_tokens: int
    prompt_tokens: int = 512
    grain: int = 1
    colocated: bool = False
    guests: int = 0
    turns: Turns | None = None
    user_s: float = 0.0
    workers: int = 8
    in_flight: int | None = None
    steps: int = 12
    warm_up: int = 4
    seed: int = 1
    update_mode: UpdateMode = UpdateMode.interrupt
    update_fraction: float = 1.0
    update_timeout_s: float = 60.0
    routing: str = "least_requests"
    pacing: Pacing = Pacing.eager
    on_stale: OnStale = OnStale.drop
    health_interval_s: float = 10.0
    request_timeout_s: float = 600.0
    rollout_timeout_s: float = 3600.0
    lease_s: float = 10.0
    faults: Faults = field(default_factory=Faults)
    step_limit_s: float = 7200.0
    encode: bool = False
    host: Host | None = None
    shares_prefixes: bool = False
    """True if the trainer computes the common prefix of a group's samples once."""
    in_order: bool = False
    """True if `lengths` are `Recorded` groups in the data order, each of which keeps its place."""


@dataclass
class Outcome:
    """Outcome of a simulation. Shares are of the measured time. `staleness` counts tokens by age in versions."""

    step_s: float
    wait_s: float
    generation_idle: float
    training_idle: float
    idle: float
    """Share of all devices' time in which they are idle."""
    running: float
    """Mean number of sequences at a server."""
    tokens_per_s: float
    """Generated tokens per second."""
    trained_per_s: float
    """Generated tokens that were trained, per second. This is the useful rate, as steps of short answers end sooner."""
    staleness: Counter[int]
    long_share: float
    """Share of the trained answers with at least `LONG` tokens. It falls if the selection favours short answers."""
    interrupted: float
    """Tokens that had to be prefilled again after weight updates, as a share of those generated."""
    retracted: int
    dropped: dict[str, int]
    deaths: int
    silences: int
    virtual_s: float
    real_s: float
    calls: int
    steps: list[float]
    faults: list[str]
    """Findings of the audit."""

    @property
    def staleness_mean(self) -> float:
        """Mean age of trained tokens, in versions."""
        total = self.staleness.total()
        return sum(age * tokens for age, tokens in self.staleness.items()) / total if total else 0.0

    @property
    def staleness_max(self) -> int:
        """Age of the oldest trained token, in versions."""
        return max(self.staleness, default=0)
