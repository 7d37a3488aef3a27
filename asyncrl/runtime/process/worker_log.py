"""Filter of a worker process's log, with a limit on lines that peers cause.

Libraries log the actions of peers: a connection that breaks during a write is a traceback of uvloop, and a busy peer
breaks thousands. So within `REPEAT_S` seconds the same message of a library is written `MOST_ALIKE` times at most, and
`MOST` messages of all libraries. Omitted messages are counted.
"""

from __future__ import annotations

import logging
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from asyncrl.comm.waits.limits import REPEAT_S

MOST_ALIKE: Final = 5
MOST: Final = 100
_ALIKE_CHARS: Final = 80
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_log = logging.getLogger(__name__)


class WorkerLogFilter(logging.Filter):
    """Passes all messages of asyncrl and of the user's own files, and warnings of libraries within the module's limits.

    HTTP clients, which agents use thousands of times a minute, log each request below the level of a warning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._since = clock()
        self._seen: Counter[str] = Counter()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """True if `record` is written."""
        if not _is_of_library(record):
            return True
        return record.levelno >= logging.WARNING and self._has_room(record)

    def _has_room(self, record: logging.LogRecord) -> bool:
        if (now := self._clock()) - self._since > REPEAT_S:
            left_out, self._left_out = self._left_out, 0
            self._since, self._seen = now, Counter()
            if left_out:
                _log.warning("%d messages of libraries were left out of this log", left_out)
        first_line = str(record.msg).partition("\n")[0][:_ALIKE_CHARS]
        alike = f"{record.name}: {first_line}"
        if self._seen.total() < MOST and self._seen[alike] < MOST_ALIKE:
            self._seen[alike] += 1
            return True
        if not self._left_out:
            _log.warning("messages as %r are left out for up to %g s: there are too many", alike, REPEAT_S)
        self._left_out += 1
        return False


def _is_of_library(record: logging.LogRecord) -> bool:
    """True if neither asyncrl nor a file of the user logs it. uvloop's own frames are invisible, so that its messages,
    which have asyncio's name, seem to come from the file that called it.
    """
    package = record.name.partition(".")[0]
    return package != "asyncrl" and (package == "asyncio" or record.pathname.startswith(_LIBRARIES))
