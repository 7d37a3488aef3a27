"""A simulated generation server: the HTTP paths of a real one, and the life of its process.

Its answers are decoded by `ContinuousBatch`, a model of the engine's speed. An answer repeats one number, which encodes
its seed, after the tokens that it has in common with its group (`Running.generated`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from asyncrl.inference.client import RID_DELIMITER
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
from simulator.host.cores import Cores
from simulator.servers.continuous_batch import ContinuousBatch
from simulator.servers.engine_model import GROUPS_TOKEN, EngineCounts, EngineModel, Running
from simulator.servers.lengths import Lengths


class Engine:
    """A simulated generation server, a `Host`. Units are those of the model and the lengths.

    Args:
        model: its speed.
        lengths: lengths of answers.
        version: version of its weights.
        cores: the cores that it shares with other processes.

    Attributes:
        gone: set once the process has ended, which breaks its calls.
        frozen: an event while the process is suspended: nothing is answered until it is set.
    """

    def __init__(self, model: EngineModel, lengths: Lengths, version: int = 0, cores: Cores | None = None) -> None:
        self.model, self.version = model, version
        self._lengths = lengths
        self.gone: asyncio.Event = asyncio.Event()
        self.frozen: asyncio.Event | None = None
        self._batch = ContinuousBatch(model, cores or Cores(math.inf))

    @property
    def counts(self) -> EngineCounts:
        """Work of the server at the last event."""
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
                self._batch.go_on()
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
        length, own_from, leads = self._lengths.answer(input_ids[0], seed, int(rid.split(RID_DELIMITER, 2)[1]))
        left = max(1, length - before)
        most = params["max_new_tokens"]
        finish = "stop" if left <= most else "length"
        token = GROUPS_TOKEN if leads else 2 + seed % 1_000_003
        parts = float(max(0, own_from - before))
        future: asyncio.Future[Running] = asyncio.get_running_loop().create_future()
        return Running(rid, input_ids, token, float(min(left, most)), parts, finish, future)

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
        await self._batch.cores.work(self.model.update_s)
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
        """Suspend the process: it computes and answers nothing until `go_on`."""
        self.frozen = asyncio.Event()
        self._batch.suspend()

    def go_on(self) -> None:
        """Resume the process after `stop`."""
        assert self.frozen is not None
        self.frozen.set()
        self.frozen = None
        self._batch.resume()

    def settle(self) -> EngineCounts:
        """Return the counts as of now."""
        self._batch.advance()
        return self.counts

    @property
    def sequences(self) -> int:
        """Number of running and queued answers."""
        return len(self._batch)
