"""`package.module:name` and `path/to/file.py:name` both name each kind of thing of a user's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.plugin_code.import_paths import PluginError, definition, load_plugin, split_path
from asyncrl.config.plugin_code.interfaces import problems
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.master.graph import load_graph
from asyncrl.rollout.user_code.components import UserComponents

MINE = """
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.algorithms.filters import GroupView, FilterDecision
from asyncrl.plugins.envs.single_turn import SingleTurnEnv
from asyncrl.master.graph import Call, Graph

marks = []


class Rows:
    def __init__(self, *, split, seed, size: int = 3):
        self.split, self.size = split, size
    def __len__(self):
        return self.size
    def row(self, index):
        return {"prompt": f"{index}+1=", "answer": str(index + 1), "split": self.split}


class MyAgent(SingleTurnAgent):
    pass


class MyEnv(SingleTurnEnv):
    pass


def score(data, completion, *, scale: float = 1.0):
    return scale


def graph(config, *, weight: float = 1.0):
    return Graph("mine", (Call("x", "actor", __file__ + ":node"), Call("y", "actor", "my_things:node", after=("x",))))


def node(ctx, batch):
    return {}


def my_filter(group, *, least: float = 0.0):
    return FilterDecision(True)


def my_shaping(group, *, by: float = 1.0):
    return group.rewards_S * by


def my_loss(inputs, *, scale: float = 1.0):
    from asyncrl.algorithms.policy_losses import reinforce
    return reinforce(inputs)


def my_correction(inputs, *, cap: float = 2.0):
    from asyncrl.algorithms.grpo import token_truncate
    return token_truncate(inputs)


def my_advantage(inputs, *, scale: float = 1.0):
    from asyncrl.algorithms.advantages import rloo
    return rloo(inputs)


def my_kl(inputs, *, scale: float = 1.0):
    from asyncrl.algorithms.kl import k2
    return k2(inputs)


def my_aggregation(tokens, *, scale: float = 1.0):
    from asyncrl.algorithms.objective import token_mean
    return token_mean(tokens)


def my_value_loss(inputs, *, scale: float = 1.0):
    from asyncrl.algorithms.critic import squared
    return squared(inputs)
"""
AGENT_METHODS = ("my_things:{}", "{folder}/my_things.py:{}")


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """`mine(form, name)`: the import path of `name` of the user's module."""
    (tmp_path / "my_things.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_things", raising=False)
    return lambda form, name: form.format(name, folder=tmp_path)


def checked(*overrides: str) -> ExperimentConfig:
    config = load_experiment("async_ppo", overrides)
    assert isinstance(config, ExperimentConfig)
    validate(config)
    return config


@pytest.mark.parametrize("form", AGENT_METHODS)
@pytest.mark.parametrize(
    ("group", "name"),
    [("dataset", "Rows"), ("eval", "Rows"), ("agent", "MyAgent"), ("env", "MyEnv"), ("reward", "score")],
)
async def test_what_a_rollout_worker_takes_is_found(
    mine: Callable[[str, str], str], tiny_model: Path, form: str, group: str, name: str
) -> None:
    scale = "reward.args.scale=0.75" if group == "reward" else "seed=1"
    config = checked(f"{group}.path='{mine(form, name)}'", f"model.path={tiny_model}", scale)
    assert "my_things" not in sys.modules, "a check must not run the user's module"
    plugins = UserComponents(config)
    async with plugins.runner:
        env = plugins.environments.one()
        await env.reset(options={"data": {"prompt": "1+1=", "answer": "2"}})
        _, reward, *_ = await env.step("1+1=2#2")
    parts = {
        "dataset": type(plugins.prompts.train_set).__name__,
        "eval": type(plugins.prompts.eval_sets["held_out"][1]).__name__,
        "agent": type(plugins.agent).__name__,
        "env": env._env.__class__.__name__ if group == "env" else "",  # type: ignore[attr-defined]
        "reward": name if reward == 0.75 else "",
    }
    assert parts[group] == name


@pytest.mark.parametrize("form", AGENT_METHODS)
@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("algorithm.policy_loss", "my_loss"),
        ("algorithm.correction", "my_correction"),
        ("algorithm.advantage", "my_advantage"),
        ("algorithm.kl", "my_kl"),
        ("algorithm.aggregation", "my_aggregation"),
        ("algorithm.critic.value_loss", "my_value_loss"),
    ],
)
def test_what_a_training_rank_takes_is_found(
    mine: Callable[[str, str], str], form: str, setting: str, name: str
) -> None:
    pytest.importorskip("torch")
    from asyncrl.config.plugin_code.catalog import resolve
    from asyncrl.trainer.functions.model_functions import TrainState

    path = mine(form, name)
    config = checked(f"{setting}.name='{path}'", "algorithm.kl_coef=0.1")
    assert TrainState(config.algorithm).value_objective
    function: Any = resolve(name.removeprefix("my_").replace("loss", "policy_loss", name == "my_loss"), path)
    assert function.func.__name__ == name


