"""The user's order of the buffer: the least ranks first, but never at the price of a rollout that cannot wait."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from asyncrl.api import ReadyRollout
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.master.checks import check
from asyncrl.master.data.order import BufferOrderFailed, ConfiguredOrder
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.settings import BufferOrderConfig
from asyncrl.rollout.checks import problems_of_others
from asyncrl.trainer.messages import RolloutRecord

LIMIT_S = 120.0
MINE = """
def hardest_first(rollout, *, from_age=0):
    return sum(rollout.rewards) / len(rollout.rewards) if rollout.age >= from_age else 1.0

def broken(rollout):
    return {"e0-1": 0.0}[rollout.prompt_id]

def not_a_number(rollout):
    return float("nan")

def leaves(rollout):
    raise SystemExit(3)

def too_late(rollout):
    raise TimeoutError("of my own")

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


async def taken(order: BufferOrderConfig, *records: RolloutRecord, batch: int = 2, eta: int = 2) -> list[list[str]]:
    """Return the rollouts that the steps from version 3 on train."""
    buffer = SampleBuffer(batch, eta, "drop")
    mine = ConfiguredOrder(replace(order, timeout_s=LIMIT_S)) if order.path else None
    buffer.add(records)
    batches = []
    version = 3
    while (found := buffer.take(version, await mine.ranks(buffer.live(), version) if mine else {})) is not None:
        batches.append([each.rollout_id for each in found.records])
        buffer.mark_trained(found)
        version += 1
    return batches


ROLLOUTS = [record(0, 1.0), record(1, 0.25), record(2, 0.5), record(3, 0.0)]


async def test_the_least_ranks_are_trained_first_and_within_a_batch_the_data_order_holds(mine: str) -> None:
    assert await taken(BufferOrderConfig(), *ROLLOUTS) == [["r0", "r1"], ["r2", "r3"]]
    assert await taken(BufferOrderConfig(f"{mine}:hardest_first"), *ROLLOUTS) == [["r1", "r3"], ["r0", "r2"]]
    assert (await taken(BufferOrderConfig(f"{mine}:hardest_first", {"from_age": 1}), *ROLLOUTS))[0] == ["r0", "r1"]


async def test_what_cannot_wait_comes_first_and_what_is_stale_not_at_all(mine: str) -> None:
    order = BufferOrderConfig(f"{mine}:hardest_first")
    last_chance, stale = record(4, 1.0, oldest=1), record(5, 0.0, oldest=0)
    assert await taken(order, *ROLLOUTS, last_chance, stale) == [["r3", "r4"], ["r1", "r2"]]
    one_step_left = record(4, 1.0, oldest=2)
    assert (await taken(order, *ROLLOUTS[1:], one_step_left))[0] == ["r1", "r3"], "it can wait for the next step"


