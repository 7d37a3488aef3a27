"""The life cycle of a worker process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.comm.name_files import FileResolver
from asyncrl.comm.names import WorkerStatus, incarnation_key, status_key
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import NAMES_DIR, write_run_config
from asyncrl.runtime.settings import EXIT_LOST

STOPPED_AT_ONCE = """
import os, signal, sys
from pathlib import Path
from asyncrl.runtime.supervisor import STOP_SIGNAL
from asyncrl.runtime.process.starting import ReportedStatus
from asyncrl.runtime.process.worker import Worker, WorkerSpec

def show(status, state, reason=""):
    print(state)
    if state == "starting":
        os.kill(os.getpid(), STOP_SIGNAL)

ReportedStatus.set = show

class Early(Worker):
    def configure(self):
        print("configured")

    def run(self):
        print("ran")

sys.exit(Early(WorkerSpec("early", 3, Path(sys.argv[1]))).start())
"""


def test_a_stop_request_in_the_first_moments_is_a_clean_end(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.encrypt = False
    write_run_config(config, tmp_path)
    command = [sys.executable, "-c", STOPPED_AT_ONCE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["starting", "done"]


REFUSES = """
import sys
from pathlib import Path
from asyncrl.config.setting import ConfigError
from asyncrl.master.peers import Stalled
from asyncrl.comm.request_reply import RemoteError
from asyncrl.comm.request_reply import Failure
from asyncrl.master.step import ExecutionError
from asyncrl.runtime.process.starting import ReportedStatus
from asyncrl.runtime.process.worker import OutOfMemory, Worker, WorkerSpec

def reported(message):
    "What a MasterWorker raises if a rank has run out of memory."
    try:
        raise RemoteError("model_worker/1", "run_call", Failure("OutOfMemory", message, "Traceback: of torch"))
    except RemoteError as error:
        failed = ExecutionError("call 'actor_train' failed: Traceback: of torch")
        failed.__cause__ = error
        return failed

ReportedStatus.set = lambda status, state, reason="": print(state, reason)

class Refuses(Worker):
    def run(self):
        raise {raised}

sys.exit(Refuses(WorkerSpec("refuses", 0, Path(sys.argv[1]))).start())
"""


@pytest.mark.parametrize(
    ("error", "within"),
    [
        ("ConfigError", "{}"),
        ("Stalled", "ExceptionGroup('loops', [{}])"),
        ("OutOfMemory", "{}"),
        ("OutOfMemory", "reported(str({}))"),
        ("OutOfMemory", "ExceptionGroup('loops', [reported(str({}))])"),
    ],
)
def test_what_a_worker_finds_wrong_with_the_run_is_told_by_its_message_alone(
    tmp_path: Path, error: str, within: str
) -> None:
    config = ExperimentConfig()
    config.system.encrypt = False
    write_run_config(config, tmp_path)
    raised = within.format(f"{error}(\"agent.path='x:y': no such file\")")
    command = [sys.executable, "-c", REFUSES.format(raised=raised), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == f"failed {error}: agent.path='x:y': no such file"
    assert ended.stderr.splitlines() == ["refuses/0 failed: agent.path='x:y': no such file"]


CUT_OFF = """
import sys
from pathlib import Path
from asyncrl.comm.name_resolve import NameResolveUnavailable
from asyncrl.runtime.process.starting import ReportedStatus
from asyncrl.runtime.process.worker import Worker, WorkerSpec

ReportedStatus.set = lambda status, state, reason="": print(state, reason)

class CutOff(Worker):
    def run(self):
        raise ExceptionGroup("loops", [ExceptionGroup("calls", [NameResolveUnavailable("etcd does not answer")])])

sys.exit(CutOff(WorkerSpec("cut_off", 0, Path(sys.argv[1]))).start())
"""


def test_an_outage_of_name_resolution_is_told_by_a_sentence_with_its_setting(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.encrypt = False
    write_run_config(config, tmp_path)
    command = [sys.executable, "-c", CUT_OFF, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    (reported,) = ended.stderr.splitlines()
    assert reported.startswith("cut_off/0 failed: etcd does not answer; ")
    assert "system.name_resolve_timeout_s=60 " in reported


SENT_TO_ALL = """
import os, signal, subprocess, sys
from pathlib import Path
from asyncrl.runtime.process.starting import ReportedStatus
from asyncrl.runtime.process.worker import Worker, WorkerSpec

ReportedStatus.set = lambda status, state, reason="": print(state, flush=True)

class Sent(Worker):
    def run(self):
        os.kill(os.getpid(), signal.SIGTERM)
        child = subprocess.Popen(["sleep", "600"])
        child.terminate()
        print("child ended with", child.wait(), flush=True)

sys.exit(Sent(WorkerSpec("sent", 0, Path(sys.argv[1]))).start())
"""


def test_sigterm_that_a_batch_system_sends_to_all_processes_ends_no_worker_but_what_it_started(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.encrypt = False
    write_run_config(config, tmp_path)
    command = [sys.executable, "-c", SENT_TO_ALL, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["starting", "child ended with -15", "done"]


WAITS = """
import sys
from pathlib import Path
from asyncrl.runtime.process.worker import Worker, WorkerSpec

