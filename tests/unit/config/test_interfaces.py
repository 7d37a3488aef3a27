"""A user's agent or environment of a wrong form is refused by what is wrong with it, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.config.plugin_code.catalog import function_entry
from asyncrl.config.plugin_code.interfaces import agent_problems, environment_problems, problems
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.data import check_data
from asyncrl.rollout.checks import code_problems

SOURCE = """
import functools
from abc import ABC
from typing import Generic, TypeVar

import asyncrl.api
import gymnasium
from asyncrl.plugins.agents.retry import RetryAgent
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.api import Agent, Environment, run_in

T = TypeVar("T")


class Base(Agent):
    def __init__(self, *, tokenizer, tries: int = 1): ...


class Neither(Base): ...


class Misspelt(Base):
    async def Run(self, prompt, env, client): ...


class TwoForms(Base):
    def run(self, prompt, env, client): ...
    async def collect_trajectory(self, prompt, env, obs_queue, act_queue): ...


class NoEnv(Base):
    def run(self, prompt, client): ...


class ThirdByName(Base):
    async def run(self, prompt, env, *, client): ...


class FewQueues(Base):
    async def collect_trajectory(self, prompt, env): ...


class Generates(Base):
    async def run(self, prompt, env, client):
        for _ in range(3):
            yield 1.0


class PlainlyGenerates(Base):
    def run(self, prompt, env, client):
        yield 1.0


class Duck:
    def __init__(self, *, tokenizer): ...
    async def run(self, prompt, env, client): ...


class NoTokenizer(Agent):
    def __init__(self): ...
    async def run(self, prompt, env, client): ...


class Good(Base, ABC):
    async def run(self, prompt, env, client, more=None):
        def numbers():
            yield 1

        return sum(numbers())


class Inherits(RetryAgent): ...


class OverridesRun(SingleTurnAgent):
    async def run(self, prompt, env, client): ...


class TakesAll(Base):
    def __init__(self, *, tokenizer, chat, tools): ...
    async def run(self, prompt, env, client): ...


class NoInit(Agent):
    async def run(self, prompt, env, client): ...


def with_budget(method):
    @functools.wraps(method)
    async def run(self, *args):
        return await method(self, *args, budget=1)

    return run


class Decorated(Base):
    @with_budget
    async def run(self, prompt, env, client, budget): ...


class Static(Base):
    @staticmethod
    async def run(prompt, env, client): ...


class Around(Base):
    async def roll_out(self, prompt, make_env, client): ...
    async def run(self): ...


class Elsewhere(asyncrl.api.Agent): ...


class Typed(Base, Generic[T]):
    run = Good.run


@run_in("thread")
class Anything(Base):
    def run(self, *args): ...


async def run(prompt, env, client, *, tries=2): ...


async def with_tokenizer(prompt, env, client, *, tokenizer): ...


def two(prompt, client): ...


async def generates(prompt, env, client):
    yield 1.0


one = 1


class World(Environment):
    def __init__(self, *, reward): ...
    def reset(self, *, seed=None, options=None): ...
    def step(self, action): ...


class Half(Environment):
    def __init__(self, *, reward): ...
    def reset(self, *, seed=None, options=None): ...


class Whole(Half):
    async def step(self, action): ...


class NoOptions(World):
    def reset(self): ...


class SeedByPlace(World):
    def reset(self, seed, options): ...


class AnyOptions(World):
    async def reset(self, **kwargs): ...


class StepOfTwo(World):
    def step(self, action, reward): ...


class Yields(World):
    async def reset(self, *, seed=None, options=None):
        yield 1


class DuckWorld:
    def __init__(self, *, reward): ...
    def reset(self, *, seed=None, options=None): ...
    def step(self, action): ...


class Gymnasium(gymnasium.Env):
    def __init__(self, *, reward): ...
    def reset(self, *, seed=None, options=None): ...
    def step(self, action): ...


def make(*, reward):
    return World(reward=reward)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("forms") / "mine.py"
    file.write_text(SOURCE)
    return file


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "Neither",
            "none of run_group, run, collect_trajectory: implement `run`",
        ),
        ("Misspelt", "implements none"),
        ("TwoForms", "`run` and `collect_trajectory`, of which only one would be called: keep one"),
        ("NoEnv", r"NoEnv: `run` is called as run(prompt, env, client)"),
        ("ThirdByName", r"ThirdByName: `run` is called as run(prompt, env, client)"),
        ("FewQueues", "called as collect_trajectory(prompt, env, obs_queue, act_queue)"),
        ("Generates", "`run` contains `yield`"),
        ("PlainlyGenerates", "`run` contains `yield`"),
        ("Duck", "not an asyncrl.api.Agent"),
        ("Elsewhere", "implements none"),
        ("NoTokenizer", "does not take 'tokenizer'"),
        ("NoInit", "does not take 'tokenizer'"),
        ("one", "it is a int; name a class or function"),
        ("two", "run(prompt, env, client)"),
        ("generates", "`generates` contains `yield`"),
        ("nobody", "defines no 'nobody'"),
    ],
)
def test_agents_of_a_wrong_form_are_told_what_is_wrong(source: Path, name: str, why: str) -> None:
    (problem,) = agent_problems("agent", f"{source}:{name}", {})
    assert problem.startswith("agent.")
    assert f"{source}:{name}" in problem
    assert why in problem


