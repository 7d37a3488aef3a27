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
    """The agent, the environment or a server raised; see `failed_in`."""
    timeout = auto()
    """It took longer than `rollout.rollout_timeout_s`."""
    agent_rejected = auto()
    """The agent returned no samples."""
    worker_died = auto()
    """Its RolloutWorker is gone."""


_OWN = frozenset(DropReason)


def failed_in(label: str | None) -> str:
    """The reason of a rollout that failed, in users' code where that is known: `failed: reward my.py:score`."""
    return DropReason.failed if label is None else f"{DropReason.failed}: {label}"


def is_filter_reason(reason: str) -> bool:
    """Whether `reason` is one that a filter gave."""
    return reason.partition(":")[0] not in _OWN
