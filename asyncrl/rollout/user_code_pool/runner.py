"""Run users' code off the worker's event loop, with limits. Its failure costs a sample, never the worker.

There are three places (`asyncrl.api.RunIn`):

- The user's `async def` code runs on a separate event loop, in a thread (`threads`). Code that blocks there stops
  other `async def` code of the user and is named in the log. It does not delay the worker's leases and answers.
- A plain `def` runs in a daemon thread, at most `rollout.user_code.threads` at a time. At its time limit the call
  is abandoned, because Python cannot end a thread.
- Code that is marked or set to `process` runs in a process (`process_pool`). The process and all that it started are
  killed at its time limit. Its memory and its number of processes are limited, and it is replaced after a number of
  calls.

This file joins the three: it loads a named piece of code, runs one call of it, times and limits it, and names its
failure (`UserCodeError`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from asyncrl.api.reward import RunIn, marked_run_in
from asyncrl.comm.waits import LOOK_S, REPEAT_S, run_on
from asyncrl.config.machine import usable_cores
from asyncrl.config.plugin_code.import_paths import PluginError, load_plugin
from asyncrl.config.setting import ConfigError, PluginConfig
from asyncrl.plugins.settings import AgentConfig, EnvConfig, RewardConfig, ToolConfig
from asyncrl.rollout.settings import UserCodeConfig
from asyncrl.rollout.user_code_pool.call_records import Activity, Code, checked, timed

if TYPE_CHECKING:
    from asyncrl.rollout.user_code_pool.child import CodeTarget
    from asyncrl.rollout.user_code_pool.process_pool import ProcessPool
    from asyncrl.rollout.user_code_pool.threads import UserLoop, UserThreads

HELD_S = 1.0
"""Without a turn after which an event loop counts as blocked, and the blocking code is named."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class UserCodeRunner:
    """Runs users' code with time limits. An asynchronous context manager, entered in the worker's event loop.

    `call` may be awaited in that loop and in the users'; `call_blocking` is for threads.

    Args:
        envs: their `processes` and `process_max_episodes`; each process is for one episode's environment.
        agents: likewise.

    """

    def __init__(
        self, settings: UserCodeConfig, envs: EnvConfig | None = None, agents: AgentConfig | None = None
    ) -> None:
        self._settings, self._envs, self._agents = settings, envs or EnvConfig(), agents or AgentConfig()
        self.running = RunningCalls(settings.slow_call_s)
        self._pools: list[ProcessPool] = []

    @cached_property
    def threads(self) -> UserThreads:
        """The users' event loop and threads, made on first use in the worker's own loop; as the processes below."""
        from asyncrl.rollout.user_code_pool.threads import UserThreads  # not for asyncrl's own agents and rewards

        made = UserThreads(self._settings.threads, self.running.track)
        self.running.users_loop = made.loop
        return made

    @cached_property
    def env_processes(self) -> ProcessPool:
        """The processes of environments, for the worker's own loop."""
        return self._pool(self._envs.processes, self._envs.process_max_episodes, Activity.env_wait)

    @cached_property
    def agent_processes(self) -> ProcessPool:
        """The processes of agents, for the worker's own loop."""
        return self._pool(self._agents.processes, self._agents.process_max_episodes, Activity.agent_wait)

    @cached_property
    def _processes(self) -> ProcessPool:
        size = self._settings.processes or max(2, usable_cores())
        return self._pool(size, self._settings.process_max_calls, Activity.process_wait)

    def _pool(self, size: int, max_calls: int, waits: Activity) -> ProcessPool:
        from asyncrl.rollout.user_code_pool.process_pool import ProcessLimits, ProcessPool  # only with run_in=process

        memory_bytes, children = self._settings.process_memory_mb << 20, self._settings.process_children
        self._pools.append(ProcessPool(size, ProcessLimits(memory_bytes, children + 1, max_calls), waits))
        return self._pools[-1]

    async def __aenter__(self) -> Self:
        self._home = asyncio.get_running_loop()
        self.running.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the processes; threads end with the worker."""
        await self.running.stop()
        await asyncio.gather(*(pool.close() for pool in self._pools))

    async def call(self, code: Code, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `function` in the place of `code` and return its result.

        Raises:
            UserCodeError: it raised, took longer than `code.timeout_s`, its process was lost, or too many calls of
                `code` never returned.
        """
        work, running = partial(function, *args, **kwargs), partial(self.running.track, code.label, code.activity)
        if code.run_in == RunIn.process:
            return await self.on_worker_loop(self._in_a_process(code, list(args), running))
        if is_async(function):
            return await self.threads.call_async(code, work)
        if code.run_in == RunIn.loop:
            with running(holds_loop=True):
                return checked(code, work)
        return await self.on_worker_loop(self.threads.call(code, work))

    def call_blocking(self, code: Code, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Like `call`, for a caller in a thread: code for threads then runs in the caller's thread.

        Such code has no separate limit; the limit of the caller's call includes it.
        """
        if code.run_in != RunIn.process and not is_async(function):
            with self.running.track(code.label, code.activity):
                return checked(code, partial(function, *args, **kwargs))
        return self.from_thread(self.call(code, function, *args, **kwargs)).result()

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Run `function` in a separate thread, without a time limit or a label, and return its result."""
        return await self.threads.run(function)

    def from_thread(self, work: Awaitable[Any]) -> Future[Any]:
        """Start `work` on the worker's own loop, from a thread."""
        return asyncio.run_coroutine_threadsafe(run_on(self._home, work), self._home)

    async def on_worker_loop(self, work: Awaitable[Any]) -> Any:
        """Run `work` on the worker's own event loop and return its result; called from any loop."""
        return await run_on(self._home, work)

    async def _in_a_process(
        self, code: Code, arguments: list[Any], running: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> Any:
        assert code.target is not None, code.label
        return await self._processes.call(code.label, code.target, code.sees, arguments, code.timeout_s, running)


class RunningCalls:
    """Tracks calls. Between `start` and `stop` it also watches the worker's event loop and the users'.

    Args:
        slow_s: a call that takes this many seconds or more is logged.

    Attributes:
        users_loop: the users' event loop, once there is one.
    """

    def __init__(self, slow_s: float) -> None:
        self.users_loop: UserLoop | None = None
        self._slow_s = slow_s
        self._labels: dict[int, str] = {}
        self._numbers = itertools.count()
        self._logged_at: dict[str, float] = {}
        self._not_logged: Counter[str] = Counter()

    def start(self) -> None:
        """Watch the running event loop from now on."""
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Stop watching."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    @contextlib.contextmanager
    def track(self, label: str, activity: Activity, *, holds_loop: bool = False) -> Iterator[None]:
        """Track the call of this block: time it, name it if it is slow, and list it as running.

        Args:
            label: name of the code.
            activity: activity that its time counts as.
            holds_loop: the call runs on an event loop, and blocks it until it returns.
        """
        number, begun = next(self._numbers), time.monotonic()
        self._labels[number] = label
        try:
            with timed(activity):
                yield
            if holds_loop and (held_s := time.monotonic() - begun) > HELD_S:
                _log.warning(
                    "%s held an event loop for %.2g s; run it in a thread or a process (run_in)", label, held_s
                )
        finally:
            del self._labels[number]
            now = time.monotonic()
            if line := self.slow_line(label, now - begun, now):
                _log.warning("%s", line)

    async def _watch(self) -> None:
        """Log the code that blocks this loop or the users' loop."""
        users_logged = False
        while True:
            begun, users = time.monotonic(), self.users_loop
            answered = None if users is None else users.ping()
            await asyncio.sleep(LOOK_S)
            held_s = time.monotonic() - begun - LOOK_S
            if held_s > HELD_S and (running := sorted(set(list(self._labels.values())))):
                _log.warning(
                    "the worker did not get a turn for %.2g s while these ran: %s; what computes in Python for long "
                    "holds the interpreter's lock: run it in a process (run_in: process)",
                    held_s,
                    ", ".join(running),
                )
            if users is not None and answered is not None and not answered.is_set() and held_s < HELD_S:
                if not users_logged:
                    _log.warning(
                        "asynchronous code of the user's has held its event loop for %.2g s; write what blocks as "
                        "plain `def`, which runs in a thread; it is at\n%s",
                        LOOK_S,
                        users.stack(),
                    )
                users_logged = True
            else:
                users_logged = False

    def slow_line(self, label: str, seconds: float, now: float) -> str | None:
        """Return the log line about a call that took `seconds` and ended at `now`; None if it was not slow, or code of
        this label was named less than `REPEAT_S` ago.
        """
        if seconds < self._slow_s:
            return None
        if now - self._logged_at.get(label, -REPEAT_S) < REPEAT_S:
            self._not_logged[label] += 1
            return None
        self._logged_at[label] = now
        more = self._not_logged.pop(label, 0)
        before = f", and {more} more of its calls were slow since the last such line" if more else ""
        return f"{label} took {seconds:.3g} s{before}"


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call of `function` returns an awaitable: `async def`, also as a method or an instance's call."""
    while isinstance(function, partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)


def is_built_in(thing: object) -> bool:
    """True if the class or function `thing`, or the class of the instance `thing`, is part of asyncrl."""
    module: str = getattr(thing, "__module__", None) or type(thing).__module__
    return module.partition(".")[0] == "asyncrl"


def loaded(group: str, plugin: PluginConfig) -> Any:
    """Return the class or function of the setting `<group>.path`."""
    try:
        found = load_plugin(plugin.path)
    except PluginError as error:
        raise ConfigError(f"{group}.path={error}") from error
    if not callable(found):
        raise ConfigError(f"{group}.path={plugin.path!r}: it is a {type(found).__name__}; name a class or function")
    return found


def built(group: str, plugin: PluginConfig, base: type, **supplied: object) -> Any:
    """Construct the instance of `base` that `<group>.path` and `<group>.args` describe."""
    try:
        made = loaded(group, plugin)(**supplied, **plugin.args)
    except ConfigError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        given = f"{group}.path={plugin.path!r}, {group}.args={plugin.args}"
        raise ConfigError(f"{given}: {type(error).__name__}: {error}") from error
    if not isinstance(made, base):
        kind = type(made).__name__
        raise ConfigError(f"{group}.path={plugin.path!r} made a {kind}; it needs to be an asyncrl.api.{base.__name__}")
    return made


def run_in_of(
    group: str, config: AgentConfig | EnvConfig | RewardConfig | ToolConfig, found: object, called: Callable[..., Any]
) -> RunIn:
    """Return where the code `found` of the setting `<group>.path` runs: as `<group>.run_in` says, or as it is marked.

    Args:
        called: `found`, or the method of it that is called.

    Raises:
        ConfigError: it is to run in a thread, and `called` is asynchronous.
    """
    run_in = config.run_in if config.run_in != RunIn.auto else marked_run_in(found)
    if run_in == RunIn.thread and is_async(called):
        form = "is `async def`" if called is found else f"has an `async def {called.__name__}`"
        raise ConfigError(
            f"{group}.run_in=thread: {config.path!r} {form}, which runs on an event loop; leave it at auto"
        )
    return run_in


def target_in(run_in: RunIn, path: str, args: Mapping[str, Any]) -> CodeTarget | None:
    """Return what a process of the pool loads, for code that runs in one; None for other code."""
    if run_in != RunIn.process:
        return None
    from asyncrl.rollout.user_code_pool.child import CodeTarget

    return CodeTarget(path, dict(args))
