"""Remarks of a run's processes that the terminal shows between two rows of metrics.

    <run folder>/remarks.jsonl    {"time": ..., "remark": "WARNING: ..."}

The launcher shows each line once. The file belongs to one launch.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from asyncrl.config.run_dir import REMARKS_FILE

_log = logging.getLogger(__name__)


def remark(run_dir: Path, text: str) -> None:
    """Log `text`, and have the launcher of the run in `run_dir` show it."""
    _log.warning("%s", text)
    try:
        with (run_dir / REMARKS_FILE).open("a") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "remark": text}) + "\n")
    except OSError as error:  # it tells people what happened; the run must not wait for it, nor end
        _log.warning("the launcher cannot show this: %s", error)
