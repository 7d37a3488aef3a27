"""The environments of a run's episodes, and where they run.

- Built-in ones do not block and run on the worker's event loop, unchanged.
- The user's have their plain methods called in threads, and others on the users' event loop (`HostedEnvironment`).
- One that may hang, crash or need too much memory has a process for its episode (`in_processes`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.api import Environment, RewardFunction, RunIn, StepResult
from asyncrl.config.setting import PluginConfig
from asyncrl.plugins.settings import GYMNASIUM, GYMNASIUM_ENV, EnvConfig
from asyncrl.rollout.user_code_pool.call_records import Activity, UserCodeError, plain_number
from asyncrl.rollout.user_code_pool.runner import Code, UserCodeRunner, built, is_async, is_built_in, loaded, place_of


class Environments:
    """Environments by group.

    Args:
        config: the settings `env`.
        reward: passed to environments with this parameter.
        at_once: True if the agent plays a whole group at once.

    Raises:
        ConfigError: `env` does not name an environment, or one that cannot run where `run_in` says.
    """

    def __init__(self, config: EnvConfig, reward: RewardFunction, runner: UserCodeRunner, at_once: bool) -> None:
        self._config, self._reward, self._runner, self._at_once = config, reward, runner, at_once
        self._env: PluginConfig = config
        if config.path.startswith(GYMNASIUM):  # the id of a registered environment
            self._env = PluginConfig(GYMNASIUM_ENV, {"id": config.path.removeprefix(GYMNASIUM), **config.args})
        found = loaded("env", self._env)
        step = getattr(found, "step", found)
        self._off_the_loop = not is_built_in(found) or not is_async(step)
        self.place = place_of("env", config, found, step)

    def check_group(self, agent: str, group_size: int) -> None:
        """Check that a group of this size can have its environments.

        Raises:
            ConfigError: it cannot.
        """

    def of_group(self, size: int) -> Callable[[], Environment]:
        """Return a function that makes the environments of one group of `size` episodes, one per call, retries
        included.
        """
        config = self._config
        if not config.vectorized:
            return self.one
        from asyncrl.plugins.envs.gymnasium_vector import VectorGames  # gymnasium is an extra

        code = Code(f"env {config.path}.step", Activity.env, config.timeout_s, RunIn.thread)
        call = functools.partial(self._runner.call, code)

        def games(size: int) -> VectorGames:
            return VectorGames(call, size, **self._env.args)

        together, made = games(size), itertools.count()
        return lambda: (together if next(made) < size else games(1)).member()  # a retried episode plays alone

    def one(self) -> Environment:
        """Make an environment for one episode. If its methods block, it is constructed on first use, where it runs."""
        config = self._config
        make = functools.partial(built, "env", self._env, Environment, reward=self._reward)
        if self._off_the_loop:
            return HostedEnvironment(make, f"env {config.path}", config.timeout_s, self._runner)
        made: Environment = make()
        return made


class UsersEnvironment(Environment):
    """An environment of the user's off the worker's event loop, whose methods may be awaited on any loop.

    Args:
        label: its name in messages, such as `env my.py:MyEnv`.
        timeout_s: time limit of one call, in seconds.
    """

    def __init__(self, label: str, timeout_s: float, runner: UserCodeRunner) -> None:
        self._label, self._timeout_s, self._runner = label, timeout_s, runner
        self._in_turn = asyncio.Lock()
        """Held during a call, on the worker's loop."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Call the environment's `reset`. The first call makes the environment."""
        observation, info = self._checked("reset", await self._call("reset", seed=seed, options=options))
        return observation, info

    async def step(self, action: Any) -> StepResult:
        """Call the environment's `step`."""
        result: StepResult = self._checked("step", await self._call("step", action))
        return result

    def _checked(self, name: str, value: Any) -> Any:
        label = f"{self._label}.{name}"
        return _step_of(label, value) if name == "step" else _parts_of(label, value, 2)

    @abstractmethod
    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any: ...


class HostedEnvironment(UsersEnvironment):
    """An environment whose plain methods run in threads, one after the other, and others on the users' loop.

    Attributes other than its methods are read from the user's environment.

    Args:
        make: constructs it; runs in a thread. The other arguments are those of `UsersEnvironment`.
    """

    def __init__(self, make: Callable[[], Environment], label: str, timeout_s: float, runner: UserCodeRunner) -> None:
        super().__init__(label, timeout_s, runner)
        self._make = make
        self._env: Environment | None = None
        self._abandoned = self._closed = False

    async def close(self) -> None:
        """Close it once, unless it was never constructed, or a call still runs in a thread that cannot be ended."""
        if self._env is not None and not self._abandoned and not self._closed:
            self._closed = True
            await self._call("close")

    def call_blocking(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `reset` or `step` from a thread, in which a plain method then runs, and return the result."""
        if self._env is None:
            self._env = self._runner.call_blocking(self._code("made"), self._make)
        return self._checked(
            name, self._runner.call_blocking(self._code(name), getattr(self._env, name), *args, **kwargs)
        )

    def __getattr__(self, name: str) -> Any:
        env = self.__dict__.get("_env")
        if env is None:
            raise AttributeError(f"{self._label}: {name!r} is asked for before `reset`, which makes the environment")
        return getattr(env, name)

    def _code(self, name: str) -> Code:
        return Code(f"{self._label}.{name}", Activity.env, self._timeout_s, RunIn.auto)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._env is None:
            self._env = await self._runner.call(self._code("made"), self._make)
        method = getattr(self._env, name)
        if is_async(method):
            return await self._runner.call(self._code(name), method, *args, **kwargs)
        return await self._runner.at_home(self._in_thread(name, functools.partial(method, *args, **kwargs)))

    async def _in_thread(self, name: str, method: Callable[[], Any]) -> Any:
        async with self._in_turn:
            if self._abandoned:
                raise RuntimeError(
                    f"{self._label}.{name} is called while an earlier call still runs that was abandoned"
                )
            self._abandoned = True
            try:
                value = await self._runner.call(self._code(name), method)
            except UserCodeError as error:
                self._abandoned = error.still_runs
                raise
            self._abandoned = False
            return value


def _parts_of(label: str, value: Any, number: int) -> Sequence[Any]:
    """Return what the method `label` of an environment returned, which is `number` values.

    Raises:
        UserCodeError: it is not.
    """
    if not isinstance(value, list | tuple) or len(value) != number:
        method = label.rpartition(".")[2]
        raise UserCodeError(
            label,
            f"returned {value!r:.80}; gymnasium's {method} returns {number} values",
            how=f"returned what is no {method}",
        )
    return value


def _step_of(label: str, value: Any) -> StepResult:
    """Return the result of an environment's `step`, with its reward as a number.

    Raises:
        UserCodeError: it is not a result of `step`, or the reward is not a finite number.
    """
    observation, given, terminated, truncated, info = _parts_of(label, value, 5)
    reward = plain_number(given)
    if reward is None or not math.isfinite(reward):
        raise UserCodeError(
            label,
            f"returned the reward {given!r:.80}, a {type(given).__name__}; a reward is a finite number",
            how="returned what is no reward",
        )
    return observation, reward, terminated, truncated, info
