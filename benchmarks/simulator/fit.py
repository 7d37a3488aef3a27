"""A model of this machine, fitted to the embedded engine and one real run of the demo, and what it says of other runs.

What is measured, and kept in a file, so that it can be looked at again (`Measurements`):

1. The engine and its server, without any run (`simulator.speed`).
2. Rounds of real runs, one after the other (`simulator.real`): steps, CPU time by process, the groups generated.

What is taken from where. From the round's first run, with η = 0, in which generation and training take turns: the
`TrainerModel` (seconds of a step over the tokens that it computes; of publishing) and the CPU time of all other
processes, by rollout and by step (`Host`), and of the engine beside them (`fit_engine`). From each run that is
predicted: its settings, and the groups that it generated, in the data order: how long their answers are, where they
part, and whether their rewards differ. That is what the policy did, which depends on what it learned and not on how
fast anything is. No time of a run is taken but of the first, and of that none in which it waits or generates.

What is predicted: how long generation takes, who waits for whom, what interruptions cost, and how it goes where all
compute at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_supervised
from asyncrl.trainer.supervised.base_model import ensure_base_model
from simulator.real import IN_FLIGHT, RUNS, WARM_UP, B, RealRun, Run, as_json, from_json, real_run
from simulator.servers.engine_model import EngineModel
from simulator.servers.lengths import Recorded
from simulator.setup import Host, Outcome, Setup
from simulator.simulation import simulate
from simulator.speed import Speed, least_squares, measure_speed
from simulator.trainer import TrainerModel

WANTED = 0.10
DISTURBED = 0.05
"""Share of the machine beyond which a run counts as disturbed by something else."""
TRIES = 3
SETTLED = 2
"""Steps of the first run after which its training is looked at: the early ones, whose groups part most, tell most of
how its time grows with tokens."""


class Measurements:
    """Rounds in a JSON file: each has the speed that was measured before it, and its runs by name."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.rounds: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []

    def measure(self, steps: int) -> None:
        """Add a round; on a machine that does nothing else some four minutes of 40 steps."""
        model_path = ensure_base_model(load_supervised("arithmetic_base"))
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / "runs"
            root.mkdir()
            speed = asyncio.run(measure_speed(model_path, Path(folder)))
            runs = {run.name: as_json(_undisturbed(run, model_path, steps, root)) for run in RUNS}
        self.rounds.append({"steps": steps, "speed": asdict(speed), "runs": runs})
        self._file.write_text(json.dumps(self.rounds) + "\n")

    def of(self, number: int) -> tuple[Speed, dict[str, RealRun]]:
        """A round."""
        kept = self.rounds[number]
        speed = Speed(**kept["speed"] | {"engine": EngineModel(**kept["speed"]["engine"])})
        return speed, {name: from_json(run) for name, run in kept["runs"].items()}


def _undisturbed(run: Run, model_path: Path, steps: int, root: Path) -> RealRun:
    """The run, made again where something else ran beside it; after `TRIES` the one beside which least did."""
    made = []
    for _ in range(TRIES):
        made.append(real_run(run, model_path, steps, root))
        if made[-1].others <= DISTURBED:
            break
    return min(made, key=lambda real: real.others)


def computed_tokens(row: dict[str, float]) -> float:
    """Return the tokens that a step of a real run computed: those of groups whose rewards differ, each distinct prefix
    once."""
    prompts = (1.0 - row["reward/frac_zero_std"]) * (row["tokens/batch"] - row["tokens/trained"])
    return row["tokens/computed_ratio"] * (row["tokens/loss"] + prompts)


def fit_trainer(real: RealRun) -> TrainerModel:
    """By the times of a real run's steps, less what the master computes in them; what a step does besides waiting and
    training counts as publishing."""
    rows = real.rows[SETTLED:]
    tokens = [[1.0, computed_tokens(row)] for row in rows]
    fixed, token = map(float, least_squares(tokens, [row["time/train_s"] for row in rows]))
    rest = [row["time/step_s"] - row["time/train_s"] - row["time/wait_for_batch_s"] for row in rows]
    of_master = (real.cpu["master_worker"] + real.cpu["master_worker+"]) / 2
    return TrainerModel(
        token_s=token, fixed_s=max(0.0, fixed - of_master), publish_s=max(0.0, statistics.median(rest) - of_master)
    )


def fit_rollouts(rollouts: list[tuple[float, int]]) -> tuple[float, float]:
    """CPU-seconds of the RolloutWorker for a rollout and for a token of its answers, by the steps of a run in which a
    step's rollouts end before the next one's begin."""
    ends = [used_s for used_s, _ in rollouts[B - 1 :: B]]
    tokens = [sum(tokens for _, tokens in rollouts[B * step : B * step + B]) for step in range(len(ends))]
    used = [later - earlier for earlier, later in pairwise(ends)]
    rollout_s, token_s = least_squares([[float(B), float(each)] for each in tokens[1:]], used)
    return float(rollout_s), float(token_s)


