"""The devices are taken to save a run that was asked to stop, with a limit."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from asyncrl.colocated.master import SharedDevices
from asyncrl.comm.names import TrainerTurn
from asyncrl.manager.messages import WaitAsleepReply, WaitAsleepRequest
from asyncrl.runtime.process.waiting import StopRequested


class Board:
    def trainer_turn(self) -> TrainerTurn | None:
        return None

    def announce_turn(self, turn: TrainerTurn) -> None:
        pass


class Announcer:
    announced, evaluating = 0, False


class Manager:
    """Answers with the colocated servers that still have the devices."""

    def __init__(self, *waits_for: str) -> None:
        self._waits_for = list(waits_for)

    async def call(self, request: WaitAsleepRequest) -> WaitAsleepReply:
        return WaitAsleepReply(self._waits_for)


def parts(manager: Manager) -> Any:
    return Board(), manager, None, Announcer()


@pytest.mark.parametrize("stayed", [(), ("generation_server/0", "generation_server/1")])
async def test_colocated_servers_that_the_manager_still_names_are_a_warning(
    stayed: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    turns = SharedDevices(*parts(Manager(*stayed)), asyncio.Event(), colocated=2, others=0)
    turns.begin()
    with caplog.at_level(logging.WARNING):
        await turns.take_to_end(5.0)
    warning = f"saving beside {', '.join(stayed)}, which did not leave the devices within 5 s"
    assert [record.getMessage() for record in caplog.records] == ([warning] if stayed else [])


async def test_a_stop_request_ends_the_wait_for_a_manager_that_does_not_answer() -> None:
    """With servers elsewhere the manager is asked before they wake; the checkpoint must not wait for it."""

    class Frozen(Manager):
        async def call(self, request: WaitAsleepRequest) -> WaitAsleepReply:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    asked, stop = asyncio.Event(), asyncio.Event()
    turns = SharedDevices(*parts(Frozen()), stop, colocated=1, others=1)
    turns.begin()
    turns._announce(training=True)  # the trainer has the devices after a step
    wake_rule = asyncio.create_task(turns.wake(4))
    await asked.wait()
    stop.set()
    async with asyncio.timeout(3):
        with pytest.raises(StopRequested):
            await wake_rule
