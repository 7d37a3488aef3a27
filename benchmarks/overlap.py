"""Does generation overlap training? The demo with η = 0 and η = 4: same seed, steps and processes, in turns.

    python benchmarks/overlap.py [--modes interrupt retract in_place] [--steps 40] [--rounds 3] [setting=value ...]

With η = 0 nothing overlaps: a step waits for its rollouts (generation alone), then trains and publishes (training
alone). So that run gives both times; those with η = 4, one for each `manager.update_mode` asked for, give the step.
Figures of a run are medians over the steps after a warm-up, the last lines medians over the rounds' ratios.

    efficiency = max(generation alone, training alone) / step with η = 4

The CPU share of GserverManager and MasterWorker is their CPU time over wall-clock time while steps are trained. Below,
every process's CPU-seconds for a step: where the time goes that two cores have, whatever else overlaps.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from common import Table, demo_model, parser, verdict

from asyncrl.observe.tail import read_rows

WARM_UP_STEPS = 8
ETA = 4
CONTROL = ("gserver_manager", "master_worker")
TITLE = re.compile(r"^asyncrl (\w+)/")
MEASURED_RUN = ("eval.interval=0", "checkpoint.interval=0", "logging.tensorboard=false", "resume=restart")
"""Settings of runs whose steps are timed: nothing but training."""
TARGETS = {"speed-up": 1.5, "efficiency": 0.9, "control": 0.10}


@dataclass(frozen=True)
class Measured:
    """Medians of one run, in seconds per step; `control` is the share of one core, `cpu` CPU-seconds a step by kind of
    process."""

    step: float
    wait_data: float
    train: float
    publish: float
    control: float
    cpu: dict[str, float]


def wait_for_step(process: subprocess.Popen[bytes], metrics: Path, step: int) -> None:
    """Return once the run's file of metrics has a row for each of `step` steps and the initial model, or it ended."""
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= step):
        time.sleep(0.05)  # a benchmark looks; it synchronises nothing


def cpu_seconds(process: subprocess.Popen[bytes]) -> Counter[str]:
    """Return the CPU seconds of a run's processes so far, by kind of process."""
    seconds: Counter[str] = Counter()
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile is none of the run's
            if named := TITLE.search(" ".join(child.cmdline())):
                seconds[named[1]] += sum(child.cpu_times()[:2])  # type: ignore[assignment]
    return seconds


def run(root: Path, steps: int, eta: int, mode: str, number: int, overrides: Sequence[str]) -> Measured:
    """One run of the demo.

    Raises:
        SystemExit: the run failed.
    """
    trial = f"eta{eta}-{mode}-{number}"
    run_dir = root / "overlap" / trial
    settings = [f"max_head_offpolicyness={eta}", f"manager.update_mode={mode}", f"total_train_steps={steps}"]
    settings += ["experiment_name=overlap", f"trial_name={trial}", f"fileroot={root}", *MEASURED_RUN]
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings, *overrides]
    process = subprocess.Popen(command, stdout=sys.stderr)
    marks: list[tuple[float, Counter[str]]] = []
    for step in (WARM_UP_STEPS, steps - 2):
        wait_for_step(process, run_dir / "metrics.jsonl", step)
        marks.append((time.monotonic(), cpu_seconds(process)))
    if process.wait() != 0:
        raise SystemExit(f"the run with η = {eta} failed; logs in {run_dir / 'logs'}")
    (begun, before), (ended, after) = marks
    rows = read_rows(run_dir / "metrics.jsonl")[WARM_UP_STEPS:]

    def median(name: str) -> float:
        return float(statistics.median(row[f"time/{name}_s"] for row in rows))

    return Measured(
        step=median("step"),
        wait_data=median("wait_for_batch"),
        train=median("train"),
        publish=median("publish"),
        control=sum(after[kind] - before[kind] for kind in CONTROL) / (ended - begun),
        cpu={kind: (after[kind] - before[kind]) / (steps - 2 - WARM_UP_STEPS) for kind in sorted(after)},
    )


def main() -> None:
    """Print every round, the medians of every mode, and CPU-seconds by process."""
    command = parser(__doc__)
    command.add_argument("--modes", nargs="+", default=["interrupt", "retract", "in_place"])
    command.add_argument("--steps", type=int, default=40)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("overrides", nargs="*", metavar="setting=value")
    args = command.parse_intermixed_args()
    settings, modes = [f"model.path={demo_model()}", *args.overrides], args.modes
    table = Table("update mode", "generation", "training", "step, η = 0", f"step, η = {ETA}", *TARGETS)
    runs: dict[str, list[Measured]] = {}
    found: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            alone = run(Path(folder), args.steps, 0, modes[0], number, settings)
            runs.setdefault("η = 0", []).append(alone)
            first = number % len(modes)  # another one is first in each round
            for mode in [*modes[first:], *modes[:first]]:
                own = run(Path(folder), args.steps, ETA, mode, number, settings)
                runs.setdefault(f"η = {ETA}, {mode}", []).append(own)
                training = alone.train + alone.publish
                ratios = (alone.step / own.step, max(alone.wait_data, training) / own.step, own.control)
                found[mode].append(ratios)
                times = (alone.wait_data, training, alone.step, own.step)
                table.row(mode, *(f"{each:.3f} s" for each in times), *(f"{each:.3f}" for each in ratios))
    for mode, of_mode in found.items():
        for (name, target), values in zip(TARGETS.items(), zip(*of_mode, strict=True), strict=True):
            value = statistics.median(values)
            met = verdict(value, target, at_least=name != "control")
            print(f"{mode}: {name} {value:.3f}, target {target:.2f}: {met}")
    kinds = list(runs["η = 0"][0].cpu)
    table = Table("CPU-seconds a step", *kinds, "together")
    for name, measured in runs.items():
        used = [statistics.median(each.cpu[kind] for each in measured) for kind in kinds]
        table.row(name, *(f"{each:.3f}" for each in used), f"{sum(used):.3f}")


if __name__ == "__main__":
    main()
