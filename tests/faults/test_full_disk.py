"""A disk that is full for a while holds the run up; nothing is lost, and it goes on once there is room."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.datasets.used_prompts import UsedPrompts

pytestmark = pytest.mark.slow


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


def test_a_full_disk_holds_the_run_up_and_loses_nothing(start_run: Any, small_disk: Path) -> None:
    steps = 20
    run = start_run(total_train_steps=steps, checkpoint__interval=1)
    run.wait_for_step(3)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(12)
    held_at = max(row["step"] for row in run.rows())
    assert held_at < steps
    ballast.unlink()
    assert run.wait(180) == 0, run.output + run.logs()
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))
    assert "FAILED" not in run.output
    assert run.summary()["restarts"] == {}
    state = json.loads((run.run_dir / "checkpoints" / f"v{steps}" / "state.json").read_text())
    assert len(UsedPrompts.from_json(state["master_state"]["buffer"]["used_prompts"])) == steps * 4
    waited = [log.name for log in (run.run_dir / "logs").glob("*.log") if "waiting to write" in log.read_text()]
    assert waited, run.logs()
