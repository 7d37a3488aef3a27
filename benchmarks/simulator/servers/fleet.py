"""The generation servers of a simulated run, and their registrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from simulator.host.cores import Cores
from simulator.servers.engine_model import EngineCounts, EngineModel
from simulator.servers.generation_server import Engine
from simulator.servers.lengths import Lengths
from simulator.wire import Network


class Fleet:
    """The servers of a run.

    Args:
        models: speed of each server.
        tell: called with the registered servers: index to (URL, version at registration).

    Attributes:
        engines: living servers by index.
    """

    def __init__(
        self,
        models: Sequence[EngineModel],
        lengths: Lengths,
        network: Network,
        tell: Callable[[Mapping[int, tuple[str, int]]], None],
        cores: Cores,
    ) -> None:
        self._models, self._lengths, self._network, self._tell, self._cores = models, lengths, network, tell, cores
        self._lives = 0
        self._urls: dict[int, str] = {}
        self._registered: Mapping[int, tuple[str, int]] = {}
        self._past = EngineCounts()
        self.engines: dict[int, Engine] = {}

    def __len__(self) -> int:
        """Number of servers, dead ones included."""
        return len(self._models)

    def start(self) -> None:
        """Register all servers."""
        for index in range(len(self)):
            self._begin(index)
        self._tell(self._registered)

    def kill(self, index: int) -> None:
        """End the server's process; its registration stays."""
        engine = self.engines.pop(index)
        del self._network.hosts[self._urls[index]]
        self._past.add(engine.settle())
        engine.die()

    def unregister(self, index: int) -> None:
        """End the server's registration."""
        self._registered = {key: value for key, value in self._registered.items() if key != index}
        self._tell(self._registered)

    def restart(self, index: int) -> None:
        """Start and register a new process, at another address and with the initial model's weights."""
        self._begin(index)
        self._tell(self._registered)

    def counts(self) -> EngineCounts:
        """Return the counts of all servers up to now."""
        total = EngineCounts()
        total.add(self._past)
        for engine in self.engines.values():
            total.add(engine.settle())
        return total

    @property
    def sequences(self) -> int:
        """Return the number of answers that run or wait at the servers."""
        return sum(engine.sequences for engine in self.engines.values())

    def _begin(self, index: int) -> None:
        self._lives += 1
        url = f"http://server{index}-{self._lives}"
        engine = Engine(self._models[index], self._lengths, cores=self._cores)
        self.engines[index] = self._network.hosts[url] = engine
        self._urls[index] = url
        self._registered = {**self._registered, index: (url, 0)}
