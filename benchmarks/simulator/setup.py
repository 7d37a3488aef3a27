"""Setup and outcome of a simulation: speeds of servers and trainer, faults, lengths of answers, settings of the run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from asyncrl.inference.random_streams import uniform
from asyncrl.manager.settings import UpdateMode
from asyncrl.master.settings import OnStale
from asyncrl.rollout.settings import Pacing

LONG = 16_384
"""Tokens of an answer that counts as long."""
STEP_LIMIT_S = 7200.0
"""A step that takes longer is a stall."""

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speed of a server, with the terms of `engine`. `update_s`: time from its pause to its new weights.

    `kv_tokens`: number of tokens of context that fit its memory.
    """

    step_s: float
    sequence_s: float
    context_s: float
    prefill_s: float
    prefill_token_s: float
    max_running: int
    kv_tokens: float
    update_s: float
    switch_s: float = 0.0
    """Seconds that a device shared with the trainer takes to change its user, in each direction."""

    def decode_step_s(self, running: int, context: float) -> float:
        """Return the time for one token of each of `running` sequences with `context` tokens in total."""
        return self.step_s + self.sequence_s * running + self.context_s * context

    def coarse(self, grain: int) -> EngineModel:
        """Return the same server in units of `grain` tokens: a unit of an answer takes `grain` steps."""
        return replace(
            self,
            step_s=self.step_s * grain,
            sequence_s=self.sequence_s * grain,
            context_s=self.context_s * grain * grain,
            prefill_token_s=self.prefill_token_s * grain,
            kv_tokens=self.kv_tokens / grain,
        )


@dataclass(frozen=True, slots=True)
class TrainerModel:
    """Speed of training. A step takes `fixed_s`, plus `token_s` for each token of its batch including prompts. Then
    publishing its weights takes `publish_s`. If the same devices generate, changing from generation to training and
    back takes `switch_s`.
    """

    token_s: float
    fixed_s: float
    publish_s: float
    switch_s: float = 0.0

    def step_s(self, tokens: float) -> float:
        """Return the seconds of a step on a batch of `tokens`, without publishing."""
        return self.fixed_s + self.token_s * tokens + self.switch_s

    def coarse(self, grain: int) -> TrainerModel:
        """Return the model in units of `grain` tokens."""
        return replace(self, token_s=self.token_s * grain)


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of the servers; times in seconds, None: never.

    Attributes:
        death_every_s: mean time between two deaths of one server; `restart_s`: until its next process registers.
        silence_every_s: mean time between two suspensions of one server, of `silence_s` each.
    """

    death_every_s: float | None = None
    restart_s: float = 90.0
    silence_every_s: float | None = None
    silence_s: float = 60.0

    @property
    def any(self) -> bool:
        """True if servers leave service at all."""
        return bool(self.death_every_s or self.silence_every_s)


def _normal(seed: int) -> float:
    return _NORMAL.inv_cdf(min(max(uniform(seed, 0), 1e-12), 1 - 1e-12))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths of answers in tokens, a function of the seed, so that an interrupted answer continues to the same end.

    Log-normal, as lengths of reasoning models' answers have a median of some thousand tokens and a tail up to `limit`.
    Answers to one prompt are similar: the share `alike` of the logarithm's variance is common to a prompt.

        log length = log median + σ (√alike · z(prompt) + √(1 - alike) · z(answer)),   z standard normal
    """

    median: float
    sigma: float
    limit: int
    alike: float = 0.5

    def tokens(self, prompt: int, seed: int) -> int:
        """Return the number of tokens of the answer."""
        z = math.sqrt(self.alike) * _normal(prompt) + math.sqrt(1 - self.alike) * _normal(seed)
        return max(1, min(self.limit, round(self.median * math.exp(self.sigma * z))))

    def coarse(self, grain: int) -> LogNormal:
        """Return the same lengths in units of `grain` tokens."""
        return LogNormal(self.median / grain, self.sigma, max(1, self.limit // grain), self.alike)


@dataclass(frozen=True)
class Setup:
    """Setup of a simulation. Lengths are in tokens, times in seconds; settings are named as in an experiment.

    Attributes:
        servers, engine: generation servers and the speed of each.
        trainer: the speed of training.
        devices: devices of generation and of training; the same ones if `colocated`.
        lengths: lengths of answers, at most `max_new_tokens` each.
        batch, group: rollouts per step, answers per rollout.
        colocated_servers: servers, the last ones, on the trainer's devices, which take turns with it
            (`generation.colocated`).
        grain: tokens that one simulated token stands for.
        in_flight: rollouts at a time over all workers; None: as many as the gate can allow.
        steps, warm_up: train steps, and the number of first steps that are not measured.
    """

    servers: int
    engine: EngineModel
    trainer: TrainerModel
    devices: tuple[int, int]
    lengths: LogNormal
    eta: int
    batch: int
    group: int
    max_new_tokens: int
    prompt_tokens: int = 512
    grain: int = 1
    colocated: bool = False
    colocated_servers: int = 0
    workers: int = 8
    in_flight: int | None = None
    steps: int = 12
    warm_up: int = 4
    seed: int = 1
    update_mode: UpdateMode = UpdateMode.interrupt
    update_fraction: float = 1.0
    pacing: Pacing = Pacing.eager
    on_stale: OnStale = OnStale.drop
    health_interval_s: float = 10.0
    request_timeout_s: float = 600.0
    faults: Faults = field(default_factory=Faults)

    @property
    def prompt_units(self) -> int:
        """Simulated tokens of a prompt."""
        return max(1, self.prompt_tokens // self.grain)

    @property
    def most_units(self) -> int:
        """Simulated tokens of the longest answer."""
        return max(1, self.max_new_tokens // self.grain)


@dataclass
class Outcome:
    """Outcome of a simulation. Shares are of the measured time. `staleness` counts tokens by age in versions."""

    step_s: float
    wait_s: float
    generation_idle: float
    training_idle: float
    tokens_per_s: float
    """Generated tokens per second."""
    trained_per_s: float
    """Generated tokens that were trained, per second. This is the useful rate, as steps of short answers end sooner."""
    staleness: Counter[int]
    long_share: float
    """Share of the trained answers with at least `LONG` tokens. It falls if the selection favours short answers."""
    interrupted: float
    """Tokens that had to be prefilled again after weight updates, as a share of those generated."""
    deaths: int
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
