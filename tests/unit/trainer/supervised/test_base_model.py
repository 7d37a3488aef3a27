"""The base model is made once, found afterwards, and a changed recipe is another model."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from asyncrl.config.load import experiments_dir, load_supervised, recipes_dir
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer, model_files
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import ReferenceConfig, ReferenceTrainer
from asyncrl.trainer.settings import OptimizerName
from asyncrl.trainer.supervised import child
from asyncrl.trainer.supervised.base_model import (
    SHIPPED_DIR,
    SHIPPED_FILE,
    BaseModelError,
    base_model_dir,
    ensure_base_model,
    existing_base_model,
    shipped_dir,
)
from asyncrl.trainer.supervised.settings import (
    DEFAULT_FILEROOT,
    SFTConfig,
    SFTDatasetConfig,
    SFTPhaseConfig,
)
from asyncrl.trainer.supervised.supervised_loop import SFTProgress, make_base_model

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def made_from_what_is_imported(monkeypatch: pytest.MonkeyPatch, warm_python: str) -> None:
    """The process that trains a model begins with what the tests have imported; a wheel's run starts it anew."""
    monkeypatch.setattr(child, "sys", SimpleNamespace(executable=warm_python))


SHIPPED = ("arithmetic_base", "tool_calculator_base")
TINY = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def recipe(root: Path, steps: int = 2) -> SFTConfig:
    config = SFTConfig(
        optimizer=OptimizerName.muon, fileroot=str(root), batch_size=2, phases=[SFTPhaseConfig(steps=steps)]
    )
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


def test_a_model_that_another_user_put_into_a_shared_folder_is_not_trained(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    config = recipe(tmp_path)
    folder = base_model_dir(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for path in (folder, folder / "config.json"):
        os.chown(path, 12345, -1)
    with pytest.raises(BaseModelError, match=f"{folder} belongs to user 12345"):
        ensure_base_model(config)


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


def shipped_record(experiment: str) -> dict[str, Any]:
    file = shipped_dir(load_supervised(experiment)) / SHIPPED_FILE
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return record


TEACHER = recipes_dir() / SHIPPED_DIR / "distill_teacher"
REWARD_MODEL = experiments_dir() / SHIPPED_DIR / "reward_model"


@pytest.mark.parametrize("experiment", SHIPPED)
def test_the_package_has_the_base_model_of_the_recipe_as_it_is(experiment: str) -> None:
    """A recipe that was changed needs `python experiments/recipes/ship_base_models.py`."""
    folder = shipped_dir(load_supervised(experiment))
    files = {name: file for name, file in model_files(folder).items() if name != SHIPPED_FILE}
    assert {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()} == shipped_record(experiment)[
        "sha256"
    ]


@pytest.mark.parametrize("folder", [TEACHER, REWARD_MODEL], ids=lambda folder: folder.name)
def test_the_package_has_teacher_and_reward_model_as_they_were_made(folder: Path) -> None:
    """A change to one needs `async_distill_teacher.py` or `reward_model_base.py` of `experiments/recipes`."""
    record = json.loads((folder / SHIPPED_FILE).read_text(encoding="utf-8"))
    files = {file.name: file for file in folder.iterdir() if file.name != SHIPPED_FILE}
    assert {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()} == record["sha256"]
    assert sum(file.stat().st_size for file in files.values()) < 1 << 20
    assert 0.5 < record["held_out_accuracy"] < 1


def test_the_package_has_no_base_model_of_a_former_recipe() -> None:
    expected = {shipped_dir(load_supervised(experiment)).name for experiment in SHIPPED}
    found = {folder.name for folder in (experiments_dir() / SHIPPED_DIR).iterdir()}
    assert found == expected | {REWARD_MODEL.name}


@pytest.mark.parametrize("experiment", SHIPPED)
def test_the_first_start_copies_the_packages_model(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = replace(load_supervised(experiment), fileroot=str(tmp_path / "runs"))
    assert existing_base_model(config) == shipped_dir(config)
    folder = ensure_base_model(config)
    assert folder.is_relative_to(tmp_path / "runs")
    assert {name: file.read_bytes() for name, file in model_files(folder).items()} == {
        name: file.read_bytes() for name, file in model_files(shipped_dir(config)).items()
    }
    assert "copied from the package" in capsys.readouterr().out
    assert existing_base_model(config) == folder


@pytest.mark.parametrize("experiment", SHIPPED)
def test_the_recipe_begins_as_it_did_when_the_packages_model_was_made(experiment: str, tmp_path: Path) -> None:
    expected, losses = shipped_record(experiment)["first_losses"][:5], []

    class Enough(Exception):
        pass

    def progress(row: SFTProgress) -> None:
        losses.append(row.loss)
        if len(losses) == len(expected):
            raise Enough

    with pytest.raises(Enough):
        make_base_model(load_supervised(experiment), tmp_path / "model", progress=progress)
    assert losses == pytest.approx(expected, rel=0.01)


def test_the_demos_base_model_is_right_as_often_as_its_record_says() -> None:
    """A base that is never right, or always, leaves RL nothing to select."""
    folder, problems = shipped_dir(load_supervised("arithmetic_base")), 256
    dataset = ArithmeticDataset(split="held_out", num_rows=problems)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = ReferenceTrainer(
        ReferenceConfig(), model, PromptFormat(load_tokenizer(folder), None), dataset, arithmetic_reward
    )
    accuracy = trainer.greedy_accuracy(dataset)
    assert 0.3 < accuracy < 0.5
    assert accuracy == pytest.approx(shipped_record("arithmetic_base")["greedy_accuracy"], abs=0.06)


def test_changed_rows_of_a_file_are_another_model(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    config = SFTConfig(fileroot=str(tmp_path), dataset=SFTDatasetConfig(str(rows)))
    before = base_model_dir(config)
    assert base_model_dir(config) == before
    rows.write_text('{"prompt": "1+1=", "completion": "3"}\n')
    assert base_model_dir(config) != before
