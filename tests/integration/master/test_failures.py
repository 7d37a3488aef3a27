"""Failures, stalls, checkpoints that cannot be written: what is complete is saved, and the run says what is wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from asyncrl.comm.http_client import HttpRefused
from asyncrl.comm.request_reply import RequestTimeout
from asyncrl.comm.waits import RunningClock
from asyncrl.manager.client import ManagerGone
from asyncrl.manager.messages import RunBegin, StatusReply, StatusRequest
from asyncrl.master import peers
from asyncrl.master.data import sample_buffer
from asyncrl.master.data.sample_buffer import CountsError
from asyncrl.master.peers import Stalled
from asyncrl.master.step import ExecutionError
from asyncrl.trainer.messages import (
    AskPulse,
    BeginStep,
    FinishShare,
    PollBuffer,
    RankPulse,
    RunCall,
    SaveCheckpoint,
)
from tests.integration.master.fakes import (
    FakeWorkers,
    Run,
    check_history,
    make_config,
    running,
    until,
)
from tests.statuses import status_reply


async def test_a_stall_says_who_waits_for_what_on_which_counter(tmp_path: Path) -> None:
    now = 0.0
    run = Run(tmp_path, make_config(), clock=RunningClock(lambda: now))
    await run.deliver(range(3))
    async with running(run) as task:
        await until(lambda: run.begun == 1 and len(run.loop.run_state.buffer) == 3)
        run.loop.stall.limit_s = 0.05  # below the setting's least value
        while not task.done():  # what passes between two waits is no silence
            now += 0.1
            await asyncio.sleep(0.01)
        with pytest.raises(Stalled) as stall:
            await task
    message = str(stall.value)
    assert "step 0 waits for trajectories" in message
    assert "3 of 4 rollouts in the buffer" in message
    assert "gate: trained 0 + finished 0 + running 0 of 8 allowed" in message


async def test_a_manager_that_always_refuses_the_trainer_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would admit no rollout, and the run would end at its stall limit."""
    run = Run(tmp_path, make_config())

    async def refuse(begin: RunBegin) -> None:
        raise HttpRefused("http://manager/begin_run", 413, b"more than 256 MB")

    monkeypatch.setattr(run.manager, "begin_run", refuse)
    async with running(run) as task:
        with pytest.raises(HttpRefused, match="413: more than 256 MB"):
            await task


async def test_a_pause_of_the_master_is_no_stall(tmp_path: Path) -> None:
    now = 0.0
    run = Run(tmp_path, make_config(total_train_steps=2), clock=RunningClock(lambda: now))
    await run.deliver(range(4))
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 1 and len(run.rows()) == 1)
        await run.deliver(range(4, 5), oldest=1)
        await until(lambda: len(run.loop.run_state.buffer) == 1)
        now += 2 * run.config.system.stall_timeout_s  # the process is stopped
        await run.deliver(range(5, 6), oldest=1)
        await until(lambda: len(run.loop.run_state.buffer) == 2)
        await run.deliver(range(6, 8), oldest=1)
        await task
    assert run.loop.run_state.version == 2


async def test_the_stall_clock_begins_once_generation_servers_and_rollout_workers_have_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.master.data.stall.LOOK_S", 0.01)
    run = Run(tmp_path, make_config())
    run.loop.stall.limit_s = 0.02
    looks = 0

    def starting() -> bool:
        nonlocal looks
        looks += 1
        return looks < 20  # ten times the limit

    run.board.producers_start = starting  # type: ignore[method-assign]
    with pytest.raises(Stalled, match="0 of 4 rollouts in the buffer"):
        await run.loop.run()
    assert looks >= 20


