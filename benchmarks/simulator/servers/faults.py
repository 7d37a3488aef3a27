"""Generation servers that die, freeze or are slow. The random choices depend only on the run's seed.

A server that dies breaks the calls to it. Its registration stays until its lease is over. Then a new process replaces
it, at another address and with the initial model's weights, as after a restart by the launcher. A suspended server (a
frozen virtual machine, a hanging driver) answers nothing, and later continues from the same state. A preempted server
dies and returns much later, together with others.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from simulator.servers.engine_model import EngineModel
from simulator.servers.fleet import Fleet


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of the servers; times in seconds, None: never.

    Attributes:
        slow_share, slow_factor: this share of the servers takes this factor longer for everything. death_every_s: mean
        time between two deaths of one server; `restart_s`: until its next process registers. silence_every_s: mean time
        between two suspensions of one server, of `silence_s` each. preempted_share, preempted_at_s, preempted_for_s:
        this share of the servers is taken away at this time, for this time.
    """

    slow_share: float = 0.0
    slow_factor: float = 2.0
    death_every_s: float | None = None
    restart_s: float = 90.0
    silence_every_s: float | None = None
    silence_s: float = 60.0
    preempted_share: float = 0.0
    preempted_at_s: float = 300.0
    preempted_for_s: float = 600.0

    @property
    def any(self) -> bool:
        """True if servers leave service at all."""
        return bool(self.death_every_s or self.silence_every_s or self.preempted_share)


class ServerFaults:
    """Causes the faults of a run's servers.

    Args:
        servers: number of servers.
        lease_s: seconds by which a registration outlives its process.

    Attributes:
        deaths, silences: number of deaths and suspensions so far.
    """

    def __init__(self, faults: Faults, servers: int, *, lease_s: float, seed: int) -> None:
        self._faults, self._lease_s = faults, lease_s
        self._random = random.Random(f"faults {seed}")
        self._slow = frozenset(self._random.sample(range(servers), round(faults.slow_share * servers)))
        self.deaths = self.silences = 0

    def model_of(self, index: int, model: EngineModel) -> EngineModel:
        """Return the speed of the server `index`, if `model` is that of a server that is not slow."""
        return model.slower(self._faults.slow_factor) if index in self._slow else model

    async def run(self, fleet: Fleet) -> None:
        """Cause the faults."""
        faults, seeds = self._faults, [self._random.getrandbits(32) for _ in range(2 * len(fleet) + 1)]
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(fleet)):
                if faults.death_every_s:
                    tasks.create_task(self._deaths(fleet, index, faults.death_every_s, random.Random(seeds[2 * index])))
                if faults.silence_every_s:
                    own = random.Random(seeds[2 * index + 1])
                    tasks.create_task(self._silences(fleet, index, faults.silence_every_s, own))
            if faults.preempted_share:
                tasks.create_task(self._preemption(fleet, random.Random(seeds[-1])))

    async def _die(self, fleet: Fleet, index: int, back_after_s: float) -> None:
        """End the server's process; a new one starts later."""
        fleet.kill(index)
        self.deaths += 1
        await asyncio.sleep(min(self._lease_s, back_after_s))
        if back_after_s > self._lease_s:
            fleet.unregister(index)
            await asyncio.sleep(back_after_s - self._lease_s)
        fleet.restart(index)

    async def _deaths(self, fleet: Fleet, index: int, every_s: float, own: random.Random) -> None:
        while True:
            await asyncio.sleep(own.expovariate(1 / every_s))
            if index in fleet.engines:
                await self._die(fleet, index, self._faults.restart_s)

    async def _silences(self, fleet: Fleet, index: int, every_s: float, own: random.Random) -> None:
        while True:
            await asyncio.sleep(own.expovariate(1 / every_s))
            engine = fleet.engines.get(index)
            if engine is None or engine.frozen is not None:
                continue
            engine.stop()
            self.silences += 1
            await asyncio.sleep(self._faults.silence_s)
            if not engine.gone.is_set():
                engine.go_on()

    async def _preemption(self, fleet: Fleet, own: random.Random) -> None:
        faults = self._faults
        await asyncio.sleep(faults.preempted_at_s)
        taken = own.sample(sorted(fleet.engines), round(faults.preempted_share * len(fleet)))
        await asyncio.gather(*(self._die(fleet, index, faults.preempted_for_s) for index in taken))
