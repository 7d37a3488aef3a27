"""The same command over several hosts by Slurm, stopped and continued in an allocation."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.commands.audit import audit

from ..conftest import LIMIT_S
from .clusters import slurm
from .hosts import assert_gone, over, with_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_run_on_slurm_is_stopped_and_continued_in_an_allocation(
    start_run: Any, ctrl_c: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_there: str
) -> None:
    hosts = with_python(over("slurm", "n1", "n2"), python_there)
    with slurm(tmp_path / "slurm", nodes=2) as environment:
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        first = start_run("async_ppo", total_train_steps=100_000, **hosts)
        first.wait_for_step(3)
        ctrl_c(first)
        assert first.wait() == 130, first.output + first.logs()
        allocate = ["salloc", "--no-shell", "--nodes=2", "--cpus-per-task=4"]
        reported = subprocess.run(
            allocate, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
        )
        monkeypatch.setenv("SLURM_JOB_ID", re.findall(r"Granted job allocation (\d+)", reported.stderr)[0])
        goal = int(first.rows()[-1]["step"]) + 3
        second = start_run(total_train_steps=goal, **hosts)
        assert second.wait() == 0, second.output + second.logs()
        assert [row["step"] for row in second.rows()] == list(range(1, goal + 1))
        assert audit(second.run_dir).findings == ()
        assert_gone(second)
