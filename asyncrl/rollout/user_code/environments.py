"""The environments of a run's episodes, made where they are to run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from asyncrl.api import Environment, RunIn
from asyncrl.api.reward import marked_run_in
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.plugins.envs.settings import GYMNASIUM, GYMNASIUM_ENV, EnvConfig
from asyncrl.rollout.scoring import AnswerReward
from asyncrl.rollout.user_code.loaded import built, loaded
from asyncrl.rollout.user_code_pool.adapters import HostedEnvironment, is_built_in
from asyncrl.rollout.user_code_pool.child.environment import ProcessEnvironment
from asyncrl.rollout.user_code_pool.messages import CodeTarget
from asyncrl.rollout.user_code_pool.process_slots import GroupSlots, ProcessSlots
from asyncrl.rollout.user_code_pool.runner import Code, UserCodeRunner, is_async
from asyncrl.rollout.user_code_pool.timing import Activity


class Environments:
    """Environments by group.

    Args:
        config: the settings `env`.
        reward: offered to those that take it.
        at_once: whether the agent plays a whole group at once.
        places: of all environments with a process of their own.

    Raises:
        ConfigError: `env` names no environment, or one that cannot run where it is to.
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
        """Check that a group which is played at once finds a process for each environment.

        Raises:
            ConfigError: it does not.
        """
        if self._in_process and self._at_once and self._config.processes < group_size:
            raise ConfigError(
                f"env.processes={self._config.processes}: agent.path={agent!r} plays its group at once and may open "
                f"all its environments, group_size={group_size} of them; have env.processes at least that"
            )

    def of_group(self, size: int) -> Callable[[], Environment]:
        """Makes the environments of one group of `size` episodes, one for each call, and those of later tries."""
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
        return lambda: (together if next(made) < size else games(1)).member()  # who tries again plays alone

    def one(self, places: GroupSlots | None = None) -> Environment:
        """A new environment, for one episode. One whose methods block is made when it is first used, where it runs.

        Args:
            places: of a group that is played at once, where environments have processes.
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
    """The class and its arguments that `env.path` names, which may be a game of gymnasium's."""
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
