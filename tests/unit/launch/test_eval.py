"""The settings of a run that is evaluated."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncrl.api import Sample
from asyncrl.comm.names import TrialHolder
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.run_dir import ANSWERS_DIR, LOCK_FILE, run_dir_of, write_run_config
from asyncrl.launch.commands.eval import load_settings, main, write_measured_answers


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
    found = load_settings(args, run, scratch)
    assert found.reward.path == f"{project}/code/my.py:score"
    assert found.reward.args == {"table": f"{project}/table.txt", "other": "not_there.txt"}
    assert found.eval.reward == {"path": f"{project}/code/my.py:grade", "args": {"table": f"{project}/table.txt"}}
    assert found.eval.path == "mine.jsonl", "what the command line names is meant from here"


def test_answers_that_are_not_there_are_told_by_their_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    from asyncrl.rollout.evaluation import Answer, KeptAnswers

    config, out = ExperimentConfig(fileroot=str(tmp_path)), tmp_path / "answers.jsonl"
    tokens = np.array([1, 2], np.int32)
    sample = Sample(tokens, np.array([0, 1], np.uint8), np.zeros(2, np.float32), np.array([-1, 0], np.int32), 1.0)
    keeps = KeptAnswers(run_dir_of(config) / ANSWERS_DIR, 1, 1, str, index=0, workers=1)
    asyncio.run(keeps.keep("held_out", 0, {0: [Answer([sample], None, {})]}))
    measured = {"set": "held_out", "eval/held_out/prompts": 1.0}
    assert write_measured_answers(config, out, [measured])
    assert capsys.readouterr().err == ""
    assert not write_measured_answers(config, out, [measured | {"eval/held_out/prompts": 2.0}])
    assert "answers.jsonl has 1 of 2 answers to held_out" in capsys.readouterr().err
    assert write_measured_answers(config, out, [{"set": "held_out", "failed": "TimeoutError"}])
    assert out.read_text() == ""


def test_a_folder_that_is_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "its/base"}')
    assert main([str(tmp_path), "--experiment", "async_ppo"], "asyncrl") == 2
    assert "not a Hugging Face folder: an adapter (peft) of the base model 'its/base'" in capsys.readouterr().err
