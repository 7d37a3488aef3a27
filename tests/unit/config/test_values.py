"""What a value means: a text is what was written, anything else is of its setting's type, from every source."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.run_dir import read_run_config, write_run_config
from asyncrl.config.setting import ConfigError
from asyncrl.config.values import changed, literal, to_yaml

UNQUOTED = ["007", "1_0", "1e3", "2026-11-28", "true", "0x10", "1.10", "1.0", "on", "off", "yes", "no", "12:30", ".5"]
"""Texts of which YAML makes something else."""
TYPED = [
    *UNQUOTED,
    "null",
    "~",
    "",
    " lead",
    "a #b",
    "[x]",
    "{y: 1}",
    "it's",
    "a, b",
    "lr=1e-6,kl",
    "a:b",
    "-x",
    "é",
    "*",
]


def in_file(folder: Path, text: str, *overrides: str) -> ExperimentConfig:
    (folder / "mine.yaml").write_text(f"defaults: [async_ppo, _self_]\n{text}\n")
    config = load_experiment("mine", overrides, folder)
    assert isinstance(config, ExperimentConfig)
    return config


def typed(*overrides: str) -> ExperimentConfig:
    config = load_experiment("async_ppo", overrides)
    assert isinstance(config, ExperimentConfig)
    return config


def from_python(values: Mapping[str, Any]) -> ExperimentConfig:
    config = load_experiment("async_ppo", [], values=values)
    assert isinstance(config, ExperimentConfig)
    return config


@pytest.mark.parametrize("text", TYPED)
def test_a_setting_of_text_is_what_was_typed(text: str) -> None:
    config = typed(f"trial_name={text}", f"dataset.fields.answer={text}", f"logging.wandb_project={text}")
    assert (config.trial_name, config.dataset.fields["answer"], config.logging.wandb_project) == (text, text, text)


@pytest.mark.parametrize("text", UNQUOTED)
def test_a_setting_of_text_is_what_a_file_has(text: str, tmp_path: Path) -> None:
    config = in_file(
        tmp_path,
        f"trial_name: {text}\nrollout: {{sampling: {{stop: [{text}]}}}}\ndataset: {{fields: {{{text}: {text}}}}}",
    )
    assert config.trial_name == text
    assert config.rollout.sampling.stop == [text]
    assert config.dataset.fields == {text: text}


@pytest.mark.parametrize("text", TYPED)
def test_a_setting_of_text_is_pythons_text(text: str) -> None:
    assert from_python({"trial_name": text, "rollout.sampling.stop": [text]}).rollout.sampling.stop == [text]


@pytest.mark.parametrize("value", [1.10, True, None, 1j])
def test_what_has_lost_its_text_in_python_is_no_text(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^trial_name='.*': a text is needed; put it in quotes$"):
        from_python({"trial_name": value})


def test_escapes_in_double_quotes_mean_what_yaml_means_and_the_same_from_every_source(tmp_path: Path) -> None:
    wanted = ["\n\n", " lead", "\\n", 'a"b']
    given = r"""["\n\n", ' lead', '\n', "a\"b"]"""
    assert typed(f"rollout.sampling.stop={given}").rollout.sampling.stop == wanted
    assert in_file(tmp_path, f"rollout: {{sampling: {{stop: {given}}}}}").rollout.sampling.stop == wanted
    assert from_python({"rollout.sampling.stop": wanted}).rollout.sampling.stop == wanted
    assert typed(r'dataset.system_prompt="two\nlines"').dataset.system_prompt == "two\nlines"
    assert typed(r"dataset.system_prompt=two\nlines").dataset.system_prompt == r"two\nlines"


class Mode(Enum):
    fast = "quick"


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("fileroot", Path("/runs"), "/runs"),
        ("trial_name", 7, "7"),
        ("optimizer.lr", np.float64(1e-4), 1e-4),
        ("optimizer.lr", 1, 1.0),
        ("total_train_steps", np.int64(2), 2),
        ("group_size", 4.0, 4),
        ("group_size", "4e0", 4),
        ("seed", "9007199254740993", 9007199254740993),
        ("seed", " +5 ", 5),
        ("optimizer.lr", "1", 1.0),
        ("logging.tensorboard", np.bool_(False), False),
        ("profile.steps", (1, 2), [1, 2]),
        ("profile.ranks", range(2), [0, 1]),
        ("profile.ranks", np.arange(2), [0, 1]),
        (
            "agent.args",
            {"a": (1, 2), "b": {"c": np.float32(0.5)}, "d": None},
            {"a": [1, 2], "b": {"c": 0.5}, "d": None},
        ),
        ("agent.args", {"on": "no", "mode": Mode.fast, "file": Path("x")}, {"on": "no", "mode": "quick", "file": "x"}),
        ("on_stale", "drop", "drop"),
        ("optimizer", {"lr": 1e-3, "beta1": 0.8}, None),
        ("reward.path", load_experiment, "asyncrl.config.load:load_experiment"),
        ("reward.path", ExperimentConfig, "asyncrl.config.experiment:ExperimentConfig"),
        ("rewards", [{"name": "a", "path": "x:y", "weight": np.int32(2)}], None),
    ],
)
def test_python_values_are_set_as_they_are(name: str, value: object, meant: object) -> None:
    found: Any = from_python({name: value})
    for part in name.split("."):
        found = getattr(found, part)
    if name == "optimizer":
        assert (found.lr, found.beta1) == (1e-3, 0.8)
    elif name == "rewards":
        assert (found[0].name, found[0].path, found[0].weight) == ("a", "x:y", 2.0)
    else:
        assert found == meant
        assert isinstance(found, type(meant))
        assert not isinstance(found, np.generic)


def test_not_a_number_reaches_free_form_arguments() -> None:
    assert np.isnan(from_python({"agent.args": {"x": float("nan")}}).agent.args["x"])


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ({"reward.path": lambda data, text: 1.0}, "the run's processes cannot import it; define it in a file"),
        ({"reward.args": {"judge": print}}, "reward.args.judge='print': the function or class print cannot be sent"),
        ({"reward.args": {"judge": object()}}, "reward.args.judge='<object object at"),
        ({"optimizer.lr": object()}, "a number is needed"),
        ({"optimizer.lr": True}, "optimizer.lr='True': a number is needed"),
        ({"group_size": 4.5}, "group_size='4.5': a whole number is needed"),
        ({"group_size": float("nan")}, "group_size='nan': a whole number is needed"),
        ({"group_size": float("inf")}, "group_size='inf': a whole number is needed"),
        ({"group_size": [4]}, "group_size='[4]': a whole number is needed"),
        ({"group_size": [4, 5]}, "group_size='[4, 5]': several values; give one; a whole number is needed"),
        ({"logging.tensorboard": "maybe"}, "logging.tensorboard='maybe': neither true nor false"),
        ({"logging.tensorboard": 2}, "logging.tensorboard='2': neither true nor false"),
        ({"rewards": [{"xyz": 1}]}, "rewards[0].xyz: no such setting; there are path, args"),
        ({"rewards": [{"nam": 1}]}, "rewards[0].nam: no such setting, did you mean 'name'? there are path"),
        ({"rewards": ["a"]}, "rewards[0]='a': settings are needed; write {path: VALUE}, with any of path, args"),
        ({"dataset.fields": "answer"}, "dataset.fields='answer': names with values are needed; write {NAME: VALUE}"),
        ({"optimizer": 3}, "optimizer is a group of settings and takes no value"),
        ({"optimizer": {"lrr": 3}}, "unknown setting 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ({"rollout.sampling.stop": "</s>"}, "rollout.sampling.stop='</s>': a list is needed; write [</s>]"),
        ({"agent.path": {"x": 1}}, "agent.path='{x: 1}': a text is needed"),
        ({3: 4}, "unknown setting '3'"),
    ],
)
def test_python_values_that_fit_nothing_are_refused_in_words_of_settings(values: Any, reported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_python(values)
    assert reported in str(caught.value)


DATE = {"d": "2026-11-28", "e": None}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ('{a:1, b: {c:[1,2]}, d:"x"}', {"a": 1, "b": {"c": [1, 2]}, "d": "x"}),
        ("{a: 1e-3, b: 010, c: 12:30, d: 2026-11-28, e: null}", {"a": 1e-3, "b": "010", "c": "12:30"} | DATE),
        ("{a: 'on', b: true, c: -1_000, d: 0x10, e: .5}", {"a": "on", "b": True, "c": -1000, "d": 16, "e": 0.5}),
        ("{1: a, b: {1: a, 2.5: b, yes: c}}", {"1": "a", "b": {1: "a", 2.5: "b", "yes": "c"}}),
    ],
)
def test_free_form_arguments_mean_what_yaml_means(given: str, meant: object, tmp_path: Path) -> None:
    assert typed(f"agent.args={given}").agent.args == meant
    if ":1," not in given:
        assert in_file(tmp_path, f"agent: {{args: {given}}}").agent.args == meant


def test_a_word_that_may_be_a_text_or_a_switch_is_refused_where_the_setting_does_not_decide(tmp_path: Path) -> None:
    reported = r"""agent.args.mode='off': it may mean false or be a text; write false, or "off" with its quotes"""
    with pytest.raises(ConfigError, match=reported):
        typed("agent.args.mode=off")
    with pytest.raises(ConfigError, match=reported):
        in_file(tmp_path, "agent: {args: {mode: off}}")
    assert typed('agent.args.mode="off"', "logging.tensorboard=off").agent.args == {"mode": "off"}


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ("agent.args={a}", "'a' has no value"),
        ("rollout.filters=zero_variance", "a list is needed; write [{name: zero_variance}]"),
        ("policies={name: a}", "a list is needed; write [{name: A}]"),
        ("agent.args={a: [*.py]}", "not valid YAML: while scanning an alias"),
        ("agent.args={a: 1, a: 2}", "duplicate key 'a'"),
        ('agent.args={a:"x, y"}', "not valid YAML"),
        ("agent.path.x=1", "agent.path is set as a whole; write agent.path=VALUE"),
        ("eval.sets.0.path=x", "eval.sets is set as a whole"),
        ("~agent.args.x", "it is not set"),
        ('rollout.sampling.stop=["${"]', r"for a text with ${ write \${"),
        ("group_size=1.5", "group_size='1.5': a whole number is needed"),
        ("profile.steps=[1, x]", "profile.steps[1]='x': a whole number is needed"),
        ("seed=1,2", "several values; give one"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(given: str, reported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        typed(given)
    assert reported in str(caught.value)


def test_an_entry_of_a_mapping_can_be_removed_and_a_later_value_wins() -> None:
    config = typed("agent.args={a: 1, b: {c: 2, d: 3}}", "~agent.args.a", "agent.args.b.c=5", "++seed=3", "seed=4")
    assert config.agent.args == {"b": {"c": 5, "d": 3}}
    assert config.seed == 4
    assert typed("agent.args.x=").agent.args == {"x": ""}


@pytest.mark.parametrize(
    "name", ["a #b", "it's", 'say "x"', "a: b", "{x}", "$HOME", "${seed}", "\\${seed}", "x\ny", "é", "%TAG"]
)
@pytest.mark.parametrize("written", ["'${here:}/code.py:f'", '"${here:}/code.py:f"', "${here:}/code.py:f"])
def test_here_is_the_folder_whatever_its_name_is(tmp_path: Path, name: str, written: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    config = in_file(folder, f"reward: {{args: {{x: {{y: ['{HERE}']}}}}}}\nagent:\n  path: {written}")
    assert config.agent.path == f"{folder}/code.py:f"
    assert config.reward.args == {"x": {"y": [str(folder)]}}


HERE = "${here:}"


def test_a_resolved_text_with_a_dollar_sign_and_a_brace_can_be_read_again(tmp_path: Path) -> None:
    config = typed(r"dataset.system_prompt=say \${name}", f"fileroot={tmp_path}")
    assert config.dataset.system_prompt == "say ${name}"
    write_run_config(config, tmp_path)
    assert read_run_config(tmp_path) == config
    (tmp_path / "again.yaml").write_text(
        to_yaml({"defaults": ["experiment_schema"], **literal(msgspec.to_builtins(config))})
    )
    assert load_experiment("again", [], tmp_path) == config


def test_all_wrong_settings_of_a_file_are_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        in_file(tmp_path, "optimizer: {lrr: 3, lr: fast}\ngroup_sise: 2\nalgorithm: {kl: {nam: k3}}", "seeed=3")
    reported = str(caught.value).splitlines()
    assert len(reported) == 5
    for part in (
        "'optimizer.lrr' in mine.yaml",
        "optimizer.lr='fast'",
        "'group_sise'",
        "'algorithm.kl.nam'",
        "'seeed'",
    ):
        assert len([line for line in reported if part in line]) == 1, part


def test_what_an_anchor_names_can_be_merged_in(tmp_path: Path) -> None:
    args = "{a: &a {x: 1, y: 2}, b: &b {<<: *a, y: 3}, c: {z: 4, <<: [*b, *a]}, d: *b}"
    b = {"x": 1, "y": 3}
    assert in_file(tmp_path, f"agent: {{args: {args}}}").agent.args == {"a": {"x": 1, "y": 2}, "b": b, "d": b} | {
        "c": {"x": 1, "y": 3, "z": 4}
    }
    for wrong in ("3", "[*a, 3]"):
        with pytest.raises(ConfigError, match="<< merges mappings alone"):
            in_file(tmp_path, f"agent: {{args: {{a: &a {{x: 1}}, b: {{<<: {wrong}}}}}}}")


def test_a_changed_group_of_settings_has_the_given_values_and_keeps_the_others() -> None:
    before = ExperimentConfig().rollout.sampling
    made = changed("sampling", before, {"temperature": 0.5, "stop": ["a"]})
    assert (made.temperature, made.stop, made.top_p) == (0.5, ["a"], before.top_p)
    assert before.stop == ExperimentConfig().rollout.sampling.stop
    with pytest.raises(ConfigError) as caught:
        changed("sampling", before, {"temperature": "hot", "tempratur": 1})
    assert "sampling.temperature='hot': a number is needed\nsampling.tempratur: no such setting" in str(caught.value)


def test_a_null_in_a_file_leaves_a_text_at_its_default_and_is_a_text_where_it_is_typed(tmp_path: Path) -> None:
    config = in_file(tmp_path, "trial_name: null\ndataset:\n  path:")
    default = load_experiment("async_ppo", [])
    assert isinstance(default, ExperimentConfig)
    assert (config.trial_name, config.dataset.path) == (default.trial_name, default.dataset.path)
    assert load_experiment("async_ppo", ["trial_name=null"]).trial_name == "null"
