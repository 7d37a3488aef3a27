"""An environment in a separate process for its episode, because it may hang, crash or need too much memory.

The process is taken at `reset`, once one is free, and returned at `close`. A failure in between kills the process and
all that it started. Observations, actions and infos are sent as plain data. The reward that the environment calls is
requested over the same pipe and runs in its own place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from asyncrl.api import Environment, RewardFunction, StepResult, scored
from asyncrl.rollout.user_code_pool.messages import MAKE, USE, ChildCall, CodeTarget
from asyncrl.rollout.user_code_pool.process_pool import START_LIMIT_S, Lease
from asyncrl.rollout.user_code_pool.process_slots import GroupSlots
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner
from asyncrl.rollout.user_code_pool.timing import Activity, timed
from asyncrl.rollout.user_code_pool.user_code_errors import parts_of, step_of


class ProcessEnvironment(Environment):
    """An environment that runs in a process of the pool.

    Args:
        target: its class, with the arguments of the constructor.
        reward: the constructor's argument `reward`.
        label: its name in messages, such as `env my.py:MyEnv`.
        timeout_s: time limit of one call, including the rewards that it requests.
        places: slots of its group, if the group may open several environments before using one; None without a group.
    """

    def __init__(
        self,
        target: CodeTarget,
        reward: RewardFunction,
        label: str,
        timeout_s: float,
        runner: UserCodeRunner,
        places: GroupSlots | None = None,
    ) -> None:
        self._target, self._reward, self._label = target, reward, label
        self._timeout_s, self._runner, self._places = timeout_s, runner, places
        self._in_turn = asyncio.Lock()
        self._lease: Lease | None = None
        self._failed = self._closed = False

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        """Call the environment's `reset`; the first call constructs the environment."""
        value = await self._runner.at_home(self._call("reset", [], {"seed": seed, "options": options}))
        observation, info = parts_of(f"{self._label}.reset", value, 2)
        return observation, info

    async def step(self, action: Any) -> StepResult:
        """Call the environment's `step`."""
        value = await self._runner.at_home(self._call("step", [action], {}))
        return step_of(f"{self._label}.step", value)

    async def close(self) -> None:
        """Close the environment and return its process; further calls do nothing."""
        await self._runner.at_home(self._end())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._label} runs in a process, where only reset, step and close are called, not {name!r}; set "
            "env.run_in=thread"
        )

    async def _call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        async with self._in_turn:
            if self._failed or self._closed:
                why = "an earlier call failed" if self._failed else "it was closed"
                raise RuntimeError(f"{self._label}.{method} is called after {why}")
            self._failed = True  # reset once the call has succeeded
            try:
                if self._lease is None:
                    self._lease = await self._leased()
                    await self._ask("made", ChildCall(self._target, MAKE, []), START_LIMIT_S)
                value = await self._ask(method, self._use(method, args, kwargs), self._timeout_s)
                self._failed = self._closed  # closed meanwhile, so this call returns the process
                return value
            finally:
                if self._failed:
                    await self._give_back(whole=False)

    async def _leased(self) -> Lease:
        if self._places is None:
            return await self._runner.lease(self._label, Activity.env_wait)
        with timed(Activity.env_wait):
            await self._places.enter()
        try:
            return await self._runner.lease(self._label, Activity.env_wait)
        except BaseException:
            self._places.leave()
            raise

    async def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._in_turn.locked():  # the running call gives the process back
            return
        whole = False
        try:
            if self._lease is not None:
                await self._ask("close", self._use("close", [], {}), self._timeout_s)
                whole = True
        finally:
            await self._give_back(whole=whole)

    def _use(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> ChildCall:
        return ChildCall(self._target, USE, [method, args, kwargs])

    async def _ask(self, name: str, call: ChildCall, timeout_s: float) -> Any:
        assert self._lease is not None
        label = f"{self._label}.{name}"
        with self._runner.running.track(label, Activity.env):
            return await self._lease.ask(label, call, timeout_s, self._rewarded)

    async def _rewarded(self, data: Mapping[str, Any], completion: str) -> float:
        return await scored(self._reward, data, completion)

    async def _give_back(self, *, whole: bool) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await asyncio.shield(self._given_back(lease, whole=whole))

    async def _given_back(self, lease: Lease, *, whole: bool) -> None:
        try:
            await lease.give_back(whole=whole)
        finally:
            if self._places is not None:
                self._places.leave()
