"""The loop from step to step: what is waited for, who is told what, which weights stay."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm.request_reply import Request
from asyncrl.comm.waits import RunningClock
from asyncrl.manager import messages as m
from asyncrl.manager.messages import StatusReply
from asyncrl.observe.metrics.sample_tables import SampleTables
from asyncrl.runtime.run_log import note_restart, note_resumed
from asyncrl.trainer.messages import (
    BeginStep,
    CollectWeights,
    Discard,
    Publish,
    RunCall,
    SaveCheckpoint,
)
from asyncrl.trainer.parallel.placement import Placement, WorkerGrid
from tests.integration.master.fakes import (
    FakeManager,
    FakeWorkers,
    Run,
    make_config,
    rollout,
    running,
    until,
)
from tests.statuses import status_reply


async def test_trains_every_step_and_leaves_rows_with_all_required_keys(
    tmp_path: Path, required_metrics: set[str]
) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["policy_version"] for row in rows] == [1, 2, 3]
    assert rows[0].keys() >= required_metrics
    assert rows[0]["reward/mean"] == 0.5
    assert rows[0]["ppo/loss_per_minibatch"] == [0.1, 0.2]
    assert rows[0]["rank/memory_bytes"] == 999 + run.workers.count, "the largest of the ranks"
    mean = sum(range(1, run.workers.count + 1)) / run.workers.count
    assert (rows[0]["rank/tflops_per_s"], rows[0]["rank/mfu"]) == (2 * mean, 0.25 * mean)
    assert run.board.versions == [1, 2, 3]
    assert run.summary()["books"] == {
        "submitted": 12, "trained": 12, "dropped": {}, "abandoned": 0, "running": 0, "finished_untrained": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("transport", "on_disk"), [("disk", [True] * 5), ("tensor", [False, True, False, True, True])])
async def test_weights_are_written_for_servers_that_read_them_with_checkpoints_and_at_the_end(
    tmp_path: Path, transport: str, on_disk: list[bool]
) -> None:
    config = make_config(total_train_steps=5, checkpoint__interval=2)
    config.manager.weight_transport = transport
    run = Run(tmp_path, config)
    await run.deliver(range(20), oldest=4)
    await run.loop.run()
    published = run.workers.requests(Publish)
    assert [(request.version, request.to_disk) for request in published] == list(enumerate(on_disk, start=1))
    kept = [request.keep for request in run.workers.requests(CollectWeights)]
    assert transport == "disk" or kept[3] == (2, 3), "the newest folder goes only when there is a newer one"


async def test_a_run_that_is_stopped_leaves_its_last_weights_on_disk(tmp_path: Path) -> None:
    config = make_config(total_train_steps=9, checkpoint__interval=0)
    config.manager.weight_transport = "tensor"
    run = Run(tmp_path, config)
    await run.deliver(range(4), oldest=0)
    async with running(run) as task:
        await until(lambda: run.board.versions == [1])
        run.stop.set()
        await task
    published = [(request.version, request.to_disk) for request in run.workers.requests(Publish)]
    assert published == [(1, False), (1, True)]


async def test_a_batch_is_in_data_order_and_every_rank_is_told_its_part(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1), FakeWorkers(count=2))
    for worker, orders in ((0, (5, 0)), (1, (3, 1))):
        for order in orders:
            await run.deliver(range(order, order + 1), worker=worker)
    await run.loop.run()
    first, second = [request for _, request in run.workers.log if isinstance(request, BeginStep)]
    assert (first.leaving, second.leaving) == (("r0", "r5"), ("r1", "r3"))
    shares = [share for step in (first, second) for share in step.shares if share is not None]
    assert [len(share.rollout_ids) for share in shares] == [2, 2]
    assert all(list(share.rollout_ids) == sorted(share.rollout_ids) for share in shares)
    came_from = {
        rollout: source for share in shares for rollout, source in zip(share.rollout_ids, share.sources, strict=True)
    }
    assert came_from == {"r0": 0, "r5": 0, "r1": 1, "r3": 1}


async def test_trajectories_are_asked_of_the_heads_steps_of_all_and_weights_of_the_actors_ranks(tmp_path: Path) -> None:
    actor = WorkerGrid(data=2, tensor=2, pipeline=2)
    config = make_config(total_train_steps=2)
    config.algorithm.kl_coef = 0.1  # so there is a reference model
    placed = Placement({"actor": actor, "ref": WorkerGrid(data=1, first=8)})
    run = Run(tmp_path, config, FakeWorkers(placed=placed))
    run.manager.lose(4)
    await run.deliver(range(4), worker=1)
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 1)
        await run.workers.deliver(rollout(4, 1, worker=1))
        await run.deliver(range(4, 8), oldest=1, worker=1, tag="again")
        await task

    def asked(kind: type[Request[Any]], **fields: str) -> list[int]:
        found = [(worker, request) for worker, request in run.workers.log if isinstance(request, kind)]
        return [worker for worker, request in found if all(getattr(request, k) == v for k, v in fields.items())]

    assert asked(BeginStep) == list(range(9)) * 2
    assert asked(Publish) == list(range(8)) * 2
    assert asked(RunCall, name="ref_inf") == [8] * 2
    assert asked(RunCall, name="actor_train") == list(range(8)) * 2
    assert set(asked(SaveCheckpoint)) == set(range(9))
    steps = [request for _, request in run.workers.log if isinstance(request, BeginStep)]
    assert {len(step.leaving) for step in steps if step is not steps[2] and step is not steps[11]} == {0}
    assert {worker for step in (steps[2], steps[11]) for worker in step.targets[0]} == {0, 2}, "both of the actor's"
    assert {worker for step in (steps[2], steps[11]) for worker in step.targets[1]} == {8}, "the reference model's one"
    discards = [(worker, request) for worker, request in run.workers.log if isinstance(request, Discard)]
    assert discards == [(2, Discard(("r4",)))], "the head of data index 1 is worker 2"


async def test_metadata_is_collected_while_a_step_trains(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=2))
    run.workers.train_gate = asyncio.Event()
    await run.deliver(range(4))
    async with running(run) as task:
        await until(lambda: bool(run.workers.requests(RunCall)))
        await run.deliver(range(4, 8))
        await until(lambda: len(run.loop.run_state.buffer) == 4)
        assert (run.loop.run_state.version, run.manager.used) == (0, set())
        run.workers.train_gate.set()
        await task
    assert run.loop.run_state.version == 2


async def test_stale_rollouts_are_dropped_freed_and_their_prompts_returned(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=3))
    await run.deliver(range(6), oldest=0)
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 1)
        await run.deliver(range(6, 8), oldest=1)
        await until(lambda: run.loop.run_state.version == 2)
        assert run.workers.discarded == []
        await run.deliver(range(8, 9), oldest=0, tag="late")
        await run.deliver(range(9, 13), oldest=2)
        await task
    assert run.workers.discarded == ["late8"]
    drops = [drop for _, _, drops in run.manager.reports for drop in drops]
    assert drops == [m.DroppedRollout("late8", "stale")]
    assert "e0-8" not in run.manager.used
    assert sum(row["rollout/dropped_stale"] for row in run.rows()) == 1
    assert max(row["staleness/max"] for row in run.rows()) <= 1


@pytest.mark.parametrize("late", ["before the other", "in the other's step", "after the other's step"])
async def test_what_a_given_up_worker_delivers_late_does_not_count_and_its_prompt_is_trained_once(
    tmp_path: Path, late: str
) -> None:
    run = Run(tmp_path, make_config(total_train_steps=2))
    run.manager.lose(3)

    async def arrives() -> None:
        await run.workers.deliver(rollout(3, 0))
        await until(lambda: run.workers.discarded == ["r3"])

    await run.deliver(range(3))
    async with running(run) as task:
        await until(lambda: run.begun == 1 and len(run.loop.run_state.buffer) == 3)
        if late == "before the other":
            await arrives()
            assert len(run.loop.run_state.buffer) == 3
            assert run.loop.run_state.version == 0, "the step waits for one more"
        run.workers.train_gate = asyncio.Event()
        await run.deliver([3], tag="again")
        await until(lambda: bool(run.workers.requests(RunCall)))
        if late == "in the other's step":
            await arrives()
        run.workers.train_gate.set()
        await until(lambda: run.loop.run_state.version == 1)
        if late == "after the other's step":
            await arrives()
        await run.deliver(range(4, 8), oldest=1)
        await task
    assert run.workers.trained_rollouts() == ["r0", "r1", "r2", "again3", "r4", "r5", "r6", "r7"]
    assert run.workers.discarded == ["r3"]
    assert run.summary()["books"]["dropped"] == {"worker_died": 1}
    assert sum(row["rollout/dropped_worker_died"] for row in run.rows()) == 1


async def test_wait_holds_the_step_until_nothing_would_expire(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1, on_stale="wait"))
    run.manager.expiring = [["r9"], ["r9"]]
    await run.deliver(range(4))
    await run.loop.run()
    assert run.manager.asked == [0, 0, 0]


async def test_a_step_that_is_held_for_longer_than_the_stall_limit_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work that the step waits for is running, each part within its own limit."""
    monkeypatch.setattr("asyncrl.master.data.stall.ASK_S", 0.0)
    now = 0.0
    config = make_config(total_train_steps=1, on_stale="wait")
    run = Run(tmp_path, config, clock=RunningClock(lambda: now))
    run.loop.stall.limit_s = 1.0

    async def status(request: m.StatusRequest) -> StatusReply:
        nonlocal now
        now += 0.3
        run.loop.stall.clock()  # else it looks like a pause of this process
        return status_reply(running=7)

    async def still_running(request: m.WaitExpiringRequest) -> m.WaitExpiringReply:
        assert request.timeout_s < run.loop.stall.limit_s
        asked = now
        await until(lambda: now > asked + 0.5)
        return m.WaitExpiringReply(["r9"] if now < 10.0 else [])

    run.manager.status = status  # type: ignore[method-assign]
    run.manager.wait_expiring = still_running  # type: ignore[method-assign]
    await run.deliver(range(4))
    await run.loop.run()
    assert run.loop.run_state.version == 1
    assert now > 10.0


