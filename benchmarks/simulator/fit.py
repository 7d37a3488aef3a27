"""The parameters of the embedded engine on this machine, and two real runs of the demo beside their predictions.

1. The engine, in process, on the demo's base model: seconds of a decode step at several numbers of sequences and
   lengths of context, of a prefill, of an update; least squares give the `EngineModel`.
2. A real run with η = 0. Generation and training take turns in it, so that each has the cores to itself: it gives the
   `TrainerModel` (seconds of a step over its tokens, of publishing) and the lengths of its answers. Its step is what
   the simulator has to predict: of it nothing is fitted but training, and generation is what the engine's model, the
   lengths and the real control plane make of it.
3. A real run with η = 4, predicted with the same parameters. There all processes compute at once. Where they have not a
   core each the model, in which nobody takes another's time, is too fast, and the deviation says by how much.

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.load import load_supervised
from asyncrl.observability.metrics import read_rows
from asyncrl.trainer.supervised.base_model import ensure_base_model
from simulator.engine import EngineModel
from simulator.lengths import Recorded
from simulator.run import Setup, simulate
from simulator.trainer import TrainerModel

LOADS = ((8, 8), (8, 64), (32, 8), (32, 64), (64, 32), (128, 8), (128, 64), (192, 32))
"""Sequences and tokens of their prompts, of the measurements."""
STEPS = 24
"""Decode steps of a measurement."""
WARM_UP = 8
WANTED = 0.10
B, GROUP, IN_FLIGHT = 32, 8, 24
"""As the demo's settings."""
RUN_LIMIT_S = 1800.0


def _least_squares(rows: list[list[float]], seconds: list[float]) -> NDArray[np.float64]:
    """Non-negative coefficients: one that comes out below 0 is left out."""
    matrix, target = np.array(rows), np.array(seconds)
    used = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            coefficients = np.zeros(matrix.shape[1])
            coefficients[used] = np.maximum(found, 0)
            return coefficients
        used.pop(int(found.argmin()))


def measure_engine(model_path: Path) -> EngineModel:
    """Fit the model of the embedded engine with the model in `model_path`, one thread, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.inference.embedded.engine import GenerationEngine
    from asyncrl.inference.embedded.types import GenerationInput, Job, SamplingSpec

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path).eval()
    limit = 256
    engine = GenerationEngine(model, max_running_requests=limit, max_model_len=256)
    engine.eos_token_ids = ()
    decode_rows, decode_s, prefill_rows, prefill_s = [], [], [], []
    for turn in range(3):
        for count, prompt in LOADS:
            inputs = tuple(
                GenerationInput(
                    f"{turn}-{count}-{prompt}-{number}",
                    tuple(1 + (number * 7 + place) % 9 for place in range(prompt)),
                    SamplingSpec(max_new_tokens=STEPS + 1, seed=number),
                )
                for number in range(count)
            )
            future = engine.submit(Job(inputs))
            times = []
            for _ in range(STEPS):
                begun = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - begun)
            while engine.step():
                pass
            assert sum(len(output.logprobs) for output in future.result(timeout=0)) == count * (STEPS + 1)
            if turn:  # the first one warms up
                decoding = statistics.median(times[2:])
                decode_rows.append([1.0, count, count * (prompt + STEPS / 2)])
                decode_s.append(decoding)
                prefill_rows.append([count, count * prompt])
                prefill_s.append(max(0.0, times[0] - decoding))
    begun = time.perf_counter()
    update = engine.update_weights(str(model_path), "1")
    while not update.done():
        engine.step()
    update_s = time.perf_counter() - begun
    step, sequence, context = _least_squares(decode_rows, decode_s)
    prefill, prefill_token = _least_squares(prefill_rows, prefill_s)
    return EngineModel(step, sequence, context, prefill, prefill_token, limit, limit * 256, update_s)


def real_run(model_path: Path, eta: int, steps: int, root: Path) -> tuple[list[dict[str, Any]], Path]:
    """The rows of a real run of the demo after its warm-up, and its folder.

    Raises:
        SystemExit: it failed.
    """
    trial = f"eta{eta}"
    settings = [f"max_head_offpolicyness={eta}", f"total_train_steps={steps}", f"model.path={model_path}"]
    settings += [f"fileroot={root}", "experiment_name=simulate", f"trial_name={trial}", "resume=restart"]
    settings += ["eval.interval=0", "checkpoint.interval=0", "logging.tensorboard=false"]
    settings += ["samples.every=1", f"train_batch_size={B}", f"group_size={GROUP}"]
    settings += [f"rollout.max_concurrent={IN_FLIGHT}"]
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings]
    done = subprocess.run(command, stdout=sys.stderr, timeout=RUN_LIMIT_S, check=False, env=dict(os.environ))
    run_dir = root / "simulate" / trial
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]
    if done.returncode or len(rows) != steps:
        raise SystemExit(f"the run with η = {eta} failed; logs in {run_dir / 'logs'}")
    return rows[WARM_UP:], run_dir


def fit_trainer(rows: list[dict[str, Any]]) -> TrainerModel:
    """By the times of a real run's steps; what a step does besides waiting and training counts as publishing."""
    tokens = [[1.0, row["tokens/batch"]] for row in rows]
    fixed, token = _least_squares(tokens, [row["time/train_s"] for row in rows])
    rest = [row["time/step_s"] - row["time/train_s"] - row["time/wait_data_s"] for row in rows]
    return TrainerModel(token_s=token, fixed_s=fixed, publish_s=statistics.median(rest))


