"""Speed of the embedded engine and its server on this machine, by measurements that know no run.

The engine in process: CPU-seconds of each decode step, with the sequences, rows and context that it had, of prefills,
and of an update; least squares give the `EngineModel`. Then its server in a process of its own: what both sides compute
for a call beyond the engine's work, and for an update as the manager makes it, with its probe.
"""

from __future__ import annotations

import json
import logging
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from asyncrl.api.generation import SamplingParams
from asyncrl.comm.http.calls import JsonHttp
from asyncrl.inference.client import GenerateItem, GenerationServerClient, PauseMode
from asyncrl.manager.fleet.fleet_runner import ServerUpdater
from asyncrl.manager.fleet.logprob_check import LogprobCheck
from asyncrl.manager.fleet.servers import BeginUpdate, Target
from asyncrl.models.weights.transports.disk import DiskManagerEnd
from asyncrl.models.weights.versions.logprob_probe import PROBE_FILE, LogprobProbe, encode_probe, probe_tokens
from simulator.real import GROUP
from simulator.servers.engine_model import EngineModel

LOADS = (
    *((8, 1, 8, 1), (32, 1, 8, 1), (32, 1, 64, 1), (64, 1, 32, 1), (128, 1, 8, 1), (128, 1, 64, 1), (192, 1, 32, 1)),
    *((8, 8, 8, 8), (24, 8, 8, 8), (24, 8, 64, 8), (24, 8, 64, 2), (8, 8, 32, 1)),
)
"""Prompts, samples of each, tokens of a prompt, of the measurements; of the samples so many have one seed: they never
part, which tells what a row costs from what a sample does."""
STEPS = 24
"""Decode steps of a measurement."""
ENGINE_ROWS, ENGINE_LENGTH = 256, 256
"""As the demo's settings."""
CALLS, CALL_TOKENS, UPDATES = 100, 8, 30


@dataclass(frozen=True)
class Speed:
    """CPU-seconds of the server's and the other side's process.

    Attributes:
        engine: of the engine alone.
        server_call_s, client_call_s: of a call of one group, beyond the engine's work.
        server_update_s, manager_update_s: of an update with its probe, the engine's work included.
    """

    engine: EngineModel
    server_call_s: float
    client_call_s: float
    server_update_s: float
    manager_update_s: float


def least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> NDArray[np.float64]:
    """Non-negative coefficients: one that comes out below 0 is left out."""
    matrix, target = np.array(rows, float), np.array(seconds, float)
    used = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            coefficients = np.zeros(matrix.shape[1])
            coefficients[used] = np.maximum(found, 0)
            return coefficients
        used.pop(int(found.argmin()))


def _relative(measured: Iterable[tuple[list[float], list[float]]]) -> tuple[list[list[float]], list[float]]:
    """Rows and medians of their times, divided by these: so that the relative error is what becomes small."""
    medians = [(row, statistics.median(times)) for row, times in measured]
    return [[each / seconds for each in row] for row, seconds in medians], [1.0] * len(medians)


