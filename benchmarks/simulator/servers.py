"""Simulated generation servers: the HTTP paths of real ones, the lives of their processes, and their faults.

Answers are decoded by `ContinuousBatch`, a model of the engine's speed. An answer repeats one number, which encodes its
seed. The random choices of faults depend only on the run's seed.

A server that dies breaks the calls to it. Its registration stays until its lease is over. Then a new process replaces
it, at another address and with the initial model's weights, as after a restart by the launcher. A suspended server (a
frozen virtual machine, a hanging driver) answers nothing, and later continues from the same state.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.inference.messages import (
    AbortRequest,
    ContinueRequest,
    GenerateRequest,
    MemoryRequest,
    PauseMode,
    PauseRequest,
    UpdateWeightsRequest,
)
from asyncrl.manager.messages import BadRequest
from simulator.engine import ContinuousBatch, EngineCounts, Running
from simulator.setup import EngineModel, Faults, LogNormal
from simulator.wire import Network

LEASE_S = 10.0
"""Seconds by which a registration outlives its process."""


class Engine:
    """A simulated generation server, a `Host`. Units are those of the model and the lengths of answers."""

    def __init__(self, model: EngineModel, lengths: LogNormal) -> None:
        self.model, self.version, self._lengths = model, 0, lengths
        self.gone = asyncio.Event()
        """Set once the process has ended, which breaks its calls."""
        self.frozen: asyncio.Event | None = None
        """While the process is suspended: nothing is answered until it is set."""
        self._batch = ContinuousBatch(model)

    @property
    def counts(self) -> EngineCounts:
        """Work of the server up to now."""
        self._batch.advance()
        return self._batch.counts

    async def answer(self, path: str, body: Any) -> Any:
        """See `Host`."""
        if self.frozen is not None:
            await self.frozen.wait()
        if self.gone.is_set():
            raise ConnectionResetError("the process is gone")
        match path, body:
            case "/generate", GenerateRequest():
                return await self._generate(body)
            case "/abort_request", AbortRequest():
                self._batch.abort(body.rid or "")
            case "/pause_generation", PauseRequest():
                self._batch.pause(PauseMode(body.mode))
            case "/continue_generation", ContinueRequest():
                self._batch.resume_generation()
            case "/update_weights_from_disk", UpdateWeightsRequest():
                return await self._update(body)
            case "/model_info", _:
                return {"weight_version": str(self.version), "model_path": "simulated"}
            case (("/release_memory_occupation" | "/resume_memory_occupation"), MemoryRequest()):
                await self._switch(path, body)
            case "/ready", _:
                return None
            case _:
                raise BadRequest(f"{path} of a {type(body).__name__} is not simulated")
        return {"success": True}

    async def _generate(self, body: GenerateRequest) -> list[dict[str, Any]]:
        assert isinstance(body.rid, list)
        assert isinstance(body.sampling_params, list)
        assert body.input_ids is not None
        items = zip(body.rid, body.input_ids, body.sampling_params, strict=True)
        sequences = [self._sequence(*item) for item in items]  # type: ignore[arg-type]
        self._batch.add(sequences)
        try:
            done = await asyncio.gather(*(sequence.answer for sequence in sequences))
        except asyncio.CancelledError:  # the connection broke: a server continues, and the client aborts
            for sequence in sequences:
                if sequence.answer.cancelled():
                    sequence.answer = asyncio.get_running_loop().create_future()
            raise
        return [self._reply(sequence) for sequence in done]

    def _sequence(self, rid: str, input_ids: Sequence[int], params: dict[str, Any]) -> Running:
        seed = params["sampling_seed"]
        before = params.get("custom_params", {}).get("seed_offset", 0)
        left = max(1, self._lengths.tokens(input_ids[0], seed) - before)
        most = params["max_new_tokens"]
        finish = "stop" if left <= most else "length"
        future: asyncio.Future[Running] = asyncio.get_running_loop().create_future()
        return Running(rid, input_ids, 2 + seed % 1_000_003, float(min(left, most)), finish, future)

    def _reply(self, sequence: Running) -> dict[str, Any]:
        tokens = sequence.generated
        units = len(tokens)
        finish = "abort" if sequence.aborted else sequence.finish
        starts = [0, *(upto for upto, _ in sequence.marks)]
        versions = [*(version for _, version in sequence.marks), self.version]
        ends = [*starts[1:], units]
        spans = [
            {"version": str(version), "start": start, "end": end}
            for version, start, end in zip(versions, starts, ends, strict=True)
            if end > start
        ]
        meta = {
            "finish_reason": {"type": finish},
            "weight_version": str(self.version),
            "weight_versions": spans,
            "output_token_logprobs": [(-1.0, token, None) for token in tokens],
        }
        return {"output_ids": tokens, "meta_info": meta}

    async def _switch(self, path: str, body: MemoryRequest) -> None:
        """Pass the device to the trainer or back. Only the first kind of memory takes time."""
        if self.sequences:
            raise BadRequest(f"{path} while {self.sequences} sequences run")
        if path.startswith("/release") or body.tags == ["weights"]:
            await asyncio.sleep(self.model.switch_s)

    async def _update(self, body: UpdateWeightsRequest) -> dict[str, Any]:
        await asyncio.sleep(self.model.update_s)
        if self.frozen is not None:
            await self.frozen.wait()
        if self.gone.is_set():
            raise ConnectionResetError("the process is gone")
        self._batch.begin_version(self.version, forget=body.flush_cache)
        self.version = int(body.weight_version or 0)
        return {"success": True, "weight_version": str(self.version)}

    def die(self) -> None:
        """End the process at once: running calls break."""
        self._batch.advance()
        self.gone.set()
        if self.frozen is not None:
            self.frozen.set()
        self._batch.fail(ConnectionResetError("the process died"))

    def stop(self) -> None:
        """Suspend the process: it computes and answers nothing until `resume`."""
        self.frozen = asyncio.Event()
        self._batch.suspend()

    def resume(self) -> None:
        """Resume the process after `stop`."""
        assert self.frozen is not None
        self.frozen.set()
        self.frozen = None
        self._batch.resume()

    @property
    def sequences(self) -> int:
        """Number of running and queued answers."""
        return len(self._batch)


class Fleet:
    """The servers of a run; `engines` are the living ones by index. `tell` is called with the registered ones: index to
    (URL, version at registration).
    """

    def __init__(
        self,
        servers: int,
        model: EngineModel,
        lengths: LogNormal,
        network: Network,
        tell: Callable[[Mapping[int, tuple[str, int]]], None],
    ) -> None:
        self.servers, self._model, self._lengths, self._network, self._tell = servers, model, lengths, network, tell
        self._starts = 0
        self._urls: dict[int, str] = {}
        self._registered: Mapping[int, tuple[str, int]] = {}
        self._past = EngineCounts()
        self.engines: dict[int, Engine] = {}

    def start(self) -> None:
        """Register all servers."""
        for index in range(self.servers):
            self._begin(index)
        self._tell(self._registered)

    def kill(self, index: int) -> None:
        """End the server's process; its registration stays."""
        engine = self.engines.pop(index)
        del self._network[self._urls[index]]
        self._past.add(engine.counts)
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
            total.add(engine.counts)
        return total

    @property
    def sequences(self) -> int:
        """Return the number of answers that run or wait at the servers."""
        return sum(engine.sequences for engine in self.engines.values())

    def _begin(self, index: int) -> None:
        self._starts += 1
        url = f"http://server{index}-{self._starts}"
        engine = Engine(self._model, self._lengths)
        self.engines[index] = self._network[url] = engine
        self._urls[index] = url
        self._registered = {**self._registered, index: (url, 0)}


