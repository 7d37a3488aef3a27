"""A used trial: what is said of it, and which changed settings it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.describe import experiment_help
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment, settings
from asyncrl.config.run_dir import CONFIG_FILE, SUMMARY_FILE, run_dir_of, write_run_config
from asyncrl.models.weights.versions.manifest import Manifest, file_entry, verify, write_manifest
from asyncrl.observe.display import make_display
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.trials.resume import TrialError, check_finished, continuation

Make = Callable[..., ExperimentConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(*overrides)` is the config of a trial below the test's folder."""

    def make(*overrides: str) -> ExperimentConfig:
        config = load_experiment("async_ppo", [f"fileroot={tmp_path}", "total_train_steps=10", *overrides])
        assert isinstance(config, ExperimentConfig)
        return config

    return make


def earlier_launch(config: ExperimentConfig, *, version: int = 0, finished: bool = False) -> Path:
    """The folder that a launch of `config` leaves: with a checkpoint of `version`, and a summary if it finished."""
    run_dir = run_dir_of(config)
    run_dir.mkdir(parents=True)
    write_run_config(config, run_dir)
    if version:
        state = {"master_state": {"buffer": {"used_prompts": {"count": 4 * version}}}}
        write(run_dir / "checkpoints" / f"v{version}" / "state.json", state)
    if finished:
        write(run_dir / SUMMARY_FILE, {"steps": version})
    return run_dir


def write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


FIXED = {
    "seed": "7",
    "dataset.path": "asyncrl.plugins.datasets.supervised.demonstrations:Others",
    "dataset.args": "{max_numbers: 5}",
    "dataset.fields": "{prompt: question}",
    "dataset.shuffle": "false",
    "dataset.sources": "[{path: 'asyncrl.plugins.datasets.supervised.demonstrations:Others'}]",
    "model.path": "/models/another",
    "model.publish_dtype": "bfloat16",
    "model.lora.rank": "8",
    "model.lora.alpha": "8",
    "model.lora.targets": "[q_proj]",
    "algorithm.graph": "ppo",
    "algorithm.critic.path": "/models/critic",
    "algorithm.reference.mode": "ema",
}


def test_the_fixed_settings_are_those_that_a_checkpoint_depends_on() -> None:
    assert {path for path, _, info in settings(ExperimentConfig) if info.fixed} == set(FIXED)
    assert experiment_help("async_ppo", ExperimentConfig()).count("once a trial has a checkpoint") == len(FIXED)


@pytest.mark.parametrize(("setting", "value"), FIXED.items())
def test_a_changed_setting_that_a_checkpoint_depends_on_is_refused_by_name(
    make: Make, setting: str, value: str
) -> None:
    run_dir = earlier_launch(make(), version=4)
    before = (run_dir / CONFIG_FILE).read_text()
    launcher = Launcher(make(f"{setting}={value}", "optimizer.lr=0.5"), make_display("none", "", 1, 1))
    with pytest.raises(TrialError) as caught:
        launcher.prepare()
    message = str(caught.value)
    assert f"\n  {setting}: " in message
    assert "resume=restart" in message
    assert "optimizer.lr" not in message
    assert (run_dir / CONFIG_FILE).read_text() == before


def test_other_changed_settings_are_taken_and_told_with_what_is_continued(make: Make) -> None:
    run_dir = earlier_launch(make(), version=4)
    changed = ["optimizer.lr=0.5", "total_train_steps=20", "train_batch_size=16", "group_size=4", "rollout.workers=3"]
    changed += ["eval.args={max_numbers: 4}", "rollout.filters=[{name: zero_variance}]", "logging.display=plain"]
    text = "\n".join(continuation(run_dir, make(*changed)))
    assert "continuing from checkpoint v4: step 4 of 20, 16 prompts used" in text
    for line in (
        "optimizer.lr: 0.0001 -> 0.5",
        "total_train_steps: 10 -> 20",
        "train_batch_size: 32 -> 16",
        "group_size: 8 -> 4",
        "rollout.workers: 1 -> 3",
        'eval.args: {} -> {"max_numbers": 4}',
    ):
        assert f"\n  {line}" in text
    assert "rollout.filters" in text
    assert "logging.display" not in text


