"""Write to a disk that may be full or read-only for a while: the write is retried, and logged, until it succeeds.

Optional data, or data that can go to another place, is written within `no_retry`: the first failure is raised.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from asyncrl.comm.waits.backoff import Backoff
from asyncrl.comm.waits.limits import PATIENCE_S, REPEAT_S

PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EAGAIN})
"""Errors that someone can fix while the run waits: no space, over quota, read-only, an unreachable file server."""
_BACKOFF = Backoff(0.1, 2.0)
_patient = ContextVar("patient", default=True)

_T = TypeVar("_T")


@contextmanager
def no_retry(really: bool = True) -> Iterator[None]:
    """In this block, writes of this thread or task raise their first error instead of a retry, if `really`."""
    token = _patient.set(not really)
    try:
        yield
    finally:
        _patient.reset(token)


class _Patience:
    """Time that one write has waited, and the time of the last log line about this."""

    def __init__(self, what: str, log: logging.Logger) -> None:
        self._what, self._log = what, log
        self._since = self._said_at = 0.0
        self._failures = 0

    def delay_s(self, error: OSError) -> float:
        """Return the delay, in s, before the next try.

        Raises:
            OSError: `error`, if waiting does not help or took too long.
        """
        now = time.monotonic()
        self._since = self._since or now
        if not _patient.get() or error.errno not in PASSING or now - self._since > PATIENCE_S:
            raise error
        if now - self._said_at > REPEAT_S:
            self._said_at = now
            self._log.warning("waiting to write %s: %s", self._what, error)
        self._failures += 1
        return _BACKOFF.delay(self._failures)

    def done(self) -> None:
        """Log that the write succeeded, if it had to wait."""
        if self._failures:
            self._log.warning("wrote %s after %.1f s", self._what, time.monotonic() - self._since)


async def retry_write(write: Callable[[], _T], what: str, log: logging.Logger) -> _T:
    """Call `write`, and retry it while the disk refuses writes. Log lines name `what` is written.

    Raises:
        OSError: another failure, or the disk refused writes for `PATIENCE_S`.
    """
    patience = _Patience(what, log)
    while True:
        try:
            written = write()
        except OSError as error:
            await asyncio.sleep(patience.delay_s(error))
        else:
            patience.done()
            return written


def retry_write_blocking(write: Callable[[], _T], what: str, log: logging.Logger) -> _T:
    """As `retry_write`, for threads.

    Raises:
        OSError: another failure, or the disk refused writes for `PATIENCE_S`.
    """
    patience = _Patience(what, log)
    while True:
        try:
            written = write()
        except OSError as error:
            time.sleep(patience.delay_s(error))
        else:
            patience.done()
            return written
