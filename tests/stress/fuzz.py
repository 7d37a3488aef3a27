"""Plays many adversarial schedules of the whole protocol, and damages many messages for every decoder.

    python tests/stress/fuzz.py [--schedules 10000] [--long 3000] [--inputs 1000000] [--seed 0]

A schedule is one of `tests/unit/manager/test_any_schedule.py`: processes die, fall silent and are heard late at any
moment, and nothing may be lost, doubled or stuck. A long one has 700 moves, a short one 50. An input is one of
`tests/unit/test_decoders.py`: a damaged message, which its decoder takes or refuses by name, in bounded time and
memory. All run in batches, each a process of its own with a seed of its own, so that what is found is found again by
the command that is printed with it. The target is none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "unit"
SCHEDULES = TESTS / "manager" / "test_any_schedule.py"
DECODERS = TESTS / "test_decoders.py"
SCHEDULES_AT_A_TIME = 500
INPUTS_AT_A_TIME = 1_000
"""For each decoder."""


@dataclass
class Tally:
    """Trials of one kind, and the commands that reproduce failures."""

    name: str
    tried: int = 0
    seconds: float = 0.0
    failed: tuple[str, ...] = ()


def main() -> int:
    """Run all and print the table; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--long", type=int, default=3_000)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    args = parser.parse_args()
    tallies = [
        schedules(args.schedules, args.seed),
        long_schedules(args.long, args.seed),
        inputs(args.inputs, args.seed),
    ]
    print(f"{'':12}{'tried':>12}{'found':>8}{'seconds':>10}")
    for tally in tallies:
        print(f"{tally.name:12}{tally.tried:>12,}{len(tally.failed):>8}{tally.seconds:>10.0f}")
    return 1 if any(tally.failed for tally in tallies) else 0


def schedules(count: int, seed: int) -> Tally:
    """Play `count` schedules."""
    tally = Tally("schedules")
    while tally.tried < count:
        batch = min(SCHEDULES_AT_A_TIME, count - tally.tried)
        command = ["-m", "pytest", "-q", str(SCHEDULES), f"--hypothesis-seed={seed}", "--timeout=0"]
        command += ["--show-capture=no", "-k", "test_any_schedule and not long_schedule"]
        _run(tally, command, {"ASYNCRL_FUZZ_SCHEDULES": str(batch)}, batch)
        seed += 1
    return tally


def long_schedules(count: int, seed: int) -> Tally:
    """Play `count` long schedules; schedule i has the seed `seed` + i."""
    tally = Tally("long")
    command = ["-m", "pytest", "-q", str(SCHEDULES), "-k", "long_schedule", "--timeout=0", "--show-capture=no"]
    while tally.tried < count:
        batch = min(SCHEDULES_AT_A_TIME, count - tally.tried)
        first = str(seed + tally.tried)
        _run(tally, command, {"ASYNCRL_FUZZ_LONG_SCHEDULES": str(batch), "ASYNCRL_FUZZ_SEED": first}, batch)
    return tally


def inputs(count: int, seed: int) -> Tally:
    """Try at least `count` inputs, as many for each decoder."""
    tally = Tally("inputs")
    listed = _pytest(["-m", "pytest", "-q", str(DECODERS), "--collect-only", "-k", "damaged"], {})
    decoders = listed.stdout.count("::test_")
    if not decoders:
        raise SystemExit(f"no decoders were found:\n{listed.stdout}{listed.stderr}")
    while tally.tried < count:
        each = min(INPUTS_AT_A_TIME, -(-(count - tally.tried) // decoders))
        command = ["-m", "pytest", "-q", str(DECODERS), "-k", "damaged", "--timeout=0", "--show-capture=no"]
        _run(tally, command, {"ASYNCRL_FUZZ_INPUTS": str(each), "ASYNCRL_FUZZ_SEED": str(seed)}, each * decoders)
        seed += 1
    return tally


def _run(tally: Tally, command: list[str], settings: Mapping[str, str], tried: int) -> None:
    """Run one batch and take it into the tally."""
    begun = time.monotonic()
    done = _pytest(command, settings)
    tally.seconds += time.monotonic() - begun
    tally.tried += tried
    if done.returncode:
        again = " ".join([*(f"{name}={value}" for name, value in settings.items()), "python", *command])
        tally.failed = (*tally.failed, again)
        print(f"found by: {again}\n{done.stdout[-6000:]}{done.stderr[-2000:]}", file=sys.stderr)
    print(f"{tally.name}: {tally.tried:,} tried, {len(tally.failed)} batches found something", file=sys.stderr)


def _pytest(command: list[str], settings: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=os.environ | settings, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    raise SystemExit(main())