async def test_a_stall_names_a_worker_that_is_silent(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.loop.stall.limit_s = 0.3
    async with running(run) as task:
        await until(lambda: run.manager.reported is not None)
        run.loop.collector._heads[0].silent = True
        with pytest.raises(Stalled, match=r"data head 0 \(a ModelWorker\) is silent"):
            await task


@pytest.mark.parametrize(
    "seen",
    [status_reply(running=7), status_reply(loading=True), status_reply(running=1, dropped={"timeout": 3})],
    ids=["rollouts within their limits", "a server that loads weights", "some rollouts lost"],
)
async def test_what_is_at_work_may_take_any_time(
    tmp_path: Path, seen: StatusReply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait of many limits: each rollout has a limit of its own, and so has a server's update."""
    monkeypatch.setattr("asyncrl.master.data.stall.ASK_S", 0.0)
    now, asked = 0.0, itertools.count()
    run = Run(tmp_path, make_config(), clock=RunningClock(lambda: now))
    run.loop.stall.limit_s = 1.0

    async def status(request: StatusRequest) -> StatusReply:
        nonlocal now
        next(asked)
        now += 0.3
        run.loop.stall.clock()  # else it looks like a pause of this process
        return seen

    run.manager.status = status  # type: ignore[method-assign]
    async with running(run) as task:
        await until(lambda: next(copy(asked)) > 40 or task.done())
        assert not task.done()
        seen = status_reply()  # and then nothing
        with pytest.raises(Stalled, match="no sign of life"):
            await task


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (status_reply(running=7, able=False), "no sign of life"),
        (status_reply(running=7, rebuilt=False), "no sign of life"),
        (status_reply(running=7, loading=True), "data head 0"),
    ],
    ids=["all servers in quarantine", "the manager knows nothing", "the rank that receives them is silent"],
)
async def test_rollouts_that_cannot_arrive_are_no_sign_of_life(tmp_path: Path, seen: StatusReply, why: str) -> None:
    run = Run(tmp_path, make_config())
    run.manager.seen, run.loop.stall.limit_s = seen, 0.3
    async with running(run) as task:
        await until(lambda: run.manager.reported is not None)
        run.loop.collector._heads[0].silent = "head" in why
        with pytest.raises(Stalled, match=why):
            await task


async def test_rollouts_that_only_fail_are_no_sign_of_life_and_the_message_counts_them(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())  # 8 rollouts may be ahead
    run.loop.stall.limit_s, lost = 0.1, itertools.count()

    async def status(request: StatusRequest) -> StatusReply:
        return status_reply(running=7, dropped={"timeout": next(lost), "failed: reward": 2})

    run.manager.status = status  # type: ignore[method-assign]
    with pytest.raises(Stalled, match=r"since the last rollout that arrived, \d+ were lost \(\d+ timeout\)$"):
        await run.loop.run()
    assert next(lost) > 8


async def test_a_step_may_take_any_time_while_its_ranks_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1))
    run.loop.executor._limit_s = 0.04  # below the setting's least value
    run.workers.train_gate, run.workers.pulse = asyncio.Event(), lambda asked: RankPulse(pieces=asked)
    await run.deliver(range(4))
    async with running(run) as task:
        await until(lambda: len(run.workers.requests(AskPulse)) > 5 * peers.BUSY_LIMITS or task.done())
        assert not task.done()
        run.workers.train_gate.set()
        await task


@pytest.mark.parametrize(
    ("pulse", "why"),
    [
        (lambda asked: RankPulse(), "none has computed for 0.2 s"),
        (lambda asked: RankPulse(cpu_s=9.0 * asked), "use CPU time, but no micro-batch"),
        (None, "no sign of life from model_worker/0 for 0.04 s"),
    ],
    ids=["a deadlock", "an endless loop", "a frozen rank"],
)
async def test_ranks_that_stand_still_end_the_run_which_says_how(tmp_path: Path, pulse: Any, why: str) -> None:
    run = Run(tmp_path, make_config())
    run.loop.executor._limit_s = 0.04  # below the setting's least value
    run.workers.train_gate, run.workers.pulse = asyncio.Event(), pulse
    if pulse is None:
        run.workers.on_train = lambda: run.workers.fail.update({AskPulse: RequestTimeout("no answer")})
    await run.deliver(range(4))
    with pytest.raises(Stalled, match=rf"call 'actor_train' \(role 'actor'\) waits: .*{why}"):
        await run.loop.run()


