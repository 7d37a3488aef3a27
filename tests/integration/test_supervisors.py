"""Supervisors that start a run again on its host: the systemd unit is well-formed, the Slurm job is requeued when it
has to be.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).parents[2] / "launchers"
LIMIT_S = 60.0


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
sys.exit(int(os.environ["CODE"]))
"""


def environment_of(tmp_path: Path, code: int) -> dict[str, str]:
    """Return the environment of a job whose launcher ends with `code`; the file `told` has what it tells Slurm."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    python, scontrol = tmp_path / "python", tmp_path / "scontrol"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {tmp_path / "launcher.py"} "$@"\n')
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "told"}\n')
    python.chmod(0o755)
    scontrol.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ASYNCRL_PYTHON": str(python)}
    return environment | {"SLURM_JOB_ID": "17", "CODE": str(code)}


@pytest.mark.parametrize(
    ("asked", "code", "requeued"),
    [(True, 130, True), (True, 0, False), (True, 2, False), (False, 1, False), (False, 0, False)],
)
def test_the_slurm_job_is_requeued_where_it_was_stopped_before_its_end(
    tmp_path: Path, asked: bool, code: int, requeued: bool
) -> None:
    """The launcher gets the signal once, and the time that it takes."""
    environment = environment_of(tmp_path, code)
    what = "asked" if asked else "by_itself"
    command = ["bash", str(LAUNCHERS / "slurm_requeue.sh"), "async_ppo", what]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == f"async_ppo {what} logging.display=plain\n"
        if asked:
            job.send_signal(signal.SIGTERM)
            assert job.stdout.readline() == "asked 15\n"
        assert job.wait(LIMIT_S) == code
    told = tmp_path / "told"
    assert (told.read_text() if told.exists() else "") == ("requeue 17\n" if requeued else "")


SIGNALLED_EARLY = """trap '[ "$BASH_COMMAND" != "launcher=\\$!" ] || kill -TERM $$' DEBUG\n"""


def test_a_signal_that_comes_as_the_slurm_job_starts_the_launcher_is_passed_on_and_the_job_requeued(
    tmp_path: Path,
) -> None:
    (tmp_path / "early").write_text(SIGNALLED_EARLY)
    environment = environment_of(tmp_path, 130) | {"BASH_ENV": str(tmp_path / "early")}
    command = ["bash", str(LAUNCHERS / "slurm_requeue.sh"), "async_ppo", "asked"]
    ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    assert ended.returncode in (128 + signal.SIGTERM, 130), "it may have come before the launcher's handler"
    assert (tmp_path / "told").read_text() == "requeue 17\n"
