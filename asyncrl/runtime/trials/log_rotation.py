"""Rotate the logs of processes: the launcher copies a full log to the same name with `.1`, and empties it.

Processes write to descriptors that the launcher opened for appending, so a file is copied and truncated in place; the
next line goes to its start. Lines written between copying and truncating, microseconds apart, are lost.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

LOG_BYTES = 64 << 20
"""Largest size of a log; with the rotated one a process has at most twice as much."""
EVERY_S = 10.0

_log = logging.getLogger(__name__)


def rotate(folder: Path, limit: int = LOG_BYTES) -> list[Path]:
    """Rotate the logs in `folder` that are larger than `limit` bytes, and return them.

    A log that cannot be rotated, for example on a full disk, stays unchanged.
    """
    rotated = []
    for file in sorted(folder.glob("*.log")):
        try:
            if file.stat().st_size > limit:
                shutil.copyfile(file, file.with_name(f"{file.name}.1"))
                os.truncate(file, 0)
                rotated.append(file)
        except OSError as error:
            _log.warning("%s is not put aside: %s", file, error)
    return rotated
