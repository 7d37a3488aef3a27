"""The base model is made once, found afterwards, and a changed recipe is another model."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.trainer.supervised.base_model import BaseModelError, base_model_dir, ensure_base_model
from asyncrl.trainer.supervised.settings import DEFAULT_FILEROOT, SFTConfig, SFTPhaseConfig

pytestmark = pytest.mark.slow

TINY = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def recipe(root: Path, steps: int = 2) -> SFTConfig:
    config = SFTConfig(fileroot=str(root), batch_size=2, phases=[SFTPhaseConfig(steps=steps)])
    config.model.architecture = TINY | {"num_key_value_heads": 2, "intermediate_size": 32}
    return config


def test_a_model_is_made_once_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ensure_base_model(recipe(tmp_path))
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert {"config.json", "sft.yaml", "tokenizer_config.json"} <= {file.name for file in folder.iterdir()}
    assert ensure_base_model(recipe(tmp_path)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert [item.name for item in folder.parent.iterdir()] == [folder.name]


def test_what_decides_the_result_decides_the_folder(tmp_path: Path) -> None:
    folder = base_model_dir(recipe(tmp_path))
    assert base_model_dir(recipe(tmp_path, steps=3)) != folder
    assert base_model_dir(replace(recipe(tmp_path), seed=2)) != folder
    assert base_model_dir(replace(recipe(tmp_path), tokens_per_micro_batch=64)) == folder


def test_a_model_of_the_default_cache_is_used_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cached = base_model_dir(recipe(Path(DEFAULT_FILEROOT)))
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    elsewhere = recipe(tmp_path / "elsewhere")
    assert ensure_base_model(elsewhere) == cached
    assert not (tmp_path / "elsewhere").exists()
    assert str(cached) in capsys.readouterr().out
    changed = base_model_dir(replace(elsewhere, seed=2))
    assert changed.is_relative_to(tmp_path / "elsewhere"), "another recipe is made under its own fileroot"


def test_a_failed_recipe_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    config.dataset.args = {"no_such_argument": 1}
    with pytest.raises(BaseModelError, match="no_such_argument"):
        ensure_base_model(config)
    assert list((tmp_path / "models").iterdir()) == []


def test_nobody_else_can_hold_the_lock_of_the_models_folder(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    config.dataset.args = {"no_such_argument": 1}
    previous = os.umask(0)
    try:
        with pytest.raises(BaseModelError, match="no_such_argument"):
            ensure_base_model(config)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "models").stat().st_mode) == 0o700
    (tmp_path / "models").chmod(0o777)
    with pytest.raises(BaseModelError, match="models has mode 0777, so others can write"):
        ensure_base_model(config)
