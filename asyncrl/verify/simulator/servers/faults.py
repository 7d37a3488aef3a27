"""Generation servers that die, freeze or are slow. The random choices depend only on the run's seed.

A server that dies breaks the calls to it. Its registration stays until its lease is over; then a new process takes its
place, at another address and with the initial model's weights, as a launcher starts it. A suspended server (a frozen
virtual machine, a hanging driver) answers nothing, and later continues where it was. A preempted server dies and comes
back much later, together with others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncrl.verify.simulator.host.cores import Cores
from asyncrl.verify.simulator.servers.engine_model import EngineCounts, EngineModel
from asyncrl.verify.simulator.servers.generation_server import Engine
from asyncrl.verify.simulator.servers.lengths import Lengths
from asyncrl.verify.simulator.wire import Network


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of the servers; times in seconds, None: never.

    Attributes:
        slow_share, slow_factor: this share of the servers takes so many times as long for everything.
        death_every_s: mean time between two deaths of one server; `restart_s`: until its next process registers.
        silence_every_s: mean time between two suspensions of one server, of `silence_s` each.
        preempted_share, preempted_at_s, preempted_for_s: this share of the servers is taken away at that time, for so
            long.
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


class Fleet:
    """The servers of a run.

    Args:
        tell: called with the registered servers: index to (URL, version at registration).
        lease_s: seconds by which a registration outlives its process.
    """

    def __init__(
        self,
        count: int,
        model: EngineModel,
        lengths: Lengths,
        network: Network,
        tell: Callable[[Mapping[int, tuple[str, int]]], None],
        faults: Faults,
        *,
        lease_s: float,
        seed: int,
        cores: Cores,
    ) -> None:
        self._cores = cores
        self._model, self._lengths, self._network, self._tell = model, lengths, network, tell
        self._faults, self._lease_s, self._count = faults, lease_s, count
        self._random = random.Random(f"faults {seed}")
        slow = self._random.sample(range(count), round(faults.slow_share * count))
        self._slow = frozenset(slow)
        self._lives = 0
        self._urls: dict[int, str] = {}
        self._registered: dict[int, tuple[str, int]] = {}
        self._past = EngineCounts()
        self.engines: dict[int, Engine] = {}
        self.deaths = self.silences = 0

    def start(self) -> None:
        """Register all servers."""
        for index in range(self._count):
            self._begin(index)
        self._tell(self._registered)

    async def run(self) -> None:
        """Cause the faults."""
        faults, seeds = self._faults, [self._random.getrandbits(32) for _ in range(2 * self._count + 1)]
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._count):
                if faults.death_every_s:
                    tasks.create_task(self._deaths(index, faults.death_every_s, random.Random(seeds[2 * index])))
                if faults.silence_every_s:
                    tasks.create_task(
                        self._silences(index, faults.silence_every_s, random.Random(seeds[2 * index + 1]))
                    )
            if faults.preempted_share:
                tasks.create_task(self._preemption(random.Random(seeds[-1])))

    def counts(self) -> EngineCounts:
        """Return the counts of all servers up to now."""
        total = EngineCounts()
        total.add(self._past)
        for engine in self.engines.values():
            total.add(engine.settle())
        return total

    @property
    def sequences(self) -> int:
        """Return the number of answers under way or queued at the servers."""
        return sum(engine.sequences for engine in self.engines.values())

    def _begin(self, index: int) -> None:
        self._lives += 1
        url = f"http://server{index}-{self._lives}"
        model = self._model.slower(self._faults.slow_factor) if index in self._slow else self._model
        self.engines[index] = self._network.hosts[url] = Engine(model, self._lengths, cores=self._cores)
        self._urls[index] = url
        self._registered[index] = (url, 0)

    async def _die(self, index: int, back_after_s: float) -> None:
        """End the server's process; a new one starts later."""
        engine = self.engines.pop(index)
        del self._network.hosts[self._urls[index]]
        self._past.add(engine.settle())
        engine.die()
        self.deaths += 1
        await asyncio.sleep(min(self._lease_s, back_after_s))
        if back_after_s > self._lease_s:
            self._registered = {key: value for key, value in self._registered.items() if key != index}
            self._tell(self._registered)
            await asyncio.sleep(back_after_s - self._lease_s)
        self._registered = dict(self._registered)
        self._begin(index)
        self._tell(self._registered)

    async def _deaths(self, index: int, every_s: float, own: random.Random) -> None:
        while True:
            await asyncio.sleep(own.expovariate(1 / every_s))
            if index in self.engines:
                await self._die(index, self._faults.restart_s)

    async def _silences(self, index: int, every_s: float, own: random.Random) -> None:
        while True:
            await asyncio.sleep(own.expovariate(1 / every_s))
            engine = self.engines.get(index)
            if engine is None or engine.frozen is not None:
                continue
            engine.stop()
            self.silences += 1
            await asyncio.sleep(self._faults.silence_s)
            if not engine.gone.is_set():
                engine.go_on()

    async def _preemption(self, own: random.Random) -> None:
        faults = self._faults
        await asyncio.sleep(faults.preempted_at_s)
        taken = own.sample(sorted(self.engines), round(faults.preempted_share * self._count))
        await asyncio.gather(*(self._die(index, faults.preempted_for_s) for index in taken))
