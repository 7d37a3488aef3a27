"""Runs from Python: `asyncrl.run` and `asyncrl.load_run`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import asyncrl
from asyncrl.config.setting import ConfigError
from asyncrl.launch import notebook
from asyncrl.launch.notebook import RunFailed

from ..warm import Template

SMALL: dict[str, Any] = {
    "train_batch_size": 4,
    "group_size": 2,
    "rollout.sampling.max_new_tokens": 16,
    "eval.interval": 0,
    "checkpoint.interval": 0,
    "logging.tensorboard": False,
}


def processes_of(folder: Path) -> list[str]:
    """Command lines of what still runs in the run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line or f"[{folder.parent.name}/{folder.name}]" in line:
            found.append(line)
    return found


@pytest.fixture
def forked(template: Template | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forked from the template."""
    if template is not None:
        names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
        monkeypatch.setattr(notebook, "subprocess", SimpleNamespace(Popen=template.popen, **names))


FORKED = """
import subprocess, types
from asyncrl.launch import notebook
from tests.warm import Template
names = {{name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}}
notebook.subprocess = types.SimpleNamespace(Popen=Template({run!r}).popen, **names)
"""
"""The beginning of a program whose runs are forked from the template."""


@pytest.fixture
def settings(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    """Of an experiment whose name is this test's: others of this file run at the same time."""
    return SMALL | {"model.path": tiny_model, "fileroot": tmp_path / "runs", "experiment_name": tmp_path.name}


@pytest.mark.usefixtures("forked")
def test_leaving_the_loop_ends_the_run_after_a_checkpoint_and_the_same_call_goes_on(settings: dict[str, Any]) -> None:
    with asyncrl.run("async_ppo", settings | {"total_train_steps": 100_000}) as started:
        first = next(started)
    assert first["step"] == 1
    assert processes_of(started.folder) == []
    read = asyncrl.load_run(started.folder)
    assert read.state == "stopped"
    assert read.summary is not None
    steps = read.summary["steps"] + 2
    again = asyncrl.run("async_ppo", settings | {"total_train_steps": steps})
    assert [row["step"] for row in again] == [steps - 1, steps], "those that it makes"
    read = again.result()
    assert read.folder == again.folder == started.folder
    assert (read.state, read.summary is not None and read.summary["steps"]) == ("finished", steps)
    assert [row["step"] for row in read.metrics] == [*range(1, steps + 1)]
    assert read.table()["step"].to_pylist() == [*range(1, steps + 1)]
    assert read.config["train_batch_size"] == 4
    assert list(read.samples()) == []
    assert read.doctor().measured is not None


def test_a_wrong_setting_is_an_exception_before_anything_starts(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="group_sise"):
        asyncrl.run("async_ppo", settings | {"group_sise": 8})
    assert not settings["fileroot"].exists()


@pytest.mark.usefixtures("forked")
def test_what_the_command_finds_before_the_start_is_the_same_exception(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("def score(data, completion):\n    return data['no such key']\n")
    started = asyncrl.run("async_ppo", settings | {"reward.path": f"{reward}:score"})
    with pytest.raises(ConfigError, match="no such key"):
        next(started)


BREAKS_LATER = """
calls = 0

def score(data, completion):
    global calls
    calls += 1
    if calls > 40:  # more than the start tries
        raise OSError("the judge is away")
    return 0.0
"""


@pytest.mark.usefixtures("forked")
def test_a_run_that_fails_raises_with_what_it_said(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BREAKS_LATER)
    started = asyncrl.run("async_ppo", settings | {"reward.path": f"{tmp_path / 'mine.py'}:score"})
    with pytest.raises(RunFailed, match="the judge is away") as failed:
        started.result()
    assert "FAILED: rollout_worker/0" in str(failed.value)
    assert processes_of(started.folder) == []


def test_the_end_of_the_program_ends_the_run(settings: dict[str, Any], template: Template | None) -> None:
    given = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    given["total_train_steps"] = 100_000
    script = f"import asyncrl; run = asyncrl.run('async_ppo', {given!r}); print(next(run)['step'], run.folder)"
    if template is not None:
        template.connect()
        script = FORKED.format(run=template.run) + script
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=570, check=True)
    step, folder = ended.stdout.split()
    assert step == "1"
    assert processes_of(Path(folder)) == []
    assert asyncrl.load_run(folder).state == "stopped"
