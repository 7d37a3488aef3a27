"""Names on the Hugging Face hub become folders: the cache first; without a network one error for each."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.models import base_model_config
from asyncrl.launch.before_start.setting_checks import experiment_parser, is_hub_name, load_rl, resolve_hub_names

NAMES = ["model.path=Qwen/Qwen2.5-0.5B-Instruct", "eval.path=openai/gsm8k"]


def test_what_the_cache_holds_is_taken_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cached(name: str, *, repo_type: str, local_files_only: bool, ignore_patterns: list[str]) -> str:
        assert local_files_only
        return str(tmp_path / repo_type / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    config = load_experiment("async_ppo", NAMES)
    resolve_hub_names(config)
    assert config.model.path == str(tmp_path / "model/Qwen/Qwen2.5-0.5B-Instruct")
    assert config.eval.path == str(tmp_path / "dataset/openai/gsm8k")  # type: ignore[union-attr]


def test_without_cache_and_network_each_name_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def unreachable(name: str, *, local_files_only: bool, **_: object) -> str:
        tries.append((name, local_files_only))
        raise LocalEntryNotFoundError("not there") from (None if local_files_only else OSError("no route to host"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError) as caught:
        resolve_hub_names(load_experiment("async_ppo", NAMES))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "model.path='Qwen/Qwen2.5-0.5B-Instruct'",
        "eval.path='openai/gsm8k'",
    ]
    assert all("OSError: no route to host" in line and "give the folder of a downloaded" in line for line in lines)
    assert tries.count(("openai/gsm8k", False)) == 1


def test_paths_are_no_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for value in ("/models/qwen", "models/qwen", "./a/b", "data/rows.jsonl", "asyncrl.x:Y", "a", "a/b/c"):
        assert not is_hub_name(value)
    assert is_hub_name("Qwen/Qwen2.5-0.5B-Instruct")


def test_commands_that_take_an_experiment_and_its_base_model_take_hub_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cached(name: str, *, repo_type: str, **_: object) -> str:
        return str(tmp_path / repo_type / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    (tmp_path / "dataset/openai/gsm8k").mkdir(parents=True)
    (tmp_path / "base.yaml").write_text("defaults: [sft_schema, _self_]\ndataset: {path: openai/gsm8k}\n")
    settings = [NAMES[0], "model.base_experiment=base"]
    args = experiment_parser("rollout", "").parse_args(["async_ppo", "--config-dir", str(tmp_path)])
    config = load_rl(args, settings)
    assert config.model.path == str(tmp_path / "model/Qwen/Qwen2.5-0.5B-Instruct")
    assert base_model_config(config, tmp_path).dataset.path == str(tmp_path / "dataset/openai/gsm8k")