@pytest.mark.parametrize("form", AGENT_METHODS)
@pytest.mark.parametrize(("setting", "name"), [("rollout.filters", "my_filter"), ("rollout.shaping", "my_shaping")])
def test_filters_and_shapings_are_found(mine: Callable[[str, str], str], form: str, setting: str, name: str) -> None:
    checked(f"{setting}=[{{name: '{mine(form, name)}'}}]")


@pytest.mark.parametrize("form", AGENT_METHODS)
def test_a_graph_and_the_functions_of_its_calls_are_found(mine: Callable[[str, str], str], form: str) -> None:
    config = checked(f"algorithm.graph='{mine(form, 'graph')}'", "algorithm.graph_args.weight=2")
    assert [call.function.rpartition(":")[2] for call in load_graph(config).calls] == ["node", "node"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("my_pkg.my_loss.fn", "write my_pkg.my_loss:fn"),
        ("my_loss.py", "write my_loss.py:name"),
        ("plain", "write package.module:name or path/to/file.py:name"),
        (":fn", "write package.module:name"),
        ("module:", "write package.module:name"),
    ],
)
def test_a_path_without_a_colon_is_answered_with_the_form_that_has_one(path: str, shown: str) -> None:
    with pytest.raises(PluginError, match=shown):
        split_path(path)


def test_a_module_that_fails_is_one_error_that_says_where(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\n\nraise RuntimeError('no licence')\ndef score(): ...\n")
    for _ in range(2):  # a second try does not find half a module
        with pytest.raises(PluginError, match=r"broken\.py:3: RuntimeError: no licence"):
            load_plugin(f"{broken}:score")


def test_a_file_that_is_no_python_is_named_with_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\ndef score(:\n")
    with pytest.raises(PluginError, match=r"broken\.py:2' cannot be read as Python"):
        definition(f"{broken}:score")


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    from fast import it\nexcept ImportError:\n    def it(): ...\n",
        "if True:\n    it = 1\nelse:\n    it = 2\n",
        "it: int = 3\n",
        "import os as it\n",
        "from os.path import *\n",
        "with open(__file__) as f:\n    it = f.read()\n",
    ],
)
def test_a_name_may_be_defined_in_any_way(tmp_path: Path, source: str) -> None:
    (tmp_path / "ways.py").write_text(source)
    definition(f"{tmp_path / 'ways.py'}:it")
    if "*" not in source:
        with pytest.raises(PluginError, match="defines no 'that'"):
            definition(f"{tmp_path / 'ways.py'}:that")


@pytest.mark.parametrize(
    ("source", "args", "expected"),
    [
        ("class It:\n    def __init__(self, given, own=1): ...", {"own": 2}, None),
        ("class It:\n    def __init__(self, given, own=1): ...", {"won": 2}, "did you mean 'own'"),
        ("class It:\n    def __init__(self, given, own): ...", {}, "needs args.own"),
        ("class It:\n    def __init__(self, own=1): ...", {}, "does not take 'given'"),
        ("class It: ...", {}, "does not take 'given'"),
        ("class It:\n    def __init__(self, **anything): ...", {"own": 1}, None),
        ("class Base:\n    def __init__(self, given): ...\nclass It(Base): ...", {"own": 1}, "no parameter 'own'"),
        ("from collections import UserList\nclass It(UserList): ...", {"own": 1}, "does not take 'given'"),
        ("def It(given, *, own: int = 1): ...", {"own": "x"}, "expected int"),
        ("from functools import cache\n@cache\ndef It(x): ...", {"own": 1}, None),
        ("def It(*given, own=1): ...", {"own": 1}, "does not take 'given'"),
        ("It = print", {"own": 1}, "does not take 'given'"),
        ("It = range", {"own": 1}, None),
    ],
)
def test_arguments_are_checked_where_the_code_says_what_it_takes(
    tmp_path: Path, source: str, args: dict[str, object], expected: str | None
) -> None:
    (tmp_path / "it.py").write_text(source + "\n")
    found = list(problems("env", f"{tmp_path / 'it.py'}:It", args, supplied=("given",)))
    if expected is None:
        assert found == []
    else:
        (message,) = found
        assert message.startswith(f"env.args={args}: ")
        assert expected in message