async def test_wait_takes_what_arrived_by_the_time_the_way_was_clear(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1, on_stale="wait"))
    await run.deliver(range(4, 8), oldest=1)

    async def clear_after_an_old_one_arrived(request: m.WaitExpiringRequest) -> m.WaitExpiringReply:
        run.manager.admit("old0", 0)
        run.workers.received[0].append(rollout(0, 0, "old"))  # without waking the poll that is open
        return m.WaitExpiringReply([])

    run.manager.wait_expiring = clear_after_an_old_one_arrived  # type: ignore[method-assign]
    await run.loop.run()
    assert run.workers.trained_rollouts() == ["old0", "r4", "r5", "r6"]


async def test_groups_that_filters_dropped_are_counted_where_they_were_dropped(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.workers.filtered_in_graph = 2.0

    orders = itertools.count(20)

    async def consumed(report: m.ConsumedReport) -> m.ConsumedReply:
        once = {"failed": 5, "worker_died": 1, "stale": 7} if report.version == 1 else {}
        each = {"filter: zero_variance": 3, "filter: too_hard": 1, "failed: reward my.py:score": 1}
        each = each if report.trained else {}
        for reason, count in (once | each).items():
            for _ in range(count):
                run.manager.give_up(f"e0-{next(orders)}", reason)
        return await FakeManager.consumed(run.manager, report)

    run.manager.consumed = consumed  # type: ignore[method-assign]
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    assert [row["filter/dropped_groups"] for row in run.rows()] == [4 + 2] * 3
    assert [row["rollout/dropped_failed"] for row in run.rows()] == [5, 0, 0]
    assert [row["rollout/dropped_failed: reward my.py:score"] for row in run.rows()] == [1, 1, 1]
    assert [row["rollout/dropped_filter: zero_variance"] for row in run.rows()] == [3, 3, 3]
    assert [row["rollout/dropped_filter: too_hard"] for row in run.rows()] == [1, 1, 1]
    assert [row["rollout/dropped_worker_died"] for row in run.rows()] == [1, 0, 0]
    assert [row["rollout/dropped_stale"] for row in run.rows()] == [7, 0, 0]


async def test_weights_that_a_server_still_loads_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.manager.versions_in_use = [0]
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    kept = [request.keep for request in run.workers.requests(CollectWeights)]
    assert kept == [(0,), (0, 1), (0, 1, 2), (0, 2, 3)]


async def test_each_row_counts_the_restarts_of_all_launches(tmp_path: Path) -> None:
    note_restart(tmp_path, "rollout_worker/0", "was killed")
    note_resumed(tmp_path, "rollout_worker/0", 2.5)
    run = Run(tmp_path, make_config())
    await run.deliver(range(12), oldest=2)
    run.workers.on_train = lambda: note_restart(tmp_path, "the brain", "was killed")
    await run.loop.run()
    assert [row["restarts"] for row in run.rows()] == [2, 3, 4]
    assert [row["time/restarts_s"] for row in run.rows()] == [2.5] * 3


async def test_kept_samples_are_shown_once_their_step_is_over_and_the_last_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []

    def new(tables: SampleTables, before: int) -> list[Any]:
        shown.append(before)
        return []

    monkeypatch.setattr(SampleTables, "new", new)
    run = Run(tmp_path, make_config(samples__every=1))
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    assert shown == [1, 2, 3, 4], "those of steps before"
