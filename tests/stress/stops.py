"""What does a stop cost? A run that is asked to stop 20 times, at any moment, and continued by the same command.

    python tests/stress/stops.py [--stops 20] [--seed 0] [--experiment async_ppo] [setting=value ...]

Each launch is stopped by SIGINT at a random moment: in a third of the launches before its first step, so also while its
processes start, and otherwise up to `SPREAD_S` after it. In the end the run is audited: no rollout trained twice or too
old, no step twice, the counts of rollouts balanced.

The table: seconds from the signal to the launcher's exit, and from the next command to its first step.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.config.run_dir import METRICS_FILE
from asyncrl.launch.commands.audit import audit

SETTINGS = ("experiment_name=stops", "trial_name=stops", "logging.tensorboard=false", "checkpoint.interval=5")
STOPPED = 128 + signal.SIGINT
SPREAD_S = 8.0
EARLY_S = 12.0
"""Within so many seconds after the command comes a stop that may precede the first step."""
LIMIT_S = 600.0


def rows_of(run_dir: Path) -> int:
    """Steps that have a row of metrics."""
    metrics = run_dir / METRICS_FILE
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def step_s(begun: float, run_dir: Path, launcher: subprocess.Popen[bytes]) -> float | None:
    """Seconds since `begun` when the launch has ended a step; None if it ended before."""
    before = rows_of(run_dir)
    while rows_of(run_dir) <= before:
        if launcher.poll() is not None:
            return None
        if time.monotonic() > begun + LIMIT_S:
            raise SystemExit(f"no step within {LIMIT_S:g} s")
        time.sleep(0.05)  # a benchmark looks; it synchronises nothing
    return time.monotonic() - begun


def row(what: str, seconds: Sequence[float]) -> str:
    """A line of the table."""
    return f"| {what} | {statistics.median(seconds):.1f} s ({max(seconds):.1f} s) |"


def main() -> int:
    """Run, stop, continue, audit; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--experiment", default="async_ppo")
    parser.add_argument("overrides", nargs="*", metavar="setting=value")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background, and by what it starts
    chance, wrong = random.Random(args.seed), list[str]()
    to_exit, to_step = list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="asyncrl-stops-") as root:
        run_dir = Path(root) / "stops" / "stops"
        command = [sys.executable, "-m", "asyncrl.launch", args.experiment, f"fileroot={root}"]
        for number in range(args.stops):
            begun = time.monotonic()
            launcher = subprocess.Popen([*command, *SETTINGS, *args.overrides], stdout=sys.stderr)
            if chance.random() < 1 / 3:
                moment = chance.uniform(1.0, EARLY_S)
            else:
                moment = chance.uniform(0.0, SPREAD_S)
                if (took := step_s(begun, run_dir, launcher)) is not None:
                    to_step.append(took)
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(moment)
            asked = time.monotonic()
            launcher.send_signal(signal.SIGINT)
            code = launcher.wait(LIMIT_S)
            to_exit.append(time.monotonic() - asked)
            print(f"stop {number + 1}: {rows_of(run_dir)} steps, exit code {code}", file=sys.stderr)
            if code != STOPPED:
                wrong.append(f"launch {number + 1} ended with {code}, not {STOPPED}")
                if code == 0:
                    break
        found = audit(run_dir)
        wrong += map(str, found.findings)
        print("| of a stop | median (worst) |\n|---|--:|")
        print(row("from the signal to the exit", to_exit))
        if to_step:
            print(row("from the command to the next step", to_step))
        print(f"\n{len(to_exit)} stops, {rows_of(run_dir)} rows of steps, {len(found.findings)} findings of the audit")
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
