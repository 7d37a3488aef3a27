"""Limits of a process of the pool, and the time of its replacement. Pure: the caller passes clocks and
measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

WATCH_FROM_S = 0.25
"""Seconds after which a call is monitored; most calls are over by then and cost no read of /proc."""
WATCH_EVERY_S = 0.25
"""Seconds between two checks; a fork bomb starts about a thousand processes in that time."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of one process and of all processes that it starts.

    Attributes:
        memory_bytes: limit on the address space of each process, and on the resident memory of all together.
        processes: limit on their number, itself included.
        max_calls: number of calls after which it is replaced.
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
    """Return why a process must be killed; None if it is within its limits."""
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
