"""The registry of process kinds: what it names exists, and one process leads."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.runtime import plan
from asyncrl.runtime.plan import PROCESS_KINDS, Purpose
from asyncrl.runtime.process.worker import Worker


def test_every_kind_names_a_worker_and_one_kind_leads() -> None:
    assert all(issubclass(pkgutil.resolve_name(kind.path), Worker) for kind in PROCESS_KINDS.values())
    config = ExperimentConfig()
    leaders = [
        [name for name, kind in PROCESS_KINDS.items() if kind.leads and run in kind.runs and kind.count(config)]
        for run in Purpose
    ]
    assert leaders == [["master_worker"], ["evaluation_master"]]
    config.samples.only = True
    keeping = [name for name, kind in PROCESS_KINDS.items() if kind.leads and Purpose.train in kind.runs]
    assert [name for name in keeping if PROCESS_KINDS[name].count(config)] == ["recorder"]


def test_every_optional_part_that_the_plan_names_exists() -> None:
    parts = [path for path in vars(plan).values() if isinstance(path, str) and re.fullmatch(r"asyncrl[.\w]+:\w+", path)]
    assert plan.DEADLINE_PACING in parts
    assert all(callable(pkgutil.resolve_name(path)) for path in parts)


def test_a_replay_has_a_manager_and_one_worker_that_reads_the_kept_rollouts_and_no_server() -> None:
    config = ExperimentConfig()
    config.rollout.workers, config.generation.servers, config.rollout.encoder.servers = 3, 2, 1
    config.samples.replay = "/kept"
    counts = {name: kind.count(config) for name, kind in PROCESS_KINDS.items() if Purpose.train in kind.runs}
    assert {name: count for name, count in counts.items() if count} == {
        "master_worker": 1,
        "gserver_manager": 1,
        "model_worker": 1,
        "rollout_worker": 1,
    }


def test_the_registry_imports_no_process() -> None:
    program = (
        "import sys, asyncrl.runtime.launcher; from asyncrl.runtime.plan import PROCESS_KINDS; "
        "sys.exit(any(kind.path.split(':')[0] in sys.modules for kind in PROCESS_KINDS.values()))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=570, check=False).returncode == 0
