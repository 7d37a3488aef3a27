"""Limits on open files of a process."""

from __future__ import annotations

import errno
import resource

OTHERS = 128
"""Descriptors of a process beside its connections: logs, journals, name resolution, HTTP servers."""


def allow_all_files() -> None:
    """Let this process open as many files as its hard limit allows.

    The soft limit, mostly 1,024, is for programs that wait with `select`; none of a run's processes does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allow_connections(connections: int, to_whom: str) -> None:
    """Let this process open as many files as its hard limit allows, and check that it allows this many connections.

    Raises:
        OSError: the hard limit is too low; the message names the other ends of the connections, `to_whom`.
    """
    allow_all_files()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < (wanted := connections + OTHERS):
        raise OSError(
            errno.EMFILE,
            f"the connections to {to_whom} take {wanted} open files and the hard limit is {hard}: raise it, here and "
            f"for whatever starts the run (ulimit -Hn {wanted})",
        )
