"""Samples of one name are compared: estimators, filters, shaping and metrics; baselines by role."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import dr_grpo, rae
from asyncrl.algorithms.filters import overlong, zero_variance
from asyncrl.algorithms.grpo import grpo
from asyncrl.algorithms.inputs import AdvantageInputs
from asyncrl.api.trajectory import MAX_GROUPS, Sample, Trajectory
from asyncrl.comm.trajectory_codec import CodecError, decode_trajectories, encode_trajectories
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.observe.samples import rows_of, trajectories
from asyncrl.rollout.episode import metrics_of
from asyncrl.rollout.group_rules import GroupRules
from asyncrl.trainer.batches.step_batch import build_step_batch
from asyncrl.trainer.functions.model_functions import TrainState
from asyncrl.trainer.rank.inbox import record_of
from asyncrl.trainer.settings import SOURCE_NUMBER
from tests.examples import examples


def sample(reward: float, group: str = "", episode: int = 0, length: int = 3) -> Sample:
    mask = np.array([0] + [1] * (length - 1), np.uint8)
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        behave_logprobs=-0.5 * mask.astype(np.float32),
        versions=mask.astype(np.int32) - 1,
        reward=reward,
        group=group,
        episode=episode,
    )


def estimate(samples: list[Sample], estimator=dr_grpo) -> list[float]:
    """The advantage of each sample of one rollout."""
    batch = build_step_batch([Trajectory("r", "p", 0, samples)], [0], version=0, num_minibatches=1)
    output = estimator(
        AdvantageInputs(
            rewards_S=batch["rewards"],
            group_ids_S=batch["group_ids"],
            mask_T=batch["loss_mask"],
            seq_ids_T=batch.seq_ids_T,
            num_seqs=batch.num_seqs,
            episodes_S=batch["episodes"],
        )
    )
    ends = torch.from_numpy(batch.starts_S + batch.lengths_S - 1)
    return output.advantages_T[ends].tolist()


def test_solvers_of_one_problem_are_compared_with_each_other_and_proposers_with_proposers() -> None:
    """prime-rl's docs/algorithms.md, `hierarchical_grpo`: solvers of one proposed problem with rewards 1, 1, 0."""
    proposals = [sample(r, "proposer", episode=e) for e, r in enumerate((0.2, 0.6))]
    solvers = [sample(r, "solver/0", episode=0) for r in (1.0, 1.0, 0.0)]
    others = [sample(r, "solver/1", episode=1) for r in (0.0, 1.0)]
    advantages = estimate([*proposals, *solvers, *others])
    assert advantages == pytest.approx([-0.2, 0.2, 1 / 3, 1 / 3, -2 / 3, -0.5, 0.5])


