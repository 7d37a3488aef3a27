"""Does generation overlap training? The demo with η = 0 and η = 4: same seed, steps and processes, one after the other.

    python benchmarks/overlap.py [--steps 60] [--quick] [--json PATH] [setting=value ...]

With η = 0 nothing overlaps: a step waits for its rollouts (generation alone), then trains and publishes (training
alone). So that run gives both times; the other gives the step. Figures are medians over the steps after a warm-up.

    overlap efficiency = max(generation alone, training alone) / step with η = 4

The CPU share of GserverManager and MasterWorker is their CPU time over wall-clock time while steps are trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

WARM_UP_STEPS = 8
SETTINGS = ["eval.interval=0", "checkpoint.interval=0", "logging.tensorboard=false", "resume=restart"]
CONTROL = ("gserver_manager", "master_worker")
TARGETS = {"speed-up": 1.5, "efficiency": 0.85, "control": 0.10}


@dataclass(frozen=True)
class Measured:
    """Medians of one run, in seconds per step; `control` is the share of one core."""

    eta: int
    step: float
    wait_data: float
    train: float
    publish: float
    tokens_per_s: float
    control: float


def run(eta: int, steps: int, root: Path, overrides: list[str]) -> Measured:
    """One run of the demo."""
    run_dir = root / "overlap" / f"eta{eta}"
    settings = [f"max_head_offpolicyness={eta}", f"total_train_steps={steps}", "experiment_name=overlap"]
    settings += [f"trial_name=eta{eta}", f"fileroot={root}", *SETTINGS, *overrides]
    process = subprocess.Popen([sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings], stdout=sys.stderr)
    metrics = run_dir / "metrics.jsonl"
    begin = _control_cpu(process, metrics, WARM_UP_STEPS)
    end = _control_cpu(process, metrics, steps - 2)
    if process.wait() != 0:
        raise SystemExit(f"the run with η = {eta} failed; logs in {run_dir / 'logs'}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][WARM_UP_STEPS:]
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key.startswith("time/")}
    tokens = sum(row["tokens/batch"] for row in rows)
    return Measured(
        eta=eta,
        step=median["time/step_s"],
        wait_data=median["time/wait_data_s"],
        train=median["time/train_s"],
        publish=median["time/publish_s"],
        tokens_per_s=tokens / sum(row["time/step_s"] for row in rows),
        control=(end[1] - begin[1]) / (end[0] - begin[0]),
    )


def _control_cpu(process: subprocess.Popen[bytes], metrics: Path, step: int) -> tuple[float, float]:
    """(clock, CPU seconds of the control processes) once `step` steps are trained."""
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < step):
        time.sleep(0.05)  # a benchmark looks; it synchronises nothing
    seconds = 0.0
    for child in psutil.Process(process.pid).children():
        if any(f"asyncrl {kind}/" in " ".join(child.cmdline()) for kind in CONTROL):
            times = child.cpu_times()
            seconds += times.user + times.system
    return time.monotonic(), seconds


def table(sync: Measured, overlapped: Measured) -> str:
    """The figures for a person."""
    generation, training = sync.wait_data, sync.train + sync.publish
    lines = [
        f"{'':24}{'η = 0':>10}{f'η = {overlapped.eta}':>10}",
        f"{'step':24}{sync.step:>9.3f}s{overlapped.step:>9.3f}s",
        f"{'  waiting for data':24}{sync.wait_data:>9.3f}s{overlapped.wait_data:>9.3f}s",
        f"{'  training':24}{sync.train:>9.3f}s{overlapped.train:>9.3f}s",
        f"{'  publishing':24}{sync.publish:>9.3f}s{overlapped.publish:>9.3f}s",
        f"{'trained tokens/s':24}{sync.tokens_per_s:>10,.0f}{overlapped.tokens_per_s:>10,.0f}",
        "",
        f"generation alone {generation:.3f} s, training alone {training:.3f} s",
    ]
    for name, value in figures(sync, overlapped).items():
        ok = value <= TARGETS[name] if name == "control" else value >= TARGETS[name]
        bound = "at most" if name == "control" else "at least"
        lines.append(f"{name:12}{value:>7.2f}   target {bound} {TARGETS[name]:.2f}   {'met' if ok else 'MISSED'}")
    return "\n".join(lines)


def figures(sync: Measured, overlapped: Measured) -> dict[str, float]:
    """What the targets are about."""
    return {
        "speed-up": sync.step / overlapped.step,
        "efficiency": max(sync.wait_data, sync.train + sync.publish) / overlapped.step,
        "control": overlapped.control,
    }


def main() -> None:
    """Run both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="20 steps")
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    steps = 20 if args.quick else args.steps
    with tempfile.TemporaryDirectory() as folder:
        sync, overlapped = (run(eta, steps, Path(folder), args.overrides) for eta in (0, args.eta))
    print(table(sync, overlapped))
    if args.json:
        args.json.write_text(json.dumps([asdict(sync), asdict(overlapped), figures(sync, overlapped)], indent=1))


if __name__ == "__main__":
    main()
