"""Run one call of a named piece of users' code in its place: time it, limit it, and report its failure by name."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from asyncrl.api.reward import RunIn
from asyncrl.comm.waits.running_time import RunningTimeout
from asyncrl.config.machine_limits import usable_cores
from asyncrl.config.plugin_code.daemon_threads import DaemonThreads, UnusualExit
from asyncrl.rollout.settings import UserCodeConfig
from asyncrl.rollout.user_code_pool.messages import CodeTarget
from asyncrl.rollout.user_code_pool.process_limits import ProcessLimits
from asyncrl.rollout.user_code_pool.process_pool import Lease, ProcessPool
from asyncrl.rollout.user_code_pool.running_calls import RunningCalls
from asyncrl.rollout.user_code_pool.timing import Activity, timed
from asyncrl.rollout.user_code_pool.user_code_errors import TOO_SLOW, UserCodeError
from asyncrl.rollout.user_code_pool.user_loop import UserLoop, run_on

MAX_ABANDONED = 64
"""Limit on abandoned calls of one piece of code that still run in threads; it is not called until one of them ends."""


@dataclass(frozen=True, slots=True)
class EpisodeProcesses:
    """Number of processes for episodes, and number of episodes after which each is replaced."""

    processes: int = 1
    episodes: int = 1


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of users' code.

    Attributes:
        label: its name in counts and messages: `reward my.py:score`.
        activity: activity that its time counts as.
        timeout_s: time limit of a call.
        run_in: where it runs; `loop` for code that may run on the worker's own event loop.
        target: its import path and arguments for a process of the pool; only for `RunIn.process`.
        sees: kind of its arguments, for that process.
    """

    label: str
    activity: Activity
    timeout_s: float
    run_in: RunIn
    target: CodeTarget | None = None
    sees: str = "answer"


class CodeThreads:
    """Threads for users' code, with a limit on calls at a time, and on calls of one piece of code that never return.

    Args:
        most: number of calls at a time.
        running: tracks the calls.

    Attributes:
        threads: the threads, for calls without a limit.
    """

    def __init__(self, most: int, running: RunningCalls) -> None:
        self.threads = DaemonThreads()
        self._running = running
        self._places = asyncio.Semaphore(most)
        self._abandoned: dict[str, int] = {}

    async def call(self, code: Code, function: Callable[[], Any]) -> Any:
        """Run `function` in a thread, once one is free, and return its result. For the worker's own loop.

        Raises:
            UserCodeError: it raised, took longer than `code.timeout_s`, or too many calls of `code` never returned.
        """
        if self._abandoned.get(code.label, 0) >= MAX_ABANDONED:
            raise UserCodeError(
                code.label,
                f"is not called: {MAX_ABANDONED} calls of it never returned and each holds a thread; have it return, "
                "or run it in a process (run_in: process), which can be killed",
                how="hangs in too many threads",
            )
        async with self._thread():
            with self._running.track(code.label, code.activity):
                running = self.threads.run(partial(_checked, code, function))
                try:
                    async with RunningTimeout(code.timeout_s) as limit:
                        return await asyncio.wrap_future(running)
                except TimeoutError as error:
                    if not limit.expired():
                        raise
                    raise _too_slow(code, "its thread continues", still_runs=True) from error
                finally:
                    if not running.done():
                        self._abandoned[code.label] = self._abandoned.get(code.label, 0) + 1
                        running.add_done_callback(partial(self._came_back, asyncio.get_running_loop(), code.label))

    @contextlib.asynccontextmanager
    async def _thread(self) -> AsyncIterator[None]:
        """Hold one of the threads within this block. The wait for the thread is timed."""
        with timed(Activity.thread_wait):
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()

    def _came_back(self, loop: asyncio.AbstractEventLoop, label: str, _: object) -> None:
        with contextlib.suppress(RuntimeError):  # the worker has ended meanwhile
            loop.call_soon_threadsafe(self._forget_abandoned, label)

    def _forget_abandoned(self, label: str) -> None:
        self._abandoned[label] -= 1


