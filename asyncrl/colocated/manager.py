"""The GserverManager's part: it follows the announced turns, and reports to the MasterWorker when all colocated servers
sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from asyncrl.comm import names
from asyncrl.comm.name_resolve import NameEntryNotFound, NameResolver, NameResolveTimeout
from asyncrl.comm.waits import HOLD_S, LOOK_S
from asyncrl.manager import messages as m
from asyncrl.manager.fleet.decisions import FleetDecisions
from asyncrl.manager.fleet.fleet_runner import FleetRunner
from asyncrl.manager.fleet.servers import FleetServer


class ColocatedServers:
    """The servers on the trainer's devices, of the fleet of `decisions` and `runner`.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(
        self, resolver: NameResolver, decisions: FleetDecisions, runner: FleetRunner, clock: Callable[[], float]
    ) -> None:
        self._resolver, self._decisions, self._runner, self._clock = resolver, decisions, runner, clock
        self._last: str | None = None

    async def resume(self) -> None:
        """Load the turn and the servers' memory that an earlier manager recorded, before any server is known."""
        with contextlib.suppress(NameEntryNotFound):  # no turn exists while the ranks load their models
            self._seen(await asyncio.to_thread(self._resolver.get, names.TRAINER_TURN_KEY))
        tree = await asyncio.to_thread(self._resolver.get_subtree, names.SERVER_MEMORY)
        memory = {names.index_of(key): names.ServerMemory.decode(value) for key, value in tree.items()}
        self._runner.server_memory = memory

    async def run(self) -> None:
        """Follow the announced turns until cancelled."""
        watch = self._resolver.watch
        while True:
            try:
                found = await asyncio.to_thread(watch, names.TRAINER_TURN_KEY, LOOK_S, self._last)
            except NameResolveTimeout:
                continue
            self._seen(found)

    def _seen(self, value: str | None) -> None:
        self._last = value
        if value is not None:
            self._decisions.colocated.begin(names.TrainerTurn.decode(value))
            self._runner.changed.notify()

    async def wait_asleep(self, request: m.WaitAsleepRequest) -> m.WaitAsleepReply:
        """Wait until no colocated server has memory on a device, or is about to, in the turn `request.turn`."""
        deadline = self._clock() + min(request.timeout_s, HOLD_S)
        while True:
            waits_for = await self._blockers(request.turn)
            left_s = deadline - self._clock()
            if not waits_for or left_s <= 0:
                return m.WaitAsleepReply(waits_for, others_in_service(self._decisions), self._runner.wake_s)
            await self._runner.changed.wait(min(left_s, LOOK_S))

    async def _blockers(self, number: int) -> list[str]:
        """Return the obstacles to the start of turn `number`, as text for display."""
        turn = self._decisions.colocated.turn
        if turn.number < number or not turn.training:
            return ["the GserverManager, which has not seen the turn yet"]
        if waits_for := self._waits_for():
            return waits_for
        # A server announces that it loads, reads the turn, loads, registers, and then withdraws the announcement. So
        # one that is not found loading has registered by now, or reads the turn after it was announced.
        loading = await asyncio.to_thread(self._resolver.get_subtree, names.LOADING_COLOCATED)
        if loading:
            return [f"generation server {names.index_of(key)} (loads its model)" for key in loading]
        registered = await asyncio.to_thread(self._resolver.get_subtree, names.GENERATION_SERVERS)
        entries = {names.index_of(key): names.GenerationServerEntry.decode(value) for key, value in registered.items()}
        unknown = not_known_asleep(self._decisions, {index: entry.url for index, entry in entries.items()})
        return [f"generation server {index} (new)" for index in unknown] or self._waits_for()

    def _waits_for(self) -> list[str]:
        return [f"generation server {record.index} ({record.state})" for record in awake(self._decisions)]


def awake(fleet: FleetDecisions) -> list[FleetServer]:
    """Return the colocated servers that have not released their memory."""
    return [
        record
        for record in fleet.servers
        if record.index in fleet.colocated and record.state is not m.ServerState.ASLEEP
    ]


def others_in_service(fleet: FleetDecisions) -> int:
    """Return the number of servers that are not colocated and serve, or will once they are updated."""
    updating, serving = m.ServerState.UPDATING, m.ServerState.SERVING
    others = (record for record in fleet.servers if record.index not in fleet.colocated)
    return sum(record.state is serving or (record.state is updating and not record.failures) for record in others)


def not_known_asleep(fleet: FleetDecisions, registered: Mapping[int, str]) -> list[int]:
    """Return the colocated ones of the servers `registered` (URL by index) that are not known to sleep there."""
    asleep = {record.index: record.url for record in fleet.servers if record.state is m.ServerState.ASLEEP}
    return [index for index, url in registered.items() if index in fleet.colocated and asleep.get(index) != url]
