"""The order of a process on another host arrives, whatever its size and the room of a pipe; the other host is here."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import read_run_config, run_dir_of, write_run_config
from asyncrl.runtime import supervisor
from asyncrl.runtime.hosts.remote_workers import RemoteBackend
from asyncrl.runtime.launchers import local
from asyncrl.runtime.planning.worker_plan import Host, WorkerPlan
from asyncrl.runtime.trials.claim import TrialClaim
from asyncrl.runtime.trials.resume import TrialError

PLAN = WorkerPlan("toy", 0, host=Host(name="box2"))
LIMIT_S = 300.0
WORKER = """
import os
print(sum(len(os.environ[f"LARGE{number}"]) for number in range(3)))
raise SystemExit(7)
"""


class Backend(RemoteBackend):
    """Runs the supervisor of the other host here."""

    def carrier(self, plan: WorkerPlan, command: list[str]) -> list[str]:
        """Return the command itself."""
        return command


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(local, "adopt_orphans", lambda: None)  # of the test's own process
    monkeypatch.setattr(WorkerPlan, "command", lambda plan, run_dir: [sys.executable, "-c", WORKER])
    write_run_config(ExperimentConfig(), tmp_path)
    for number in range(3):
        monkeypatch.setenv(f"LARGE{number}", "x" * 100_000)
    return Backend(tmp_path)


async def test_a_large_order_arrives_through_a_small_pipe(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has many pipes gets no larger ones."""

    def refuse(*_: object) -> int:
        raise PermissionError("the user has too many pipes")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    async with asyncio.timeout(LIMIT_S):
        worker = await backend.start(PLAN)
        await worker.wait()
    assert (worker.exit_code, worker.last_lines()) == (7, ["300000"])


async def test_commands_wait_for_the_rest_of_the_order(backend: Backend) -> None:
    async with asyncio.timeout(LIMIT_S):
        worker = await backend.start(PLAN)
        worker.kill_process()  # the supervisor has not read anything yet
        await worker.wait()
    assert worker.exit_code == -9


async def test_an_order_that_no_host_takes_fails_by_its_size_and_leaves_no_pipe(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_ORDER", 200_000, raising=False)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TrialError, match=r"toy/0: settings and environment have 3\d{5} bytes, and another host takes"):
        await backend.start(PLAN)
    assert os.listdir("/proc/self/fd") == before


def test_a_later_launchs_processes_have_higher_numbers_though_its_host_has_another_clock(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A supervisor kills the earlier process of its place, and refuses an order that comes after a later one."""
    config = read_run_config(tmp_path)
    config.fileroot = str(tmp_path / "root")
    numbers = []
    for now in (1 << 61, 1 << 60):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        claim = TrialClaim.take(config)
        write_run_config(config, run_dir_of(config))
        here = Backend(run_dir_of(config))
        numbers += [int(here.environment(PLAN)[supervisor.PLACE_VARIABLE].partition(" ")[0]) for _ in range(2)]
        here.close()
        claim.release()
    assert numbers == sorted(set(numbers))


def test_what_describes_this_hosts_installation_stays_here(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PATH does; libraries and interpreters of this host may be missing there, or fit nothing there."""
    here = {"LD_LIBRARY_PATH": "/opt/here", "VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/conda", "CONDA_SHLVL": "1"}
    for name, value in {**here, "MY_KEY": "1", "PYTHONPATH": "/mine"}.items():
        monkeypatch.setenv(name, value)
    carried = backend.environment(PLAN)
    assert not carried.keys() & here.keys()
    assert (carried["MY_KEY"], carried["PYTHONPATH"]) == ("1", "/mine")
