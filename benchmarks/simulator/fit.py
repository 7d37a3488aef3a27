"""A model of this machine, fitted to the embedded engine and one real run of the demo, and what it says of other runs.

What is measured:

1. The engine, in process, on the demo's base model: CPU-seconds of each decode step, with the sequences, rows and
   context that it had, of prefills, and of an update; least squares give the `EngineModel`. Then calls through its
   server, in a process of its own: what both sides compute for one beyond that.
2. One real run with η = 0, in which generation and training take turns. It gives the `TrainerModel` (seconds of a step
   over the tokens that it computes; of publishing), the CPU time of the other processes for a rollout, and, with the
   same seed again and all samples kept, the groups that it generated: how long their answers are, where they part, and
   which have a reward (a group whose rewards are all alike is not trained).

What is predicted: the step time of that run (generation, waiting and the turns between processes are not fitted), and
of runs that nothing was fitted to: another η, another group size, another length of answers. Their prompts and policy
are taken to be as in the first. Nothing is adjusted to what comes out.

Processes share the machine's cores (`simulator.cores`), so the figures are those of a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import overlap
import psutil
from numpy.typing import NDArray

from asyncrl.api.generation import SamplingParams
from asyncrl.comm.http import JsonHttp
from asyncrl.config.load import load_supervised
from asyncrl.inference.client import GenerateItem, GenerationServerClient
from asyncrl.observability.metrics import read_rows
from asyncrl.trainer.supervised.base_model import ensure_base_model
from simulator.engine import EngineModel
from simulator.lengths import Recorded
from simulator.run import Host, Outcome, Setup, simulate
from simulator.trainer import TrainerModel

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
CALLS, CALL_TOKENS = 100, 8
WANTED = 0.10
B, GROUP, IN_FLIGHT, MAX_NEW_TOKENS = 32, 8, 24, 112
"""As the demo's settings."""
WARM_UP = overlap.WARM_UP_STEPS
SETTLED = 2
"""Steps of the first run after which its training is looked at: the early ones, whose groups part most, tell most of
how its time grows with tokens."""
SIMULATED_STEPS = 96
ANNOUNCE_S = 0.025
"""The manager looks for a new version 50 ms after it looked before."""


@dataclass(frozen=True)
class Run:
    """A run of the demo: what is not as in the first one."""

    name: str
    eta: int = 0
    group: int = GROUP
    max_new_tokens: int = MAX_NEW_TOKENS
    fitted: bool = False

    @property
    def settings(self) -> list[str]:
        """On the command line."""
        return [f"group_size={self.group}", f"rollout.sampling.max_new_tokens={self.max_new_tokens}"]


RUNS = (
    Run("η = 0", fitted=True),
    Run("η = 1", eta=1),
    Run("η = 4", eta=4),
    Run("η = 0, groups of 4", group=4),
    Run("η = 4, groups of 4", eta=4, group=4),
    Run("η = 0, answers of at most 32", max_new_tokens=32),
)


@dataclass(frozen=True)
class Measured:
    """Of a real run, after its warm-up: seconds of a step, and of waiting for data in it; CPU-seconds of a step by kind
    of process; rows of its metrics from the first step on."""

    step_s: float
    wait_s: float
    cpu: dict[str, float]
    rows: list[dict[str, Any]] = field(repr=False)


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


