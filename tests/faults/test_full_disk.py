"""A disk that is full for a while holds the run up; nothing is lost, and it goes on once there is room."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from asyncrl.datasets.used_prompts import UsedPrompts

from ..conftest import Gate

pytestmark = pytest.mark.slow

FULL_S = 12.0
WROTE = re.compile(r"wrote .+ after [\d.]+ s")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB below the folder of the run."""
    folder = tmp_path / "tiny"
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs", str(folder)]
    if os.getuid() != 0 or not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_holds_the_run_up_and_loses_nothing(
    start_run: Any, gate: Callable[[int], Gate], small_disk: Path
) -> None:
    """For longer than any lease."""
    steps, held = 10, gate(3)
    run = start_run(total_train_steps=steps, checkpoint__interval=1, **held.settings)
    run.wait_for_step(3)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        fill(file)
        held.open()
        until = time.monotonic() + FULL_S
        while time.monotonic() < until:
            assert run.process.poll() is None, run.output
            fill(file)  # old checkpoints and weights that are removed make no room
            threading.Event().wait(0.02)
    held_at = max(row["step"] for row in run.rows())
    assert held_at < steps
    ballast.unlink()
    assert run.wait() == 0, run.output + run.logs()
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))
    assert "FAILED" not in run.output
    assert run.summary()["restarts"] == {}
    state = json.loads((run.run_dir / "checkpoints" / f"v{steps}" / "state.json").read_text())
    assert len(UsedPrompts.from_json(state["master_state"]["buffer"]["used_prompts"])) == steps * 4
    # that it waits may be told nowhere as long as the logs are full, too
    waited = [log.name for log in (run.run_dir / "logs").glob("*.log") if WROTE.search(log.read_text())]
    assert waited, run.logs()


def fill(file: BinaryIO) -> None:
    """Write to it until the disk takes no more."""
    with contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
