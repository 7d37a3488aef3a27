"""The trainer takes the devices that it shares with servers with a batch in hand, and gives them back to wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.comm.names import TrainerTurn
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.trainer.messages import BeginStep
from tests.integration.master.fakes import Run, make_config, running, until


def shared(**changes: object) -> ExperimentConfig:
    config = make_config(**changes)
    config.generation.colocated = "all"
    return config


def turns(run: Run) -> list[tuple[bool, int]]:
    """Whose turns they were, and the version that colocated servers were to have."""
    assert [turn.number for turn in run.board.turns] == list(range(1, len(run.board.turns) + 1))
    return [(turn.training, turn.version) for turn in run.board.turns]


async def test_a_turn_begins_with_a_batch_and_ends_before_data_is_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path, shared(total_train_steps=2))
    run.manager.asleep = [["generation server 0 (serving)"]]
    async with running(run) as task:
        await until(lambda: turns(run) == [(False, 0)])
        await run.deliver(range(3), oldest=1)
        await asyncio.sleep(0)
        assert turns(run) == [(False, 0)], "three rollouts are no batch"
        await run.deliver([3], oldest=1)
        await until(lambda: run.board.versions == [1])
        await until(lambda: turns(run) == [(False, 0), (True, 0), (False, 1)])
        assert run.manager.asked_asleep == [2, 2], "asked until all sleep"
        await run.deliver(range(4, 8), oldest=1)
        await task
    assert turns(run) == [(False, 0), (True, 0), (False, 1), (True, 1), (False, 2)]
    assert all("time/switch_s" in row for row in run.rows())


async def test_a_step_waits_for_every_colocated_server(tmp_path: Path) -> None:
    run = Run(tmp_path, shared(total_train_steps=1))
    run.manager.asleep = [["generation server 0 (releasing)"]] * 10_000
    await run.deliver(range(4), oldest=1)
    async with running(run) as task:
        await until(lambda: len(run.manager.asked_asleep) > 3)
        assert run.workers.requests(BeginStep) == []
        run.manager.asleep.clear()
        await task
    assert len(run.workers.requests(BeginStep)) == 1


async def test_batches_that_are_there_are_trained_in_one_turn(tmp_path: Path) -> None:
    run = Run(tmp_path, shared())
    await run.deliver(range(12), oldest=2)
    await run.loop.run()
    assert turns(run) == [(False, 0), (True, 0), (False, 3)]
    assert run.manager.asked_asleep == [2]
    assert [row["time/switch_s"] > 0 for row in run.rows()] == [True, False, False]


async def test_colocated_servers_end_what_would_expire_before_the_step(tmp_path: Path) -> None:
    run = Run(tmp_path, shared(on_stale="wait", total_train_steps=2))
    run.manager.expiring = [[], ["r-9"], ["r-9"]]
    await run.deliver(range(8), oldest=1)
    await run.loop.run()
    assert turns(run) == [(False, 0), (True, 0), (False, 1), (True, 1), (False, 2)]


async def test_no_turn_begins_during_an_evaluation_and_one_is_given_back_for_it(tmp_path: Path) -> None:
    run = Run(tmp_path, shared(total_train_steps=2, eval__interval=1))
    run.rollouts.finish = asyncio.Event()
    await run.deliver(range(8), oldest=1)
    async with running(run) as task:
        await until(lambda: run.rollouts.started == [0])
        assert turns(run) == [(False, 0)]
        of_0, run.rollouts.finish = run.rollouts.finish, asyncio.Event()
        of_0.set()
        await until(lambda: run.rollouts.started == [0, 1])
        await until(lambda: turns(run)[2:] == [(False, 1)])
        run.rollouts.finish.set()
        await task
    assert run.rollouts.started == [0, 1, 2]
    assert turns(run) == [(False, 0), (True, 0), (False, 1), (True, 1), (False, 2)]


async def test_a_stopped_run_saves_in_a_turn_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, shared())
    async with running(run) as task:
        await until(lambda: turns(run) == [(False, 0)])
        run.stop.set()
        await task
    assert turns(run) == [(False, 0), (True, 0)]


async def test_another_master_continues_the_numbers(tmp_path: Path) -> None:
    run = Run(tmp_path, shared(total_train_steps=1))
    run.board.turns = [TrainerTurn(1, training=True, version=0)]
    await run.deliver(range(4), oldest=1)
    await run.loop.run()
    assert turns(run) == [(True, 0), (False, 0), (True, 0), (False, 1)]


async def test_without_colocated_servers_nothing_is_announced(tmp_path: Path) -> None:
    run = Run(tmp_path, make_config(total_train_steps=1))
    await run.deliver(range(4), oldest=1)
    await run.loop.run()
    assert (run.board.turns, run.manager.asked_asleep) == ([], [])
    assert "time/switch_s" not in run.rows()[0]


async def test_colocated_servers_sleep_while_others_are_sooner_and_serve_when_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.master.train_loop.LOOK_S", 0.01)
    config = make_config(total_train_steps=3)
    config.generation.colocated, config.generation.servers = "1", 3
    run = Run(tmp_path, config)
    run.manager.others, run.manager.wake_s = 2, 1e6
    async with running(run) as task:
        await until(lambda: turns(run) == [(False, 0)])
        await run.deliver(range(4), oldest=2)
        await until(lambda: run.board.versions == [1])
        asked = len(run.manager.asked_asleep)
        await until(lambda: len(run.manager.asked_asleep) > asked + 3)
        assert turns(run) == [(False, 0), (True, 0)], "a switch takes longer than the others need"
        await run.deliver(range(4, 8), oldest=2)
        await until(lambda: run.board.versions == [1, 2])
        run.manager.others = 0
        await until(lambda: turns(run) == [(False, 0), (True, 0), (False, 2)])
        await run.deliver(range(8, 12), oldest=2)
        await task
    assert turns(run)[3:] == [(True, 2), (False, 3)]
