"""The user's order of the buffer: the least ranks first, but never at the price of a rollout that cannot wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.master.buffer import SampleBuffer
from asyncrl.master.buffer_order import buffer_order
from asyncrl.master.settings import BufferOrderConfig, check
from asyncrl.trainer.messages import RolloutRecord

MINE = """
def hardest_first(rollout, *, from_age=0):
    return sum(rollout.rewards) / len(rollout.rewards) if rollout.age >= from_age else 1.0

def broken(rollout):
    return {"e0-1": 0.0}[rollout.prompt_id]

def not_a_number(rollout):
    return float("nan")

constant = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


def record(order: int, reward: float, oldest: int = 3) -> RolloutRecord:
    return RolloutRecord(
        f"r{order}",
        f"e0-{order}",
        order,
        0,
        oldest,
        {oldest: 6},
        (8, 8),
        (6, 6),
        (reward, reward),
        (False, False),
        (0, 1),
    )


def taken(order: BufferOrderConfig, *records: RolloutRecord, batch: int = 2, eta: int = 2) -> list[list[str]]:
    """What the steps from version 3 on train."""
    buffer = SampleBuffer(batch, eta, "drop", ranks=buffer_order(order))
    buffer.add(records)
    batches = []
    version = 3
    while (found := buffer.take(version)) is not None:
        batches.append([each.rollout_id for each in found.records])
        buffer.mark_trained(found)
        version += 1
    return batches


ROLLOUTS = [record(0, 1.0), record(1, 0.25), record(2, 0.5), record(3, 0.0)]


def test_the_least_ranks_are_trained_first_and_within_a_batch_the_data_order_holds(mine: str) -> None:
    assert taken(BufferOrderConfig(), *ROLLOUTS) == [["r0", "r1"], ["r2", "r3"]]
    assert taken(BufferOrderConfig(f"{mine}:hardest_first"), *ROLLOUTS) == [["r1", "r3"], ["r0", "r2"]]
    assert taken(BufferOrderConfig(f"{mine}:hardest_first", {"from_age": 1}), *ROLLOUTS)[0] == ["r0", "r1"]


def test_what_cannot_wait_comes_first_and_what_is_stale_not_at_all(mine: str) -> None:
    order = BufferOrderConfig(f"{mine}:hardest_first")
    last_chance, stale = record(4, 1.0, oldest=1), record(5, 0.0, oldest=0)
    assert taken(order, *ROLLOUTS, last_chance, stale) == [["r3", "r4"], ["r1", "r2"]]


@pytest.mark.parametrize("name", ["broken", "not_a_number"])
def test_where_it_fails_the_step_takes_the_oldest_and_the_log_says_so(
    mine: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert taken(BufferOrderConfig(f"{mine}:{name}"), *ROLLOUTS) == [["r0", "r1"], ["r2", "r3"]]
    assert f"{name} " in caplog.text
    assert "oldest tokens first in step 4" in caplog.text


def test_a_path_that_names_no_function_is_refused(mine: str) -> None:
    for path, message in ((f"{mine}:constant", "it is a int"), (f"{mine}:nothing", "defines no 'nothing'")):
        with pytest.raises(ConfigError, match=message):
            buffer_order(BufferOrderConfig(path))
    config = ExperimentConfig()
    config.buffer.order = BufferOrderConfig(f"{mine}:hardest_first", {"form_age": 1})
    assert "did you mean 'from_age'?" in "".join(check(config))
    config.buffer.order = BufferOrderConfig(args={"x": 1})
    assert "give buffer.order.path" in "".join(check(config))
