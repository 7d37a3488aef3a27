"""Settings of the GserverManager."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Optional

from asyncrl.config.setting import setting
from asyncrl.manager.router import POLICIES
from asyncrl.models.weights.transports import TRANSPORTS
from asyncrl.trainer.settings import RoleRanks

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


class UpdateMode(StrEnum):
    """Effect of a weight update on running answers; docs/main_settings.md says when to choose which."""

    interrupt = auto()
    """They are returned to their clients, which send them again."""
    retract = auto()
    """They go back into the server's own queue."""
    in_place = auto()
    """They continue with the keys and values that they have."""
    finish = auto()
    """The server is drained first."""


class PickVersion(StrEnum):
    """Choice of the version that a server of a pool gets."""

    uniform = auto()
    """Any member of the pool, each with the same probability."""
    latest = auto()
    """The newest member."""
    prioritised = auto()
    """A member with a probability in proportion to (1 - w)², where w is how often the policy wins against it."""


@dataclass
class VersionPoolConfig:
    """Older versions of the trained policy, as a pool of opponents."""

    every: int = setting(10, "each version that this number divides joins the pool", unit="versions", minimum=1)
    keep: int = setting(5, "newest members that stay in the pool; their weights stay on disk", minimum=1)
    pick: PickVersion = setting(
        PickVersion.uniform,
        "how a server chooses its member: each as likely (uniform), the newest (latest), or those rather that the "
        "policy wins against less often, by the agent's metric won/<name> (prioritised)",
    )
    hold: int = setting(
        1, "a server keeps the member that it chose for so many versions of the policy", unit="versions", minimum=1
    )

    def members(self, newest: int) -> list[int]:
        """Return the versions in the pool once `newest` is published, oldest first; none before the first joins."""
        return [version for version in range(newest - newest % self.every, 0, -self.every)][: self.keep][::-1]

    def needed(self, newest: int) -> set[int]:
        """Return the versions whose weights servers may read while `newest` is published."""
        return {*self.members(newest), *self.members(self.chosen_at(newest))}

    def choose(self, newest: int, seed: int, server: int, win_rates: Mapping[int, float] | None = None) -> int | None:
        """Return the member that `server` plays once `newest` is published; None if the pool has no member yet.

        The choice depends on the arguments alone, so a resumed run makes the same ones. Prioritised choices follow
        AlphaStar (Vinyals et al. 2019, prioritised fictitious self-play with f(w) = (1 - w)²).

        Args:
            win_rates: by member, how often the policy won against it when the choice was made, below 1; 1/2 if unknown.
        """
        since = self.chosen_at(newest)
        members = self.members(since)
        if not members:
            return None
        if self.pick == PickVersion.latest:
            return members[-1]
        draw = random.Random(f"{seed}/{server}/{since}")
        if self.pick == PickVersion.prioritised:
            rates = win_rates or {}
            return draw.choices(members, [(1.0 - rates.get(member, 0.5)) ** 2 for member in members])[0]
        return draw.choice(members)

    def chosen_at(self, newest: int) -> int:
        """Return the version at which servers made the choices that hold at `newest`."""
        return newest - newest % self.hold


@dataclass
class PolicyConfig:
    """A policy that agents ask beside the run's own: `client.policy(name)`."""

    name: str = setting("", "the name by which agents ask for it: letters, digits, `_` and `-`")
    path: Optional[str] = setting(
        None,
        "Hugging Face folder of a model that stays as it is, or with `trained` of the initial model; null: older "
        "versions of the run's own policy, or with `trained` its initial model",
    )
    url: Optional[str] = setting(
        None,
        "in place of path: a generation server that somebody else runs, SGLang or another with its HTTP API; its model "
        "stays as it is",
    )
    versions: VersionPoolConfig = field(default_factory=VersionPoolConfig)
    servers: int = setting(1, "GenerationServers for it, beside generation.servers", minimum=1)
    trained: bool = setting(False, "whether it is trained too, on the samples of its own clients")
    train_every: int = setting(
        1, "of a trained one: only steps from versions v with v mod train_every = train_offset train it", minimum=1
    )
    train_offset: int = setting(0, "see train_every; less than it", minimum=0)
    parallel: Optional[str] = setting(None, "of a trained one: its parallel layout; null: trainer.parallel")
    ranks: RoleRanks = setting(
        RoleRanks.shared,
        "of a trained one: on the ranks of the run's own policy, of which it may take fewer (shared), or on separate "
        "ranks, which train it at the same time (own); its critic, reference and reward models are on its ranks",
    )
    shared_critic: bool = setting(
        False,
        "of a trained one: whether it has the critic of the run's own policy, which is trained on the samples of both",
    )
    optimizer: dict[str, Any] = setting(
        help="of a trained one: settings of `optimizer` that differ from the run's", factory=dict
    )
    algorithm: dict[str, Any] = setting(
        help="of a trained one: settings of `algorithm` that differ from the run's", factory=dict
    )

    @property
    def is_pool(self) -> bool:
        """True if it stands for older versions of the run's own policy."""
        return self.path is None and self.url is None and not self.trained

    @property
    def is_prioritised(self) -> bool:
        """True if it is a pool whose servers choose by win rates."""
        return self.is_pool and self.versions.pick == PickVersion.prioritised

    def trains_at(self, version: int) -> bool:
        """True if the step from `version` trains it."""
        return self.trained and version % self.train_every == self.train_offset


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
        "quarantined and updated again; null: 1e-3 where both compute in float32, 1 where servers "
        "quantise, else 0.5; 0: not checked",
        unit="nats",
        minimum=0.0,
    )
