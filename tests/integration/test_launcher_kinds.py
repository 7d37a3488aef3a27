"""A kind of process that is entered in the registry is planned, started and stopped like any other. Real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ADDED = """
import os
from pathlib import Path

from asyncrl.runtime.plan import PROCESS_KINDS, ProcessKind
from asyncrl.runtime.process.worker import Worker
from asyncrl.runtime.plan import Resources


def one(config, index, here):
    return Resources(threads=3)


class Leader(Worker):
    "Ends once the server serves and the launcher has told that it goes on without the panel."

    def run(self):
        self.resolver.wait("server", 60)
        while "the run continues without it" not in Path(os.environ["REPORT"]).read_text():
            self.stop_requested.wait(0.01)
        print("threads of the leader:", os.environ["OMP_NUM_THREADS"])


class Panel(Worker):
    def run(self):
        raise RuntimeError("the panel is broken")


class Server(Worker):
    def run(self):
        self.resolver.add("server", "serves")
        self.stop_requested.wait(120)
        print("the server was asked to stop:", self.stop_requested.is_set())


PROCESS_KINDS.clear()
PROCESS_KINDS |= {
    "server": ProcessKind("sitecustomize:Server", resources=one, serves=True),
    "panel": ProcessKind("sitecustomize:Panel", resources=one, essential=False),
    "leader": ProcessKind("sitecustomize:Leader", resources=one, leads=True),
}
"""
"""Python imports a module of this name at the start of every process, so that all of the run know the added kinds."""

LAUNCH = """
import sys
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observe.display import make_display
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime import launcher as launcher_module

launcher_module.STOP_S = 60.0  # a machine may stand still for longer than the usual one
launcher = Launcher(ExperimentConfig(fileroot=sys.argv[1]), make_display("plain", "", 1, 1))
launcher.prepare()
sys.exit(launcher.run())
"""


def test_added_kinds_run_and_the_death_of_one_that_is_not_essential_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ADDED)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    reported = tmp_path / "told"
    with reported.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-u", "-c", LAUNCH, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": path, "REPORT": str(reported)},
            stdout=output,
            stderr=output,
            timeout=300,
            check=False,
        )
    printed = reported.read_text()
    assert ended.returncode == 0, printed
    assert "started 3 processes" in printed
    assert "panel/0 (pid " in printed
    assert "exited with 1; the run continues without it" in printed
    logs = {file.name: file.read_text() for file in (tmp_path / "async_ppo" / "trial0" / "logs").iterdir()}
    assert "threads of the leader: 3" in logs["leader-0.log"]
    assert "the panel is broken" in logs["panel-0.log"]
    assert "the server was asked to stop: True" in logs["server-0.log"]