def _prompt(number: int, length: int) -> tuple[int, ...]:
    """Another one for each number."""
    return tuple(1 + (number // 9**place if place < 4 else number + place) % 9 for place in range(length))


def measure_engine(model_path: Path) -> EngineModel:
    """Fit the model of the embedded engine with the model in the folder `model_path`, one thread, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.inference.embedded.engine import GenerationEngine
    from asyncrl.inference.embedded.engine_io import GenerationInput, Job, SamplingSpec
    from asyncrl.inference.embedded.rows import IDLE_STEPS
    from asyncrl.inference.embedded.scheduler import CHANGE_SHARE

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    engine = GenerationEngine(model, max_running_requests=ENGINE_ROWS, max_model_len=ENGINE_LENGTH)
    engine.eos_token_ids = ()
    batch = engine._batch
    forward = batch.prefills.forward

    def submit(name: str, prompts: Iterable[tuple[int, ...]], tokens: int, alike: int = 1) -> Any:
        inputs = (
            GenerationInput(f"{name}-{number}", prompt, SamplingSpec(max_new_tokens=tokens, seed=number // alike))
            for number, prompt in enumerate(prompts)
        )
        return engine.submit(Job(tuple(inputs)))

    decodes: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    prefills: dict[int, tuple[list[float], list[float]]] = {}
    for turn in range(4):
        for load, (prompts, samples, length, alike) in enumerate(LOADS):
            asked = [_prompt(number, length) for number in range(prompts) for _ in range(samples)]
            future = submit(f"{turn}-{load}", asked, STEPS, alike)
            for step in range(STEPS):
                rows, prefilled, begun = batch.counts.decoded_rows, forward.computed_tokens, time.process_time()
                engine.step()
                seconds = time.process_time() - begun
                rows, prefilled = batch.counts.decoded_rows - rows, forward.computed_tokens - prefilled
                if not turn:  # warms up
                    continue
                decode = [1.0, len(asked), rows, rows * (length + step)]
                if prefilled:
                    prefills.setdefault(load, ([1.0, len(asked), prefilled, *decode], []))[1].append(seconds)
                else:
                    decodes.setdefault((load, step), (decode, []))[1].append(seconds)
            assert sum(len(output.logprobs) for output in future.result(timeout=0)) == len(asked) * STEPS
    updates = []
    for version in range(1, 6):
        begun = time.process_time()
        update = engine.update_weights(str(model_path), str(version))
        while not update.done():
            engine.step()
        updates.append(time.process_time() - begun)
    of_decode = least_squares(*_relative(decodes.values()))
    rest = [statistics.median(times) - float(np.dot(of_decode, each[3:])) for each, times in prefills.values()]
    admission, prefill, token = least_squares([each[:3] for each, _ in prefills.values()], rest)
    step_s, sequence, row, context = map(float, of_decode)
    return EngineModel(
        step_s=step_s,
        sequence_s=sequence,
        context_s=context,
        prefill_s=float(prefill),
        prefill_token_s=float(token),
        max_running=ENGINE_ROWS,
        kv_tokens=ENGINE_ROWS * ENGINE_LENGTH,
        update_s=statistics.median(updates),
        row_s=row,
        admission_s=float(admission),
        change_share=CHANGE_SHARE,
        idle_steps=IDLE_STEPS,
    )


class _Threads:
    """CPU-seconds of a process: of its main thread, which does HTTP in a server, and of all."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def used(self) -> tuple[float, float]:
        """Up to now."""
        main = total = 0.0
        for thread in self._process.threads():
            with suppress(OSError):  # a thread that ended
                accounts = Path(f"/proc/{self._process.pid}/task/{thread.id}/schedstat").read_text()
                seconds = 1e-9 * int(accounts.split()[0])
                total += seconds
                main += seconds * (thread.id == self._process.pid)
        return main, total


async def measure_speed(model_path: Path, folder: Path) -> Speed:
    """Measure engine and server with the model in `model_path`; `folder` takes a copy of it."""
    from engine import embedded_server

    engine = measure_engine(model_path)
    version = folder / "v1"
    shutil.copytree(model_path, version)
    vocabulary = json.loads((model_path / "config.json").read_text())["vocab_size"]
    tokens = probe_tokens(vocabulary, ENGINE_LENGTH)
    (version / PROBE_FILE).write_bytes(encode_probe(LogprobProbe.of(tokens, [[0.0] * len(each) for each in tokens])))
    check = LogprobCheck(1e9, logging.getLogger("probe"))  # the time counts, not the answer
    async with embedded_server(model_path, ENGINE_ROWS) as url:
        http = JsonHttp(None)
        client = GenerationServerClient(http, url)
        updater = ServerUpdater(http, DiskManagerEnd(), timeout_s=60.0, check=check)
        *_, server = psutil.Process().children(recursive=True)  # below its supervisor
        threads = _Threads(server)

        async def call(number: int) -> None:
            rids = (f"{number};{member};0;" for member in range(GROUP))
            items = [
                GenerateItem(rid, _prompt(number, 16), CALL_TOKENS, seed=member) for member, rid in enumerate(rids)
            ]
            await client.generate(items, SamplingParams(max_new_tokens=CALL_TOKENS), timeout_s=60.0)

        async def update(number: int) -> None:
            order = BeginUpdate(0, url, number, Target(1, str(version)), PauseMode.abort)
            await updater.update(order)

        async def measured(work: Callable[[int], Awaitable[None]], times: int) -> tuple[float, float, float]:
            """CPU seconds per call of the server's main thread, its process and this one, after warm-up calls."""
            for number in range(2 * times):
                if number == times:
                    before = (*threads.used(), time.process_time())
                await work(number)
            after = (*threads.used(), time.process_time())
            main, whole, own = ((later - earlier) / times for later, earlier in zip(after, before, strict=True))
            return main, whole, own

        server_call_s, _, client_call_s = await measured(call, CALLS)
        _, server_update_s, manager_update_s = await measured(update, UPDATES)
        await http.close()
    return Speed(engine, server_call_s, client_call_s, server_update_s, manager_update_s)
