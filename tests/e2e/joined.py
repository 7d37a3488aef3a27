"""`asyncrl join` as a child of a test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ..conftest import LIMIT_S
from ..warm import Template, WarmProcess

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Joined:
    """A `join` as a child, and what it has printed. `template` forks its processes."""

    def __init__(self, run_dir: Path, options: Sequence[str], template: Template | None) -> None:
        arguments, environment = ["join", str(run_dir), *options], os.environ | ONE_THREAD
        self.process: subprocess.Popen[str] | WarmProcess
        if template is not None:
            self.process = template.launch(arguments, environment)
        else:
            command = [sys.executable, "-m", "asyncrl.launch", *arguments]
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> None:
        """Wait for its end; `output` is all that it printed then."""
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
