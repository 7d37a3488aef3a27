"""`attach` shows the output of a detached run as it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import run_dir_of
from asyncrl.launch.commands import attach
from asyncrl.observe.status import ProcessHistory
from asyncrl.runtime.trials.claim import TrialClaim


def test_a_launch_has_started_once_its_own_launcher_says_so(tmp_path: Path) -> None:
    observed = ProcessHistory(tmp_path, "launcher-0")
    assert 7 not in observed.launches()
    for name, pid in (("launcher-0", 6), ("model_worker-0", 7)):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"span": "start", "begin": 1, "end": 2, "pid": {pid}}}\n')
    assert [pid in observed.launches() for pid in (6, 7)] == [True, False]
    with (tmp_path / "launcher-0.jsonl").open("a") as lines:
        lines.write(
            '{"span": "call", "begin": 3, "end": 4, "pid": 7}\n{"span": "start", "begin": 3, "end": 4, "pid": 7}\n'
        )
    assert 7 in observed.launches()


@pytest.mark.parametrize("where", ["nothing", "ended", "terminal", "container"])
def test_a_run_that_cannot_be_attached_to_is_refused_with_what_it_is(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ExperimentConfig(fileroot=str(tmp_path))
    message = "no run of this user has this folder"
    if where != "nothing":
        claim = TrialClaim.take(config, detached=where == "container")
        if where == "container":
            elsewhere = structs.replace(claim.holder, machine=f"{claim.holder.machine.partition('/')[0]}/1")
            os.ftruncate(claim.lock.descriptor, 0)
            os.pwrite(claim.lock.descriptor, elsewhere.encode().encode(), 0)
        if where == "ended":
            claim.release()
        message = {
            "ended": "no run is active there",
            "terminal": "runs there in its own terminal",
            "container": "in another container, which this one cannot signal; attach there",
        }[where]
    assert attach.main([str(run_dir_of(config))], "asyncrl") == 2
    assert message in capsys.readouterr().err
    if where in ("terminal", "container"):
        claim.release()


def test_a_launcher_that_has_just_ended_is_no_run(tmp_path: Path) -> None:
    """It died since its lock was looked at."""
    config = ExperimentConfig(fileroot=str(tmp_path))
    claim = TrialClaim.take(config, detached=True)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    os.pwrite(claim.lock.descriptor, structs.replace(claim.holder, pid=ended.pid).encode().encode().ljust(4096), 0)
    assert attach.attach(run_dir_of(config)) is None
    claim.release()
