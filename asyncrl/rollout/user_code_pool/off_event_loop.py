"""Adapt users' agents and environments to the rollout loop: asynchronous, and off its event loop.

Built-in ones are used unchanged, because they do not block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.api import Agent, ChatClient, Environment, GroupClient, Outcome, Prompt, RunIn, Sample, StepResult
from asyncrl.rollout.user_code_pool.child.agent_protocol import answer, outcome_of
from asyncrl.rollout.user_code_pool.messages import MAKE, USE, ChildCall, CodeTarget
from asyncrl.rollout.user_code_pool.process_pool import START_LIMIT_S
from asyncrl.rollout.user_code_pool.runner import Code, UserCodeRunner, is_async
from asyncrl.rollout.user_code_pool.timing import Activity
from asyncrl.rollout.user_code_pool.user_code_errors import UserCodeError, parts_of, step_of


def is_built_in(thing: object) -> bool:
    """True if the class or function `thing`, or the class of the instance `thing`, is part of asyncrl."""
    module: str = getattr(thing, "__module__", None) or type(thing).__module__
    return module.partition(".")[0] == "asyncrl"


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """Arguments to build an agent in a process: its name, its tokenizer's folder, and its time limit in seconds."""

    target: CodeTarget
    model: str
    chat: bool
    timeout_s: float


def adapted_agent(agent: Agent, runner: UserCodeRunner, process: AgentProcess | None = None) -> Agent:
    """Wrap `agent` so that it runs off the worker's event loop; with `process`, in processes.

    Raises:
        TypeError: its `collect_trajectory` is a plain function, although its queues need an event loop; or it must run
            in processes and is not a plain `run`.
    """
    if process is not None:
        return _in_process(agent, runner, process)
    name, form = type(agent).__name__, type(agent).form()
    assert form is not None, "an agent that implements nothing cannot be made"
    plain = not is_async(getattr(agent, form))
    if plain and form == "collect_trajectory":
        raise TypeError(
            f"agent {name}: `collect_trajectory` is a plain `def`, and its queues are awaited; write `async def "
            "collect_trajectory`, or a plain `run`, which calls client.generate(...)"
        )
    if plain:
        kind: type[Agent] = _EpisodeInThread if form == "run" else _GroupInThread
    elif is_built_in(agent):
        return agent
    else:
        kind = _AgentOnUsersLoop
    adapted: Agent = type(name, (kind,), {})(agent, runner)  # messages show the name of the agent's class
    return adapted


def _in_process(agent: Agent, runner: UserCodeRunner, process: AgentProcess) -> Agent:
    name, form = type(agent).__name__, type(agent).form()
    if form != "run" or is_async(agent.run):
        raise TypeError(
            f"agent.run_in=process: agent {name} is not a plain `def run(prompt, env, client)`; move code that "
            f"computes or may crash into an environment, a tool or a reward with run_in=process, and keep "
            f"agent.run_in=auto, as the agent mostly waits for the policy"
        )
    adapted: Agent = type(name, (_EpisodeInProcess,), {})(process, runner)
    return adapted


class _EpisodeInProcess(Agent):
    """Runs each episode in a process, which calls client and environment over its pipe."""

    def __init__(self, process: AgentProcess, runner: UserCodeRunner) -> None:
        self._process, self._runner = process, runner
        self._label = f"agent {process.target.path}"

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Outcome:
        process, label = self._process, self._label
        lease, whole = await self._runner.lease(label, Activity.agent_wait), False
        try:
            make = ChildCall(process.target, MAKE, [process.model, process.chat])
            await lease.ask(label, make, START_LIMIT_S, partial(answer, env, client))
            use = ChildCall(process.target, USE, ["run", [prompt], {}])
            raw = await lease.ask(label, use, process.timeout_s, partial(answer, env, client))
            whole = True
            return outcome_of(raw)
        finally:
            await asyncio.shield(lease.give_back(whole=whole))


