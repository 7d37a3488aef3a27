"""The `config.json` of a model folder, read in one way everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.manager.settings import PolicyConfig
from asyncrl.models.model_config import read_model_config
from asyncrl.trainer.checks import check


@pytest.mark.parametrize("content", ["[]", "1", "{"])
def test_a_file_without_an_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError):
        read_model_config(tmp_path)


def test_a_policys_config_without_an_object_ends_no_check(tmp_path: Path, llama_dir: str) -> None:
    (tmp_path / "config.json").write_text("[]")
    config = ExperimentConfig()
    config.model.path = llama_dir
    config.policies = [PolicyConfig("judge", path=str(tmp_path), trained=True)]
    assert not any("its vocabulary has" in problem for problem in check(config)), "the folder's own check reports it"
