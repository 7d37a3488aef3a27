"""The settings of a run that is evaluated."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from asyncrl.comm.names import TrialHolder
from asyncrl.commands.eval import _settings
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.runtime.run_dir import LOCK_FILE, write_run_config


def test_relative_paths_of_a_run_mean_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, run, scratch = (tmp_path / name for name in ("project", "run", "scratch"))
    for folder in (project, run, scratch):
        folder.mkdir()
    (project / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    (project / "table.txt").write_text("")
    overrides = [
        "dataset.path=rows.jsonl",
        "eval.path=asyncrl.plugins.datasets.arithmetic:ArithmeticDataset",
        "reward.path=code/my.py:score",
        "reward.args={table: table.txt, other: not_there.txt}",
        "eval.reward={path: 'code/my.py:grade', args: {table: table.txt}}",
    ]
    config = load_experiment("async_ppo", overrides)
    assert isinstance(config, ExperimentConfig)
    write_run_config(config, run)
    (run / LOCK_FILE).write_text(TrialHolder("l", "h", "m", 1, 2, "now", str(run), folder=str(project)).encode())
    (run / LOCK_FILE).chmod(0o600)
    args = argparse.Namespace(experiment=None, config_dir=None, overrides=["eval.path=mine.jsonl"])
    monkeypatch.chdir(scratch)
    found = _settings(args, run, scratch)
    assert found.reward.path == f"{project}/code/my.py:score"
    assert found.reward.args == {"table": f"{project}/table.txt", "other": "not_there.txt"}
    assert found.eval.reward == {"path": f"{project}/code/my.py:grade", "args": {"table": f"{project}/table.txt"}}
    assert found.eval.path == "mine.jsonl", "what the command line names is meant from here"
