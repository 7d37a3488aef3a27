"""A user's agent or environment of a wrong form is refused by what is wrong with it, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.load import load_experiment
from asyncrl.config.plugin_code.agent_interfaces import agent_problems, environment_problems
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.checks import validate

SOURCE = """
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


def two(prompt, client): ...


async def generates(prompt, env, client):
    yield 1.0


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
            "none of run_group, run, collect_trajectory; implement `run(self, prompt, env, client)`",
        ),
        ("Misspelt", "implements none"),
        ("TwoForms", "`run` and `collect_trajectory`, of which only one would be called; keep one"),
        ("NoEnv", r"NoEnv: `run` is called as run(prompt, env, client)"),
        ("ThirdByName", r"ThirdByName: `run` is called as run(prompt, env, client)"),
        ("FewQueues", "called as collect_trajectory(prompt, env, obs_queue, act_queue)"),
        ("Generates", "`run` contains `yield`"),
        ("Duck", "not an asyncrl.api.Agent"),
        ("NoTokenizer", "does not take 'tokenizer'"),
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


@pytest.mark.parametrize(
    "name", ["Good", "Inherits", "OverridesRun", "Around", "Elsewhere", "Typed", "Anything", "run"]
)
def test_agents_of_a_right_form_and_those_whose_source_does_not_say_pass(source: Path, name: str) -> None:
    assert list(agent_problems("agent", f"{source}:{name}", {})) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Half", "does not implement `step`"),
        ("NoOptions", "`reset` receives seed and options by name; add the parameters seed and options"),
        ("StepOfTwo", "`step` is called as step(action)"),
        ("DuckWorld", "not an asyncrl.api.Environment"),
    ],
)
def test_environments_of_a_wrong_form_are_told_what_is_wrong(source: Path, name: str, why: str) -> None:
    (problem,) = environment_problems("env", f"{source}:{name}", {})
    assert problem.startswith("env.path=")
    assert why in problem


@pytest.mark.parametrize("name", ["World", "Whole", "SeedByPlace", "AnyOptions", "Gymnasium", "make"])
def test_environments_of_a_right_form_and_those_whose_source_does_not_say_pass(source: Path, name: str) -> None:
    assert list(environment_problems("env", f"{source}:{name}", {})) == []


def test_the_settings_are_checked_so(source: Path) -> None:
    overrides = [f"agent.path={source}:Neither", f"env.path={source}:Half"]
    with pytest.raises(ConfigError, match="implements none of") as refused:
        validate(load_experiment("async_ppo", overrides))
    assert "does not implement `step`" in str(refused.value)