RIGHT = ["Good", "Inherits", "OverridesRun", "Decorated", "Static", "TakesAll", "Around", "Typed", "Anything"]


@pytest.mark.parametrize("name", [*RIGHT, "run", "with_tokenizer"])
def test_agents_of_a_right_form_pass(source: Path, name: str) -> None:
    assert list(agent_problems("agent", f"{source}:{name}", {})) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Half", "does not implement `step`"),
        ("NoOptions", "`reset` receives seed and options by name; add the parameters seed and options"),
        ("StepOfTwo", "`step` is called as step(action)"),
        ("DuckWorld", "not an asyncrl.api.Environment"),
        ("Gymnasium", "not an asyncrl.api.Environment"),
        ("Yields", "`reset` contains `yield`"),
    ],
)
def test_environments_of_a_wrong_form_are_told_what_is_wrong(source: Path, name: str, why: str) -> None:
    (problem,) = environment_problems("env", f"{source}:{name}", {})
    assert problem.startswith("env.path=")
    assert why in problem


@pytest.mark.parametrize("name", ["World", "Whole", "SeedByPlace", "AnyOptions", "make"])
def test_environments_of_a_right_form_pass(source: Path, name: str) -> None:
    assert list(environment_problems("env", f"{source}:{name}", {})) == []


def test_the_settings_are_checked_so(source: Path) -> None:
    overrides = [f"agent.path={source}:Neither", f"env.path={source}:Half", f"eval.env.path={source}:NoOptions"]
    config = load_experiment("async_ppo", overrides)
    assert isinstance(config, ExperimentConfig)
    agent, env, of_set = code_problems(config)
    assert "implements none of" in agent
    assert env.startswith("env.path=")
    assert of_set.startswith("eval.env.path=")


ANNOTATED = """
from enum import Enum
from typing import Annotated, Literal, Optional


class Mode(Enum):
    FAST = 1


def function():
    class Within: ...

    def takes(data, completion, *, mode: Within | None = None): ...

    return takes


within = function()


def noted(data, completion, *, mode: Annotated[str, object()] = ""): ...


def chosen(data, completion, *, mode: Literal[Mode.FAST] = Mode.FAST): ...


def perhaps_chosen(data, completion, *, mode: Optional[Literal[Mode.FAST]] = None): ...


def told(data, completion, *, mode: "how it is done" = None): ...


def told_twice(data, completion, *, mode: "Literal[Mode.FAST]" = None): ...
"""


@pytest.mark.parametrize("name", ["within", "noted", "chosen", "perhaps_chosen", "told", "told_twice"])
def test_a_parameter_whose_annotation_is_no_python_as_text_accepts_anything(tmp_path: Path, name: str) -> None:
    (tmp_path / "annotated.py").write_text(ANNOTATED)
    path = f"{tmp_path / 'annotated.py'}:{name}"
    assert list(problems("reward", path, {"mode": "x"}, positional=2)) == []
    (problem,) = problems("reward", path, {"mod": "x"}, positional=2)
    assert "did you mean 'mode'?" in problem


def test_the_same_holds_where_the_source_is_read(tmp_path: Path) -> None:
    source = 'def shape(group, *, mode: Literal[Mode.FAST], other: "how it is done", of: int): ...\n'
    (tmp_path / "annotated.py").write_text(source)
    params = function_entry("shaping", f"{tmp_path / 'annotated.py'}:shape").params
    assert params is not None
    assert [params[name].accepts("x") for name in ("mode", "other", "of")] == [True, True, False]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["agent.args.retries=2"],
            [
                "agent.args={'retries': 2}",
                "no parameter 'retries'; it takes no parameters; an inherited one goes with '~agent.args.retries'",
            ],
        ),
        (
            ["env.path=asyncrl.plugins.envs.retry:RetryEnv", "env.args.feedbak=x"],
            ["env.args=", "did you mean 'feedback'?"],
        ),
        (["env.path=asyncrl.plugins.rewards.arithmetic:arithmetic_reward"], ["env.args", "does not take 'reward'"]),
        (["reward.args.last=1"], ["reward.args={'last': 1}", "it takes no parameters"]),
        (["eval.reward.args.least=3"], ["eval.reward.args=", "'least'"]),
    ],
)
def test_arguments_of_built_in_code_are_checked_so(overrides: list[str], parts: list[str]) -> None:
    config = load_experiment("async_ppo", overrides)
    assert isinstance(config, ExperimentConfig)
    (problem,) = code_problems(config)
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["dataset.args.num_row=3"], ["dataset.path=", "args {'num_row': 3}", "did you mean 'num_rows'?"]),
        (["dataset.args.num_rows=many"], ["dataset.path=", "'num_rows' is 'many' (str), expected int"]),
        (["eval.args.num_row=3"], ["eval.path=", "did you mean 'num_rows'?"]),
        (["dataset.path=HERE/rows.jsonl", "dataset.args={held_out: 0.1}"], ["rows.jsonl", "'held_out_share'?"]),
    ],
)
def test_arguments_of_data_sets_are_checked_where_the_launcher_loads_them(
    tmp_path: Path, overrides: list[str], parts: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = load_experiment("async_ppo", [each.replace("HERE", str(tmp_path)) for each in overrides])
    with pytest.raises(ConfigError) as refused:
        check_data(config, None)
    assert all(part in str(refused.value) for part in parts), refused.value