@pytest.mark.parametrize("name", ["broken", "not_a_number", "leaves", "too_late"])
async def test_where_it_fails_the_step_takes_the_oldest_and_the_log_says_so(
    mine: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await taken(BufferOrderConfig(f"{mine}:{name}"), *ROLLOUTS) == [["r0", "r1"], ["r2", "r3"]]
    assert f"{name} " in caplog.text
    assert "took longer" not in caplog.text, "a TimeoutError of the function's own is a failure like others"
    assert "; step 4 does without it" in caplog.text


async def test_one_that_takes_too_long_costs_the_order_of_its_steps_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, mine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop goes on meanwhile, and while it hangs it is not called again."""
    begun, hang, calls = threading.Event(), threading.Event(), list[str]()

    def slow(rollout: ReadyRollout) -> float:
        calls.append(rollout.prompt_id)
        begun.set()
        hang.wait(LIMIT_S)
        return -rollout.order

    monkeypatch.setattr("asyncrl.master.data.order.load_plugin", lambda path: slow)
    order = ConfiguredOrder(BufferOrderConfig("mine.py:slow", timeout_s=0.05))
    assert await order.ranks(ROLLOUTS, 3) == {}
    assert "buffer.order mine.py:slow took longer than buffer.order.timeout_s=0.05 for 4 rollouts" in caplog.text
    assert await asyncio.to_thread(begun.wait, LIMIT_S)
    assert await order.ranks(ROLLOUTS, 4) == {}
    assert "slow has not returned from an earlier step's call; step 5 does without it" in caplog.text
    assert (calls, order.failures) == (["e0-0"], 2)
    hang.set()
    assert order._busy is not None
    await asyncio.wait_for(order._busy, LIMIT_S)
    order._limit_s = LIMIT_S
    assert await order.ranks(ROLLOUTS, 5) == {"r0": 0.0, "r1": -1.0, "r2": -2.0, "r3": -3.0}


async def test_what_arrives_while_it_ranks_is_behind_what_it_ranked(mine: str) -> None:
    buffer = SampleBuffer(2, 2, "drop")
    buffer.add([record(0, 1.0), record(2, 0.5)])
    order = ConfiguredOrder(BufferOrderConfig(f"{mine}:hardest_first", timeout_s=LIMIT_S))
    ranks = await order.ranks(buffer.live(), 3)
    buffer.add([record(1, 0.0)])
    batch = buffer.take(3, ranks)
    assert batch is not None
    assert [each.rollout_id for each in batch.records] == ["r0", "r2"]


async def test_the_function_sees_the_rollout_and_the_age_of_its_oldest_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = list[ReadyRollout]()

    def note(rollout: ReadyRollout) -> float:
        seen.append(rollout)
        return 0.0

    monkeypatch.setattr("asyncrl.master.data.order.load_plugin", lambda path: note)
    order = ConfiguredOrder(BufferOrderConfig("mine.py:note", timeout_s=LIMIT_S))
    empty = structs.replace(record(1, 0.0, oldest=-1), generated=(0, 0), version_tokens={})
    timed = structs.replace(record(0, 0.5, oldest=3), metrics={"time/reward_s": 2.0})
    await order.ranks([timed, empty], 5)
    assert seen[0] == ReadyRollout("e0-0", 0, 2, (0.5, 0.5), (6, 6), (False, False), {"time/reward_s": 2.0})
    assert seen[1].age == 0, "it has no token that could be old"


async def test_failures_are_counted_where_there_is_an_order(mine: str, caplog: pytest.LogCaptureFixture) -> None:
    order = ConfiguredOrder(BufferOrderConfig(f"{mine}:broken", timeout_s=LIMIT_S))
    assert order.metrics() == {"rollout/order_failed": 0.0}
    for _ in range(2):
        assert await order.ranks(ROLLOUTS, 3) == {}
    assert order.metrics() == {"rollout/order_failed": 2.0}


def test_a_path_that_names_no_function_is_refused(mine: str) -> None:
    for path, message in ((f"{mine}:constant", "it is a int"), (f"{mine}:nothing", "defines no 'nothing'")):
        with pytest.raises(ConfigError, match=message):
            ConfiguredOrder(BufferOrderConfig(path))
    config = ExperimentConfig()
    config.buffer.order = BufferOrderConfig(f"{mine}:hardest_first", {"form_age": 1})
    assert "did you mean 'from_age'?" in "".join(problems_of_others(config))
    config.buffer.order = BufferOrderConfig(args={"x": 1})
    assert "give buffer.order.path" in "".join(check(config))


CLASS = """
class LeastSeen:
    "Rows that were trained least often come first."

    def __init__(self, weight=1.0):
        self.weight, self.times = weight, {}

    def __call__(self, rollout):
        return self.weight * self.times.get(rollout.prompt_id.partition("-")[2], 0)

    def trained(self, rollouts):
        for rollout in rollouts:
            row = rollout.prompt_id.partition("-")[2]
            self.times[row] = self.times.get(row, 0) + 1

    def state(self):
        return self.times

    def restore(self, state):
        self.times = dict(state)


class HalfAState:
    def __call__(self, rollout):
        return 0.0

    def state(self):
        return {}


class NoCall:
    pass


class NotPlain(LeastSeen):
    def state(self):
        return {1, 2}
"""


@pytest.fixture
def classes(tmp_path: Path) -> str:
    (tmp_path / "classes.py").write_text(CLASS)
    return str(tmp_path / "classes.py")


def of_row(row: int, epoch: int) -> RolloutRecord:
    return structs.replace(record(row + 10 * epoch, 0.5), prompt_id=f"e{epoch}-{row}")


async def test_an_object_is_told_what_is_trained_and_goes_on_from_its_state(classes: str) -> None:
    config = BufferOrderConfig(f"{classes}:LeastSeen", timeout_s=LIMIT_S)
    order = ConfiguredOrder(config)
    assert order.state() == {"path": config.path, "state": {}}
    await order.trained([of_row(0, 0), of_row(1, 0)], 3)
    kept = json.loads(json.dumps(order.state()))
    await order.trained([of_row(0, 1)], 4)
    assert kept["state"] == {"0": 1, "1": 1}, "of the step that it was kept after"
    again = ConfiguredOrder(config)
    await again.restore(kept)
    waiting = [of_row(0, 2), of_row(1, 2), of_row(2, 2)]
    assert await again.ranks(waiting, 5) == {"r20": 1.0, "r21": 1.0, "r22": 0.0}
    assert await order.ranks(waiting, 5) == {"r20": 2.0, "r21": 1.0, "r22": 0.0}
    another = ConfiguredOrder(
        BufferOrderConfig(f"{classes}:NotPlain".replace("NotPlain", "LeastSeen"), {"weight": 2.0})
    )
    await another.restore({"path": "elsewhere.py:Other", "state": {"0": 7}})
    assert another.state() == {"path": config.path, "state": {}}


@pytest.mark.timeout(60)
async def test_a_state_that_cannot_be_restored_in_time_ends_the_start_with_the_setting(classes: str) -> None:
    order, hang = ConfiguredOrder(BufferOrderConfig(f"{classes}:LeastSeen", timeout_s=0.05)), threading.Event()
    order._own.restore = lambda state: hang.wait(LIMIT_S)
    with pytest.raises(BufferOrderFailed, match=r"took longer than buffer\.order\.timeout_s=0\.05 for restore"):
        await order.restore(order.state())
    hang.set()


async def test_an_object_that_fails_to_hear_of_a_step_does_not_cost_the_step(
    classes: str, caplog: pytest.LogCaptureFixture
) -> None:
    order = ConfiguredOrder(BufferOrderConfig(f"{classes}:LeastSeen", timeout_s=LIMIT_S))
    order._own.times = None
    await order.trained([of_row(0, 0)], 3)
    assert "step 4 was not reported to it" in caplog.text
    assert order.failures == 1


async def test_an_object_begins_anew_where_nothing_was_kept_of_it(
    classes: str, caplog: pytest.LogCaptureFixture
) -> None:
    order = ConfiguredOrder(BufferOrderConfig(f"{classes}:LeastSeen", timeout_s=LIMIT_S))
    await order.restore(None)
    assert order.state()["state"] == {}
    assert not caplog.records
    await order.restore({"path": "elsewhere.py:Other", "state": {"0": 7}})
    assert "begins anew: what was kept is of 'elsewhere.py:Other'" in caplog.text


async def test_a_functions_order_keeps_nothing(mine: str) -> None:
    order = ConfiguredOrder(BufferOrderConfig(f"{mine}:hardest_first"))
    await order.trained(ROLLOUTS, 3)
    assert order.state() is None
    await order.restore({"path": "before.py:Counted", "state": {"0": 7}})
    assert order.failures == 0


def test_an_object_that_cannot_be_kept_is_refused_before_the_start(classes: str) -> None:
    with pytest.raises(ConfigError, match=r"state\(\) and restore\(state\) both or neither"):
        ConfiguredOrder(BufferOrderConfig(f"{classes}:HalfAState"))
    with pytest.raises(ConfigError, match=r"its objects need __call__\(rollout\)"):
        ConfiguredOrder(BufferOrderConfig(f"{classes}:NoCall"))
    with pytest.raises(ConfigError, match=r"buffer\.order\.path=.*NotPlain.*state\(\) is a set; state must be"):
        ConfiguredOrder(BufferOrderConfig(f"{classes}:NotPlain"))
    config = ExperimentConfig()
    config.buffer.order = BufferOrderConfig(f"{classes}:LeastSeen", {"weight": 2.0})
    assert [*problems_of_others(config), *(line for line in check(config) if "buffer.order" in line)] == []
    config.buffer.order.args = {"wait": 2.0}
    (problem,) = problems_of_others(config)
    assert problem.startswith("buffer.order.args={'wait': 2.0}: ")
    assert "has no parameter 'wait'" in problem
    with pytest.raises(ConfigError, match="has no parameter 'wait'"):
        ConfiguredOrder(config.buffer.order)
