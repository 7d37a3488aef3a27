"""Does anything grow? A run of two hours in which a process is killed every two minutes, measured, then audited.

    python tests/stress/soak.py [--minutes 120] [--kill-every 120] [--sample-every 10] [--seed 0] [setting=value ...]

Sampled are, for each process of the run by its name: resident memory, open descriptors and threads; and of the run: the
entries in name resolution, the bytes it has in `/dev/shm`, and those of its folder. A killed process is followed by
another of the same name, so a series goes on across deaths; what a new process takes up at first counts too.

Whether a series levels off is judged after the first third of the time. Mann and Kendall's test asks whether there is a
trend at all (one-sided, p < 0.01, on medians of blocks, as samples in a row depend on each other); if so, the slope of
Theil and Sen says how much: a series that would gain more than a tenth of its level, and more than a least amount that
is worth speaking of, in the time that was judged GROWS. Deaths disturb both little, as they go by ranks and medians.
Files that tell of every step or rollout (ledger, metrics, logs, ...) grow by design; their bytes per step are told.

In the end the run is asked to stop, its rollout counts have to balance, and the audit must find nothing.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import psutil

from asyncrl.config.load import load_supervised
from asyncrl.config.run_dir import (
    LEDGER_DIR,
    LOGS_DIR,
    METRICS_FILE,
    NAMES_DIR,
    RESTARTS_FILE,
    SAMPLES_DIR,
)
from asyncrl.launch.commands.audit import audit
from asyncrl.runtime.trials.memory_checkpoint import MemoryCheckpoint
from asyncrl.trainer.supervised.base_model import ensure_base_model

SETTINGS = [
    "experiment_name=soak",
    "trial_name=soak",
    "total_train_steps=1000000",
    "optimizer.schedule=constant",
    "eval.interval=100",
    "checkpoint.interval=20",
    "logging.tensorboard=false",
    "system.restarts_per_process=1000000",
]
BY_DESIGN = (LEDGER_DIR, LOGS_DIR, METRICS_FILE, RESTARTS_FILE, SAMPLES_DIR)
KILLED = ("generation_server", "gserver_manager", "master_worker", "model_worker", "rollout_worker")
TITLE = re.compile(r"asyncrl (\w+/\d+)")
WARM_UP = 1 / 3
BLOCKS = 24
"""Medians of so many blocks are tested for a trend."""
Z = 2.326
"""One-sided p < 0.01."""
SHARE = 0.1
LEAST = {"memory": 32 << 20, "descriptors": 8, "threads": 4, "names": 4, "shm": 16 << 20, "folder": 16 << 20}
"""Growth that is worth speaking of."""
STOP_LIMIT_S = 300.0
STOPPED = 128 + signal.SIGINT
"""Exit code of a run that was asked to stop and did so with its rollout counts in order."""

Series = dict[tuple[str, str], list[tuple[float, float]]]
"""By quantity and name: times in seconds and values."""


def processes(launcher: psutil.Process) -> Iterator[tuple[str, psutil.Process]]:
    """The launcher and the run's workers, by name."""
    yield "launcher", launcher
    for child in launcher.children(recursive=True):
        with suppress(psutil.Error):
            if found := TITLE.search(" ".join(child.cmdline())):
                yield found[1], child


def bytes_below(folder: Path, without: Iterable[str] = ()) -> int:
    """Bytes of all files below `folder`, those of `without` left out."""
    left_out, total = set(without), 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.relative_to(folder).parts[0] not in left_out and path.is_file():
                total += path.stat().st_size
    return total


def sample(launcher: psutil.Process, run_dir: Path, at: float, series: Series) -> None:
    """Take one sample of everything into `series`."""
    for name, process in processes(launcher):
        with suppress(psutil.Error):
            values = process.memory_info().rss, process.num_fds(), process.num_threads()
            for quantity, value in zip(("memory", "descriptors", "threads"), values, strict=True):
                series[quantity, name].append((at, value))
    series["names", "run"].append((at, len(list((run_dir / NAMES_DIR).rglob("*.json")))))
    series["shm", "run"].append((at, bytes_below(MemoryCheckpoint(run_dir).folder)))
    series["folder", "run"].append((at, bytes_below(run_dir, BY_DESIGN)))