def measure_engine(model_path: Path, call_engine_s: list[float]) -> EngineModel:
    """Fit the model of the embedded engine with the model in `model_path`, one thread, on the CPU.

    Args:
        model_path: the model's folder.
        call_engine_s: is told how long the engine takes for what `measure_calls` asks in a call.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.inference.embedded.engine import GenerationEngine
    from asyncrl.inference.embedded.types import GenerationInput, Job, SamplingSpec

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    engine = GenerationEngine(model, max_running_requests=ENGINE_ROWS, max_model_len=ENGINE_LENGTH)
    engine.eos_token_ids = ()
    batch = engine._batch

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
                rows, prefilled, begun = batch.decoded_rows, batch.runner.prefilled_tokens, time.process_time()
                engine.step()
                seconds = time.process_time() - begun
                rows, prefilled = batch.decoded_rows - rows, batch.runner.prefilled_tokens - prefilled
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
    for number in range(CALLS):
        begun = time.process_time()
        future = submit(f"call-{number}", [_prompt(number, 16)] * GROUP, CALL_TOKENS)
        while not future.done():
            engine.step()
        call_engine_s.append(time.process_time() - begun)
    decode = least_squares(*_relative(decodes.values()))
    rest = [statistics.median(times) - float(np.dot(decode, each[3:])) for each, times in prefills.values()]
    admission, prefill, token = least_squares([each[:3] for each, _ in prefills.values()], rest)
    step, sequence, row, context = map(float, decode)
    return EngineModel(
        step_s=step,
        sequence_s=sequence,
        context_s=context,
        prefill_s=float(prefill),
        prefill_token_s=float(token),
        max_running=ENGINE_ROWS,
        kv_tokens=ENGINE_ROWS * ENGINE_LENGTH,
        update_s=statistics.median(updates),
        row_s=row,
        admission_s=float(admission),
    )


async def measure_calls(model_path: Path, engine_s: float) -> tuple[float, float]:
    """CPU-seconds of a call of one group, of the server beyond its engine's `engine_s` and of the client."""
    from engine import embedded_server

    sampling = SamplingParams(max_new_tokens=CALL_TOKENS)
    async with embedded_server(model_path, ENGINE_ROWS) as url:
        http = JsonHttp(None)
        client = GenerationServerClient(http, url)
        server = psutil.Process().children(recursive=True)

        def cpu() -> tuple[float, float]:
            used = 0.0
            for each in server:
                with suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    used += times.user + times.system
            return used, time.process_time()

        for number in range(2 * CALLS):
            if number == CALLS:
                before = cpu()
            rids = (f"{number};{member};0;" for member in range(GROUP))
            prompt = _prompt(number, 16)
            items = [GenerateItem(rid, prompt, CALL_TOKENS, seed=member) for member, rid in enumerate(rids)]
            await client.generate(items, sampling, timeout_s=60.0)
        after = cpu()
        await http.close()
    server_s, client_s = ((later - earlier) / CALLS for later, earlier in zip(after, before, strict=True))
    return max(0.0, server_s - engine_s), client_s


def real_run(run: Run, model_path: Path, steps: int, root: Path, *more: str) -> tuple[Measured, Path]:
    """What the demo does, and its folder.

    Raises:
        SystemExit: it failed.
    """
    folder = root / run.name.replace(" ", "_").replace(",", "")
    overrides = [f"model.path={model_path}", f"train_batch_size={B}", f"rollout.max_concurrent={IN_FLIGHT}"]
    found = overlap.run(run.eta, "interrupt", steps, folder, [*overrides, *run.settings, *more])
    (run_dir,) = (folder / "overlap").iterdir()
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]
    measured = rows[WARM_UP:]
    step_s, wait_s = (statistics.fmean(row[f"time/{name}_s"] for row in measured) for name in ("step", "wait_data"))
    return Measured(step_s, wait_s, found.cpu, rows), run_dir


def computed_tokens(row: dict[str, Any]) -> float:
    """What a step of a real run computed: the tokens of samples of groups whose rewards differ, each distinct prefix
    once."""
    prompts = (1.0 - row["reward/groups_without_variance"]) * (row["tokens/batch"] - row["tokens/trained"])
    return float(row["tokens/stream_ratio"] * (row["tokens/loss"] + prompts))


def fit_trainer(rows: list[dict[str, Any]]) -> TrainerModel:
    """By the times of a real run's steps; what a step does besides waiting and training counts as publishing."""
    rows = rows[SETTLED:]
    tokens = [[1.0, computed_tokens(row)] for row in rows]
    fixed, token = map(float, least_squares(tokens, [row["time/train_s"] for row in rows]))
    rest = [row["time/step_s"] - row["time/train_s"] - row["time/wait_data_s"] for row in rows]
    return TrainerModel(token_s=token, fixed_s=fixed, publish_s=statistics.median(rest))


