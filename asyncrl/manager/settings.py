"""Settings of the GserverManager."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Optional

from asyncrl.config.setting import setting
from asyncrl.manager.router import POLICIES, Policy
from asyncrl.trainer.settings import RoleRanks
from asyncrl.weights.transports import TRANSPORTS

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


def _first_sentence(policy: type[Policy]) -> str:
    return " ".join((policy.__doc__ or "").partition(".")[0].split())


class UpdateMode(StrEnum):
    """Effect of a weight update on running requests. docs/sizing.md explains the choice."""

    interrupt = auto()
    """Clients receive the tokens so far, and send the requests again."""
    retract = auto()
    """Requests go back into the server's own queue."""
    in_place = auto()
    """Requests continue with the keys and values that they have."""
    finish = auto()
    """The server is drained first."""


class PickVersion(StrEnum):
    """Choice of the version that a server of a pool gets."""

    uniform = auto()
    """Any member of the pool, each with the same probability."""
    latest = auto()
    """The newest member."""
    prioritised = auto()
    """A member with probability proportional to (1 - w)², where w is the policy's win rate against it."""


@dataclass
class VersionPoolConfig:
    """Older versions of the trained policy, as a pool of opponents."""

    every: int = setting(10, "each version that this number divides joins the pool", unit="versions", minimum=1)
    keep: int = setting(5, "newest members that stay in the pool; their weights stay on disk", minimum=1)
    pick: PickVersion = setting(
        PickVersion.uniform,
        "how a server chooses its member: all equally likely (uniform), the newest (latest), or more often those that "
        "the policy wins against less, by the agent's metric won/<name> (prioritised)",
    )
    hold: int = setting(
        1,
        "number of versions of the policy for which a server keeps the member that it chose",
        unit="versions",
        minimum=1,
    )

    def members(self, newest: int) -> list[int]:
        """Return the versions in the pool once `newest` is published, oldest first; none before the first joins."""
        return [version for version in range(newest - newest % self.every, 0, -self.every)][: self.keep][::-1]

    def needed(self, newest: int) -> set[int]:
        """Return the versions whose weights servers may read while `newest` is published."""
        return {*self.members(newest), *self.members(self.chosen_at(newest))}

    def choose(self, newest: int, seed: int, server: int, win_rates: Mapping[int, float] | None = None) -> int | None:
        """Return the member that `server` plays once `newest` is published; None if the pool has no member yet.

        The choice depends only on the arguments, so a resumed run makes the same choices. Prioritised choices follow
        AlphaStar (Vinyals et al. 2019, prioritised fictitious self-play with f(w) = (1 - w)²).

        Args:
            win_rates: by member, the policy's win rate against it when the choice was made, below 1; 1/2 if unknown.
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

    name: str = setting("", "name by which agents request it: letters, digits, `_` and `-`")
    path: Optional[str] = setting(
        None,
        "Hugging Face folder of a model that is never updated, or with `trained` of the initial model; null: older "
        "versions of the run's own policy, or with `trained` its initial model",
    )
    url: Optional[str] = setting(
        None,
        "used instead of path: URL of a generation server outside the run, SGLang or another with its HTTP API; its "
        "model is never updated",
    )
    versions: VersionPoolConfig = field(default_factory=VersionPoolConfig)
    servers: int = setting(1, "number of GenerationServers for it, in addition to generation.servers", minimum=1)
    trained: bool = setting(False, "train it too, on the samples of its own clients")
    train_every: int = setting(
        1, "of a trained policy: a step from version v trains it if v mod train_every = train_offset", minimum=1
    )
    train_offset: int = setting(0, "remainder of the versions that train_every selects; less than it", minimum=0)
    parallel: Optional[str] = setting(None, "of a trained policy: its parallel layout; null: trainer.parallel")
    ranks: RoleRanks = setting(
        RoleRanks.shared,
        "of a trained policy: it trains on the ranks of the run's own policy, or on some of them (shared), or on "
        "separate ranks at the same time (own); its critic, reference and reward models are on its ranks",
    )
    shared_critic: bool = setting(
        False,
        "of a trained policy: it uses the critic of the run's own policy, which is trained on the samples of both",
    )
    optimizer: dict[str, Any] = setting(
        help="of a trained policy: settings of `optimizer` that differ from the run's", factory=dict
    )
    algorithm: dict[str, Any] = setting(
        help="of a trained policy: settings of `algorithm` that differ from the run's", factory=dict
    )

    @property
    def is_pool(self) -> bool:
        """True if this is a pool of older versions of the run's own policy."""
        return self.path is None and self.url is None and not self.trained

    @property
    def is_prioritised(self) -> bool:
        """True if this is a pool whose servers choose by win rates."""
        return self.is_pool and self.versions.pick == PickVersion.prioritised

    def trains_at(self, version: int) -> bool:
        """True if the step from `version` trains this policy."""
        return self.trained and version % self.train_every == self.train_offset


@dataclass
class ManagerConfig:
    """GserverManager: router, staleness gate, weight updates."""

    routing: str = setting(
        "least_requests",
        "policy by which the router chooses a request's server. "
        + ". ".join(f"{name}: {_first_sentence(policy)}" for name, policy in POLICIES.items()),
        choices=tuple(POLICIES),
    )
    update_mode: UpdateMode = setting(
        UpdateMode.interrupt,
        "what a weight update does with running requests; interrupt: abort them, and clients send them again with "
        "their tokens so far; retract: put them back into the server's queue, where they continue under the new "
        "weights (SGLang 0.5.20 or newer); in_place: continue them at once with the keys and values that the old "
        "weights left in the cache (cheapest, nothing is computed again; log-probabilities are those of this mixture); "
        "finish: wait for their end",
    )
    weight_transport: str = setting(
        "disk",
        "how servers get a version; disk: from its folder; tensor: by shared memory, on one machine; distributed: by a "
        "process group of trainer and server, NCCL between GPUs, else gloo. Without disk, the trainer keeps a copy of "
        "each version in use in memory, and writes folders only with checkpoints and at the end; this needs "
        "generation.backend=sglang",
        choices=tuple(TRANSPORTS),
    )
    update_fraction: float = setting(
        1.0,
        "share of the servers, at least one, that may be out of service for an update at the same time; 1: all. With "
        "less, some always serve, but new rollouts wait longer for the gate, which counts by the oldest served version",
        minimum=0.0,
        maximum=1.0,
    )
    update_timeout_s: float = setting(
        60.0,
        "longest time in which a server whose weights are updated neither computes nor reads; then it is quarantined. "
        "A server of generation.sglang.urls shows no such signs: there it limits the whole update",
        unit="s",
        minimum=0.1,
    )
    health_interval_s: float = setting(1.0, "time between two health checks of a server", unit="s", minimum=0.05)
    logprob_check_tolerance: Optional[float] = setting(
        None,
        "largest mean difference per token between a server's and the trainer's log-probabilities of a fixed prompt "
        "after an update; beyond it the server is quarantined and updated again; null: 1e-3 if both compute in "
        "float32, 1 if servers quantise, else 0.5; 0: not checked",
        unit="nats",
        minimum=0.0,
    )
