"""Turns of the trainer and of servers on its devices, announced in the process in place of name resolution."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.colocated.master import SharedDevices
from asyncrl.comm.names import TrainerTurn
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner
from asyncrl.manager.messages import WaitRestingReply
from asyncrl.master.data.batches import DeviceTurns
from asyncrl.master.data.collector import Collector
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.data.stall import StallWatch
from simulator.setup import Setup


class Turns:
    """The turn announced last, which the manager receives at once, and its answer whether all guests rest.

    Replaces `asyncrl.colocated.manager` and the key in name resolution between master and manager.
    """

    def __init__(self, decisions: FleetDecisions, runner: FleetRunner) -> None:
        self._decisions, self._runner = decisions, runner
        self._loop = asyncio.get_running_loop()
        self._turn: TrainerTurn | None = None

    def producers_start(self) -> bool:
        """See `NameBoard`; all servers and workers are there from the beginning."""
        return False

    def trainer_turn(self) -> TrainerTurn | None:
        """See `NameBoard`."""
        return self._turn

    def announce_turn(self, turn: TrainerTurn) -> None:
        """See `NameBoard`."""
        self._turn = turn
        self._decisions.guests.begin(turn)
        self._runner.changed.notify()

    async def wait_resting(self, turn: int, timeout_s: float) -> WaitRestingReply:
        """See `ManagerClient`."""
        deadline = self._loop.time() + timeout_s
        while True:
            waits_for = [f"generation server {life.index} ({life.state})" for life in self._decisions.not_resting]
            left_s = deadline - self._loop.time()
            if not waits_for or left_s <= 0:
                return WaitRestingReply(waits_for, self._decisions.others_in_service, self._runner.wake_s)
            await self._runner.changed.wait(left_s)


@dataclass(slots=True)
class Announced:
    """The newest version, of which servers know, and none of which is evaluated. Replaces the `VersionAnnouncer`."""

    announced: int = 0
    evaluating: bool = False
    free_since: float = 0.0


def device_turns(
    setup: Setup,
    decisions: FleetDecisions,
    runner: FleetRunner,
    announcer: Announced,
    manager: Any,
    buffer: SampleBuffer,
    collector: Collector,
) -> DeviceTurns:
    """Return the turns of the trainer and its guests; without guests they take no time."""
    if not setup.guests:
        return DeviceTurns()
    stop, clock = asyncio.Event(), asyncio.get_running_loop().time
    simulated: Any = Turns(decisions, runner), announcer, clock
    turns, announces, time = simulated
    ahead = (setup.eta + 1) * setup.batch
    stall = StallWatch(
        setup.step_limit_s, time, stop, announces, turns, manager, buffer, collector, ahead, run_dir=Path()
    )
    return SharedDevices(turns, turns, stall, announces, stop, setup.guests, setup.servers - setup.guests)