@pytest.mark.parametrize("estimator", [grpo, dr_grpo])
def test_one_name_for_all_changes_nothing(estimator) -> None:
    rewards = [0.0, 1.0, 0.25, 1.0]
    named = [sample(r, "solver", episode=e // 2) for e, r in enumerate(rewards)]
    unnamed = [dataclasses.replace(s, group="") for s in named]
    assert estimate(named, estimator) == estimate(unnamed, estimator)


def test_samples_of_different_names_share_a_rollout_and_no_baseline() -> None:
    groups = ["a", "b", "a", "b"]
    samples = [sample(r, g, episode=n // 2) for n, (r, g) in enumerate(zip((1.0, 5.0, 0.0, 7.0), groups, strict=True))]
    trajectory = Trajectory("r", "p", 0, samples)
    batch = build_step_batch([trajectory, trajectory], [0, 0], version=0, num_minibatches=1)
    assert batch["rollouts"].tolist() == [0] * 4 + [1] * 4
    assert batch["group_ids"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert batch.group_names == ("a", "b", "a", "b")
    assert estimate(samples) == pytest.approx([0.5, -1.0, -0.5, 1.0])


def test_a_rollout_is_dropped_only_if_no_name_has_a_signal() -> None:
    rules = GroupRules([zero_variance])
    equal = [sample(1.0, "a", 0), sample(1.0, "a", 1), sample(0.0, "b", 0), sample(0.0, "b", 1)]
    assert rules.judge([dataclasses.replace(s, group="") for s in equal]).keep, "compared as one they differ"
    verdict = rules.judge(equal)
    assert (verdict.keep, verdict.reason) == (False, "zero_variance")
    assert rules.judge([*equal[:3], sample(0.5, "b", 1)]).keep
    assert not record_of(Trajectory("r", "p", 0, equal), 0).has_signal
    assert record_of(Trajectory("r", "p", 0, [*equal[:3], sample(0.5, "b", 1)]), 0).has_signal


def test_a_rollout_of_which_each_name_fails_another_filter_is_dropped() -> None:
    filters = [zero_variance, functools.partial(zero_variance, on="agent/kind")]
    a = [dataclasses.replace(sample(r, "a", e), metrics={"kind": 0.0}) for e, r in enumerate((0.0, 1.0))]
    b = [dataclasses.replace(sample(1.0, "b", e), metrics={"kind": float(e)}) for e in range(2)]
    assert not GroupRules(filters).judge([*a, *b]).keep


def test_the_solutions_of_one_episode_are_judged_as_a_group() -> None:
    rules, alone = GroupRules([zero_variance]), [sample(r, "solver", episode=0) for r in (0.0, 1.0)]
    assert rules.judge(alone).keep
    assert not rules.judge([dataclasses.replace(s, group="") for s in alone]).keep, "a group of one episode"


def test_shaping_sees_the_lengths_of_one_name() -> None:
    rules = GroupRules(shapings=[functools.partial(overlong, max_length=6, margin=2)])
    both = [sample(1.0, "a", 0, length=4), sample(1.0, "b", 0, length=5)]
    assert [s.reward for s in rules.shape(both)] == [1.0, 1.0], "3 and 4 generated tokens"
    together = [dataclasses.replace(s, group="") for s in both]
    assert [s.reward for s in rules.shape(together)] == [0.0, 0.0], "7 in the episode"


def test_metrics_have_the_mean_reward_of_each_role() -> None:
    samples = [sample(1.0, "solver/0"), sample(0.0, "solver/1"), sample(0.25, "proposer")]
    assert metrics_of(samples) == {"reward/role/solver": 0.5, "reward/role/proposer": 0.25}
    assert metrics_of([sample(1.0)]) == {}


def test_a_field_of_the_rows_has_its_own_metric_and_the_number_of_a_teachers_source_none() -> None:
    numbers = [{"row/level": level, "turns": 2.0, SOURCE_NUMBER: 1.0} for level in (1.0, 4.0)]
    samples = [dataclasses.replace(sample(0.0), metrics=each) for each in numbers]
    assert metrics_of(samples) == {"row/level": 2.5, "agent/turns": 2.0}


@settings(max_examples=examples(25))
@given(st.lists(st.lists(st.sampled_from(["", "a", "b/1", "\u00e9"]), min_size=1, max_size=6), min_size=1, max_size=4))
def test_names_survive_the_wire_and_kept_samples(groups: list[list[str]]) -> None:
    sent = [Trajectory(f"r{n}", "p", n, [sample(0.5, name) for name in names]) for n, names in enumerate(groups)]
    arrived = decode_trajectories(encode_trajectories(sent))
    again = decode_trajectories(encode_trajectories(arrived))
    for names, *each in zip(groups, arrived, again, strict=True):
        assert [[s.group for s in trajectory.samples] for trajectory in each] == [names, names]
    rows = [row for trajectory in arrived for row in rows_of(trajectory, 1, str, {})]
    assert [[s.group for s in trajectory.samples] for _, trajectory in trajectories(rows)] == groups


def test_names_cost_a_byte_a_sample() -> None:
    def size(*names: str) -> int:
        samples = [sample(0.5, name) for name in names]
        return sum(len(frame) for frame in encode_trajectories([Trajectory("r", "p", 0, samples)]))

    unnamed, named = ([size(*[name] * n) for n in (8, 808)] for name in ("", "judge"))
    assert 800 <= (named[1] - named[0]) - (unnamed[1] - unnamed[0]) < 810


def test_too_many_or_too_long_names_are_refused() -> None:
    many = [sample(0.5, f"s/{n}") for n in range(MAX_GROUPS + 1)]
    with pytest.raises(CodecError, match="256 comparison groups"):
        encode_trajectories([Trajectory("r", "p", 0, many)])
    for name in ("x" * 65, "a\nb"):
        with pytest.raises(ValueError, match="comparison group"):
            sample(0.5, name)


# rae


def roles_of(samples: list[tuple[str, float]], baselines: dict[str, float], **fields: object) -> AdvantageInputs:
    roles = sorted({role for role, _ in samples})
    count = len(samples)
    return AdvantageInputs(
        **{
            "rewards_S": torch.tensor([reward for _, reward in samples], dtype=torch.float64),
            "group_ids_S": torch.arange(count),
            "mask_T": torch.ones(count, dtype=torch.bool),
            "seq_ids_T": torch.arange(count),
            "num_seqs": count,
            "roles_S": torch.tensor([roles.index(role) for role, _ in samples if role in roles]),
            "roles": roles,
            "baselines": baselines,
        }
        | fields
    )


def test_rae_is_spirals_recursion_where_a_role_has_one_episode_a_step() -> None:
    """The paper's loop: A = r - b, then b <- decay b + (1 - decay) r, for each role by itself."""
    generator = np.random.default_rng(3)
    expected, baselines = {"first": 0.0, "second": 0.0}, {}
    for _ in range(30):
        played = {role: float(generator.normal()) for role in expected}
        output = rae(roles_of(list(played.items()), baselines), decay=0.9)
        assert output.advantages_T.tolist() == pytest.approx([r - expected[role] for role, r in played.items()])
        expected = {role: 0.9 * expected[role] + 0.1 * r for role, r in played.items()}
        baselines = output.baselines
        assert baselines == pytest.approx(expected)


def test_the_baseline_of_many_equal_rewards_is_the_recursions() -> None:
    output = rae(roles_of([("a", 2.0)] * 7 + [("b", 1.0)], {"a": 0.5, "gone": 3.0}), decay=0.9)
    expected = 0.5
    for _ in range(7):
        expected = 0.9 * expected + 0.1 * 2.0
    assert output.baselines == pytest.approx({"a": expected, "b": 0.1, "gone": 3.0})
    assert output.advantages_T.tolist() == pytest.approx([1.5] * 7 + [1.0])


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-5, 5)), min_size=2, max_size=9), st.integers(1, 8))
def test_neither_order_nor_ranks_change_the_baselines(samples: list[tuple[str, float]], cut: int) -> None:
    before = {"a": 1.0, "c": -2.0}
    whole = rae(roles_of(samples, before))
    assert rae(roles_of(samples[::-1], before)).baselines == pytest.approx(whole.baselines)
    roles = sorted({role for role, _ in samples})
    inputs = [
        roles_of(part, before, roles=roles, roles_S=torch.tensor([roles.index(role) for role, _ in part]))
        for part in (samples[:cut], samples[cut:])
        if part
    ]
    sums: list[torch.Tensor] = []
    for part in inputs:  # what each rank brings to the only reduction
        rae(dataclasses.replace(part, all_reduce=lambda x: sums.append(x) or x))
    found = [rae(dataclasses.replace(part, all_reduce=lambda _: torch.stack(sums).sum(0))) for part in inputs]
    assert all(each.baselines == pytest.approx(whole.baselines) for each in found)
    advantages = itertools.chain(*(each.advantages_T.tolist() for each in found))
    assert [*advantages] == pytest.approx(whole.advantages_T.tolist())


def test_a_checkpoint_has_the_baselines() -> None:
    config = ExperimentConfig().algorithm
    state = TrainState(config)
    state.baselines = {"first": 1 / 3, "": 0.1}
    resumed = TrainState(config)
    resumed.load_state_dict(state.state_dict())
    assert resumed.baselines == state.baselines
    old = {key: value for key, value in state.state_dict().items() if key != "baselines"}
    resumed.load_state_dict(old)
    assert resumed.baselines == {}


def test_a_decay_of_one_would_never_learn() -> None:
    with pytest.raises(ValueError, match=r"decay is 1\.0"):
        rae(roles_of([("a", 1.0)], {}), decay=1.0)
