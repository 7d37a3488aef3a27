"""The environments of a run's episodes, and where they run.

- Built-in ones do not block and run on the worker's event loop, unchanged.
- The user's have their plain methods called in threads, and others on the users' event loop (`hosted`).
- One that may hang, crash or need too much memory has a process for its episode (`in_processes`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from asyncrl.api import Environment, RewardFunction, RunIn
from asyncrl.config.setting import PluginConfig
from asyncrl.plugins.settings import GYMNASIUM, GYMNASIUM_ENV, EnvConfig
from asyncrl.rollout.user_code_pool.call_records import Activity, Code
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner, built, is_async, is_built_in, loaded, place_of


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
            from asyncrl.rollout.user_code.hosted import HostedEnvironment

            return HostedEnvironment(make, f"env {config.path}", config.timeout_s, self._runner)
        made: Environment = make()
        return made
