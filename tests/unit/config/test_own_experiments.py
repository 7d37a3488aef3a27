"""A user's folder of experiments: what is in it comes first, and all of it may be based on what is built in."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import experiments_dir, load_experiment, load_supervised, recipes_dir
from asyncrl.config.setting import ConfigError
from asyncrl.launch.help import list_experiments


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "my experiments, two"  # a name that a grammar may trip over
    folder.mkdir()
    return folder


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n")


def load(name: str, folder: Path, *overrides: str) -> ExperimentConfig:
    config = load_experiment(name, overrides, folder)
    assert isinstance(config, ExperimentConfig)
    return config


def message_of(name: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(name, [], folder)
    return str(caught.value)


def test_a_users_experiment_is_based_on_a_built_in_one(own: Path) -> None:
    write(own, "mine", "defaults: [async_grpo, _self_]", "experiment_name: mine", "optimizer: {lr: 0.5}")
    config = load("mine", own, "group_size=3")
    assert (config.experiment_name, config.optimizer.lr, config.group_size) == ("mine", 0.5, 3)
    assert config.algorithm.aggregation.name == "seq_mean_token_mean"


def test_a_users_experiment_is_based_on_another_of_the_same_folder(own: Path) -> None:
    write(own, "common", "defaults: [async_ppo, _self_]", "seed: 5")
    write(own, "mine", "defaults: [common, _self_]", "group_size: 2")
    assert (load("mine", own).seed, load("mine", own).group_size) == (5, 2)


def test_here_is_the_folder_of_the_file_that_says_it(own: Path) -> None:
    write(own, "mine", "defaults: [custom_graph, _self_]", "reward: {path: '${here:}/rewards.py:score'}")
    config = load("mine", own)
    assert config.reward.path == f"{own}/rewards.py:score"
    assert config.algorithm.graph == f"{recipes_dir()}/custom_graph_example.py:build_graph"


def test_built_in_experiments_run_as_they_are_and_make_base_models_beside_a_users_own(own: Path) -> None:
    assert load("async_ppo", own) == load_experiment("async_ppo", [])
    assert load_supervised("arithmetic_base", own) == load_supervised("arithmetic_base")


def test_a_users_experiment_wins_over_a_built_in_one_of_its_name(own: Path) -> None:
    write(own, "async_ppo", "defaults: [experiment_schema, _self_]", "seed: 77")
    assert load("async_ppo", own).seed == 77
    assert load("async_grpo", own).seed == 77
    assert load_experiment("async_ppo", []).seed == 1


def test_an_experiment_based_on_its_own_name_is_refused(own: Path) -> None:
    write(own, "async_ppo", "defaults: [async_ppo, _self_]")
    assert "give it another name" in message_of("async_ppo", own)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("defaults: [async_pop, _self_]", ["'async_pop'", "did you mean 'async_ppo'"]),
        ("defaults: [async_ppo, _self_]\noptimizer: {lrr: 3}", ["'optimizer.lrr'", "did you mean 'optimizer.lr'"]),
        ("defaults: [async_ppo, _self_]\non_stale: maks", ["on_stale='maks'", "did you mean 'mask'"]),
        ("defaults: [async_ppo, _self_]\noptimizer: {lr: 3", ["not valid YAML", "mine.yaml"]),
        ("seed: 3", ["defaults list must begin with"]),
    ],
)
def test_a_mistake_in_an_experiments_file_is_one_line(own: Path, text: str, parts: list[str]) -> None:
    write(own, "mine", text)
    message = message_of("mine", own)
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"--config-dir '{tmp_path / 'nowhere'}': no such folder" in message_of("async_ppo", tmp_path / "nowhere")


def test_the_list_shows_the_users_experiments_then_the_built_in_ones_then_recipes(own: Path) -> None:
    write(own, "mine", "# What it is for", "defaults: [async_ppo, _self_]")
    text = list_experiments(own)
    parts = (str(own), "  mine ", "What it is for", "built-in experiments:", "  async_ppo ", "recipes: ", "  kimi_k2 ")
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_a_program_that_uses_hydra_itself_keeps_its_state() -> None:
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    ConfigStore.instance().store("of_the_program", {"depth": 3})
    with initialize_config_module("asyncrl.config", version_base="1.3"):
        theirs = GlobalHydra.instance(), GlobalHydra.instance().hydra
        load_experiment("async_grpo", [], experiments_dir())
        assert (GlobalHydra.instance(), GlobalHydra.instance().hydra) == theirs
        assert compose("of_the_program") == {"depth": 3}
        assert "async_grpo.yaml" not in ConfigStore.instance().repo, "experiments are not the program's configs"