class ServerFaults:
    """Causes the faults of a run's servers; `deaths` counts them."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults, self._random = faults, random.Random(f"faults {seed}")
        self.deaths = 0

    async def run(self, fleet: Fleet) -> None:
        """Cause the faults."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(fleet.servers):
                own = [random.Random(self._random.getrandbits(32)) for _ in range(2)]
                if self._faults.death_every_s:
                    tasks.create_task(self._deaths(fleet, index, self._faults.death_every_s, own[0]))
                if self._faults.silence_every_s:
                    tasks.create_task(self._silences(fleet, index, self._faults.silence_every_s, own[1]))

    async def _deaths(self, fleet: Fleet, index: int, every_s: float, own: random.Random) -> None:
        while True:
            await asyncio.sleep(own.expovariate(1 / every_s))
            fleet.kill(index)
            self.deaths += 1
            await asyncio.sleep(LEASE_S)
            fleet.unregister(index)
            await asyncio.sleep(self._faults.restart_s - LEASE_S)
            fleet.restart(index)

    async def _silences(self, fleet: Fleet, index: int, every_s: float, own: random.Random) -> None:
        while True:
            await asyncio.sleep(own.expovariate(1 / every_s))
            engine = fleet.engines.get(index)
            if engine is None:
                continue
            engine.stop()
            await asyncio.sleep(self._faults.silence_s)
            if not engine.gone.is_set():
                engine.resume()
