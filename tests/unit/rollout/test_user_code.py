"""A RolloutWorker that cannot load what the user named says which setting, and why, in one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.rollout.checks import check
from asyncrl.rollout.rehearsal import MadeUpPolicy
from asyncrl.rollout.settings import EvalSetConfig
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.user_code_errors import UserCodeError

MINE = """
class Choosy:
    def __init__(self, *, tokenizer=None, reward=None):
        raise LookupError("no table")


class Plain:
    def __init__(self, *, tokenizer=None, reward=None): ...


number = 3
"""


@pytest.mark.parametrize(
    ("group", "path", "message"),
    [
        ("agent", "{mine}:Choosy", "agent.path='{mine}:Choosy', agent.args={{}}: LookupError: no table"),
        ("agent", "{mine}:Plain", "agent.path='{mine}:Plain' made a Plain; it needs to be an asyncrl.api.Agent"),
        ("reward", "{mine}:number", "reward.path='{mine}:number': it is a int; name a class or function"),
        ("reward", "{mine}:gone", "reward.path='{mine}:gone': {mine} defines no 'gone'; it has: Choosy, Plain, number"),
        ("env", "{broken}:Env", "env.path='{broken}:Env': importing it failed in {broken}:2: ZeroDivisionError"),
        ("dataset", "{mine}:Plain", "dataset.path='{mine}:Plain': TypeError: "),
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


async def test_an_environment_that_cannot_be_built_is_one_error(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = ExperimentConfig()
    config.model.path, config.env.path = str(tiny_model), f"{tmp_path / 'mine.py'}:Choosy"
    components = UserComponents(config)
    async with components.runner:
        with pytest.raises(UserCodeError, match=r"env\.path=.*LookupError: no table"):
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
    found = [problem for problem in check(config) if problem.startswith("agent.")]
    if message:
        (problem,) = found
        assert message in problem
        with pytest.raises(ConfigError, match=r"^agent\.path="):
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
    async with components.runner, components.tools:
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
