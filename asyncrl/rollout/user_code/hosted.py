"""The user's agents and environments off the worker's event loop: on the users' loop, or in threads.

The agent's client and, in a thread, its environment stay on the worker's event loop. `_Crossing` carries calls there.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import CoroutineType
from typing import Any

from asyncrl.api import Agent, Environment, GroupClient, Prompt, RunIn, Sample, StepResult
from asyncrl.rollout.user_code_pool.call_records import Activity, Code, UserCodeError, plain_number
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner, is_async

_CLIENTS = ("episode", "conversation", "policy")
"""Methods of a client that return another client."""


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
        return await self._runner.on_worker_loop(self._in_thread(name, partial(method, *args, **kwargs)))

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


async def on_users_loop(
    agent: Agent, runner: UserCodeRunner, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
) -> Sequence[Sample]:
    policy: Any = _Crossing(client, runner.on_worker_loop)
    samples: Sequence[Sample] = await runner.threads.loop.run(agent.roll_out(prompt, make_env, policy))
    return samples


async def in_thread(agent: Agent, form: str, runner: UserCodeRunner, prompt: Prompt, env: Any, client: object) -> Any:
    """Play in a thread: an episode (`form` is `run`), or a group (`run_group`) for which `env` makes environments."""
    wait = _ThreadWaits(runner)
    world = _Crossing(env, wait) if form == "run" else lambda: _Crossing(env(), wait)
    try:
        return await runner.in_thread(partial(getattr(agent, form), prompt, world, _Crossing(client, wait)))
    finally:
        wait.end()


class _Crossing:
    """A client or an environment of the worker's event loop, for an agent elsewhere.

    Args:
        cross: runs a coroutine on the worker's loop. Returns an awaitable to an agent on the users' loop, and the
            result to one in a thread, which waits for it.
    """

    def __init__(self, inner: object, cross: Callable[[CoroutineType[Any, Any, Any]], Any]) -> None:
        self._inner, self._cross = inner, cross

    def __getattr__(self, name: str) -> Any:
        if isinstance(self._inner, HostedEnvironment) and name in ("reset", "step"):
            return partial(self._inner.call_blocking, name)
        found = getattr(self._inner, name)
        if name in _CLIENTS and not isinstance(self._inner, Environment):
            return lambda *args, **kwargs: _Crossing(found(*args, **kwargs), self._cross)
        if not is_async(found):
            return found
        return lambda *args, **kwargs: self._cross(found(*args, **kwargs))


class _ThreadWaits:
    """The waits of a rollout's thread for the worker's loop. `end` ends them, and all later ones."""

    def __init__(self, runner: UserCodeRunner) -> None:
        self._runner, self._running, self._ended = runner, set[Future[Any]](), False

    def __call__(self, work: CoroutineType[Any, Any, Any]) -> Any:
        """Return the result of `work`.

        Raises:
            RuntimeError: the rollout has ended.
        """
        if self._ended:
            work.close()
            raise RuntimeError(f"{work.__qualname__} was called after the rollout had ended")
        wait = self._runner.from_thread(work)
        self._running.add(wait)
        if self._ended:  # meanwhile
            wait.cancel()
        try:
            return wait.result()
        finally:
            self._running.discard(wait)

    def end(self) -> None:
        """End the rollout: callers that wait get an error."""
        self._ended = True
        for wait in tuple(self._running):
            wait.cancel()
