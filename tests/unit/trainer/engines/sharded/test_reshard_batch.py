"""Columns that a call wrote arrive at the ranks of a role of another layout as if that role's own ranks had computed
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig
from asyncrl.master.step import Assignment, plan_step
from asyncrl.trainer.batches.column_moves import Shares, move_columns
from asyncrl.trainer.batches.exchange import exchange_trajectories
from asyncrl.trainer.batches.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.messages import GridShare, MoveColumns
from asyncrl.trainer.parallel.world import World
from asyncrl.trainer.settings import RoleRanks

pytestmark = pytest.mark.slow

ROLLOUTS = 7
COLUMNS = ("score", "chosen", "position", "per_sample", "flag_per_sample")


def columns_of(batch: StepBatch) -> dict[str, Tensor]:
    """Columns of every type and level; their values depend only on the sample, not on its batch."""
    tokens, samples = batch["tokens"], batch["rewards"]
    return {
        "score": tokens.float() / 7 + batch["behave_logprobs"],
        "chosen": tokens % 3 == 0,
        "position": tokens * 11,
        "per_sample": samples * 5 + batch["lengths"],
        "flag_per_sample": batch["lengths"] % 2 == 0,
    }


def shares_of(cuts: list[list[Assignment]], world: World) -> Shares:
    """Return this rank's shares of a step with the assignments `cuts`."""
    reported = plan_step(cuts, world.placement, version=3, min_version=0, minibatches=2)[world.worker]
    shares = zip(world.placement.distinct, reported.shares, strict=True)
    return {grid: share for grid, share in shares if share is not None}


@pytest.mark.parametrize(
    ("actor", "critic", "ranks"),
    [
        ("d2", "t2", RoleRanks.shared),
        ("d3", "d2", RoleRanks.shared),
        ("d1", "p2", RoleRanks.own),
        ("d2t2", "d2p2", RoleRanks.shared),
    ],
)
@pytest.mark.parametrize("everything_to_one", [False, True])
def test_columns_cross_between_grids_in_both_directions(
    config: ExperimentConfig,
    make_trajectories: Any,
    on_ranks: Any,
    actor: str,
    critic: str,
    ranks: RoleRanks,
    everything_to_one: bool,
) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.trainer.parallel = actor
    config.algorithm.critic.parallel, config.algorithm.critic.ranks = critic, ranks
    rollouts = {each.rollout_id: each for each in make_trajectories(groups=ROLLOUTS, group_size=3)}

    def batch_of(share: GridShare) -> StepBatch:
        trajectories = [rollouts[rollout_id] for rollout_id in share.rollout_ids]
        return build_step_batch(trajectories, share.minibatches, version=3, num_minibatches=2)

    def move(world: World) -> list[tuple[str, str]]:
        """Return the differences on this rank."""
        first, second = world.placement.grid("actor"), world.placement.grid("critic")
        order = [(number * 3) % ROLLOUTS for number in range(ROLLOUTS)]
        names = list(rollouts)
        dealt_to = sorted(number % first.data for number in range(ROLLOUTS))
        dealt = [number % second.data for number in range(ROLLOUTS)]
        cuts = [
            [
                Assignment(names[number], 0, 0 if everything_to_one else data, number % 2)
                for number, data in zip(order, places, strict=True)
            ]
            for places in (dealt_to, dealt)
        ]
        shares = shares_of(cuts, world)
        wrong = []
        for source, target in (("actor", "critic"), ("critic", "actor")):
            batches = {grid: batch_of(share) for grid, share in shares.items()}
            given, taken = world.placement.grid(source), world.placement.grid(target)
            if given in batches:
                for key, column in columns_of(batches[given]).items():
                    batches[given][key] = column
            move_columns(MoveColumns(COLUMNS, source, target), world, shares, batches)
            if taken in batches:
                for key, expected in columns_of(batches[taken]).items():
                    arrived = batches[taken][key]
                    same_type = arrived.dtype == expected.dtype or not len(expected)
                    if not same_type or not torch.equal(arrived.to(expected.dtype), expected):
                        wrong.append((target, key))
        return wrong

    assert not any(on_ranks(config, move))


