"""Limits of a process of the pool, and the time of its replacement. Pure: the caller passes clocks and
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

WATCH_FROM_S = 0.25
"""A call is watched from here on: most are over by then and cost no look at /proc."""
WATCH_EVERY_S = 0.25
"""Between two looks; a fork bomb starts some thousand processes in that time."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of one process and of all processes that it starts.

    Attributes:
        memory_bytes: address space of each process, and resident memory of all together.
        processes: how many there may be, itself included.
        max_calls: after so many calls it is renewed.
    """

    memory_bytes: int
    processes: int
    max_calls: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a process and all that it started use at a moment."""

    processes: int
    resident_bytes: int


def excess(limits: ProcessLimits, usage: Usage) -> str | None:
    """Why a process is to be killed; None if it keeps to its limits."""
    if usage.processes > limits.processes:
        return f"started {usage.processes - 1} processes (rollout.user_code.process_children={limits.processes - 1})"
    if usage.resident_bytes > limits.memory_bytes:
        used, allowed = usage.resident_bytes >> 20, limits.memory_bytes >> 20
        return f"used {used} MB with what it started (rollout.user_code.process_memory_mb={allowed})"
    return None


def keep(limits: ProcessLimits, calls: int, *, left_behind: bool) -> bool:
    """True if a process that has answered `calls` calls takes another one. A process that left others behind does
    not.
    """
    return calls < limits.max_calls and not left_behind