def test_a_resume_tells_at_which_learning_rate_it_goes_on(make: Make) -> None:
    run_dir = earlier_launch(make(), version=5)
    changed = ["optimizer.schedule=linear", "trainer.ppo_minibatches=1", "optimizer.lr=1e-4"]
    changed += ["algorithm.critic.optimizer.warmup_ratio=0.8", "algorithm.critic.optimizer.lr=1e-3"]
    actor, critic = continuation(run_dir, make(*changed))[-2:]
    assert actor == "learning rate: 5e-05 in step 6 of 10, by optimizer.schedule"
    assert critic.startswith("learning rate of the critic: 0.000625 in step 6 of 10, by algorithm.critic.optimizer")


def test_with_the_same_settings_only_the_checkpoint_is_told(make: Make) -> None:
    run_dir = earlier_launch(make(), version=4)
    assert continuation(run_dir, make()) == ["continuing from checkpoint v4: step 4 of 10, 16 prompts used"]


def test_without_a_checkpoint_a_trial_begins_anew_with_whatever_settings(make: Make) -> None:
    assert continuation(earlier_launch(make()), make("seed=7")) == []


def test_restart_takes_any_setting(make: Make) -> None:
    run_dir = earlier_launch(make(), version=4)
    launcher = Launcher(make("seed=7", "resume=restart"), make_display("none", "", 1, 1))
    launcher.prepare()
    assert not (run_dir / "checkpoints").exists()


def test_a_checkpoint_that_cannot_be_read_is_passed_over(make: Make) -> None:
    run_dir = earlier_launch(make(), version=4)
    (run_dir / "checkpoints" / "v8").mkdir()
    (run_dir / "checkpoints" / "v8" / "state.json").write_text('{"cut of')
    damaged, line = continuation(run_dir, make())
    assert damaged.startswith("checkpoint v8 is damaged and passed over: ")
    assert line.startswith("continuing from checkpoint v4")


def test_a_checkpoint_whose_tensors_are_damaged_is_passed_over_and_named(make: Make) -> None:
    run_dir = earlier_launch(make(), version=4)
    for version in (4, 8):
        folder = run_dir / "checkpoints" / f"v{version}"
        write(folder / "state.json", {"master_state": {"buffer": {"used_prompts": {"count": 4 * version}}}})
        (folder / "shard.safetensors").write_bytes(b"tensors")
        files = {name: file_entry(folder / name) for name in ("state.json", "shard.safetensors")}
        write_manifest(folder, Manifest("checkpoint", version, files))
    assert continuation(run_dir, make(), verify) == ["continuing from checkpoint v8: step 8 of 10, 32 prompts used"]
    (run_dir / "checkpoints" / "v8" / "shard.safetensors").write_bytes(b"tensorz")
    damaged, line = continuation(run_dir, make(), verify)
    assert damaged.startswith("checkpoint v8 is damaged and passed over: shard.safetensors has the checksum ")
    assert str(run_dir) not in damaged
    assert line == "continuing from checkpoint v4: step 4 of 10, 16 prompts used"
    (run_dir / "checkpoints" / "v4" / "shard.safetensors").unlink()
    with pytest.raises(TrialError, match=r"(?s)none of its checkpoints can be used:\n.*v8.*\n.*v4.*resume=restart"):
        continuation(run_dir, make(), verify)


def test_one_file_spelled_in_two_ways_is_no_change(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    run_dir = earlier_launch(make("dataset.path=data.jsonl"), version=4)
    assert len(continuation(run_dir, make(f"dataset.path={tmp_path / 'data.jsonl'}"))) == 1


def test_a_setting_that_the_earlier_launch_did_not_know_is_not_compared(make: Make) -> None:
    run_dir = earlier_launch(make(), version=4)
    lines = (run_dir / CONFIG_FILE).read_text().splitlines()
    (run_dir / CONFIG_FILE).write_text("\n".join(["forgotten: 1", *(line for line in lines if "seed" not in line)]))
    assert len(continuation(run_dir, make("seed=7"))) == 1


def test_a_finished_trial_is_known_and_other_settings_end_in_an_error_that_names_them(make: Make) -> None:
    run_dir = earlier_launch(make(), version=10, finished=True)
    assert check_finished(run_dir, make())
    assert check_finished(run_dir, make("resume=auto", "logging.display=none"))
    assert not check_finished(run_dir, make("total_train_steps=20", "optimizer.lr=0.5"))
    with pytest.raises(TrialError, match=r"is complete.*\n  optimizer\.lr: 0\.0001 -> 0\.5\n.*resume=restart"):
        check_finished(run_dir, make("optimizer.lr=0.5"))
