"""A used trial: what is said of it, and which changed settings it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment, settings
from asyncrl.config.run_dir import CONFIG_FILE, SUMMARY_FILE, run_dir_of, write_run_config
from asyncrl.launch.help import experiment_help
from asyncrl.observe.display import make_display
from asyncrl.runtime.launcher import Launcher
from asyncrl.runtime.trials.claim import TrialError
from asyncrl.runtime.trials.resume import changed_settings, check_finished, continuation
from asyncrl.weights.manifest import Manifest, file_entry, verify, write_manifest

Make = Callable[..., ExperimentConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(*overrides)` is the config of a trial below the test's folder."""

    def make(*overrides: str) -> ExperimentConfig:
        config = load_experiment("async_ppo", [f"fileroot={tmp_path}", "total_train_steps=10", *overrides])
        assert isinstance(config, ExperimentConfig)
        return config

    return make


def earlier_launch(config: ExperimentConfig, *, version: int = 0, finished: bool = False, total: int = 10) -> Path:
    """The folder that a launch of `config` leaves: with a checkpoint of `version`, and a summary if it finished."""
    run_dir = run_dir_of(config)
    run_dir.mkdir(parents=True)
    write_run_config(config, run_dir)
    if version:
        write(run_dir / "checkpoints" / f"v{version}" / "state.json", state_of(version))
    if finished:
        write(
            run_dir / SUMMARY_FILE,
            {"steps": version, "total_steps": total, "eval": {}, "evaluations_failed": [], "books": {}},
        )
    return run_dir


def state_of(version: int) -> dict[str, Any]:
    """What `state.json` of the checkpoint of `version` has, as far as a launch reads it."""
    return {"roles": {"actor": {}}, "master_state": {"gate": {"used": {"count": 4 * version}, "line": 0}}}


def write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


FIXED = {
    "seed": "7",
    "dataset.path": "asyncrl.data.demonstrations:Others",
    "dataset.args": "{max_numbers: 5}",
    "dataset.fields": "{prompt: question}",
    "dataset.shuffle": "false",
    "dataset.sources": "[{path: 'asyncrl.data.demonstrations:Others'}]",
    "model.path": "/models/another",
    "model.publish_dtype": "bfloat16",
    "model.vision": "freeze",
    "model.lora.rank": "8",
    "model.lora.alpha": "8",
    "model.lora.targets": "[q_proj]",
    "algorithm.graph": "ppo",
    "algorithm.critic.path": "/models/critic",
    "algorithm.critic.value_norm": "running",
    "algorithm.reference.mode": "ema",
    "optimizer.name": "muon",
    "algorithm.critic.optimizer.name": "muon",
}

PARTLY_FIXED = {"algorithm.reference.path", "policies"}
"""Settings of which some changes are refused: by `_is_fixed`."""
FREE_GROUPS = """
    agent env reward rollout generation manager buffer eval checkpoint logging profile samples system optimizer
    algorithm.critic.optimizer dataset.curriculum
"""
"""Groups whose settings, but those in `FIXED`, act on what comes: no checkpoint is misread with another value."""
FREE = """
    experiment_name trial_name fileroot resume my my_class rewards tools mcp
    total_train_steps total_epochs train_batch_size group_size max_head_offpolicyness on_stale
    model.base_experiment model.dtype model.float32_head model.attn_implementation model.lora.publish
    dataset.max_prompt_tokens dataset.overlong dataset.chat_template dataset.chat_template_args dataset.system_prompt
    trainer.parallel trainer.engine trainer.device trainer.threads trainer.tokens_per_micro_batch trainer.share_prefixes
    trainer.gradient_checkpointing trainer.activations_on trainer.compile trainer.offload trainer.score_ahead
    trainer.ppo_minibatches trainer.ppo_epochs trainer.train_every trainer.train_offset
    trainer.buffer_capacity trainer.buffer_memory trainer.collective_timeout_s moe.replay_routing
    algorithm.graph_args algorithm.plugins algorithm.prox algorithm.policy_loss.name algorithm.policy_loss.params
    algorithm.correction.name algorithm.correction.params algorithm.selection.name algorithm.selection.params
    algorithm.advantage.name algorithm.advantage.params algorithm.aggregation.name algorithm.aggregation.params
    algorithm.kl.name algorithm.kl.params algorithm.kl_coef algorithm.kl_in algorithm.kl_target algorithm.kl_horizon
    algorithm.entropy_coef algorithm.log_ratio_coef algorithm.stop_kl algorithm.stop_weight_variance
    algorithm.teachers algorithm.reward_models algorithm.critic.parallel algorithm.critic.ranks
    algorithm.critic.value_loss.name algorithm.critic.value_loss.params algorithm.critic.warmup_steps
    algorithm.reference.parallel algorithm.reference.ranks algorithm.reference.ema_decay
"""
"""Further settings of that kind.

What `model.base_experiment` makes is `model.path`, and the roles that `algorithm.graph_args` may change are compared by
`check_same_roles`. Masters are float32 in any `model.dtype`, and checkpoints hold adapters however they are published.
"""