def fit_host(cpu: dict[str, float], call_s: float) -> Host:
    """By the CPU time of a run's processes, of which each rollout made one call."""
    rollout_s = max(0.0, cpu["rollout_worker"] / B - call_s)
    control_s = sum(cpu[kind] for kind in overlap.CONTROL) / B
    return Host(len(os.sched_getaffinity(0)), call_s, rollout_s, control_s, ANNOUNCE_S)


def predict(
    engine: EngineModel, trainer: TrainerModel, host: Host, lengths: Recorded, prompt: int, run: Run
) -> Outcome:
    """What the simulator says of that run."""
    share = lengths.trained_share(run.group, run.max_new_tokens, prompt)
    setup = Setup(
        name=f"demo, {run.name}",
        servers=1,
        engine=engine,
        trainer=replace(trainer, token_s=share * trainer.token_s),
        devices=(1, 1),
        lengths=lengths,
        eta=run.eta,
        batch=B,
        group=run.group,
        max_new_tokens=run.max_new_tokens,
        prompt_tokens=prompt,
        workers=1,
        in_flight=IN_FLIGHT,
        steps=SIMULATED_STEPS,
        warm_up=WARM_UP,
        health_interval_s=1.0,
        request_timeout_s=120.0,
        host=host,
        shares_prefixes=True,
    )
    return simulate(setup)


def fit(steps: int, record: Path | None = None) -> None:
    """Measure, print, and hold the real runs beside their predictions.

    Args:
        steps: of each run; more than `WARM_UP` and two.
        record: file for the groups that the first run generated.
    """
    if steps <= WARM_UP + 2:
        raise SystemExit(f"--steps {steps}: {WARM_UP} of them warm up; give more")
    model_path = ensure_base_model(load_supervised("sft"))
    of_calls: list[float] = []
    engine = measure_engine(model_path, of_calls)
    server_s, client_s = asyncio.run(measure_calls(model_path, statistics.median(of_calls)))
    engine = replace(engine, call_s=server_s)
    print(
        f"engine: {engine}\na call: {1e3 * server_s:.2f} ms of the server, {1e3 * client_s:.2f} ms of its client",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        root, began = Path(folder), time.monotonic()
        _, kept = real_run(RUNS[0], model_path, steps, root / "kept", "samples.every=1")
        lengths = Recorded.of_run(kept, WARM_UP)
        if record is not None:
            lengths.save(record)
        lines = []
        for run in RUNS:
            real, _ = real_run(run, model_path, steps, root)
            if run.fitted:
                trainer, host = fit_trainer(real.rows), fit_host(real.cpu, client_s)
                samples = statistics.fmean(row["tokens/batch"] for row in real.rows[WARM_UP:]) / (B * run.group)
                prompt = max(1, round(samples - lengths.mean))
                print(f"trainer: {trainer}\nhost: {host}\nprompts of {prompt} tokens, answers of {lengths.mean:.1f}")
            found = predict(engine, trainer, host, lengths, prompt, run)
            off = found.step_s / real.step_s - 1
            seen, hit = "fitted to" if run.fitted else "not seen", "met" if abs(off) <= WANTED else "MISSED"
            times = (real.step_s, real.wait_s, found.step_s, found.wait_s)
            cells = [run.name, seen, *(f"{each:.3f} s" for each in times), f"{off:+.1%}", f"{WANTED:.0%}", hit]
            lines.append(f"| {' | '.join([*cells, *found.faults])} |")
            print(lines[-1], {kind: round(seconds, 3) for kind, seconds in real.cpu.items()}, flush=True)
    head = "| run | the model has | a step | of it waiting | predicted | of it waiting | off by | target | |"
    print("", head, "|---|---|--:|--:|--:|--:|--:|--:|---|", *lines, sep="\n")
    print(f"\n{len(RUNS) + 1} runs of {steps} steps took {time.monotonic() - began:.0f} s")
