"""A piece of users' code, and what is recorded of its calls: how long a rollout waits, rewards and failures by name.

A rollout's meter follows it through tasks and threads.

    with metered() as meter:
        ...                              # the rollout, wherever its parts run
    meter.metrics()                      # {"rollout/env_s": 0.8, "rollout/reward_s": 0.2, "reward/correct": 0.5}
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum, auto
from numbers import Real
from typing import TYPE_CHECKING, Any

from asyncrl.api import EpisodeError, EpisodeTimeout
from asyncrl.api.reward import RunIn

if TYPE_CHECKING:
    from asyncrl.rollout.user_code_pool.child import CodeTarget

TOO_SLOW = "did not return in time"
"""Description of the failure of a call that exceeds its time."""


class Activity(StrEnum):
    """Activities that a rollout waits for; each is a metric, `rollout/<activity>_s`."""

    generate = auto()
    env = auto()
    env_wait = auto()
    """Waiting for a free process for an environment."""
    agent_wait = auto()
    """Waiting for a free process for an agent."""
    process_wait = auto()
    """Waiting for a free process of `rollout.user_code.processes` for a reward or a tool."""
    thread_wait = auto()
    """Waiting for a free thread of `rollout.user_code.threads` for a plain function."""
    reward = auto()
    tool = auto()


def seconds_in_any(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of `intervals`, each a begin and an end in seconds.

    So calls that run at the same time count once: no activity of a rollout takes longer than the rollout.
    """
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


class Meter:
    """Meter of one rollout, parts of which may run in several threads: entries are appended, and read at the end.

    Attributes:
        intervals: when each activity ran, begin and end in seconds of one clock.
        rewards: values that each reward gave, by its name.
        failures: number of rewards that failed, so that their `failure_reward` was used.
        verdicts: by name, True if the verdict found the last answer right.
        tools: tool metrics of each sample: `tool/<name>/calls` and so on.
    """

    def __init__(self) -> None:
        self.intervals: dict[Activity, list[tuple[float, float]]] = {activity: [] for activity in Activity}
        self.rewards: defaultdict[str, list[float]] = defaultdict(list)
        self.failures = 0
        self.verdicts: dict[str, bool] = {}
        self.tools: list[Mapping[str, float]] = []
        self._lock, self._limited, self._own_s, self._since = threading.Lock(), 0, 0.0, time.monotonic()

    @property
    def own_s(self) -> float:
        """Seconds so far in which nothing ran that has a limit of its own."""
        with self._lock:
            return self._own_s + (0.0 if self._limited else time.monotonic() - self._since)

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Within this block something runs that has a limit of its own, so the time is not the rollout's."""
        with self._lock:
            if not self._limited:
                self._own_s += time.monotonic() - self._since
            self._limited += 1
        try:
            yield
        finally:
            with self._lock:
                self._limited -= 1
                self._since = time.monotonic()

    @property
    def verdict(self) -> bool | None:
        """True if all verdicts found the last answer right; None if there was no verdict."""
        return all(self.verdicts.values()) if self.verdicts else None

    def metrics(self) -> dict[str, float]:
        """Return the seconds in which each activity ran (`seconds_in_any`), and means of rewards and tool metrics.

        Means of tool metrics are over the samples that used any tool.
        """
        found = {f"rollout/{activity}_s": seconds_in_any(ran) for activity, ran in self.intervals.items() if ran}
        if self.failures:
            found["rollout/failed_rewards"] = float(self.failures)
        for name in sorted({name for metrics in self.tools for name in metrics}):
            found[name] = sum(metrics.get(name, 0.0) for metrics in self.tools) / len(self.tools)
        return found | {f"reward/{name}": sum(values) / len(values) for name, values in self.rewards.items()}


_current: ContextVar[Meter | None] = ContextVar("asyncrl_meter", default=None)


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    """Yield a meter for everything that runs within this block, including tasks and threads started in it."""
    meter = Meter()
    token = _current.set(meter)
    try:
        yield meter
    finally:
        _current.reset(token)


def current_meter() -> Meter:
    """Return the meter of the current rollout; outside of a rollout, a meter that is never read."""
    return _current.get() or Meter()


@contextlib.contextmanager
def timed(activity: Activity) -> Iterator[None]:
    """Count the time within this block as the rollout's `activity`. All activities have limits of their own, except
    that a request may wait for a server (`Activity.generate`).
    """
    begun, meter = time.monotonic(), current_meter()
    try:
        with contextlib.nullcontext() if activity == Activity.generate else meter.limited():
            yield
    finally:
        meter.intervals[activity].append((begun, time.monotonic()))


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


class UserCodeError(RuntimeError):
    """A call of users' code failed: it raised, took too long, or its process died. It costs the sample at hand.

    Args:
        what: description of the failure for the log.

    Attributes:
        label: name of the called code, by which failures are counted: `reward my.py:score`.
        how: kind of failure, one of a few, by which failures are counted: `raised ValueError`.
        still_runs: True if the call was abandoned in a thread that still runs.
    """

    def __init__(self, label: str, what: str, *, how: str = "failed", still_runs: bool = False) -> None:
        super().__init__(f"{label} {what}")
        self.label, self.how = label, how
        self.still_runs = still_runs


def checked(code: Code, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except UserCodeError:
        raise
    except BaseException as error:  # also those that no event loop can carry
        raise raised(code, error) from error


def raised(code: Code, error: BaseException) -> UserCodeError:
    how = f"raised {type(error).__name__}"
    return UserCodeError(code.label, f"{how}: {error}", how=how)


def plain_number(value: object) -> float | None:
    """Return a number as Python has it, also one of numpy or torch and an array of a single one; None for others."""
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        value = tolist()
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, Real | Decimal) else None


def failed_user_code(error: BaseException | None) -> UserCodeError | None:
    """Return the failure of users' code that caused `error`, looking through causes and groups; None if unknown."""
    return next((each for each in _behind(error) if isinstance(each, UserCodeError)), None)


def failed_label(error: BaseException | None) -> str | None:
    """Return the label of the users' code that caused `error`; None if none is known."""
    failed = failed_user_code(error)
    return None if failed is None else failed.label


def group_failed_in(error: BaseException, agent: str, of_the_policy: Collection[BaseException]) -> str | None:
    """Return the label of the users' code in which a group failed with `error`; None if the policy failed it.

    Args:
        agent: name to return for failures in no other user code.
        of_the_policy: errors that the policy raised while the group was played.
    """
    if (label := failed_label(error)) is not None:
        return label
    failed = any(each is failure for each in _behind(error, contexts=True) for failure in of_the_policy)
    return None if failed else f"agent {agent}"


def named_failure(error: BaseException, agent: str) -> str:
    """Return the name under which an episode that failed with `error` is counted: `env my.py:Game.step raised
    ValueError`.

    Args:
        agent: name to use if no other user code is known to have failed.
    """
    failed = failed_user_code(error)
    if failed is not None:
        return f"{failed.label} {failed.how}"
    if isinstance(error, EpisodeTimeout):
        return f"agent {agent} exceeded rollout.rollout_timeout_s"
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EpisodeError) and error.__cause__ is not None:  # it was cancelled from within, or called exit
        error = error.__cause__
    return f"agent {agent} raised {type(error).__name__}"


def _behind(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield `error`, its causes, and the members of exception groups; with `contexts` also errors being handled."""
    waiting, seen = [error], set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:  # an exception group may be the cause of its own members
            continue
        seen.add(id(error))
        yield error
        waiting.append(error.__cause__)
        if contexts:
            waiting.append(error.__context__)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
