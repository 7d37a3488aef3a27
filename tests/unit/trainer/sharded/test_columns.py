"""What a call wrote arrives with the ranks of a role of another layout as if that role's own ranks had computed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ChoiceConfig
from asyncrl.trainer.columns import Deals, move_columns
from asyncrl.trainer.messages import Assignment, BeginStep, MoveColumns
from asyncrl.trainer.parallel import World
from asyncrl.trainer.redistribute import deals
from asyncrl.trainer.settings import RoleRanks
from asyncrl.trainer.step_batch import StepBatch, build_step_batch
from asyncrl.trainer.worker_grid import WorkerGrid

ROLLOUTS = 7
COLUMNS = ("score", "chosen", "position", "per_sample", "flag_per_sample")


def columns_of(batch: StepBatch) -> dict[str, Tensor]:
    """Of every type and level; told by the content of a sample, whatever batch it is in."""
    tokens, samples = batch["tokens"], batch["rewards"]
    return {
        "score": tokens.float() / 7 + batch["behave_logprobs"],
        "chosen": tokens % 3 == 0,
        "position": tokens * 11,
        "per_sample": samples * 5 + batch["lengths"],
        "flag_per_sample": batch["lengths"] % 2 == 0,
    }


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

    def batch_of(dealt: Deals, grid: WorkerGrid, data: int) -> StepBatch:
        mine = [deal for deal in dealt[grid] if deal.data == data]
        trajectories = [rollouts[deal.rollout_id] for deal in mine]
        return build_step_batch(trajectories, [deal.minibatch for deal in mine], version=3, num_minibatches=2)

    def move(world: World) -> list[tuple[str, str]]:
        """What differs on this rank."""
        first, second = world.placement.grid("actor"), world.placement.grid("critic")
        order = [(number * 3) % ROLLOUTS for number in range(ROLLOUTS)]
        names = list(rollouts)
        dealt_to = sorted(number % first.data for number in range(ROLLOUTS))
        step = BeginStep(
            version=3,
            min_version=0,
            num_minibatches=2,
            assignment=tuple(
                Assignment(names[number], 0, 0 if everything_to_one else data, number % 2)
                for number, data in zip(order, dealt_to, strict=True)
            ),
            elsewhere=(tuple(0 if everything_to_one else number % second.data for number in range(ROLLOUTS)),),
        )
        dealt = deals(step, world.placement)
        wrong = []
        for source, target in (("actor", "critic"), ("critic", "actor")):
            batches = {grid: batch_of(dealt, grid, place.coordinates.data) for grid, place in world.places.items()}
            given, taken = world.placement.grid(source), world.placement.grid(target)
            if given in batches:
                for key, column in columns_of(batches[given]).items():
                    batches[given][key] = column
            move_columns(MoveColumns(COLUMNS, source, target), world, dealt, batches)
            if taken in batches:
                for key, expected in columns_of(batches[taken]).items():
                    arrived = batches[taken][key]
                    same_type = arrived.dtype == expected.dtype or not len(expected)
                    if not same_type or not torch.equal(arrived.to(expected.dtype), expected):
                        wrong.append((target, key))
        return wrong

    assert not any(on_ranks(config, move))


def test_a_column_that_is_neither_per_token_nor_per_sample_is_refused(
    config: ExperimentConfig, make_trajectories: Any, on_ranks: Any, tmp_path: Path
) -> None:
    config.algorithm.graph, config.algorithm.advantage = "ppo", ChoiceConfig("gae")
    config.trainer.parallel, config.algorithm.critic.ranks = "d1", RoleRanks.own
    rollouts = make_trajectories(groups=2, group_size=3)

    def move(world: World) -> str:
        step = BeginStep(0, 0, 1, tuple(Assignment(each.rollout_id, 0, 0, 0) for each in rollouts), ((0, 0),))
        batch = build_step_batch(rollouts, [0, 0], version=0, num_minibatches=1)
        if not world.hosts("actor"):
            return "not asked"
        batch._columns["per_group"] = torch.zeros(2)
        with pytest.raises(ValueError, match="'per_group' has 2 rows, which is neither one per token") as raised:
            move_columns(
                MoveColumns(("per_group",), "actor", "critic"),
                world,
                deals(step, world.placement),
                {world.placement.grid("actor"): batch},
            )
        return str(raised.value)

    on_ranks(config, move)