async def test_a_failed_call_is_named_and_leaves_the_last_checkpoint_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    run.workers.fail[RunCall] = RuntimeError("out of memory")
    await run.deliver(range(4))
    with pytest.raises(ExecutionError, match=r"call 'actor_inf'.*model_worker/0 failed: out of memory"):
        await run.loop.run()
    assert run.workers.saved() == []


@pytest.mark.parametrize("manager", ["dead", "silent"])
async def test_without_the_manager_a_stopped_run_saves_its_last_step_and_the_next_launch_goes_on_from_there(
    tmp_path: Path, manager: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate's part of the checkpoint is that of the step: nobody knows what happened at the gate since."""
    monkeypatch.setattr(sample_buffer, "ANSWER_S", 0.05)
    run = Run(tmp_path, make_config(total_train_steps=3))
    await run.deliver(range(6))
    async with running(run) as task:
        await until(lambda: run.loop.run_state.recorded == 1)
        run.manager.give_up("e0-20")
        setattr(run.manager, manager, True)
        run.stop.set()
        with pytest.raises((ManagerGone, CountsError)):
            await task
    assert run.workers.saved() == [1]
    assert json.loads((tmp_path / "books.json").read_text())["books"]["trained"] == 4
    assert run.workers.stored is not None
    assert run.workers.stored["gate"]["used"]["count"] == 4
    lines = (tmp_path / "ledger" / "000001.jsonl").read_text().splitlines()
    assert json.loads(lines[run.workers.stored["gate"]["line"] - 1])["kind"] == "step"

    run = Run(tmp_path, run.config, FakeWorkers(stored=run.workers.stored))
    await run.deliver(range(4, 12), oldest=1, tag="again")
    await run.loop.run()
    assert run.workers.trained_rollouts() == [f"again{order}" for order in range(4, 12)]
    check_history(tmp_path, steps=3)


async def test_a_stop_saves_before_it_calls_the_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So one that does not answer costs the checkpoint nothing."""
    run = Run(tmp_path, make_config())
    await run.deliver(range(6))
    async with running(run) as task:
        await until(lambda: run.loop.run_state.recorded == 1)
        answers, saved = run.manager._answers, list[list[int]]()

        async def noted() -> None:
            saved.append(run.workers.saved())
            await answers()

        monkeypatch.setattr(run.manager, "_answers", noted)
        run.stop.set()
        await task
    assert len(saved) > 1
    assert saved == [[1]] * len(saved)


async def test_a_step_that_the_manager_did_not_record_is_not_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(8))
    run.workers.on_train = lambda: setattr(run.manager, "dead", True)
    with pytest.raises(ManagerGone):
        await run.loop.run()
    assert run.loop.run_state.version == 1
    assert (run.workers.saved(), run.rows(), run.board.versions) == ([], [], [])


@pytest.mark.parametrize(
    ("of", "fails"),
    [
        ("publishing", "publish"),
        ("memory_checkpointer", "finish"),
        ("announcer", "published"),
        ("metrics_log", "step"),
        ("checkpoints", "begin"),
    ],
)
async def test_what_is_saved_after_a_failure_at_a_steps_end_is_what_the_counts_have(
    tmp_path: Path, of: str, fails: str
) -> None:
    """Without an in-memory checkpoint, a step is complete once it is trained; the run goes on as if nothing was."""
    run = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=1, max_head_offpolicyness=3))
    await run.deliver(range(8))
    part = getattr(run.loop, of)
    does = getattr(part, fails)

    def fail(*given: Any, **options: Any) -> Any:
        if run.loop.run_state.version == 2:
            setattr(part, fails, does)
            raise OSError("disk full")
        return does(*given, **options)

    setattr(part, fails, fail)
    with pytest.raises(OSError, match="disk full"):
        await run.loop.run()
    recorded = 1 if of == "metrics_log" else 2
    assert run.workers.saved()[-1] == recorded
    assert [row["step"] for row in run.rows()] == list(range(1, recorded + 1))
    run = Run(tmp_path, run.config, follows=run)
    await run.deliver(range(4 * recorded, 16), oldest=recorded, tag="again")
    await run.loop.run()
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]
    assert run.workers.stored is not None
    assert run.workers.stored["gate"]["used"]["count"] == 16
    check_history(tmp_path, steps=4)


async def test_training_goes_on_while_a_checkpoint_is_written_and_only_a_whole_one_counts(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=2))
    written = run.workers.write_gate = asyncio.Event()
    async with running(run) as task:
        await run.deliver(range(8))
        await until(lambda: run.loop.run_state.version == 2)
        await run.deliver(range(8, 12), oldest=2)
        await until(lambda: run.loop.run_state.version == 3)
        assert [save.version for save in run.workers.requests(SaveCheckpoint)] == [2]
        assert run.workers.saved() == []
        await run.deliver(range(12, 16), oldest=2)
        await until(lambda: run.loop.run_state.version == 4)
        assert [save.version for save in run.workers.requests(SaveCheckpoint)] == [2], "the second waits for the first"
        written.set()
        await task
    assert run.workers.saved() == [2, 4]


async def test_no_step_is_trained_after_a_checkpoint_that_could_not_be_written(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=1))
    run.workers.fail[FinishShare] = OSError("disk full")
    async with running(run) as task:
        await run.deliver(range(4))
        await until(lambda: bool(run.workers.requests(FinishShare)))
        await run.deliver(range(4, 8))
        with pytest.raises(OSError, match="disk full"):
            await task
    assert run.loop.run_state.version == 1
    assert [save.version for save in run.workers.requests(SaveCheckpoint)] == [1, 1], "tried once more at the end"
    assert run.workers.saved() == []


async def test_a_step_that_fails_leaves_the_checkpoint_under_way_to_be_finished(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=4, checkpoint__interval=1))
    written = run.workers.write_gate = asyncio.Event()
    async with running(run) as task:
        await run.deliver(range(4))
        await until(lambda: run.loop.run_state.version == 1)
        run.workers.fail[RunCall] = RuntimeError("out of memory")
        await run.deliver(range(4, 8))
        await until(lambda: len(run.workers.requests(BeginStep)) == 2)
        written.set()
        with pytest.raises(ExecutionError, match="out of memory"):
            await task
    assert run.workers.saved() == [1]


async def test_nothing_is_saved_through_a_worker_that_is_gone(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config())
    await run.deliver(range(5))
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 1)
        run.workers.fail[PollBuffer] = ConnectionError("model_worker/0 is gone")
        await run.deliver(range(5, 6))
        with pytest.raises(ConnectionError, match="model_worker/0"):
            await task
    assert run.workers.saved() == []


@pytest.mark.parametrize("left", [0, 3])
async def test_a_run_whose_prompts_are_used_up_ends_with_the_last_whole_batch(tmp_path: Path, left: int) -> None:
    run = Run(tmp_path, make_config(total_epochs=1.0, eval__interval=2))  # 3 steps, if no prompt is dropped for good
    run.manager.seen, run.loop.stall.limit_s = status_reply(used_up=True), 0.4
    await run.deliver(range(4 + left))
    run.manager.give_up("e0-20")
    await run.loop.run()
    assert [row["step"] for row in run.rows()] == [0, 1]
    summary = run.summary()
    assert summary["eval"]["held_out"]["version"] == 1, "the last version is evaluated"
    assert (summary["steps"], summary["total_steps"]) == (1, 1)
    assert summary["books"]["abandoned"] == left
    (reported,) = [json.loads(line)["remark"] for line in (tmp_path / "remarks.jsonl").read_text().splitlines()]
    assert "used up after step 1 of 3 (dropped: 1 failed)" in reported
    assert f": {left} are left, fewer than train_batch_size=4" in reported
