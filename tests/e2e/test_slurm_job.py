"""A whole run as a job of a real Slurm: cancelled, and requeued before its time limit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.run_dir import CHECKPOINTS_DIR, versions_in

from ..conftest import LIMIT_S, Run
from ..warm import Template, python_of_hosts
from .clusters import await_that, slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "launchers" / "slurm_requeue.sh"


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster", nodes=1) as environment:
        yield environment["SLURM_CONF"]


class Job:
    """A run that is started by a job."""

    def __init__(self, start_run: Any, tmp_path: Path, script: str, *options: str) -> None:
        self._log = tmp_path / "job.log"
        (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{script}\n")
        inside = ["sbatch", "--parsable", f"--output={self._log}", *options, str(tmp_path / "job.sh")]
        self.run: Run = start_run(inside=inside, total_train_steps=100_000, checkpoint__interval=100_000)
        assert self.run.wait() == 0, self.run.output
        self._id = self.run.output.strip()

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def command(self, *words: str) -> str:
        reported = subprocess.run([*words, self._id], capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return reported.stdout

    def steps(self) -> list[int]:
        """Steps that the terminal shows."""
        return [int(step) for step in re.findall(r"^step (\d+)", self.log, re.MULTILINE)]

    def wait_for_steps(self, count: int) -> None:
        await_that(lambda: len(self.steps()) >= count, f"{count} steps: {self._log}", LIMIT_S)

    def state(self) -> str:
        return re.findall(r"JobState=(\w+)", self.command("scontrol", "show", "job"))[0]

    def wait_for(self, *states: str) -> None:
        await_that(lambda: self.state() in states, f"one of {states}: {self._log}", LIMIT_S)

    def assert_saved(self) -> None:
        assert versions_in(self.run.run_dir / CHECKPOINTS_DIR)[-1] == self.run.rows()[-1]["step"]
        assert "FAILED:" not in self.log


@pytest.fixture
def python(template: Template | None, tmp_path: Path) -> str:
    """An interpreter whose runs are forked from the template."""
    return sys.executable if template is None else str(python_of_hosts(template, tmp_path, module="asyncrl.launch"))


def test_a_requeued_job_goes_on_where_it_saved_shows_each_step_once_and_saves_when_it_is_cancelled(
    start_run: Any, tmp_path: Path, slurm_conf: str, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm_conf)
    monkeypatch.setenv("ASYNCRL_PYTHON", python)
    job = Job(start_run, tmp_path, f"shift 3; . {SCRIPT}", "--requeue", "--open-mode=append")
    job.wait_for_steps(3)
    job.command("scancel", "--batch", "--signal=USR1")  # as before a time limit
    job.wait_for("PENDING")
    job.assert_saved()
    first, stopped = job.steps(), job.log.count("stopping after a checkpoint")
    job.wait_for_steps(len(first) + 3)
    job.command("scancel")  # SIGTERM to all of its processes at once
    job.wait_for("CANCELLED")
    assert job.log.count("stopping after a checkpoint") == stopped + 1
    job.assert_saved()
    assert job.steps() == list(range(first[0], first[0] + len(job.steps())))
