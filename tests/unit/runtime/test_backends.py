"""Launcher back ends: a file and a row each; the local one starts children and leaves none."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from asyncrl.config.load import settings
from asyncrl.runtime.backends import LauncherBackend, WorkerHandle, backend_class
from asyncrl.runtime.settings import LAUNCHERS, SystemConfig


def test_the_choices_of_the_setting_are_the_rows_of_the_table() -> None:
    (choices,) = (info.choices for path, _, info in settings(SystemConfig) if path == "launcher")
    assert choices == tuple(LAUNCHERS) == ("kubernetes", "local", "ray", "slurm", "ssh")
    assert all(issubclass(backend_class(name), LauncherBackend) for name in LAUNCHERS)


def test_a_run_on_one_box_imports_nothing_of_other_hosts(tmp_path: Path) -> None:
    program = (
        "import sys, asyncrl.launch.train; from pathlib import Path\n"
        "from asyncrl.config.experiment import ExperimentConfig\n"
        "from asyncrl.runtime import backends, checks\n"
        "assert not list(checks.check(ExperimentConfig())), 'the defaults have no fault'\n"
        "backends.backend_class('local')(Path(sys.argv[1]))\n"
        "print([name for name in sys.modules if 'asyncrl.hosts' in name])"
    )
    assert run_script(program, tmp_path) == "[]\n"


def test_a_new_back_end_is_one_file_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(
        "from asyncrl.runtime.backends import LauncherBackend\n"
        "class Backend(LauncherBackend):\n"
        "    async def start(self, plan): ...\n"
        "    async def close(self): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(LAUNCHERS, "toy", "toy:Backend")
    backend = backend_class("toy")(tmp_path)
    assert isinstance(backend, LauncherBackend)
    assert backend.run_dir == tmp_path


def run_script(script: str, folder: Path) -> str:
    """Run `script` in a separate process and return its output: a back end adopts and kills everything below its
    process.
    """
    command = [sys.executable, "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=570, check=True).stdout


PREPARED = """
import asyncio, sys, time
from pathlib import Path

import psutil

from asyncrl.runtime.backends import LocalBackend as Backend
from asyncrl.runtime.plan import WorkerPlan


def runs(program):
    WorkerPlan.command = lambda plan, run_dir: [sys.executable, "-c", program]
    return asyncio.ensure_future(backend.start(WorkerPlan("toy", 2)))


backend = Backend(Path(sys.argv[1]))
"""

ENDING = """
async def main():
    worker = await runs("for i in range(40): print('line', i)\\nraise SystemExit(3)")
    await worker.wait()
    print(worker.exit_code, len(worker.last_lines()) < 40, worker.last_lines()[-1], worker.log)
    worker.terminate()
    worker.kill()

asyncio.run(main())
"""


def test_a_local_process_leaves_its_exit_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    printed = run_script(PREPARED + ENDING, tmp_path)
    assert printed == f"3 True line 39 {tmp_path / 'logs' / 'toy-2.log'}\n"


def test_the_end_of_a_log_begins_with_the_first_error_in_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("    raise error\nKeyError: 3\n07:48:39 ERROR x/0 x/0 failed: no room\n07:48:40 INFO x/0 ended\n")
    handle = Mock(log=log)
    assert WorkerHandle.last_lines(handle) == ["07:48:39 ERROR x/0 x/0 failed: no room", "07:48:40 INFO x/0 ended"]
    log.write_text("KeyError: 3\nno ERROR is known\n")
    assert WorkerHandle.last_lines(handle) == ["KeyError: 3", "no ERROR is known"]


KILLING = """
WITH_A_CHILD = '''
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
'''

async def main():
    worker = await runs(WITH_A_CHILD)
    while not worker.last_lines():
        await asyncio.sleep(0.01)
    child = psutil.Process(int(worker.last_lines()[0]))
    worker.kill()
    await worker.wait()
    print(worker.exit_code, psutil.wait_procs([child], timeout=120)[1])

asyncio.run(main())
"""


def test_a_killed_local_process_takes_what_it_started_along(tmp_path: Path) -> None:
    assert run_script(PREPARED + KILLING, tmp_path) == "-9 []\n"


CLOSING = """
async def main():
    return await runs("import time; time.sleep(600)")

print(asyncio.run(main()).description)
asyncio.run(backend.close())
"""


def test_nothing_is_left_once_the_back_end_is_closed(tmp_path: Path) -> None:
    _, pid = run_script(PREPARED + CLOSING, tmp_path).split()
    deadline = time.monotonic() + 60.0
    while runs(int(pid)) and time.monotonic() < deadline:  # it was killed, which may take it a moment
        time.sleep(0.01)
    assert not runs(int(pid))


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)  # whose parent has not buried it yet
    return False
