"""Supervisors that start a run again on its host: the systemd unit is well-formed, the Slurm job is requeued when it
has to be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..e2e.clusters import await_that, slurm

LAUNCHERS = Path(__file__).parents[2] / "launchers"
LIMIT_S = 300.0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    unit = tmp_path / "asyncrl@trial0.service"
    shutil.copy(LAUNCHERS / "asyncrl@.service", unit)
    command = ["systemd-analyze", "verify", "--user", str(unit)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert ended.stdout + ended.stderr == ""


LAUNCHER = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print(*sys.argv[1:], flush=True)
if "asked" in sys.argv:
    print("asked", signal.sigtimedwait([signal.SIGTERM], 120).si_signo, flush=True)
codes = sys.argv[3].split(",")
starts = "starts"
open(starts, "a").write("x")
sys.exit(int(codes[min(os.path.getsize(starts), len(codes)) - 1]))
"""


@pytest.fixture(scope="module")
def slurm_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster", nodes=1) as environment:
        yield environment


class Job:
    """A job of the script, whose launcher is a program that ends with the given codes, one each start."""

    def __init__(self, folder: Path, environment: dict[str, str], what: str, codes: str, **others: str) -> None:
        (folder / "launcher.py").write_text(LAUNCHER)
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {folder / "launcher.py"} "$@"\n')
        python.chmod(0o755)
        self._folder = folder
        self._environment = environment | {"ASYNCRL_PYTHON": str(python), "ASYNCRL_RETRY_S": "0"} | others
        script = [str(LAUNCHERS / "slurm_requeue.sh"), "async_ppo", what, codes]
        self.id = self._command("sbatch", "--parsable", f"--chdir={folder}", f"--output={folder}/log", *script).strip()

    def _command(self, *words: str) -> str:
        ended = subprocess.run(
            words, env=self._environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return ended.stdout

    def signal(self, *arguments: str) -> None:
        self._command("scancel", *arguments, self.id)

    @property
    def log(self) -> str:
        file = self._folder / "log"
        return file.read_text() if file.exists() else ""

    def state(self) -> tuple[str, int]:
        """Its state, as Slurm calls it, and how often it was requeued."""
        reported = dict(part.partition("=")[::2] for part in self._command("scontrol", "show", "job", self.id).split())
        return reported["JobState"], int(reported["Restarts"])

    def end(self, *ends: tuple[str, int]) -> None:
        """Wait until it is in one of these states."""
        await_that(lambda: self.state() in ends, f"one of {ends}: {self.log}", LIMIT_S)


@pytest.mark.parametrize(
    ("codes", "end"), [("0", ("COMPLETED", 0)), ("1", ("FAILED", 0)), ("2", ("FAILED", 0)), ("4,4,0", ("COMPLETED", 0))]
)
def test_a_slurm_job_that_ends_by_itself_is_not_requeued_and_tries_again_while_another_run_holds_the_trial(
    tmp_path: Path, slurm_environment: dict[str, str], codes: str, end: tuple[str, int]
) -> None:
    job = Job(tmp_path, slurm_environment, "by_itself", codes)
    job.end(end)
    assert job.log == f"async_ppo by_itself {codes} logging.display=plain\n" * len(codes.split(","))


@pytest.mark.parametrize(
    ("arguments", "codes", "end"),
    [
        (["--batch", "--signal=USR1"], "130", ("PENDING", 1)),  # as before a time limit
        (["--batch", "--signal=USR1"], "0", ("COMPLETED", 0)),
        (["--batch", "--signal=USR1"], "2", ("FAILED", 0)),
        (["--batch", "--signal=TERM"], "130", ("FAILED", 0)),
        ([], "130", ("CANCELLED", 0)),
    ],
)
def test_a_slurm_job_is_requeued_before_its_time_limit_and_not_when_it_is_cancelled(
    tmp_path: Path, slurm_environment: dict[str, str], arguments: list[str], codes: str, end: tuple[str, int]
) -> None:
    """The launcher is asked to stop in each case, and gets the time that it takes."""
    job = Job(tmp_path, slurm_environment, "asked", codes)
    await_that(lambda: "async_ppo" in job.log, "the launcher", LIMIT_S)
    job.signal(*arguments)
    job.end(end)
    assert "asked 15\n" in job.log
    job.signal()


SIGNALLED_EARLY = """trap '[ "$BASH_COMMAND" != "launcher=\\$!" ] || kill -USR1 $$' DEBUG; set -T\n"""


def test_a_signal_that_comes_as_the_slurm_job_starts_the_launcher_is_passed_on_and_the_job_requeued(
    tmp_path: Path, slurm_environment: dict[str, str]
) -> None:
    (tmp_path / "early").write_text(SIGNALLED_EARLY)
    job = Job(tmp_path, slurm_environment, "asked", "130", BASH_ENV=str(tmp_path / "early"))
    job.end(("PENDING", 1))
    job.signal()
