"""The environment that an agent acts in: Gymnasium's interface, asynchronous."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

StepResult = tuple[Any, float, bool, bool, Mapping[str, Any]]
"""(observation, reward, terminated, truncated, info), as in Gymnasium."""


class Environment(ABC):
    """Subclass, implement `reset` and `step`, and name the class in `env.path`. `env.args` go to the constructor.

    One instance serves one episode (with `Agent.collect_trajectory` one group). It is closed when the episode (or
    group) ends, for any result.

    The methods may be plain `def`s. Each call then runs in a thread, the calls of one instance one after another, and
    the reward that the constructor receives is a plain function. Use `def` for code that sleeps, computes or calls a
    service synchronously: `async def`s share one event loop with all your other asynchronous code. A call that takes
    longer than `env.timeout_s` fails its rollout.
    """

    @abstractmethod
    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode for the row in `options["data"]`; returns (observation, info).

        An agent that passes a seed passes the same seed to all members of a group, so they begin in the same state.
        """

    @abstractmethod
    async def step(self, action: Any) -> StepResult:
        """Apply the agent's action (for the built-in environments: the answer's text)."""

    async def close(self) -> None:
        """Release what `reset` acquired. The default holds nothing."""
        return None