class Waits(Worker):
    def run(self):
        self.ready()
        print("ready", flush=True)
        self.stop_requested.wait()

    def close(self):
        print("closed", flush=True)

sys.exit(Waits(WorkerSpec("waits", 3, Path(sys.argv[1]), incarnation=1)).start())
"""


def test_what_finds_another_in_its_place_ends_at_once_and_touches_nothing(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.encrypt, config.system.lease_s = False, 1.0
    write_run_config(config, tmp_path)
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as given_up,
        FileResolver(tmp_path / NAMES_DIR) as resolver,
    ):
        try:
            assert given_up.stdout is not None
            assert given_up.stdout.readline() == "ready\n"
            successor = WorkerStatus("starting", 1, incarnation=2).encode()
            resolver.add(status_key("waits", 3), successor, replace=True)
            reported, why = given_up.communicate(timeout=300)
        finally:
            given_up.kill()
    assert given_up.returncode == EXIT_LOST, why
    assert reported == ""
    assert resolver.get(status_key("waits", 3)) == successor


def test_what_is_started_late_after_its_successor_ends_before_it_takes_a_name(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.encrypt = False
    write_run_config(config, tmp_path)
    with FileResolver(tmp_path / NAMES_DIR) as resolver:
        resolver.add(incarnation_key("waits", 3), "2")
        command = [sys.executable, "-c", WAITS, str(tmp_path)]
        late = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert (late.returncode, late.stdout) == (EXIT_LOST, ""), late.stderr
        assert list(resolver.get_subtree()) == [incarnation_key("waits", 3)]


ANNOUNCES = """
import sys
from pathlib import Path
from asyncrl.runtime.process.worker import Worker, WorkerSpec

class Announces(Worker):
    def run(self):
        self.ready()
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            self.resolver.add("model_version/actor", "7", replace=True)
        except Exception:
            print("saved what is complete", flush=True)
            raise

    def close(self):
        print("closed", flush=True)

sys.exit(Announces(WorkerSpec("announces", 0, Path(sys.argv[1]), incarnation=1)).start())
"""


def test_what_was_given_up_and_announces_something_ends_there_and_writes_nothing_more(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.encrypt, config.system.lease_s = False, 3600.0  # so it does not find out in another way
    write_run_config(config, tmp_path)
    command, pipe = [sys.executable, "-c", ANNOUNCES, str(tmp_path)], subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as given_up,
        FileResolver(tmp_path / NAMES_DIR) as resolver,
    ):
        try:
            assert given_up.stdout is not None
            assert given_up.stdout.readline() == "ready\n"
            resolver.add(incarnation_key("announces", 0), "2")
            reported, why = given_up.communicate("go\n", timeout=300)
        finally:
            given_up.kill()
        assert (given_up.returncode, reported) == (EXIT_LOST, ""), why
        assert "model_version/actor" not in resolver.get_subtree()


DOES_NOT_STOP = """
import asyncio, logging, os, signal, sys, time
from pathlib import Path
from asyncrl.runtime.supervisor import STOP_SIGNAL
from asyncrl.runtime.process.starting import ReportedStatus
from asyncrl.runtime.process.worker import AsyncWorker, WorkerSpec

logging.basicConfig(level=logging.INFO)

async def answer_a_stranger():
    await asyncio.Event().wait()

ReportedStatus.set = lambda status, state, reason="": print(state, flush=True)

class Slow(AsyncWorker):
    stop_limit_s = float(sys.argv[2])

    async def main(self):
        waiting = asyncio.create_task(answer_a_stranger())
        os.kill(os.getpid(), STOP_SIGNAL)
        await self.stop.wait()
        if sys.argv[3] == "late":
            await asyncio.to_thread(time.sleep, 60)

sys.exit(Slow(WorkerSpec("slow", 0, Path(sys.argv[1]))).start())
"""


def test_a_process_that_does_not_stop_in_time_says_in_its_log_what_it_waits_for(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.encrypt = False
    write_run_config(config, tmp_path)
    command = [sys.executable, "-c", DOES_NOT_STOP, str(tmp_path)]
    with subprocess.Popen([*command, "0.05", "late"], stderr=subprocess.PIPE, text=True) as late:
        assert late.stderr is not None
        reported = [next(late.stderr)]
        while "most recent call first" not in reported[-1]:
            reported.append(next(late.stderr))
        late.kill()
    log = "".join(reported)
    assert "asked to stop 0.05 s ago, this process waits for:" in log
    assert "answer_a_stranger" in log
    assert "to_thread" in log
    in_time = subprocess.run([*command, "600", "soon"], capture_output=True, text=True, timeout=300, check=False)
    assert in_time.returncode == 0, in_time.stderr
    assert "asked to stop" not in in_time.stderr