def test_each_setting_is_known_to_be_fixed_or_free_once_there_is_a_checkpoint() -> None:
    known = [path for path, _, _ in settings(ExperimentConfig)]
    groups = tuple(f"{group}." for group in FREE_GROUPS.split())
    free = {path for path in known if path.startswith(groups) and path not in FIXED}
    decided = [*free, *FREE.split(), *PARTLY_FIXED, *FIXED]
    undecided = set(known) - set(decided)
    assert not undecided, (
        "decide whether a checkpoint is misread with another value of these: then `fixed=True` in the definition and a "
        "line in FIXED, else a line in FREE"
    )
    assert sorted(decided) == sorted(known)  # each once


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


JUDGE = "policies=[{name: judge, trained: true, train_every: 2, optimizer: {lr: 0.1}, algorithm: {kl_coef: 0.1}}]"


@pytest.mark.parametrize(
    "now",
    [
        "policies=[]",
        "policies=[{name: judge, trained: true, path: /models/other}]",
        "policies=[{name: judge, trained: true, shared_critic: true}]",
        "policies=[{name: judge, trained: true, algorithm: {critic: {value_norm: ema}}}]",
        "policies=[{name: judge, trained: true, algorithm: {graph: dapo}}]",
        "policies=[{name: jury, trained: true}]",
    ],
)
def test_changed_trained_policies_are_refused_where_their_checkpoint_would_be_misread(make: Make, now: str) -> None:
    run_dir = earlier_launch(make(JUDGE), version=4)
    with pytest.raises(TrialError, match=r"(?s)\n  policies: .*resume=restart"):
        continuation(run_dir, make(now))


def test_what_a_checkpoint_does_not_have_of_policies_may_change(make: Make) -> None:
    run_dir = earlier_launch(make(JUDGE), version=4)
    assert len(continuation(run_dir, make(JUDGE))) == 1, "nothing has changed"
    now = "policies=[{name: old, versions: {}}, {name: judge, trained: true, algorithm: {graph: grpo}, parallel: d2}]"
    assert "policies: " in "\n".join(continuation(run_dir, make(now)))


def test_the_first_weights_of_a_reference_are_fixed_if_it_is_averaged(make: Make) -> None:
    run_dir = earlier_launch(make(), version=4)
    assert "reference.path" in "\n".join(continuation(run_dir, make("algorithm.reference.path=/models/other")))
    write_run_config(make("algorithm.reference.mode=ema"), run_dir)
    with pytest.raises(TrialError, match=r"\n  algorithm\.reference\.path"):
        continuation(run_dir, make("algorithm.reference.mode=ema", "algorithm.reference.path=/models/other"))


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
        write(folder / "state.json", state_of(version))
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


def test_a_changed_secret_is_told_without_its_value(make: Make) -> None:
    before, now = (make(f"agent.args={{api_key: {key}, tries: {tries}}}") for key, tries in (("s3cr3t", 1), ("n3w", 2)))
    reported = continuation(earlier_launch(before, version=4), now)[1]
    assert '{"api_key": "(hidden)", "tries": 1} -> {"api_key": "(hidden)", "tries": 2}' in reported


def test_a_dollar_and_a_brace_in_a_value_are_text(make: Make) -> None:
    before, now = (make(f"agent.args={{hint: 'costs \\${{{text}'}}") for text in ("seed}", "seed} or \\${"))
    assert before.agent.args == {"hint": "costs ${seed}"}
    run_dir = earlier_launch(before, version=4)
    assert len(continuation(run_dir, before)) == 1
    assert 'agent.args: {"hint": "costs ${seed}"} -> {"hint": "costs ${seed} or ${"}' in continuation(run_dir, now)[1]


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


def test_a_setting_of_the_earlier_launch_is_compared_by_its_name_now(make: Make) -> None:
    config = make()
    file = earlier_launch(config, version=4) / CONFIG_FILE
    file.write_text(file.read_text().replace("in_memory: true", "keep_last_step: false"))
    (change,) = changed_settings(run_dir_of(config), config)
    assert (change.setting, change.before, change.now) == ("checkpoint.in_memory", False, True)


def test_a_finished_trial_is_known_and_other_settings_end_in_an_error_that_names_them(make: Make) -> None:
    run_dir = earlier_launch(make(), version=10, finished=True)
    assert check_finished(run_dir, make())
    assert check_finished(run_dir, make("resume=auto", "logging.display=none"))
    assert not check_finished(run_dir, make("total_train_steps=20", "optimizer.lr=0.5"))
    with pytest.raises(TrialError, match=r"is complete.*\n  optimizer\.lr: 0\.0001 -> 0\.5\n.*resume=restart"):
        check_finished(run_dir, make("optimizer.lr=0.5"))


def test_a_trial_whose_epochs_are_used_up_has_nothing_to_run_until_its_settings_change(make: Make) -> None:
    run_dir = earlier_launch(make("total_epochs=2"), version=7, finished=True, total=7)
    assert check_finished(run_dir, make("total_epochs=2"))
    assert not check_finished(run_dir, make("total_epochs=2", "train_batch_size=4"))
    write(run_dir / SUMMARY_FILE, json.loads((run_dir / SUMMARY_FILE).read_text()) | {"total_steps": 10})
    assert not check_finished(run_dir, make("total_epochs=2")), "it was stopped"
