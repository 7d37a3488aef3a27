"""A RolloutWorker that cannot load what the user named says which setting, and why, in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.rehearsal import MadeUpPolicy
from asyncrl.rollout.checks import check, code_problems
from asyncrl.rollout.settings import EvalSetConfig
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import UserCodeError

MINE = """
from asyncrl.api import Agent, Environment


class Choosy(Agent):
    def __init__(self, *, tokenizer):
        raise LookupError("no table")

    async def run(self, prompt, env, client): ...


class ChoosyEnv(Environment):
    def __init__(self, *, reward):
        raise LookupError("no table")

    async def reset(self, *, seed=None, options=None): ...
    async def step(self, action): ...


def makes_plain(*, reward):
    return Plain()


class Plain:
    def __init__(self, *, tokenizer=None, reward=None): ...


number = 3
"""


@pytest.mark.parametrize(
    ("group", "path", "message"),
    [
        ("agent", "{mine}:Choosy", "agent.path='{mine}:Choosy', agent.args={{}}: LookupError: no table"),
        ("agent", "{mine}:Plain", "agent.path='{mine}:Plain': it is not an asyncrl.api.Agent; derive it"),
        ("reward", "{mine}:number", "reward.path='{mine}:number': it is a int; name a class or function"),
        ("reward", "{mine}:gone", "reward.path='{mine}:gone': {mine} defines no 'gone'; it has: Agent, Environment, "),
        ("env", "{broken}:Env", "env.path='{broken}:Env': importing it failed in {broken}:2: ZeroDivisionError"),
        ("dataset", "{mine}:Plain", "dataset.path='{mine}:Plain': '{mine}:Plain' does not take 'split', which"),
        ("eval", "{folder}/none.jsonl", "eval.path='{folder}/none.jsonl': {folder}/none.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_loaded_is_one_error(
    tmp_path: Path, tiny_model: Path, group: str, path: str, message: str
) -> None:
    places = {"mine": tmp_path / "mine.py", "broken": tmp_path / "broken.py", "folder": tmp_path}
    places["mine"].write_text(MINE)
    places["broken"].write_text("class Env: ...\n1 / 0\n")
    config = ExperimentConfig()
    config.model.path = str(tiny_model)
    getattr(config, group).path = path.format(**places)
    with pytest.raises(ConfigError) as caught:
        UserComponents(config)
    assert str(caught.value).startswith(message.format(**places))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ChoosyEnv", "LookupError: no table"),
        ("makes_plain", "made a Plain; it needs to be an asyncrl.api.Environment"),
    ],
)
async def test_an_environment_that_cannot_be_built_is_one_error(
    tmp_path: Path, tiny_model: Path, name: str, why: str
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = ExperimentConfig()
    config.model.path, config.env.path = str(tiny_model), f"{tmp_path / 'mine.py'}:{name}"
    components = UserComponents(config)
    async with components.runner:
        with pytest.raises(UserCodeError, match=rf"env\.path=.*{why}"):
            await components.environments.one().reset()


FUNCTIONS = """
async def run(prompt, env, client, *, tokenizer, least: float = 0.0): ...
def plain(prompt, env, client): ...
def two(prompt, env): ...
"""


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("run", {"least": 0.5}, ""),
        ("plain", {}, ""),
        ("two", {}, "an episode is run(prompt, env, client); give it these three parameters"),
        ("run", {"lest": 0.5}, "has no parameter 'lest'"),
        ("plain", {"tokenizer": 1}, "has no parameter 'tokenizer'"),
    ],
)
def test_a_function_as_an_agent_is_checked_before_anything_starts(
    tmp_path: Path, tiny_model: Path, name: str, args: dict[str, object], message: str
) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    config = ExperimentConfig()
    config.model.path, config.agent.path = str(tiny_model), f"{tmp_path / 'functions.py'}:{name}"
    config.agent.args = args
    found = [problem for problem in code_problems(config) if problem.startswith("agent.")]
    if message:
        (problem,) = found
        assert message in problem
        with pytest.raises(ConfigError, match=r"^agent\.(path|args)="):
            UserComponents(config)
    else:
        assert found == []
        assert type(UserComponents(config).agent).__name__ == name


SETS = """
from asyncrl.api import Environment


def half(data, completion):
    return 0.5


class Tells(Environment):
    def __init__(self, *, reward, value):
        self.value = value

    async def reset(self, **options):
        return "", {}

    async def step(self, action):
        return "", self.value, True, False, {}

"""


async def test_each_evaluation_set_is_played_by_its_own_agent_environment_and_reward(
    tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "sets.py").write_text(SETS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = ExperimentConfig()
    config.model.path = str(tiny_model)
    code = {
        "plain": {},
        "scored": {"reward": {"path": f"{tmp_path}/sets.py:half"}},
        "told": {"env": {"path": f"{tmp_path}/sets.py:Tells", "args": {"value": 0.75}}},
    }
    config.eval.sets = [EvalSetConfig(name, str(rows), **own) for name, own in code.items()]
    assert [problem for problem in check(config) if problem.startswith("eval")] == []
    components = UserComponents(config)
    policy = MadeUpPolicy(components.tokenizer, 1)
    found = {}
    async with components.entered():
        for name in code:
            samples, _ = await components.play_to_evaluate(name, components.prompts.evaluation(name, 0, 0), policy)
            found[name] = [sample.total_reward for sample in samples]
    assert (found["scored"], found["told"]) == ([0.5], [0.75])
    assert found["plain"] not in ([0.5], [0.75])


def test_a_sets_code_that_cannot_be_loaded_is_named_by_its_own_setting(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = ExperimentConfig()
    config.model.path = str(tiny_model)
    config.eval.agent = {"path": f"{tmp_path}/mine.py:Choosy"}
    with pytest.raises(ConfigError, match=r"^eval\.agent\.path=.*LookupError: no table"):
        UserComponents(config)
