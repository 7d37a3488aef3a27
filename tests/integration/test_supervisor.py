"""Nothing that a process started outlives it or its launcher: not what left its session, nor what forked twice."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observe.display import Display
from asyncrl.plugins.agents.verifiers_env import HOST
from asyncrl.runtime import supervisor
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.supervisor import Identity, end_marked, identity_of, kill, mark_of, supervised
from asyncrl.runtime.trials.claim import TrialClaim

LIMIT_S = 300.0
WORKER = r"""
import os, signal, time

signal.signal(signal.SIGUSR2, lambda *_: os._exit(7))
for forks in (["plain"], ["setsid"], ["setsid", "again"], ["ignoring"]):
    if os.fork() == 0:
        if "setsid" in forks:
            os.setsid()
        if "again" in forks and os.fork():
            os._exit(0)
        if "ignoring" in forks:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        os.write(1, b"%d\n" % os.getpid())  # whole, whatever the others write
        time.sleep(600)
        os._exit(0)
os.write(1, b"worker %d\n" % os.getpid())
time.sleep(600)
"""


SAYS_AND_WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: os._exit(7))
print(os.getpid(), os.getcwd(), os.environ["MINE"], flush=True)
time.sleep(600)
"""
SLOW = """
import importlib.util, os, sys

spec = importlib.util.spec_from_file_location("supervisor", sys.argv[1])
supervisor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supervisor)
start = supervisor._start

def slowly(*given):
    child = start(*given)
    os.read(0, 1)
    return child

supervisor._start = slowly
supervisor._end_as(supervisor.main(sys.argv[2:]))
"""


class Kept:
    """A worker below its supervisor, and what user code left: four children, two of them sessions of their own."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        command = supervised([sys.executable, "-c", WORKER])
        env = os.environ | (environment or {})
        self.supervisor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self.supervisor.stdout is not None
        words = [self.supervisor.stdout.readline().split() for _ in range(5)]
        self.worker = next(psutil.Process(int(line[1])) for line in words if line[0] == "worker")
        self.children = [psutil.Process(int(line[0])) for line in words if line[0] != "worker"]

    def assert_nothing_is_left(self) -> None:
        assert [child for child in psutil.wait_procs(self.children, timeout=LIMIT_S)[1] if runs(child)] == []
        assert self.supervisor.stdout is not None
        assert select.select([self.supervisor.stdout], [], [], LIMIT_S)[0], "somebody has what they inherited"
        assert self.supervisor.stdout.read() == ""

    def end(self) -> None:
        assert self.supervisor.stdout is not None
        self.supervisor.stdout.close()
        for process in self.children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.supervisor.kill()
        self.supervisor.wait(LIMIT_S)


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.fixture
def worker() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.end()


def test_when_the_launcher_is_gone_everything_goes(worker: Kept) -> None:
    assert worker.supervisor.stdin is not None
    worker.supervisor.stdin.close()  # as the kernel does when the launcher is killed
    assert worker.supervisor.wait(LIMIT_S) == -signal.SIGKILL
    worker.assert_nothing_is_left()


def test_when_the_worker_is_killed_everything_goes_and_its_signal_is_told(worker: Kept) -> None:
    worker.worker.kill()
    assert worker.supervisor.wait(LIMIT_S) == -signal.SIGKILL
    worker.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("sent", "before", "after", "code"),
    [
        ("KILL", 3, 4, supervisor.EXIT_OUT_OF_MEMORY),
        ("KILL", 3, 3, -signal.SIGKILL),
        ("SEGV", 3, 4, -signal.SIGSEGV),
    ],
)
def test_a_kill_while_the_kernel_frees_memory_is_told_from_one_from_outside(
    sent: str, before: int, after: int, code: int
) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(supervisor.__file__).parent)!r})
import supervisor
supervisor._out_of_memory_kills = iter([{before}, {after}]).__next__
supervisor._end_as(supervisor.main(["sh", "-c", "kill -{sent} $$"]))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as ended:
        assert ended.wait(LIMIT_S) == code


def test_the_kernels_count_of_kills_for_memory_is_read_where_there_is_one(tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    assert supervisor._out_of_memory_kills(counts) == 0
    counts.write_text("drop_slab 1\noom_kill 17\nballoon_inflate 3\n")
    assert supervisor._out_of_memory_kills(counts) == 17


def test_a_stop_that_comes_while_the_worker_is_being_started_reaches_it_too(tmp_path: Path) -> None:
    """The supervisor has started it, and gets no turn before it is asked to stop."""
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW)
    command = [sys.executable, "-I", "-S", str(slow), supervisor.__file__, sys.executable, "-c", SAYS_AND_WAITS]
    environment = os.environ | {"MINE": ""}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(supervisor.STOP_SIGNAL)
        process.stdin.write(b"g")  # it goes on
        process.stdin.flush()
        assert process.wait(LIMIT_S) == 7


def test_a_stop_reaches_the_worker_and_its_exit_code_is_told(worker: Kept) -> None:
    worker.supervisor.terminate()  # as a batch system does with all processes: it is not for this one
    worker.supervisor.send_signal(supervisor.STOP_SIGNAL)
    assert worker.supervisor.wait(LIMIT_S) == 7
    worker.assert_nothing_is_left()


def test_a_killed_supervisor_takes_its_worker_along_and_the_next_start_finds_the_rest() -> None:
    launch, bystander = os.urandom(16).hex(), None
    worker = Kept(environment=mark_of(launch))
    try:
        bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        worker.supervisor.kill()
        psutil.wait_procs([worker.worker], timeout=LIMIT_S)
        assert not runs(worker.worker)
        orphans = {child.pid for child in worker.children if runs(child)}
        assert orphans, "the kernel ended them all: nothing to find"
        assert orphans <= set(end_marked(launch))
        worker.assert_nothing_is_left()
        assert end_marked(launch) == []
        assert bystander.poll() is None
    finally:
        worker.end()
        if bystander is not None:
            bystander.kill()
            bystander.wait()


class Notes:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_a_host_of_verifiers_has_time_to_free_what_its_rollouts_hold(tmp_path: Path) -> None:
    """It ends with its input, which is the worker's; a program that is no cleaner is killed at once."""
    frees = f"read line; sleep 0.3; echo > {tmp_path}/"
    worker = (
        "import subprocess, sys\n"
        "for name, host in (('freed', sys.argv[1]), ('other', 'other.py')):\n"
        "    subprocess.Popen(['sh', '-c', sys.argv[2] + name, host], stdin=subprocess.PIPE)\n"
    )
    command = supervised([sys.executable, "-I", "-S", "-c", worker, str(HOST), frees])
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(LIMIT_S) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["freed"]


