"""Why a rollout leaves the count without being trained."""

from __future__ import annotations

from enum import StrEnum, auto


class DropReason(StrEnum):
    """The system's own reasons; a filter that rejects a group adds its own (`Verdict.reason`)."""

    stale = auto()
    """Its oldest token is older than η allows; the prompt is tried again."""
    duplicate_prompt = auto()
    """Another rollout of the same prompt came first."""
    failed = auto()
    """The agent, the environment or a server raised."""
    timeout = auto()
    """It took longer than `rollout.rollout_timeout_s`."""
    agent_rejected = auto()
    """The agent returned no samples."""
    worker_died = auto()
    """Its RolloutWorker is gone."""


def given_up(reason: str) -> str:
    """The reason of a group that a filter rejected for `reason`, whose prompt it would return once too often."""
    return f"{reason}_given_up"


_OWN = frozenset(DropReason)


def is_filter_reason(reason: str) -> bool:
    """Whether `reason` is one that a filter gave."""
    return reason not in _OWN
