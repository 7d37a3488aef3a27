"""A reward that is declared a verdict says whether an answer is right; what it returns is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.api.reward import is_verdict
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.plugins.rewards.code_tests import CodeTestsReward
from asyncrl.plugins.rewards.math_answer import math_answer_reward
from asyncrl.plugins.rewards.text import exact_match, f1, numeric_match
from asyncrl.plugins.sandbox import SandboxUnavailable
from asyncrl.plugins.settings import NamedRewardConfig, RewardConfig
from asyncrl.rollout.user_code.rewards import Rewards, load_rewards
from asyncrl.rollout.user_code_pool.call_records import UserCodeError, metered
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

MINE = """
from asyncrl.api import run_in, verdict

@verdict
@run_in("loop")
def right(data, completion):
    return float(completion)

@run_in("loop")
def graded(data, completion):
    return float(completion)

@run_in("loop")
class Sometimes:
    def __init__(self, strict=False):
        if strict:
            verdict(self)

    def __call__(self, data, completion):
        return float(completion)
"""


async def reported(single: RewardConfig, several: Any, *answers: str) -> tuple[float, bool | None]:
    """The last answer's reward, and the verdict on it."""
    async with UserCodeRunner(ExperimentConfig().rollout.user_code) as runner:
        rewards = Rewards(load_rewards(single, several), runner)
        with metered() as meter:
            for answer in answers:
                value = await rewards.answer({}, answer)
    return value, meter.verdict


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


@pytest.mark.parametrize(
    ("name", "args", "verdict", "expected"),
    [
        ("right", {}, None, True),
        ("right", {}, False, None),
        ("graded", {}, None, None),
        ("graded", {}, True, True),
        ("Sometimes", {}, None, None),
        ("Sometimes", {"strict": True}, None, True),
    ],
)
async def test_a_verdict_is_declared_by_mark_or_setting(
    mine: str, name: str, args: dict[str, Any], verdict: bool | None, expected: bool | None
) -> None:
    config = RewardConfig(path=f"{mine}:{name}", args=args, verdict=verdict)
    assert await reported(config, [], "1") == (1.0, expected)


async def test_a_verdict_that_is_neither_0_nor_1_is_an_error_that_says_so(mine: str) -> None:
    with pytest.raises(UserCodeError, match=r"mine.py:right is declared a verdict and returned 0.5; return 0 or 1"):
        await reported(RewardConfig(path=f"{mine}:right"), [], "0.5")
    assert await reported(RewardConfig(path=f"{mine}:graded"), [], "0.5") == (0.5, None)


async def test_the_last_answers_verdict_counts_whatever_weight_and_other_rewards_make_of_it(mine: str) -> None:
    parts = [
        NamedRewardConfig(path=f"{mine}:right", name="right", weight=0.25),
        NamedRewardConfig(path=f"{mine}:graded", name="graded", weight=10.0),
    ]
    assert await reported(RewardConfig(), parts, "1", "0") == (0.0, False)
    assert await reported(RewardConfig(), parts, "0", "1") == (10.25, True)


async def test_what_stands_in_for_a_verdict_that_failed_is_no_right_answer(mine: str) -> None:
    config = RewardConfig(path=f"{mine}:right", failure_reward=-1.0)
    assert await reported(config, [], "no number") == (-1.0, False)


def test_built_in_rewards_that_tell_right_from_wrong_are_verdicts() -> None:
    assert all(map(is_verdict, (arithmetic_reward, math_answer_reward, exact_match, numeric_match)))
    assert not is_verdict(f1)
    try:
        assert is_verdict(CodeTestsReward())
        assert not is_verdict(CodeTestsReward(all_or_nothing=False)), "a share of the tests is a grade"
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_arguments_of_a_marked_reward_are_checked_before_anything_is_run(mine: str) -> None:
    from asyncrl.plugins.checks import reward_code_problems

    config = ExperimentConfig()
    config.reward.path, config.reward.args = f"{mine}:right", {"eech": 1}
    assert "has no parameter 'eech'" in "".join(reward_code_problems(config))


def test_an_evaluation_set_has_its_own_settings_and_those_of_eval_where_it_gives_none() -> None:
    from asyncrl.config.variants import evaluation_sets, longest_answer

    sets = "eval.sets=[{name: a, path: a.jsonl, n_samples: 4, sampling: {temperature: 0.7, max_new_tokens: 300}},"
    sets += "{name: b, path: b.jsonl, interval: 0}]"
    config = load_experiment("async_ppo", [sets, "eval.size=9", "eval.sampling.top_p=0.9", "eval.interval=3"])
    assert isinstance(config, ExperimentConfig)
    a, b = evaluation_sets(config)
    assert (a.interval, a.size, a.n_samples, a.temperature, a.top_p, a.max_new_tokens) == (3, 9, 4, 0.7, 0.9, 300)
    assert (b.interval, b.size, b.n_samples, b.temperature, b.top_p, b.max_new_tokens) == (0, 9, 1, 0.0, 0.9, 112)
    assert longest_answer(config) == 300
    assert [version for version in range(8) if a.is_due(version, 7)] == [0, 3, 6, 7]
    assert not any(b.is_due(version, 7) for version in range(8))
