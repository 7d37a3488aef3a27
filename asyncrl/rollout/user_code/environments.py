"""Make the environments of a run's episodes, in the thread, process or loop in which they run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from asyncrl.api import Environment, RunIn
from asyncrl.api.reward import marked_run_in
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.plugins.envs.settings import GYMNASIUM, GYMNASIUM_ENV, EnvConfig
from asyncrl.rollout.user_code.loaded import built, loaded
from asyncrl.rollout.user_code.rewards import AnswerReward
from asyncrl.rollout.user_code_pool.child.process_environment import ProcessEnvironment
from asyncrl.rollout.user_code_pool.messages import CodeTarget
from asyncrl.rollout.user_code_pool.off_event_loop import HostedEnvironment, is_built_in
from asyncrl.rollout.user_code_pool.process_slots import GroupSlots, ProcessSlots
from asyncrl.rollout.user_code_pool.runner import Code, UserCodeRunner, is_async
from asyncrl.rollout.user_code_pool.timing import Activity


class Environments:
    """Environments by group.

    Args:
        config: the settings `env`.
        reward: passed to environments with this parameter.
        at_once: True if the agent plays a whole group at once.
        places: process slots of all environments that run in processes.

    Raises:
        ConfigError: `env` does not name an environment, or one that cannot run where `run_in` says.
    """

    def __init__(
        self, config: EnvConfig, reward: AnswerReward, runner: UserCodeRunner, at_once: bool, places: ProcessSlots
    ) -> None:
        self._config, self._reward, self._runner, self._at_once = config, reward, runner, at_once
        self._env = environment_of(config)
        found = loaded("env", self._env)
        self._off_the_loop = not is_built_in(found) or not is_async(getattr(found, "step", found))
        self._in_process = _place(config, found) == RunIn.process
        self._places = places

    def check_places(self, agent: str, group_size: int) -> None:
        """Check that a group that is played at once can have a process for each environment.

        Raises:
            ConfigError: it cannot.
        """
        if self._in_process and self._at_once and self._config.processes < group_size:
            raise ConfigError(
                f"env.processes={self._config.processes}: agent.path={agent!r} plays its group at once and may open "
                f"all its environments, group_size={group_size} of them; have env.processes at least that"
            )

    def of_group(self, size: int) -> Callable[[], Environment]:
        """Return a function that makes the environments of one group of `size` episodes, one per call, retries
        included.
        """
        config = self._config
        if self._in_process and self._at_once:
            return functools.partial(self.one, GroupSlots(self._places, size))
        if not config.vectorized:
            return self.one
        from asyncrl.plugins.envs.gymnasium_vector import VectorGames  # gymnasium is an extra

        code = Code(f"env {config.path}.step", Activity.env, config.timeout_s, RunIn.thread)
        call = functools.partial(self._runner.call, code)

        def games(size: int) -> VectorGames:
            return VectorGames(call, size, **self._env.args)

        together, made = games(size), itertools.count()
        return lambda: (together if next(made) < size else games(1)).member()  # a retried episode plays alone

    def one(self, places: GroupSlots | None = None) -> Environment:
        """Make an environment for one episode. If its methods block, it is constructed on first use, where it runs.

        Args:
            places: process slots of a group that is played at once.
        """
        config = self._config
        if self._in_process:
            target, label = CodeTarget(self._env.path, self._env.args), f"env {config.path}"
            return ProcessEnvironment(target, self._reward, label, config.timeout_s, self._runner, places)
        make = functools.partial(built, "env", self._env, Environment, reward=self._reward)
        if self._off_the_loop:
            return HostedEnvironment(make, f"env {config.path}", config.timeout_s, self._runner)
        made: Environment = make()
        return made


def environment_of(config: PluginConfig) -> PluginConfig:
    """Return the class and arguments of `env.path`, which may name a registered gymnasium environment."""
    if not config.path.startswith(GYMNASIUM):
        return config
    return PluginConfig(GYMNASIUM_ENV, {"id": config.path.removeprefix(GYMNASIUM), **config.args})


def _place(config: EnvConfig, found: Any) -> RunIn:
    """Return where the environment runs: as the setting says, or as its class or function is marked.

    Raises:
        ConfigError: it cannot run there.
    """
    wanted = config.run_in if config.run_in != RunIn.auto else marked_run_in(found)
    if wanted == RunIn.thread and is_async(getattr(found, "step", found)):
        raise ConfigError(
            f"env.run_in=thread: {config.path!r} has an `async def step`, which runs on an event loop; leave it at auto"
        )
    return wanted