def fit_host(speed: Speed, real: RealRun) -> Host:
    """By the CPU time of a run's processes, in which each rollout made one call and each step one update."""
    cpu = {kind: real.cpu[kind] + real.cpu[f"{kind}+"] for kind in real.cpu if not kind.endswith("+")}
    rollout_s, token_s = fit_rollouts(real.rollouts)
    return Host(
        cores=len(os.sched_getaffinity(0)),
        call_s=speed.client_call_s,
        rollout_s=max(0.0, rollout_s - speed.client_call_s),
        rollout_token_s=token_s,
        receive_s=real.cpu["model_worker+"] / B,
        manager_s=max(0.0, cpu["gserver_manager"] - speed.manager_update_s) / B,
        master_s=cpu["master_worker"],
        check_s=max(0.0, speed.server_update_s - speed.engine.update_s) + speed.manager_update_s,
    )


def fit_engine(speed: Speed, trainer: TrainerModel, host: Host, run: Run, real: RealRun) -> EngineModel:
    """With the CPU time that the run's server had for the same tokens: beside its HTTP and four other processes, all of
    which wake some hundred times a step, the engine finds its caches cold and takes longer than on its own."""
    alone = replace(speed.engine, call_s=speed.server_call_s)
    found = predict(alone, trainer, host, run, real)
    computed = (1.0 - found.generation_idle) * found.step_s - B * alone.call_s
    beside = real.cpu["generation_server+"] - alone.update_s
    return replace(alone.slower(beside / computed), call_s=alone.call_s)


def prompt_tokens(real: RealRun, group: int) -> int:
    """Return the mean number of tokens of the run's prompts."""
    samples = statistics.fmean(row["tokens/batch"] - row["tokens/trained"] for row in real.rows)
    return max(1, round(samples / (B * group)))


def predict(engine: EngineModel, trainer: TrainerModel, host: Host, run: Run, real: RealRun) -> Outcome:
    """Predict the run from the groups that it generated and nothing else of it."""
    setup = Setup(
        name=f"demo, {run.name}",
        servers=1,
        engine=engine,
        trainer=trainer,
        devices=(1, 1),
        lengths=Recorded.of_places(real.groups),
        eta=run.eta,
        batch=B,
        group=run.group,
        max_new_tokens=run.max_new_tokens,
        prompt_tokens=prompt_tokens(real, run.group),
        workers=1,
        in_flight=IN_FLIGHT,
        steps=len(real.rows),
        warm_up=WARM_UP,
        health_interval_s=1.0,
        request_timeout_s=120.0,
        host=host,
        shares_prefixes=True,
        in_order=True,
    )
    return simulate(setup)


def fit(file: Path, rounds: int, steps: int, record: Path | None = None) -> None:
    """Add `rounds` to the measurements in `file`, and hold all of them beside what the model of each round predicts.

    Args:
        record: file for the groups of the first run.

    Raises:
        SystemExit: too few steps, or no measurement.
    """
    if steps <= WARM_UP + 4:
        raise SystemExit(f"--steps {steps}: {WARM_UP} of them warm up; give more")
    measurements = Measurements(file)
    for _ in range(rounds):
        measurements.measure(steps)
    if not measurements.rounds:
        raise SystemExit(f"{file} has no round; give --rounds 1")
    found: dict[str, list[tuple[RealRun, Outcome]]] = {run.name: [] for run in RUNS}
    for number in range(len(measurements.rounds)):
        speed, runs = measurements.of(number)
        first = runs[RUNS[0].name]
        if record is not None:
            Recorded.of_places(first.groups).save(record)
        trainer, host = fit_trainer(first), fit_host(speed, first)
        engine = fit_engine(speed, trainer, host, RUNS[0], first)
        print(f"round {number + 1}: {engine}\n{trainer}\n{host}", flush=True)
        for run in RUNS:
            outcome = predict(engine, trainer, host, run, runs[run.name])
            found[run.name].append((runs[run.name], outcome))
            print(f"{run.name}: {_line(runs[run.name], outcome)}", *outcome.faults, flush=True)
    print("", table(found), sep="\n")


def _off(real: RealRun, outcome: Outcome) -> float:
    return outcome.step_s / real.mean("step") - 1


def _line(real: RealRun, outcome: Outcome) -> str:
    return (
        f"{real.mean('step'):.3f} s, waits {real.mean('wait_data'):.3f} s; predicted {outcome.step_s:.3f} s, "
        f"{outcome.wait_s:.3f} s; off by {_off(real, outcome):+.1%}; others had {real.others:.0%} of the machine"
    )


def table(found: dict[str, list[tuple[RealRun, Outcome]]]) -> str:
    """Write a table: for each run the medians over undisturbed rounds, and the extremes of the prediction's error."""
    lines = [
        "| run | the model has | rounds | a step | of it waiting | predicted | of it waiting | off by | from, to | |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for run in RUNS:
        rounds = [each for each in found[run.name] if each[0].others <= DISTURBED]
        if not rounds:
            lines.append(f"| {run.name} | | 0 of {len(found[run.name])} | | | | | | | disturbed |")
            continue
        offs = [_off(*each) for each in rounds]
        off = statistics.median(offs)
        times = [
            statistics.median(each)
            for each in zip(
                *((r.mean("step"), r.mean("wait_data"), o.step_s, o.wait_s) for r, o in rounds), strict=True
            )
        ]
        cells = [
            run.name,
            "fitted to" if run.fitted else "not seen",
            f"{len(rounds)} of {len(found[run.name])}",
            *(f"{each:.3f} s" for each in times),
            f"{off:+.1%}",
            f"{min(offs):+.1%}, {max(offs):+.1%}",
            "met" if abs(off) <= WANTED else "MISSED",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