def growth(points: Sequence[tuple[float, float]]) -> tuple[float, float, bool]:
    """Level, growth over the time that is judged, and whether there is a trend; see the module's docstring."""
    begin = points[0][0] + WARM_UP * (points[-1][0] - points[0][0])
    judged = [point for point in points if point[0] >= begin]
    level = statistics.median(value for _, value in judged)
    size = max(1, len(judged) // BLOCKS)
    blocks = [judged[at : at + size] for at in range(0, len(judged) - size + 1, size)]
    medians = [(statistics.median(t for t, _ in block), statistics.median(v for _, v in block)) for block in blocks]
    count = len(medians)
    if count < 4:
        return level, 0.0, False
    pairs = list(combinations(medians, 2))
    score = sum((later > earlier) - (later < earlier) for (_, earlier), (_, later) in pairs)
    ties: dict[float, int] = defaultdict(int)
    for _, value in medians:
        ties[value] += 1
    tied = sum(each * (each - 1) * (2 * each + 5) for each in ties.values())
    deviation = math.sqrt((count * (count - 1) * (2 * count + 5) - tied) / 18)
    slope = statistics.median((later - earlier) / (t2 - t1) for (t1, earlier), (t2, later) in pairs)
    return level, slope * (judged[-1][0] - judged[0][0]), deviation > 0 and (score - 1) / deviation > Z


def grows(quantity: str, points: Sequence[tuple[float, float]]) -> bool:
    """True if the series does not level off."""
    level, gained, trend = growth(points)
    return trend and gained > max(SHARE * level, LEAST[quantity])


def table(series: Series) -> tuple[str, list[str]]:
    """Every series for a person, and the names of those that grow."""
    lines, growing = [f"{'':14}{'of':24}{'samples':>8}{'level':>12}{'gained':>12}  verdict"], []
    for (quantity, name), points in sorted(series.items()):
        if len(points) < BLOCKS // 2:
            continue
        level, gained, trend = growth(points)
        verdict = "levels off"
        if grows(quantity, points):
            verdict = "GROWS"
            growing.append(f"{quantity} of {name}")
        scale, unit = (1 << 20, " MB") if quantity in ("memory", "shm", "folder") else (1, "   ")
        lines.append(
            f"{quantity:14}{name:24}{len(points):>8}{level / scale:>9.1f}{unit}{gained / scale:>+9.1f}{unit}  {verdict}"
            + (" (a trend, but small)" if trend and verdict != "GROWS" else "")
        )
    return "\n".join(lines), growing


def rows_of(run_dir: Path) -> int:
    """Steps that have a row of metrics."""
    metrics = run_dir / METRICS_FILE
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def soak(
    run_dir: Path, command: Sequence[str], minutes: float, kill_every_s: float, sample_every_s: float, seed: int
) -> tuple[Series, list[str], int]:
    """The run: what was sampled, what was killed, and the launcher's exit code."""
    chance, killed = random.Random(seed), []
    series: Series = defaultdict(list)
    started = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    launcher = psutil.Process(started.pid)
    try:
        while started.poll() is None and rows_of(run_dir) < 3:
            time.sleep(1.0)  # a benchmark looks; it synchronises nothing
        begun = time.monotonic()
        kill_at = begun + kill_every_s
        while started.poll() is None and (now := time.monotonic()) < begun + 60.0 * minutes:
            sample(launcher, run_dir, now - begun, series)
            if now >= kill_at:
                kind = chance.choice(KILLED)
                victims = [(name, process) for name, process in processes(launcher) if name.startswith(kind)]
                if victims:
                    name, victim = chance.choice(victims)
                    with suppress(psutil.Error):
                        victim.kill()
                        killed.append(name)
                        print(f"{now - begun:7.0f} s: killed {name}", file=sys.stderr)
                kill_at += kill_every_s
            time.sleep(sample_every_s)
        if started.poll() is None:
            started.send_signal(signal.SIGINT)
        return series, killed, started.wait(STOP_LIMIT_S)
    finally:
        if started.poll() is None:
            for _, process in list(processes(launcher))[::-1]:
                with suppress(psutil.Error):
                    process.kill()


def main() -> int:
    """Run, print the table, audit; 1 where anything grows or is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--sample-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as root:
        run_dir = Path(root) / "soak" / "soak"
        model = ensure_base_model(load_supervised("arithmetic_base"))
        command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", f"model.path={model}", f"fileroot={root}"]
        command += [*SETTINGS, *args.overrides]
        series, killed, code = soak(run_dir, command, args.minutes, args.kill_every, args.sample_every, args.seed)
        steps = max(1, rows_of(run_dir))
        text, growing = table(series)
        print(text)
        for name in BY_DESIGN:
            path = run_dir / name
            size = path.stat().st_size if path.is_file() else bytes_below(path)
            print(f"by design     {name:24}{size / steps:>8.0f} bytes per step")
        found = audit(run_dir)
        for finding in found.findings:
            print(finding)
        print(
            f"{steps} steps, {len(killed)} kills, exit code {code}, {len(found.findings)} findings of the audit, "
            f"{'nothing grows' if not growing else 'GROWS: ' + ', '.join(growing)}"
        )
    return 1 if growing or found.findings or code != STOPPED else 0


if __name__ == "__main__":
    raise SystemExit(main())
