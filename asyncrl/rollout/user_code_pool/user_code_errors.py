"""Errors of calls of users' code."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from asyncrl.api import EpisodeError, EpisodeTimeout, StepResult

TOO_SLOW = "did not return in time"
"""Description of the failure of a call that exceeds its time."""


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


def parts_of(label: str, value: Any, number: int) -> Sequence[Any]:
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


def step_of(label: str, value: Any) -> StepResult:
    """Return the result of an environment's `step`, with its reward as a number.

    Raises:
        UserCodeError: it is not a result of `step`, or the reward is not a finite number.
    """
    observation, given, terminated, truncated, info = parts_of(label, value, 5)
    reward = plain_number(given)
    if reward is None or not math.isfinite(reward):
        raise UserCodeError(
            label,
            f"returned the reward {given!r:.80}, a {type(given).__name__}; a reward is a finite number",
            how="returned what is no reward",
        )
    return observation, reward, terminated, truncated, info


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
