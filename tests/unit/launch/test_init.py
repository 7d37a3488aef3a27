"""`init`: a project of one's own that runs at once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.launch.__main__ import main

SHORT = ["rollout.sampling.max_new_tokens=16", "eval.sampling.max_new_tokens=16"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    assert main(["init", str(tmp_path / "my project")]) == 0
    return tmp_path / "my project"


def test_its_own_test_passes(project: Path, warm_python: str) -> None:
    ended = subprocess.run(
        [warm_python, "-m", "pytest", "-q"], cwd=project, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert "2 passed" in ended.stdout


def test_every_check_of_a_start_passes_with_its_reward_and_agent(
    project: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["mine", f"model.path={tiny_model}", f"fileroot={project.parent / 'runs'}", *SHORT]
    assert main(["doctor", *given, "--config-dir", str(project)]) == 0
    assert "agent and reward took made-up answers" in capsys.readouterr().out


def test_its_settings_name_its_own_files(project: Path) -> None:
    config = load_experiment("mine", [], project)
    assert isinstance(config, ExperimentConfig)
    assert config.reward.path == f"{project}/reward.py:score"
    rows = [json.loads(line) for line in Path(str(config.dataset.path)).read_text().splitlines()]
    assert all(eval(row["prompt"].rstrip("=")) == int(row["answer"]) for row in rows)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
