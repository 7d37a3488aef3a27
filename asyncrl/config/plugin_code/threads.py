"""Users' code in threads of its own, and the state that is kept of it.

For curricula and buffer orders, which are called beside a process's own work, and for users' functions in
RolloutWorkers (`asyncrl.rollout.user_code_pool.threads`).
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")

_Job = tuple[Callable[[], Any], "Future[Any]", contextvars.Context]


class UnusualExit(Exception):
    """The function raised an exception that an event loop cannot pass on: SystemExit, KeyboardInterrupt,
    StopIteration.
    """


class DaemonThreads:
    """Runs functions, each in a thread; thread-safe. `started` counts the threads made so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self.started = 0

    def run(self, function: Callable[[], _T]) -> Future[_T]:
        """Begin `function` in a thread, within the caller's context variables.

        An exception that an event loop cannot carry becomes the cause of an `UnusualExit`.
        """
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            jobs = self._idle.pop() if self._idle else None
            if jobs is None:
                self.started += 1
        if jobs is None:
            jobs = queue.SimpleQueue()
            name = f"user-code-{self.started}"
            threading.Thread(target=self._work, args=(jobs,), name=name, daemon=True).start()
        jobs.put((function, future, contextvars.copy_context()))
        return future

    def _work(self, jobs: queue.SimpleQueue[_Job]) -> None:
        while True:
            function, future, context = jobs.get()
            value, error = _outcome(function, context)
            with self._lock:
                self._idle.append(jobs)
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
            del function, future, context, value, error  # an idle thread must not keep its last call's objects alive


def _outcome(function: Callable[[], Any], context: contextvars.Context) -> tuple[Any, BaseException | None]:
    try:
        return context.run(function), None
    except (StopIteration, StopAsyncIteration) as error:
        unusual = UnusualExit(f"raised {type(error).__name__}")
    except Exception as error:
        return None, error
    except BaseException as error:
        unusual = UnusualExit(f"raised {type(error).__name__}")
        unusual.__cause__ = error
    return None, unusual


def plain_state(state: Any, where: str = "state()") -> Any:
    """Return a copy of `state` as a checkpoint restores it: tuples become lists.

    Raises:
        TypeError: a value would not survive JSON unchanged; the message names the value and its place.
    """
    if state is None or isinstance(state, (str, bool, int)):
        return state
    if isinstance(state, float):
        if not math.isfinite(state):
            raise TypeError(f"{where} is {state}, which JSON does not have")
        return state
    if isinstance(state, (list, tuple)):
        return [plain_state(each, f"{where}[{index}]") for index, each in enumerate(state)]
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise TypeError(
                    f"{where} has the key {key!r}, which JSON would restore as text; use str(...) or a list"
                )
        return {key: plain_state(each, f"{where}[{key!r}]") for key, each in state.items()}
    raise TypeError(
        f"{where} is a {type(state).__name__}; state must be plain data for JSON: texts, numbers, lists, mappings"
    )
