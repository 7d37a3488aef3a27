"""Turns of the trainer and of servers on its devices, announced in the process in place of name resolution."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.comm.names import TrainerTurn
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner
from asyncrl.manager.messages import WaitRestingReply
from asyncrl.master.data.collector import Collector
from asyncrl.master.data.sample_buffer import SampleBuffer
from asyncrl.master.data.stall import StallWatch
from asyncrl.master.peers.guest_turns import DeviceTurns
from asyncrl.master.peers.policy_versions import VersionAnnouncer
from asyncrl.verify.simulator.setup import Setup


class Turns:
    """The turn announced last, which the manager receives at once, and its answer whether all guests rest.

    Replaces `asyncrl.manager.fleet.guests.guests` and the key in name resolution between master and manager.
    """

    def __init__(self, decisions: FleetDecisions, runner: FleetRunner) -> None:
        self._decisions, self._runner = decisions, runner
        self._loop = asyncio.get_running_loop()
        self._turn: TrainerTurn | None = None

    def trainer_turn(self) -> TrainerTurn | None:
        """See `TurnBoard`."""
        return self._turn

    def announce_turn(self, turn: TrainerTurn) -> None:
        """See `TurnBoard`."""
        self._turn = turn
        self._decisions.guests.begin(turn)
        self._runner.changed.notify()

    async def wait_resting(self, turn: int, timeout_s: float) -> WaitRestingReply:
        """See `AsksGuests`."""
        deadline = self._loop.time() + timeout_s
        while True:
            waits_for = [f"generation server {life.index} ({life.state})" for life in self._decisions.not_resting]
            left_s = deadline - self._loop.time()
            if not waits_for or left_s <= 0:
                return WaitRestingReply(waits_for, self._decisions.others_in_service, self._runner.residence.wake_s)
            await self._runner.changed.wait(left_s)


async def _not_evaluated(name: str, version: int) -> Any:
    raise AssertionError(f"version {version} is not to be evaluated on {name}")


def without_evaluations() -> VersionAnnouncer:
    """Return the announcer of a run in which no version is evaluated."""
    clock = asyncio.get_running_loop().time
    return VersionAnnouncer(lambda version, path: None, _not_evaluated, lambda version: (), lambda *_: None, clock)


def device_turns(
    setup: Setup,
    decisions: FleetDecisions,
    runner: FleetRunner,
    announcer: VersionAnnouncer,
    manager: Any,
    buffer: SampleBuffer,
    collector: Collector,
) -> DeviceTurns:
    """Return the turns of the trainer and its guests; without guests they take no time."""
    turns, stop = Turns(decisions, runner), asyncio.Event()
    clock: Any = asyncio.get_running_loop().time
    stall = StallWatch(setup.step_limit_s, clock, stop, lambda: 0.0, manager, buffer, collector, starting=lambda: False)
    return DeviceTurns(turns, turns, stall, announcer, stop, setup.guests, setup.servers - setup.guests, clock)
