"""How many files a process may have open at once."""

from __future__ import annotations

import resource


def allow_descriptors() -> int:
    """Let this process open as many files as its hard limit allows, of which there are then so many.

    The soft limit, mostly 1,024, is for programs that wait with `select`; none of a run's processes does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
