"""The life cycle of a worker process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime.run_dir import write_run_config

STOPPED_AT_ONCE = """
import os, signal, sys
from pathlib import Path
from asyncrl.runtime.worker import Worker, WorkerSpec

class Early(Worker):
    def set_status(self, state, reason=""):
        print(self.kind, self.index, state)
        if state == "starting":
            os.kill(os.getpid(), signal.SIGTERM)

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
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["early 3 starting", "early 3 done"]


REFUSES = """
import sys
from pathlib import Path
from asyncrl.config.setting import ConfigError
from asyncrl.runtime.worker import Worker, WorkerSpec

class Refuses(Worker):
    def set_status(self, state, reason=""):
        print(state, reason)

    def run(self):
        raise ConfigError("agent.path='x:y': no such file")

sys.exit(Refuses(WorkerSpec("refuses", 0, Path(sys.argv[1]))).start())
"""


def test_a_setting_that_a_worker_finds_wrong_is_told_by_its_message_alone(tmp_path: Path) -> None:
    config = ExperimentConfig()
    config.system.encrypt = False
    write_run_config(config, tmp_path)
    command = [sys.executable, "-c", REFUSES, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "failed ConfigError: agent.path='x:y': no such file"
    assert ended.stderr.splitlines() == ["refuses/0 failed: agent.path='x:y': no such file"]
