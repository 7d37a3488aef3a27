"""An evaluation pins the version that it measures, and holds rows and checkpoints back no longer than it takes."""

from __future__ import annotations

import asyncio
import itertools
import json
from copy import copy
from pathlib import Path

import pytest

from asyncrl.master import policy_versions
from asyncrl.master.peers import Stalled
from asyncrl.rollout.settings import EvalSetConfig
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.messages import (
    CommitCheckpoint,
    Publish,
)
from asyncrl.trainer.settings import BestDirection
from tests.integration.master.fakes import (
    FakeWorkers,
    Run,
    kill,
    make_config,
    running,
    until,
)


async def test_an_evaluation_pins_its_version_while_training_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=4, eval__interval=2))
    run.rollouts.finish = asyncio.Event()
    await run.deliver(range(8), oldest=1)
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 2)
        assert run.rollouts.started == [0]
        assert run.board.versions == []  # version 0 is being measured
        run.rollouts.finish.set()
        await until(lambda: run.rollouts.started == [0, 2])
        run.rollouts.finish = None
        await run.deliver(range(8, 16), oldest=2)
        await task
    assert {2, 4} <= set(run.board.versions)  # a version that is measured is never skipped
    rows = {row["step"]: row for row in run.rows()}
    assert sorted(rows) == [0, 1, 2, 3, 4]
    measured = {"accuracy": 0.5, "reward_mean": 0.5, "len_mean": 6.0, "truncated": 0.5, "prompts": 2.0}
    measured["tool/search/calls"] = 2.0
    evaluation = {f"eval/held_out/{metric}": value for metric, value in measured.items()}
    assert rows[0].pop("eval/held_out/seconds") > 0.0
    assert rows[0] == {"step": 0, "policy_version": 0, **evaluation}
    assert [step for step, row in rows.items() if "eval/held_out/accuracy" in row] == [0, 2, 4]
    last = run.summary()["eval"]
    assert last["held_out"].pop("seconds") > 0.0
    assert last == {"held_out": {"version": 4, **measured}}
    assert [item["version"] for item in run.summary()["evaluations"]] == [0, 2, 4]
    assert run.summary()["evaluations_failed"] == []


async def test_a_failed_evaluation_does_not_hold_the_run_and_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(eval__interval=1))
    run.rollouts.fail = RuntimeError("no server")
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    assert [row["step"] for row in run.rows()] == [0, 1, 2, 3]
    assert all(row["eval/held_out/failed"] == 1.0 and "eval/held_out/accuracy" not in row for row in run.rows())
    reason = "RuntimeError: no server"
    assert run.summary()["evaluations_failed"] == [
        {"version": version, "set": "held_out", "reason": reason} for version in range(4)
    ]


async def test_of_several_sets_each_has_its_interval_and_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    config = make_config(total_train_steps=3, eval__interval=1)
    config.eval.sets = [EvalSetConfig("easy", interval=2), EvalSetConfig("hard"), EvalSetConfig("never", interval=0)]
    run = Run(tmp_path, config)
    run.rollouts.failing = ("hard",)
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    rows = run.rows()
    assert [row["step"] for row in rows if "eval/easy/accuracy" in row] == [0, 2, 3]
    assert [row["step"] for row in rows if "eval/hard/failed" in row] == [0, 1, 2, 3]
    summary = run.summary()
    assert {name: found["version"] for name, found in summary["eval"].items()} == {"easy": 3}
    assert [(item["version"], item["set"]) for item in summary["evaluations_failed"]] == [(v, "hard") for v in range(4)]