def test_the_next_launch_of_a_trial_ends_what_a_killed_one_left(tmp_path: Path) -> None:
    config, notes = ExperimentConfig(fileroot=str(tmp_path)), Notes()
    killed = TrialClaim.take(config)
    worker = Kept(environment=mark_of(killed.holder.launch))
    try:
        worker.supervisor.kill()  # and the launcher at the same moment
        killed.release()
        worker.supervisor.wait(LIMIT_S)
        launcher = Launcher(config, cast(Display, notes))
        launcher.prepare()
        worker.assert_nothing_is_left()
        (line,) = notes.lines
        assert line.startswith("ended what an earlier launch left running: pid ")
        launcher.release()
        again = Launcher(config, cast(Display, notes))
        again.prepare()
        again.release()
        assert len(notes.lines) == 1
    finally:
        worker.end()


def test_a_process_is_known_by_its_start_time_not_by_its_id_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identity_of(process.pid)
        assert identity is not None
        kill(Identity(process.pid, identity.started - 1))  # who had this id before
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        kill(identity)
        assert process.wait(LIMIT_S) == -signal.SIGKILL


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from asyncrl.runtime.backends import LocalBackend as Backend
from asyncrl.runtime.plan import WorkerPlan

WorkerPlan.command = lambda plan, run_dir: [sys.executable, "-c", Path(sys.argv[2]).read_text()]

async def main():
    backend = Backend(Path(sys.argv[1]))
    worker = await backend.start(WorkerPlan("toy", 0))
    while len(worker.last_lines()) < 5:
        await asyncio.sleep(0.01)
    print(*worker.last_lines(), sep="\\n", flush=True)
    await worker.wait()

asyncio.run(main())
"""


SAVING = """
import signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1])

def save(*_):
    (folder / "asked").touch()
    while not (folder / "may-end").exists():
        time.sleep(0.01)
    (folder / "saved").touch()
    sys.exit(0)

signal.signal(signal.SIGUSR2, save)
print("here", flush=True)
time.sleep(600)
"""
LAUNCHER_OF_TWO = """
import asyncio, os, signal, sys
from pathlib import Path
from asyncrl.runtime.backends import LocalBackend as Backend
from asyncrl.runtime.plan import WorkerPlan

folder = Path(sys.argv[1])
programs = [sys.argv[2], "import time; print('here', flush=True); time.sleep(600)"]
WorkerPlan.command = lambda plan, run_dir: [sys.executable, "-c", programs[plan.index], str(folder)]

async def main():
    backend = Backend(folder)
    backend.lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    for index in (1, 0):
        worker = await backend.start(WorkerPlan("toy", index, leads=index == 0))
        while not worker.last_lines():
            await asyncio.sleep(0.01)
        print(worker.description.split()[1], flush=True)
    await worker.wait()

asyncio.run(main())
"""


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.01)


def test_a_killed_launchers_leading_process_saves_before_the_others_end_and_keeps_the_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER_OF_TWO, str(tmp_path), SAVING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        supervisors = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
        other, _ = processes = [child for supervisor in supervisors for child in supervisor.children()]
        try:
            launcher.kill()
            wait_for(tmp_path / "asked")
            assert runs(other)
            held = [file.path for file in supervisors[1].open_files()]
            assert str(tmp_path / "lock") in held
            (tmp_path / "may-end").touch()
            left = psutil.wait_procs([*supervisors, *processes], timeout=LIMIT_S)[1]
            assert [process for process in left if runs(process)] == []
            assert (tmp_path / "saved").exists()
        finally:
            for process in [*supervisors, *processes]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def test_a_killed_launchers_leading_process_that_does_not_end_is_killed() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    command = supervised([sys.executable, "-c", deaf], grace_s=0.2)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        supervisor.stdout.readline()
        supervisor.stdin.close()
        assert supervisor.wait(LIMIT_S) == -signal.SIGKILL


def test_a_killed_launcher_leaves_nothing_of_what_user_code_forked(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), str(tmp_path / "worker.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        guard = threading.Timer(LIMIT_S, launcher.kill)
        guard.start()
        lines = [launcher.stdout.readline().split() for _ in range(5)]
        guard.cancel()
        children = [psutil.Process(int(words[0])) for words in lines if words[0] != "worker"]
        try:
            launcher.kill()
            left = psutil.wait_procs(children, timeout=LIMIT_S)[1]
            assert [child for child in left if runs(child)] == []
        finally:
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
