"""A run under faults whose command or targets fail: the report has the reason."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import METRICS_FILE, run_dir_of
from asyncrl.verify.chaos.chaos_run import ChaosRun, FaultInjector
from asyncrl.verify.chaos.faults import LAUNCHER, Fault, FaultKind


def chaos_run(folder: Path, command: Sequence[str], *plan: Fault) -> ChaosRun:
    return ChaosRun(ExperimentConfig(fileroot=str(folder)), command, command, plan, links={}, tell=lambda line: None)


def test_a_command_that_cannot_be_started_is_the_error_that_the_user_sees(tmp_path: Path) -> None:
    missing = tmp_path / "no_such_program"
    with pytest.raises(FileNotFoundError, match=missing.name):
        asyncio.run(chaos_run(tmp_path, [str(missing)]).run())


def test_a_fault_whose_target_has_just_ended_is_reported_as_not_injected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(injector: FaultInjector, fault: Fault) -> None:
        raise psutil.NoSuchProcess(17)

    monkeypatch.setattr(FaultInjector, "inject", gone)
    run_dir = run_dir_of(ExperimentConfig(fileroot=str(tmp_path)))
    run_dir.mkdir(parents=True)
    (run_dir / METRICS_FILE).write_text('{"step": 1}\n')
    fault = Fault(1, FaultKind.kill, LAUNCHER, step=1, offset=0.0, seconds=0.0)
    command = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    seen = asyncio.run(chaos_run(tmp_path, command, fault).run())
    assert seen.code == 0
    assert [(left.number, why) for left, why in seen.left] == [
        (1, "it could not be injected: process no longer exists (pid=17)")
    ]