def test_columns_of_a_policys_samples_cross_where_not_every_rollout_has_one(
    config: ExperimentConfig, make_trajectories: Any, on_ranks: Any
) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.trainer.parallel = "d2"
    config.algorithm.critic.parallel, config.algorithm.critic.ranks = "d3", RoleRanks.own
    rollouts = {each.rollout_id: each for each in make_trajectories(groups=ROLLOUTS, group_size=3)}
    names = list(rollouts)
    judged = [names[1], names[3], names[4]]  # two are on one rank of the critic, and one of its ranks has none

    def move(world: World) -> list[int]:
        """Return the numbers of rollouts in the batch of each grid that this rank is in."""
        cuts = [[Assignment(name, row % 2, row % data, (0,)) for row, name in enumerate(names)] for data in (2, 3)]
        shares = {grid: share.keeping(judged) for grid, share in shares_of(cuts, world).items()}
        batches = {
            grid: build_step_batch(
                [rollouts[name] for name in share.rollout_ids], share.minibatches, version=3, num_minibatches=1
            )
            for grid, share in shares.items()
        }
        source, target = world.placement.grid("actor"), world.placement.grid("critic")
        if source in batches:
            for key, column in columns_of(batches[source]).items():
                batches[source][key] = column
        move_columns(MoveColumns(COLUMNS, "actor", "critic"), world, shares, batches)
        if target in batches and batches[target].num_seqs:
            for key, expected in columns_of(batches[target]).items():
                assert torch.equal(batches[target][key], expected), key
        return [len(share.rollout_ids) for share in shares.values()]

    assert on_ranks(config, move) == [[1], [2], [1], [2], [0]]


def test_trajectories_come_to_the_heads_of_each_grid_in_data_order_and_to_no_other_rank(
    config: ExperimentConfig, make_trajectories: Any, on_ranks: Any
) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.trainer.parallel = "d2t2"
    config.algorithm.critic.parallel, config.algorithm.critic.ranks = "d3", RoleRanks.shared
    rollouts = {each.rollout_id: each for each in make_trajectories(groups=ROLLOUTS, group_size=2)}
    names = list(rollouts)

    def exchange(world: World) -> list[list[str]]:
        """Return the columns that arrive here for the actor, and for the critic."""
        cuts = [[Assignment(name, row % 2, row % data, (0,)) for row, name in enumerate(names)] for data in (2, 3)]
        reported = plan_step(cuts, world.placement, version=3, min_version=0, minibatches=1)[world.worker]
        held = {name: rollouts[name] for name in reported.leaving}
        arrived = []
        for grid, targets, share in zip(world.placement.distinct, reported.targets, reported.shares, strict=True):
            heads = share is not None and world.positions[grid].copy.leads
            expected = dict(zip(share.rollout_ids, share.sources, strict=True)) if share and heads else {}
            came = exchange_trajectories(
                dict(zip(reported.leaving, targets, strict=True)), expected, held, world.everyone
            )
            assert all(
                np.array_equal(each.samples[0].tokens, rollouts[each.rollout_id].samples[0].tokens) for each in came
            )
            arrived.append([each.rollout_id for each in came])
        return arrived

    assert on_ranks(config, exchange) == [
        [names[0::2], names[0::3]],
        [[], names[1::3]],
        [names[1::2], names[2::3]],
        [[], []],
    ]


def test_a_column_that_is_neither_per_token_nor_per_sample_is_refused(
    config: ExperimentConfig, make_trajectories: Any, on_ranks: Any, tmp_path: Path
) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.trainer.parallel, config.algorithm.critic.ranks = "d1", RoleRanks.own
    rollouts = make_trajectories(groups=2, group_size=3)

    def move(world: World) -> str:
        cuts = [[Assignment(each.rollout_id, 0, 0, (0,)) for each in rollouts]] * 2
        batch = build_step_batch(rollouts, [0, 0], version=0, num_minibatches=1)
        if not world.hosts("actor"):
            return "not asked"
        for column, reported in (
            (torch.zeros(2), "'mine' has 2 rows, which is neither one per token"),
            (torch.zeros(batch.num_tokens, 2), f"'mine' has shape \\({batch.num_tokens}, 2\\)"),
            (torch.zeros(batch.num_seqs, dtype=torch.complex64), "type torch.complex64; only vectors of numbers"),
        ):
            batch._columns["mine"] = column
            with pytest.raises(ValueError, match=reported):
                move_columns(
                    MoveColumns(("mine",), "actor", "critic"),
                    world,
                    shares_of(cuts, world),
                    {world.placement.grid("actor"): batch},
                )
        return "asked"

    assert "asked" in on_ranks(config, move)