class _AgentOnUsersLoop(Agent):
    def __init__(self, agent: Agent, runner: UserCodeRunner) -> None:
        self._agent, self._runner = agent, runner

    async def roll_out(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        policy: Any = _GroupOnWorkerLoop(client, self._runner)
        work = self._agent.roll_out(prompt, make_env, policy)
        samples: Sequence[Sample] = await self._runner.on_users_loop(work)
        return samples


class _EpisodeInThread(Agent):
    def __init__(self, agent: Agent, runner: UserCodeRunner) -> None:
        self._agent, self._runner = agent, runner

    async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> Outcome:
        policy, world = _BlockingClient(client, self._runner), _Blocking(env, self._runner)
        run: Any = self._agent.run
        try:
            outcome: Outcome = await self._runner.in_thread(lambda: run(prompt, world, policy))
            return outcome
        finally:
            policy.end()
            world.end()


class _GroupInThread(Agent):
    def __init__(self, agent: Agent, runner: UserCodeRunner) -> None:
        self._agent, self._runner = agent, runner

    async def run_group(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        policy, worlds = _BlockingGroup(client, self._runner), list[_Blocking]()

        def make_blocking() -> _Blocking:
            worlds.append(_Blocking(make_env(), self._runner))
            return worlds[-1]

        run_group: Any = self._agent.run_group
        try:
            samples: Sequence[Sample] = await self._runner.in_thread(lambda: run_group(prompt, make_blocking, policy))
            return samples
        finally:
            for each in (policy, *worlds):
                each.end()


class _OnWorkerLoop:
    """Proxy of `inner`, whose coroutines run on the worker's own loop, for callers on another loop."""

    def __init__(self, inner: object, runner: UserCodeRunner) -> None:
        self._inner, self._runner = inner, runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not is_async(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._runner.at_home(found(*args, **kwargs))

        return call


class _ClientOnWorkerLoop(_OnWorkerLoop):
    def conversation(self, group: str) -> _ClientOnWorkerLoop:
        inner: Any = self._inner
        return _ClientOnWorkerLoop(inner.conversation(group), self._runner)

    def policy(self, name: str) -> _ClientOnWorkerLoop:
        inner: Any = self._inner
        return _ClientOnWorkerLoop(inner.policy(name), self._runner)


class _GroupOnWorkerLoop(_OnWorkerLoop):
    def episode(self, prompt: Prompt) -> _ClientOnWorkerLoop:
        inner: Any = self._inner
        return _ClientOnWorkerLoop(inner.episode(prompt), self._runner)


class _Blocking:
    """Proxy of `inner` for callers in a thread, which waits for coroutines.

    `end` ends the waits and all later calls.
    """

    def __init__(self, inner: object, runner: UserCodeRunner) -> None:
        self._inner, self._runner = inner, runner
        self._waits: set[Future[Any]] = set()
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not is_async(found):
            return found
        blocking: Callable[..., Any] | None = None
        if isinstance(self._inner, HostedEnvironment):
            blocking = self._inner.blocking(name)
        if blocking is not None:
            return blocking

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._ended:
                raise RuntimeError(f"{name} was called after the rollout had ended")
            wait = self._runner.from_thread(found(*args, **kwargs))
            self._waits.add(wait)
            try:
                return wait.result()
            finally:
                self._waits.discard(wait)

        return call

    def end(self) -> None:
        """End the rollout: waiting callers get an error."""
        self._ended = True
        for wait in tuple(self._waits):
            wait.cancel()


class _BlockingWithOthers(_Blocking):
    """A proxy that hands out other clients, which end with it."""

    def __init__(self, inner: object, runner: UserCodeRunner) -> None:
        super().__init__(inner, runner)
        self._others: list[_Blocking] = []

    def _also(self, client: object) -> _BlockingClient:
        self._others.append(made := _BlockingClient(client, self._runner))
        return made

    def end(self) -> None:
        for each in self._others:
            each.end()
        super().end()


class _BlockingClient(_BlockingWithOthers):
    """Proxy of a `ChatClient`."""

    def conversation(self, group: str) -> _BlockingClient:
        inner: Any = self._inner
        return self._also(inner.conversation(group))

    def policy(self, name: str) -> _BlockingClient:
        inner: Any = self._inner
        return self._also(inner.policy(name))


class _BlockingGroup(_BlockingWithOthers):
    """Proxy of a `GroupClient`."""

    def episode(self, prompt: Prompt) -> _BlockingClient:
        inner: Any = self._inner
        return self._also(inner.episode(prompt))


class HostedEnvironment(Environment):
    """A user's environment, constructed on first use: plain methods run in threads, others on the users' loop.

    Plain methods of one instance run one after the other. All other attributes are read from the user's environment.

    Args:
        make: constructs it; runs in a thread.
        label: its name in messages, such as `env my.py:MyEnv`.
        timeout_s: time limit of one call.
    """

    def __init__(self, make: Callable[[], Environment], label: str, timeout_s: float, runner: UserCodeRunner) -> None:
        self._make, self._label, self._timeout_s, self._runner = make, label, timeout_s, runner
        self._env: Environment | None = None
        self._in_turn = asyncio.Lock()
        self._abandoned = self._closed = False

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        value = await self._call("reset", seed=seed, options=options)
        observation, info = parts_of(f"{self._label}.reset", value, 2)
        return observation, info

    async def step(self, action: Any) -> StepResult:
        return step_of(f"{self._label}.step", await self._call("step", action))

    async def close(self) -> None:
        """Close it once, unless it was never constructed, or a call still runs in a thread that cannot be ended."""
        if self._env is not None and not self._abandoned and not self._closed:
            self._closed = True
            await self._call("close")

    def blocking(self, name: str) -> Callable[..., Any] | None:
        """Return the method `name` for a caller in a thread, in which it then runs; None if it must be awaited."""
        if name not in ("reset", "step"):
            return None
        label = f"{self._label}.{name}"

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._env is None:
                self._env = self._runner.call_blocking(self._code("made"), self._make)
            value = self._runner.call_blocking(self._code(name), getattr(self._env, name), *args, **kwargs)
            return step_of(label, value) if name == "step" else parts_of(label, value, 2)

        return call

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
        return await self._runner.at_home(self._in_thread(name, method, args, kwargs))

    async def _in_thread(
        self, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        async with self._in_turn:
            if self._abandoned:
                raise RuntimeError(
                    f"{self._label}.{name} is called while an earlier call still runs that was abandoned"
                )
            self._abandoned = True
            try:
                value = await self._runner.call(self._code(name), method, *args, **kwargs)
            except UserCodeError as error:
                self._abandoned = error.still_runs
                raise
            self._abandoned = False
            return value