def predict(engine: EngineModel, trainer: TrainerModel, run_dir: Path, eta: int, steps: int, prompt: int) -> Setup:
    """The simulation of that run."""
    lengths = Recorded.of_run(run_dir)
    return Setup(
        name=f"demo, η = {eta}",
        servers=1,
        engine=engine,
        trainer=trainer,
        devices=(1, 1),
        lengths=lengths,
        eta=eta,
        batch=B,
        group=GROUP,
        max_new_tokens=max(lengths.lengths),
        prompt_tokens=prompt,
        workers=1,
        in_flight=IN_FLIGHT,
        steps=steps,
        warm_up=WARM_UP,
        health_interval_s=1.0,
        request_timeout_s=120.0,
    )


def fit(steps: int) -> None:
    """Measure, print, and hold the real runs beside their predictions; `steps` of each run, more than `WARM_UP`."""
    if steps <= WARM_UP:
        raise SystemExit(f"--steps {steps}: {WARM_UP} of them warm up; give more")
    model_path = ensure_base_model(load_supervised("sft"))
    engine = measure_engine(model_path)
    print(f"engine: {engine}", flush=True)
    trainer: TrainerModel | None = None
    with tempfile.TemporaryDirectory() as folder:
        for eta in (0, 4):
            rows, run_dir = real_run(model_path, eta, steps, Path(folder))
            trainer = trainer or fit_trainer(rows)
            samples = sum(row["tokens/batch"] for row in rows) / (len(rows) * B * GROUP)
            lengths = Recorded.of_run(run_dir).lengths
            prompt = max(1, round(samples - statistics.fmean(lengths)))
            if eta == 0:
                print(f"trainer: {trainer}; answers of {statistics.fmean(lengths):.1f} tokens", flush=True)
            found = simulate(predict(engine, trainer, run_dir, eta, steps, prompt))
            real = statistics.fmean(row["time/step_s"] for row in rows)
            wait = statistics.fmean(row["time/wait_data_s"] for row in rows)
            off = found.step_s / real - 1
            print(
                f"η = {eta}: a real step takes {real:.3f} s, of which {wait:.3f} s wait for data; predicted "
                f"{found.step_s:.3f} s and {found.wait_s:.3f} s; off by {off:+.0%} "
                f"({'within' if abs(off) <= WANTED else 'not within'} {WANTED:.0%}) {found.faults or ''}",
                flush=True,
            )
