"""Columns of one's own: declared once, checked where a group is played, read where it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.api import Sample, Trajectory
from asyncrl.api.columns import ColumnError, column, with_columns
from asyncrl.api.reward import reward_parts
from asyncrl.api.trajectory import SampleColumns
from asyncrl.comm.trajectory_codec import decode_trajectories, encode_trajectories
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.config.setting import ConfigError
from asyncrl.launch.before_start.setting_checks import validate
from asyncrl.plugins.settings import NamedRewardConfig
from asyncrl.rollout.group_rules import GroupRules
from asyncrl.rollout.user_code.rewards import Rewards, load_rewards
from asyncrl.rollout.user_code_pool.call_records import UserCodeError
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner
from asyncrl.trainer.batches.step_batch import build_step_batch

MakeRewards = Callable[..., list[NamedRewardConfig]]
DECLARED = ("row/difficulty", "agent/turns", "reward/format", "token/weight")


def sample(reward: float = 1.0, episode: int = 0, length: int = 5) -> Sample:
    mask = np.array([0, 0, *[1] * (length - 2)], np.uint8)
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        behave_logprobs=-mask.astype(np.float32),
        versions=mask.astype(np.int32) - 1,
        reward=reward,
        episode=episode,
        metrics={"turns": 2.0},
        reward_parts={"format": 0.5 + episode},
        token_columns={"weight": mask * np.arange(length, dtype=np.float32)},
    )


def test_trajectories_of_one_message_keep_their_own_token_columns() -> None:
    """Some have two, some have one, some none; what they share at their beginning is sent once."""
    plain = replace(sample(), token_columns={})
    more = replace(sample(), token_columns={"b": sample().token_columns["weight"], "a": sample().loss_mask * 0.5})
    sent = [Trajectory(str(n), "p", n, (own, replace(own, episode=1))) for n, own in enumerate((more, plain, sample()))]
    for before, after in zip(sent, decode_trajectories(encode_trajectories(sent)), strict=True):
        for one, other in zip(before.samples, after.samples, strict=True):
            assert list(one.token_columns) == list(other.token_columns)
            assert all((other.token_columns[name] == own).all() for name, own in one.token_columns.items())


def test_every_kind_of_column_reaches_the_batch_over_the_wire() -> None:
    samples = with_columns([sample(), sample(episode=1, length=7)], {"difficulty": 3, "prompt": "x"}, DECLARED)
    sent = Trajectory("r", "p", 0, tuple(samples))
    (received,) = decode_trajectories(encode_trajectories([sent]))
    batch = build_step_batch([received], [0], version=1, num_minibatches=1, own=DECLARED)
    assert batch["row/difficulty"].tolist() == [3.0, 3.0]
    assert batch["agent/turns"].tolist() == [2.0, 2.0]
    assert batch["reward/format"].tolist() == [0.5, 1.5]
    assert batch["token/weight"].tolist() == [0, 0, 2, 3, 4, 0, 0, 2, 3, 4, 5, 6]
    by_token = batch.own_by_token(torch.tensor([2, 7]))
    assert {name: values.tolist() for name, values in by_token.items()} == {
        "row/difficulty": [3.0, 3.0],
        "agent/turns": [2.0, 2.0],
        "reward/format": [0.5, 1.5],
        "token/weight": [2.0, 2.0],
    }


def test_a_rank_without_rollouts_has_the_columns_too() -> None:
    batch = build_step_batch([], [], version=0, num_minibatches=1, own=DECLARED)
    assert all(batch[name].shape == (0,) for name in DECLARED)


@pytest.mark.parametrize(
    ("change", "data", "message"),
    [
        ({"metrics": {}}, {"difficulty": 1}, "a sample of episode 1 lacks 'agent/turns'; it has row/difficulty"),
        ({"reward_parts": {}}, {"difficulty": 1}, "lacks 'reward/format'; it has none"),
        ({"token_columns": {}}, {"difficulty": 1}, "lacks 'token/weight'; it has none"),
        ({}, {"prompt": "x"}, "'row/difficulty' is None in this row, whose fields are prompt"),
        ({}, {"difficulty": "hard"}, "'row/difficulty' is 'hard' in this row"),
        ({}, {"difficulty": float("nan")}, "'row/difficulty' is nan in this row"),
    ],
)
def test_a_sample_that_lacks_one_is_refused_by_name(
    change: dict[str, object], data: dict[str, object], message: str
) -> None:
    samples = [sample(), replace(sample(episode=1), **change)]  # type: ignore[arg-type]
    with pytest.raises(ColumnError) as caught:
        with_columns(samples, data, DECLARED)
    assert message in str(caught.value)


def test_samples_kept_before_a_column_was_declared_are_refused() -> None:
    with pytest.raises(ColumnError, match="'agent/effort' is missing in a sample that is to be trained"):
        column(SampleColumns.join([sample()]), "agent/effort")


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(4, np.float32), np.full(5, 0.5, np.float32), np.array([0, 0, np.nan, 0, 0], np.float32)],
    ids=["length", "at the prompt", "not a number"],
)
def test_a_token_column_has_finite_numbers_at_generated_tokens_alone(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"Sample\.token_columns\['weight'\]"):
        replace(sample(), token_columns={"weight": wrong})


@pytest.mark.parametrize("name", ["difficulty", "row/", "rows/difficulty"])
def test_a_declaration_that_names_no_source_is_refused_before_the_start(name: str, tiny_model: Path) -> None:
    config = ExperimentConfig()
    config.model.path, config.rollout.columns = str(tiny_model), [name]
    with pytest.raises(ConfigError, match=r"rollout\.columns\[0\]: .*write row/<field>"):
        validate(config)


def test_the_rewards_of_turns_count_for_what_is_right() -> None:
    """As in an evaluation: an environment that rewards each turn gives the sample itself nothing."""
    by_turn = replace(sample(0.0), token_rewards=np.array([0, 0, 0, 0, 1], np.float32))
    assert GroupRules(right_at=1.0).success([by_turn, sample(0.0, 1)]) == 0.5


def test_filters_look_at_a_part_of_the_reward_where_they_are_told_to() -> None:
    group = [sample(1.0, 0), sample(1.0, 1)]  # equal sums, parts of 0.5 and 1.5
    assert not GroupRules([resolve("filter", "zero_variance")]).judge(group).keep
    assert GroupRules([resolve("filter", "zero_variance", {"on": "reward/format"})]).judge(group).keep
    params = {"on": "reward/format", "threshold": 1.0, "high": 0.5}
    assert GroupRules([resolve("filter", "success_rate", params)]).judge(group).keep
    with pytest.raises(ValueError, match="an episode has no 'reward/correct'; there are reward/format, agent/turns"):
        GroupRules([resolve("filter", "zero_variance", {"on": "reward/correct"})]).judge(group)


CODE = """
def extras(data, completion):
    return {"score": 0.5, "format": 1, "right": True, "said": completion}