class UserCodeRunner:
    """Runs users' code with time limits. An asynchronous context manager, entered in the worker's event loop.

    `call` may be awaited in that loop and in the users'; `call_blocking` is for threads.

    Args:
        envs: processes for environments, one episode's environment in each.
        agents: processes for agents, likewise.
    """

    def __init__(
        self, settings: UserCodeConfig, envs: EpisodeProcesses | None = None, agents: EpisodeProcesses | None = None
    ) -> None:
        memory_bytes = settings.process_memory_mb << 20
        limits = ProcessLimits(memory_bytes, settings.process_children + 1, settings.process_max_calls)
        self._users = UserLoop()
        self.running = RunningCalls(self._users, settings.slow_call_s)
        self._threads = CodeThreads(settings.threads, self.running)
        self._pool = ProcessPool(settings.processes or max(2, usable_cores()), limits)
        self._leased = {
            activity: ProcessPool(seats.processes, replace(limits, max_calls=seats.episodes))
            for activity, seats in (
                (Activity.env_wait, envs or EpisodeProcesses()),
                (Activity.agent_wait, agents or EpisodeProcesses()),
            )
        }

    async def __aenter__(self) -> Self:
        self._home = asyncio.get_running_loop()
        self.running.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the processes; threads end with the worker."""
        await self.running.stop()
        await asyncio.gather(*(pool.close() for pool in (self._pool, *self._leased.values())))

    async def call(self, code: Code, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` in the place of `code` and return its result.

        Raises:
            UserCodeError: it raised, took longer than `code.timeout_s`, or its process was lost.
        """
        work = partial(function, *args, **kwargs)
        if code.run_in == RunIn.process:
            return await run_on(self._home, self._in_process(code, args))
        if is_async(function):
            run = self.at_home if code.run_in == RunIn.loop else self.on_users_loop
            return await self._awaiting(code, work, run)
        if code.run_in == RunIn.loop:
            return self._on_this_loop(code, work)
        return await run_on(self._home, self._threads.call(code, work))

    def call_blocking(self, code: Code, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Like `call`, for a caller in a thread: code for threads then runs in the caller's thread.

        Such code has no separate limit; the limit of the caller's call includes it.
        """
        if code.run_in != RunIn.process and not is_async(function):
            with self.running.track(code.label, code.activity):
                return _checked(code, partial(function, *args, **kwargs))
        return self.from_thread(self.call(code, function, *args, **kwargs)).result()

    async def lease(self, label: str, waits: Activity) -> Lease:
        """Lease a process for an episode, once one is free. For the worker's own loop.

        Args:
            waits: activity that waiting counts as: `env_wait` for an environment, `agent_wait` for an agent.

        Raises:
            UserCodeError: the process did not start.
        """
        with timed(waits):
            return await self._leased[waits].lease(label)

    async def on_users_loop(self, work: Awaitable[Any]) -> Any:
        """Run the user's coroutine `work` on the users' event loop, without a time limit or a label, and return its
        result.
        """
        return await self._users.run(_awaited(work))

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Run `function` in a separate thread, without a time limit or a label, and return its result."""
        return await asyncio.wrap_future(self._threads.threads.run(function))

    def from_thread(self, work: Awaitable[Any]) -> Future[Any]:
        """Start `work` on the worker's own loop, from a thread."""
        return asyncio.run_coroutine_threadsafe(_awaited(work), self._home)

    async def at_home(self, work: Awaitable[Any]) -> Any:
        """Run `work` on the worker's own event loop and return its result; called from the users' loop."""
        return await run_on(self._home, _awaited(work))

    def _on_this_loop(self, code: Code, work: Callable[[], Any]) -> Any:
        with self.running.track(code.label, code.activity, holds_loop=True):
            return _checked(code, work)

    async def _in_process(self, code: Code, args: tuple[Any, ...]) -> Any:
        assert code.target is not None, code.label
        running = partial(self.running.track, code.label, code.activity)
        return await self._pool.call(code.label, code.target, code.sees, list(args), code.timeout_s, running)

    async def _awaiting(
        self, code: Code, function: Callable[[], Awaitable[Any]], run: Callable[[Awaitable[Any]], Awaitable[Any]]
    ) -> Any:
        async def work() -> Any:
            try:
                return await function()
            except Exception as error:
                raise _raised(code, error) from error

        with self.running.track(code.label, code.activity):
            try:
                async with RunningTimeout(code.timeout_s) as limit:
                    return await run(work())
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise _too_slow(code, "it was cancelled") from error
            except UnusualExit as error:
                raise UserCodeError(code.label, str(error), how=str(error)) from error


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call of `function` returns an awaitable: `async def`, also as a method or an instance's call."""
    while isinstance(function, partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)


def _checked(code: Code, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except UserCodeError:
        raise
    except (SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError, GeneratorExit) as error:
        raise _raised(code, error) from error
    except Exception as error:
        raise _raised(code, error) from error


def _raised(code: Code, error: BaseException) -> UserCodeError:
    if isinstance(error, UserCodeError):
        return error
    how = f"raised {type(error).__name__}"
    return UserCodeError(code.label, f"{how}: {error}", how=how)


def _too_slow(code: Code, fate: str, *, still_runs: bool = False) -> UserCodeError:
    return UserCodeError(
        code.label, f"did not return within {code.timeout_s:g} s; {fate}", how=TOO_SLOW, still_runs=still_runs
    )


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work