async def test_an_evaluation_whose_worker_is_silent_has_failed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take any time: there is no other limit."""
    monkeypatch.setattr(policy_versions, "ASK_S", 0.0)
    run = Run(tmp_path, make_config(eval__interval=3))
    run.rollouts.finish, run.rollouts.silent = asyncio.Event(), True
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    reason = "TimeoutError: RolloutWorker 0 showed no sign of life for 120 s (system.stall_timeout_s)"
    assert run.summary()["evaluations_failed"][0]["reason"] == reason


async def test_a_slow_evaluation_that_holds_the_data_back_is_no_stall(tmp_path: Path) -> None:
    """The gate has no room before a newer version is served, and none is while the evaluation goes on."""
    run = Run(tmp_path, make_config(eval__interval=10))
    stall, looks = run.loop.stall, itertools.count()
    stalls_at = stall._stalls_at
    stall._stalls_at = lambda: (next(looks), stalls_at())[1]  # type: ignore[method-assign]
    run.rollouts.finish = asyncio.Event()
    await run.deliver(range(8), oldest=1)
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 2)
        usual, stall.limit_s = stall.limit_s, 0.05  # below the setting's least value
        await run.deliver(range(8, 9), oldest=2)  # from here on it counts
        await until(lambda: len(run.loop.run_state.buffer) == 1)
        before = next(copy(looks))
        await until(lambda: next(copy(looks)) > before + 10 or task.done())
        assert not task.done()
        stall.limit_s = usual
        run.rollouts.finish.set()
        await run.deliver(range(9, 12), oldest=2)
        await task
    assert run.board.versions == [2, 3]


async def test_no_data_after_an_evaluation_is_a_stall(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(eval__interval=10))
    run.loop.stall.limit_s = 0.1  # below the setting's least value
    run.rollouts.fail = RuntimeError("no server")
    with pytest.raises(Stalled, match="step 0 waits for trajectories"):
        await run.loop.run()


async def test_a_stop_request_while_an_evaluation_holds_the_next_one_back_leaves_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=9, eval__interval=2))
    run.rollouts.finish = asyncio.Event()
    await run.deliver(range(10), oldest=1)
    async with running(run) as task:
        await until(lambda: [request.version for request in run.workers.requests(Publish)] == [1, 2])
        run.stop.set()
        async with asyncio.timeout(300):
            await task
    assert run.workers.saved() == [2]
    assert [row["step"] for row in run.rows()] == [0, 1]
    assert run.workers.stored is not None
    assert [held["step"] for held in run.workers.stored["metrics_log"]["rows"]] == [2], (
        "its own evaluation is still due"
    )
    assert sum(len(trained) for _, trained, _ in run.manager.reports) == 8
    assert run.board.versions == [], "what was served is what the evaluation measured"


async def test_a_finished_run_is_saved_before_its_last_evaluation_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1, eval__interval=1))
    await run.deliver(range(4))
    async with running(run) as task:
        await until(lambda: run.loop.run_state.version == 1)
        run.rollouts.finish = asyncio.Event()
        await until(lambda: run.rollouts.started == [0, 1])
        await until(lambda: run.workers.saved() == [1])
        assert not task.done()
        run.rollouts.finish.set()
        await task
    assert [row["eval/held_out/accuracy"] for row in run.rows()] == [0.5, 0.5]


async def test_a_row_held_for_its_evaluation_survives_a_crash(tmp_path: Path) -> None:
    config = make_config(total_train_steps=3, checkpoint__interval=1, eval__interval=1)
    first = Run(tmp_path, config)
    await first.deliver(range(4))
    async with running(first):
        await until(lambda: first.rollouts.started == [0, 1])
        first.rollouts.finish = asyncio.Event()
        await first.deliver(range(4, 8), oldest=1)
        await until(lambda: first.workers.saved()[-1:] == [2])
        rows = first.rows()
        assert [row["step"] for row in rows] == [0, 1]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    await second.deliver(range(8, 12), oldest=2)
    await second.loop.run()
    assert [row["step"] for row in second.rows()] == [0, 1, 2, 3]
    assert second.rollouts.started == [2, 3], "what was cut off is evaluated again"
    summary = second.summary()
    assert [item["version"] for item in summary["evaluations"]] == [0, 1, 2, 3]
    assert summary["evaluations_failed"] == []


async def test_an_evaluation_of_a_version_before_the_checkpoint_counts_as_failed_after_a_crash(tmp_path: Path) -> None:
    """Nobody serves that version any more."""
    config = make_config(total_train_steps=4, checkpoint__interval=2, eval__interval=3)
    first = Run(tmp_path, config)
    first.rollouts.finish = asyncio.Event()
    await first.deliver(range(8), oldest=0)
    async with running(first):
        await until(lambda: first.workers.saved() == [2])
    (tmp_path / "metrics.jsonl").write_text("")

    second = Run(tmp_path, config, FakeWorkers(stored=first.workers.stored))
    await second.deliver(range(8, 16), oldest=3)
    await second.loop.run()
    assert [row["step"] for row in second.rows()] == [0, 1, 2, 3, 4]
    assert second.rollouts.started == [3, 4]
    failed = [{"version": 0, "set": "held_out", "reason": "cut off by a restart"}]
    assert second.summary()["evaluations_failed"] == failed


async def test_an_evaluation_that_ended_after_the_last_checkpoint_is_known_when_the_run_goes_on(tmp_path: Path) -> None:
    config = make_config(total_train_steps=2, checkpoint__interval=2, eval__interval=2)
    first = Run(tmp_path, config)
    await first.deliver(range(4))
    async with running(first) as task:
        await until(lambda: first.rollouts.started == [0])
        first.rollouts.finish = asyncio.Event()
        await first.deliver(range(4, 8), oldest=1)
        await until(lambda: first.workers.saved() == [2])
        first.rollouts.finish.set()
        await task
    assert [item["version"] for item in first.summary()["evaluations"]] == [0, 2]

    second = Run(tmp_path, make_config(total_train_steps=3, eval__interval=2), FakeWorkers(stored=first.workers.stored))
    await second.deliver(range(8, 12), oldest=2)
    await second.loop.run()
    assert [row["step"] for row in second.rows()] == [0, 1, 2, 3]
    summary = second.summary()
    assert [item["version"] for item in summary["evaluations"]] == [0, 2, 3]
    assert summary["evaluations_failed"] == []


async def test_the_best_checkpoint_stays_and_one_whose_evaluation_runs(tmp_path: Path) -> None:
    config = make_config(total_train_steps=6, checkpoint__interval=1, checkpoint__keep=1, eval__interval=2)
    config.checkpoint.keep_best = "eval/held_out/len_mean"
    config.checkpoint.keep_best_direction = BestDirection.lowest
    run = Run(tmp_path, config)
    run.rollouts.lengths = {0: 1, 2: 5, 4: 3, 6: 9}
    of_4 = asyncio.Event()
    async with running(run) as task:
        for step in range(1, 7):
            if step == 4:
                await until(lambda: 2 in run.loop.metrics_log.evaluations.scores("eval/held_out/len_mean"))
                run.rollouts.finish = of_4
            await run.deliver(range(4 * step, 4 * step + 4), oldest=step - 1)
            if step == 6:
                of_4.set()
            else:
                await until(lambda: len(run.workers.saved()) == step)  # noqa: B023 - called before the next round
        await task
    protected = {int(Path(save.path).name[1:]): save.protected for save in run.workers.requests(CommitCheckpoint)}
    assert protected[3] == (2, 3), "0 was the shortest, but has no checkpoint"
    assert protected[5] == (2, 4, 5), "the evaluation of 4 runs"
    assert protected[6] == (4, 6), "4 was shorter than 2"


@pytest.mark.parametrize("next_is_due", [True, False])
async def test_an_evaluation_that_a_death_cut_off_is_made_again_before_a_newer_version_is_served(
    tmp_path: Path, memory_checkpoint: MemoryCheckpoint, next_is_due: bool
) -> None:
    config = make_config(total_train_steps=4, eval__interval=2 if next_is_due else 3)
    first = Run(tmp_path, config, memory_checkpoint=memory_checkpoint)
    first.rollouts.finish = of_0 = asyncio.Event()
    async with running(first):
        await first.deliver(range(8), oldest=1)
        await until(lambda: memory_checkpoint.version == 2)
        await until(lambda: next_is_due or len(first.manager.reports) == 2)
        kill(first)
    assert (first.rollouts.started, first.board.versions) == ([0], [])

    second = Run(tmp_path, config, follows=first)
    async with running(second) as task:
        await until(lambda: second.rollouts.started == [0, 0])
        assert (second.begun, second.board.versions) == (1, [])
        assert second.rows() == []
        of_0.set()
        await until(lambda: second.board.versions == [2])
        await second.deliver(range(8, 16), oldest=2)
        await task
    assert second.rollouts.started == ([0, 0, 2, 4] if next_is_due else [0, 0, 3, 4])
    assert [row["step"] for row in second.rows()] == [0, 1, 2, 3, 4]
    assert second.summary()["evaluations_failed"] == []
    assert [item["version"] for item in second.summary()["evaluations"]] == second.rollouts.started[1:]