def no_score(data, completion):
    return {"format": 1.0}

def hides(data, completion):
    return {"score": 1.0, "mean": 2.0}

def one(data, completion):
    return 1.0

def ten(data, completion):
    return 10.0
"""


@pytest.fixture
def rewards(tmp_path: Path) -> MakeRewards:
    (tmp_path / "code.py").write_text(CODE)

    def make(*named: tuple[str, list[str]]) -> list[NamedRewardConfig]:
        return [NamedRewardConfig(path=f"{tmp_path / 'code.py'}:{name}", name=name, sources=of) for name, of in named]

    return make


async def test_numbers_beside_the_score_are_parts_and_do_not_count(
    rewards: MakeRewards,
) -> None:
    several = rewards(("extras", []), ("one", []))
    async with UserCodeRunner(ExperimentConfig().rollout.user_code) as runner:
        with reward_parts() as parts:
            total = await Rewards(load_rewards(several[0], several), runner).answer({}, "x")
        assert total == 1.5
        assert parts.means() == {"extras": 0.5, "extras.format": 1.0, "extras.right": 1.0, "one": 1.0}
        with reward_parts() as parts:
            assert await Rewards(load_rewards(several[0], ()), runner).answer({}, "x") == 0.5
        assert parts.means() == {"format": 1.0, "right": 1.0}


@pytest.mark.parametrize(
    ("name", "message"), [("no_score", "a finite number, {'score': number, ...}"), ("hides", "'mean': 2.0")]
)
async def test_a_mapping_without_a_score_or_with_a_metrics_name_is_refused(
    rewards: MakeRewards, name: str, message: str
) -> None:
    (config,) = rewards((name, []))
    async with UserCodeRunner(ExperimentConfig().rollout.user_code) as runner:
        with pytest.raises(UserCodeError) as caught:
            await Rewards(load_rewards(config, ()), runner).answer({}, "x")
        assert message in str(caught.value)


async def test_each_row_is_scored_by_the_rewards_of_its_source(rewards: MakeRewards) -> None:
    several = rewards(("one", ["gsm8k"]), ("ten", ["code"]))
    async with UserCodeRunner(ExperimentConfig().rollout.user_code) as runner:
        scored = Rewards(load_rewards(several[0], several), runner)
        assert await scored.answer({"source": "gsm8k"}, "x") == 1.0
        assert await scored.answer({"source": "code"}, "x") == 10.0
        with pytest.raises(UserCodeError, match="has none for rows of source 'poems'"):
            await scored.answer({"source": "poems"}, "x")
        everywhere = Rewards(load_rewards(several[0], rewards(("one", ["gsm8k"]), ("ten", []))), runner)
        assert await everywhere.answer({"source": "gsm8k"}, "x") == 11.0
        assert await everywhere.answer({}, "x") == 10.0
