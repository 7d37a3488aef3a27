"""A trial with a checkpoint refuses other training data, by file and line, before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.run_dir import DamagedFile, run_dir_of
from asyncrl.data.datasets import DataRecord
from asyncrl.launch.before_start import continued
from asyncrl.launch.before_start.data import keep_data_record
from asyncrl.rollout.user_code.prompts import load_train_set
from asyncrl.runtime.trials.claim import TrialError
from asyncrl.runtime.trials.resume import newest_progress

LINES = [json.dumps({"prompt": f"{i}+1="}) for i in range(4)]


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(LINES))
    config = load_experiment("async_ppo", [f"fileroot={tmp_path}", f"dataset.path={data}", "dataset.args={}"])
    assert isinstance(config, ExperimentConfig)
    run_dir_of(config).mkdir(parents=True)
    return config


def save_checkpoint(config: ExperimentConfig, record: DataRecord | None = None) -> None:
    folder = run_dir_of(config) / "checkpoints" / "v2"
    folder.mkdir(parents=True)
    master = {"gate": {"used": {"count": 2}, "line": 0}, "data_record": record and record.checksum}
    (folder / "state.json").write_text(json.dumps({"roles": {"actor": {"step": 2}}, "master_state": master}))


def of_checkpoint(check: Callable[..., Any], config: ExperimentConfig) -> list[str]:
    """What `check` says of the newest checkpoint; nothing if there is none."""
    progress = newest_progress(run_dir_of(config))
    return [] if progress is None else [*(check(config, progress) or ())]


def check_same_data(config: ExperimentConfig) -> list[str]:
    return of_checkpoint(continued.check_same_data, config)


def change(config: ExperimentConfig) -> None:
    Path(config.dataset.path).write_text("\n".join(LINES[:2]))


def test_truncated_data_is_refused_with_file_line_and_what_to_do(config: ExperimentConfig) -> None:
    keep_data_record(config)
    save_checkpoint(config)
    assert not check_same_data(config)
    change(config)
    with pytest.raises(TrialError, match=r"data\.jsonl:2 .* 2 more.*put the data back as it was.*resume=restart"):
        check_same_data(config)
    keep_data_record(config)  # which leaves the record as it is
    with pytest.raises(TrialError):
        check_same_data(config)


def test_without_a_checkpoint_a_trial_takes_whatever_data(config: ExperimentConfig) -> None:
    keep_data_record(config)
    change(config)
    check_same_data(config)
    keep_data_record(config)
    save_checkpoint(config)
    assert not check_same_data(config)


def test_a_record_that_is_gone_is_written_again_only_of_the_same_data(config: ExperimentConfig) -> None:
    keep_data_record(config)
    file = run_dir_of(config) / "data_record.json"
    save_checkpoint(config, DataRecord.read(file))
    assert not check_same_data(config)
    file.unlink()
    (reported,) = check_same_data(config)
    assert "data_record.json was missing, and is written again" in reported
    keep_data_record(config)
    assert not check_same_data(config)
    file.unlink()
    change(config)
    with pytest.raises(TrialError, match=r"other rows .*data_record\.json is gone.*put the data back as it was"):
        check_same_data(config)


def test_a_record_of_other_data_in_place_of_the_trials_is_refused(config: ExperimentConfig) -> None:
    keep_data_record(config)
    file = run_dir_of(config) / "data_record.json"
    save_checkpoint(config, DataRecord.read(file))
    change(config)
    DataRecord.of(load_train_set(config)).write(file)
    with pytest.raises(DamagedFile, match=r"is not the one that checkpoint v2 was made with; put a copy of it back"):
        check_same_data(config)


def test_a_trial_of_an_earlier_version_is_recorded_from_now_on(config: ExperimentConfig) -> None:
    save_checkpoint(config)
    (reported,) = check_same_data(config)
    assert "nothing tells whether the training data are those" in reported
    keep_data_record(config)
    change(config)
    with pytest.raises(TrialError):
        check_same_data(config)


def test_a_graph_whose_roles_have_changed_is_refused_by_role(config: ExperimentConfig) -> None:
    save_checkpoint(config)
    of_checkpoint(continued.check_same_roles, config)
    config.algorithm.graph, config.algorithm.kl_coef = "ppo", 0.1  # a frozen reference is in no checkpoint
    with pytest.raises(TrialError, match=r"no state of role 'critic', which changes in this run; it has actor"):
        of_checkpoint(continued.check_same_roles, config)


def test_rows_of_metrics_and_lines_of_the_ledger_that_are_gone_are_told(config: ExperimentConfig) -> None:
    save_checkpoint(config)
    run_dir = run_dir_of(config)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert of_checkpoint(continued.missing_history, config) == []
    (run_dir / "metrics.jsonl").write_text('{"step": 2}\n')
    (run_dir / "ledger").mkdir()
    (run_dir / "ledger" / "000001.jsonl").write_text("none\n")
    rows, ledger = of_checkpoint(continued.missing_history, config)
    assert rows.startswith("metrics.jsonl lacks 1 of the 2 steps before the checkpoint, from step 1 on")
    assert ledger.startswith("the ledger is damaged, ledger/000001.jsonl:1: not a line of a ledger")
    shutil.rmtree(run_dir / "ledger")
    state = run_dir / "checkpoints" / "v2" / "state.json"
    content = json.loads(state.read_text())
    content["master_state"]["gate"]["line"] = 7
    content["master_state"]["metrics_log"] = {"rows": [{"step": 1}]}
    state.write_text(json.dumps(content))
    (gone,) = of_checkpoint(continued.missing_history, config)
    assert "it has 0 of the 7 lines before checkpoint v2" in gone
