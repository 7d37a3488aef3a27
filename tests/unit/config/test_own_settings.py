"""Settings of a user's own code: `my`, checked by `my_class`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.setting import ConfigError
from asyncrl.launch.help import resolved_yaml

CODE = """
from __future__ import annotations
from dataclasses import dataclass, field
from enum import Enum

class Mood(Enum):
    mild = "mild"
    strict = "strict"

@dataclass
class Judge:
    scale: float = 1.0
    mood: Mood = Mood.mild

@dataclass
class Mine:
    name: str
    turns: int = 3
    judge: Judge = field(default_factory=Judge)

class Plain:
    pass
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path / 'mine.py'}:Mine"


def load(*overrides: str) -> ExperimentConfig:
    config = load_experiment("async_ppo", overrides)
    assert isinstance(config, ExperimentConfig)
    return config


def test_values_are_typed_and_completed_and_other_settings_use_them(path: str) -> None:
    config = load(
        f"my_class={path}",
        "my.name=x",
        "my.judge.mood=strict",
        "reward.args={scale: '${my.judge.scale}', turns: '${my.turns}'}",
        "my.turns=7",
    )
    assert config.my == {"name": "x", "turns": 7, "judge": {"scale": 1.0, "mood": "strict"}}
    assert config.reward.args == {"scale": 1.0, "turns": 7}
    assert yaml.safe_load(resolved_yaml(config))["my"] == config.my


def test_a_file_of_ones_own_sets_them(path: str, tmp_path: Path) -> None:
    lines = ["defaults: [async_ppo, _self_]", f"my_class: {path}", "my: {name: y, judge: {scale: 2.5}}"]
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    config = load_experiment("own", ["my.turns=4"], tmp_path)
    assert isinstance(config, ExperimentConfig)
    assert config.my == {"name": "y", "turns": 4, "judge": {"scale": 2.5, "mood": "mild"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["my.name=x", "my.turn=4"], r"^my\.turn: .* has no such field, did you mean 'turns'\? It has: name, turns"),
        (["my.name=x", "my.turns=many"], r"^my\.turns='many': a whole number is needed"),
        (["my.name=x", "my.judge.mood=odd"], r"^my\.judge\.mood='odd': not a choice; choose one of mild, strict"),
        (["my.turns=4"], r"^my\.name: it has no default in .*; set it$"),
    ],
)
def test_what_the_class_does_not_take_is_refused_by_its_name(path: str, given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"my_class={path}", *given)


def test_without_a_dataclass_nothing_is_taken(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^my=\{'name': 'x'\}: its fields are not defined"):
        load("my.name=x")
    with pytest.raises(ConfigError, match=r"^my_class='.*': .* is not a dataclass"):
        load(f"my_class={path.replace('Mine', 'Plain')}")
    with pytest.raises(ConfigError, match=r"^my_class='.*defines no 'None_'"):
        load(f"my_class={path.replace('Mine', 'None_')}")
