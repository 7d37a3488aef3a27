"""How a call of users' code fails."""

from __future__ import annotations

from asyncrl.api import EpisodeError, EpisodeTimeout

TOO_SLOW = "did not return in time"
"""How a call fails that exceeds its time."""


class UserCodeError(RuntimeError):
    """A call of users' code failed: it raised, took too long, or its process died. It costs the sample at hand.

    Args:
        what: what it did, for the log.

    Attributes:
        label: what was called, as it is counted: `reward my.py:score`.
        how: how it failed, in one of few ways, as it is counted: `raised ValueError`.
        still_runs: it was given up in a thread, which goes on.
    """

    def __init__(self, label: str, what: str, *, how: str = "failed", still_runs: bool = False) -> None:
        super().__init__(f"{label} {what}")
        self.label, self.how = label, how
        self.still_runs = still_runs


def failed_label(error: BaseException | None) -> str | None:
    """What users' code `error` is due to, looking through causes and groups; None if none is known."""
    failed = _failed_call(error)
    return None if failed is None else failed.label


def named_failure(error: BaseException, agent: str) -> str:
    """How an episode that failed with `error` is counted: `env my.py:Game.step raised ValueError`.

    Args:
        agent: named where no other code of users is known to have failed.
    """
    failed = _failed_call(error)
    if failed is not None:
        return f"{failed.label} {failed.how}"
    if isinstance(error, EpisodeTimeout):
        return f"agent {agent} exceeded rollout.rollout_timeout_s"
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, EpisodeError) and error.__cause__ is not None:  # it was cancelled from within, or called exit
        error = error.__cause__
    return f"agent {agent} raised {type(error).__name__}"


def _failed_call(error: BaseException | None) -> UserCodeError | None:
    waiting, seen = [error], set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:  # a group may be the cause of what it holds
            continue
        seen.add(id(error))
        if isinstance(error, UserCodeError):
            return error
        waiting.append(error.__cause__)
        if isinstance(error, BaseExceptionGroup):
            waiting += error.exceptions
    return None
