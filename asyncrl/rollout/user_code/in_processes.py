"""Environments and agents in processes of the pool (`run_in: process`), as the worker sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.api import ChatClient, Environment, Outcome, Prompt, RewardFunction, scored
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.rollout.user_code.episode_code import Environments, Play, takes_tools
from asyncrl.rollout.user_code.hosted import UsersEnvironment
from asyncrl.rollout.user_code_pool.agent_protocol import answer, outcome_of
from asyncrl.rollout.user_code_pool.call_records import Activity
from asyncrl.rollout.user_code_pool.child import MAKE, USE, ChildCall, CodeTarget
from asyncrl.rollout.user_code_pool.process_pool import START_LIMIT_S, GroupSlots, PoolProcess
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner


class ProcessEnvironments(Environments):
    """Environments, each in a process of the pool."""

    def check_group(self, agent: str, group_size: int) -> None:
        """See `Environments`: a group that is played at once may need a process for each environment."""
        if self._at_once and self._config.processes < group_size:
            raise ConfigError(
                f"env.processes={self._config.processes}: agent.path={agent!r} plays its group at once and may open "
                f"all its environments, group_size={group_size} of them; have env.processes at least that"
            )

    def of_group(self, size: int) -> Callable[[], Environment]:
        """See `Environments`."""
        if self._at_once:
            return partial(self.one, GroupSlots(self._runner.env_processes.slots, size))
        return self.one

    def one(self, slots: GroupSlots | None = None) -> Environment:
        """Make an environment for one episode, constructed in its process on first use.

        Args:
            slots: slots for the processes of a group that is played at once.
        """
        target, label = CodeTarget(self._env.path, self._env.args), f"env {self._config.path}"
        return ProcessEnvironment(target, self._reward, label, self._config.timeout_s, self._runner, slots)


class ProcessEnvironment(UsersEnvironment):
    """An environment in a process of the pool.

    The process is taken at `reset`, once one is free, and returned at `close`. A failure in between kills the process
    and all that it started. Observations, actions and infos are sent as plain data. The reward that the environment
    calls is requested over the same pipe and runs in its own place, with its own limit.

    Args:
        target: its class, with the arguments of the constructor.
        reward: the constructor's argument `reward`.
        slots: those of its group, if the group may open several environments before using one; None without a group.
            The other arguments are those of `UsersEnvironment`.
    """

    def __init__(
        self,
        target: CodeTarget,
        reward: RewardFunction,
        label: str,
        timeout_s: float,
        runner: UserCodeRunner,
        slots: GroupSlots | None = None,
    ) -> None:
        super().__init__(label, timeout_s, runner)
        self._target, self._reward, self._slots = target, reward, slots
        self._lease: PoolProcess | None = None
        self._failed = self._closed = False

    async def close(self) -> None:
        """Close the environment and return its process; further calls do nothing."""
        await self._runner.on_worker_loop(self._end())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._label} runs in a process, where only reset, step and close are called, not {name!r}; set "
            "env.run_in=thread"
        )

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return await self._runner.on_worker_loop(self._call_in_turn(name, args, kwargs))

    async def _call_in_turn(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        async with self._in_turn:
            if self._failed or self._closed:
                why = "an earlier call failed" if self._failed else "it was closed"
                raise RuntimeError(f"{self._label}.{name} is called after {why}")
            self._failed = True  # reset once the call has succeeded
            try:
                if self._lease is None:
                    self._lease = await self._runner.env_processes.lease(self._label, self._slots)
                    await self._ask("made", ChildCall(self._target, MAKE, []), START_LIMIT_S)
                value = await self._ask(name, self._use(name, *args, **kwargs), self._timeout_s)
                self._failed = self._closed  # closed meanwhile, so this call returns the process
                return value
            finally:
                if self._failed:
                    await self._give_back(whole=False)

    async def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._in_turn.locked():  # the running call gives the process back
            return
        whole = False
        try:
            if self._lease is not None:
                await self._ask("close", self._use("close"), self._timeout_s)
                whole = True
        finally:
            await self._give_back(whole=whole)

    def _use(self, name: str, *args: Any, **kwargs: Any) -> ChildCall:
        return ChildCall(self._target, USE, [name, args, kwargs])

    async def _ask(self, name: str, call: ChildCall, timeout_s: float) -> Any:
        assert self._lease is not None
        label = f"{self._label}.{name}"
        with self._runner.running.track(label, Activity.env):
            return await self._lease.ask(label, call, timeout_s, partial(scored, self._reward))

    async def _give_back(self, *, whole: bool) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await asyncio.shield(lease.give_back(whole=whole))


def play_in_process(config: ExperimentConfig, runner: UserCodeRunner, *, chat: bool) -> Play:
    """Return the function that has the agent play in a process.

    Args:
        chat: whether prompts are conversations.

    Raises:
        TypeError: it cannot run in a process.
    """
    plugin = config.agent
    if takes_tools(plugin):
        raise TypeError("agent.run_in=process: it takes `tools`, which are the worker's; use agent.run_in=thread")
    if config.moe.replay_routing:
        raise TypeError(
            "agent.run_in=process: moe.replay_routing=true needs the experts of its tokens, which do not travel to a "
            "process; use agent.run_in=thread"
        )
    made = ChildCall(CodeTarget(plugin.path, dict(plugin.args)), MAKE, [str(config.model.path), chat])
    return partial(_in_process, made, config.rollout.rollout_timeout_s, runner)


async def _in_process(
    make: ChildCall, timeout_s: float, runner: UserCodeRunner, prompt: Prompt, env: Environment, client: ChatClient
) -> Outcome:
    """Play an episode in a process, which calls `client` and `env` over its pipe."""
    label, answers = f"agent {make.target.path}", partial(answer, env, client)
    async with runner.agent_processes.leased(label) as process:
        await process.ask(label, make, START_LIMIT_S, answers)
        use = ChildCall(make.target, USE, ["run", [prompt], {}])
        raw = await process.ask(label, use, timeout_s, answers)
    return outcome_of(raw)
