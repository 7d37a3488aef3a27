"""Entry point of every worker process: `python -m asyncrl.runtime.main <kind> <index> --run-dir DIR`."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import pkgutil
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from asyncrl.comm.files import PRIVATE_UMASK
from asyncrl.comm.waits import REPEAT_S
from asyncrl.runtime.plan import HOST_VARIABLE, PROCESS_KINDS
from asyncrl.runtime.process.worker import WorkerSpec, lasting_imports

MOST_ALIKE: Final = 5
MOST: Final = 100
_ALIKE_CHARS: Final = 80
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_log = logging.getLogger("asyncrl.runtime.main")  # not `__main__`, which would count as a library


def main() -> int:
    """Run one worker to its end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(PROCESS_KINDS))
    parser.add_argument("index", type=int)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--niceness", type=int, default=0, help="lower this process's priority by so much")
    parser.add_argument("--incarnation", type=int, default=0, help="how many before this one died")
    own = os.environ.get(HOST_VARIABLE, "")
    parser.add_argument("--host", default=own, help=f"address of this host; default: {HOST_VARIABLE}, or system.host")
    args = parser.parse_args()
    os.nice(args.niceness)
    os.umask(PRIVATE_UMASK)
    os.environ.pop("LOCAL_RANK", None)  # another launcher's, of which torch makes the number of a GPU
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {args.kind}/{args.index} %(message)s",
        datefmt="%H:%M:%S",
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(WorkerLogFilter())
    with lasting_imports():
        worker_class = pkgutil.resolve_name(PROCESS_KINDS[args.kind].path)
    return int(worker_class(WorkerSpec(args.kind, args.index, args.run_dir, args.incarnation, args.host)).start())


class WorkerLogFilter(logging.Filter):
    """Passes all messages of asyncrl and of the user's own files, and warnings of libraries within limits.

    Libraries log the actions of peers: a connection that breaks during a write is a traceback of uvloop, and a busy
    peer breaks thousands. So within `REPEAT_S` seconds the same message of a library is written `MOST_ALIKE` times at
    most, and `MOST` messages of all libraries. Omitted messages are counted. HTTP clients, which agents use thousands
    of times a minute, log each request below the level of a warning.
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
        return record.levelno >= logging.WARNING and self._may_log(record)

    def _may_log(self, record: logging.LogRecord) -> bool:
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


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)  # all is closed by now; tearing torch's modules down would take seconds of a busy machine
