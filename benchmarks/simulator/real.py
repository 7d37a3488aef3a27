"""Real runs of the demo, as `simulator.fit` compares them: their metrics, what their processes computed, their groups.

A run is started with `peers/recorded` on its path, so that its RolloutWorker writes down every group that it generated.
What each process computes is looked at twice, after the warm-up and two steps before the end, by the kernel's own
accounts (`schedstat`), main threads and others apart; and what the machine computed in all, so that a run beside which
something else ran is known for one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from peers.after_import import python_path

from asyncrl.observe.history.tail import read_rows
from simulator.servers.lengths import parting

WARM_UP = 8
"""Steps that are not looked at."""
B, GROUP, IN_FLIGHT, MAX_NEW_TOKENS = 32, 8, 24, 112
"""As the demo's settings."""
SETTINGS = ("eval.interval=0", "checkpoint.interval=0", "logging.tensorboard=false", "resume=restart")
RECORDED = Path(__file__).parents[1] / "peers" / "recorded"
KEPT = re.compile(r"^(step|time/\w+|tokens/\w+|reward/frac_zero_std)$")
TITLE = re.compile(r"^asyncrl (\w+)/")


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
        return [
            f"max_head_offpolicyness={self.eta}",
            f"group_size={self.group}",
            f"rollout.sampling.max_new_tokens={self.max_new_tokens}",
        ]


RUNS = (
    Run("η = 0", fitted=True),
    Run("η = 1", eta=1),
    Run("η = 4", eta=4),
    Run("η = 0, groups of 4", group=4),
    Run("η = 4, groups of 4", eta=4, group=4),
    Run("η = 0, answers of at most 32", max_new_tokens=32),
)


@dataclass(frozen=True)
class RealRun:
    """Results of one run.

    Attributes:
        rows: of its metrics, from the first step on.
        cpu: CPU-seconds a step by kind of process, `<kind>` of main threads and `<kind>+` of all others.
        others: share of the machine that computed something else meanwhile, the kernel's own work included.
        groups: by place in the data order, of each answer its tokens, how many it shares, its reward (`Recorded`).
        rollouts: in the order in which they ended, CPU-seconds of the RolloutWorker so far, and the answers' tokens.
    """

    rows: list[dict[str, float]]
    cpu: dict[str, float]
    others: float
    groups: dict[int, list[tuple[int, int, float]]]
    rollouts: list[tuple[float, int]]

    def mean(self, name: str) -> float:
        """Return the mean of `time/<name>_s` over the steps that count."""
        rows = self.rows[WARM_UP:]
        return sum(row[f"time/{name}_s"] for row in rows) / len(rows)


@dataclass(frozen=True)
class _Accounts:
    """Seconds: wall clock, of each process by kind, of all cores that computed anything."""

    at: float
    cpu: Counter[str]
    busy: float


def real_run(run: Run, model_path: Path, steps: int, root: Path) -> RealRun:
    """Do the run, in a folder of its own below `root`.

    Raises:
        SystemExit: it failed.
    """
    folder, groups = root / f"run{len(list(root.iterdir()))}", root / f"{time.monotonic_ns()}.jsonl"
    settings = [f"model.path={model_path}", f"train_batch_size={B}", f"rollout.max_concurrent={IN_FLIGHT}"]
    settings += [f"fileroot={folder}", "experiment_name=fit", "trial_name=run", f"total_train_steps={steps}"]
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings, *SETTINGS, *run.settings]
    environment = os.environ | {"RECORDED_GROUPS": str(groups), "PYTHONPATH": python_path(RECORDED)}
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
    run_dir = folder / "fit" / "run"
    before = _accounts(process, run_dir / "metrics.jsonl", WARM_UP)
    after = _accounts(process, run_dir / "metrics.jsonl", steps - 2)
    if process.wait() != 0:
        raise SystemExit(f"the run {run.name!r} failed; logs in {run_dir / 'logs'}")
    counted = steps - 2 - WARM_UP
    used = {kind: (after.cpu[kind] - before.cpu[kind]) / counted for kind in sorted(after.cpu)}
    capacity = (after.at - before.at) * (os.cpu_count() or 1)
    others = (after.busy - before.busy - counted * sum(used.values())) / capacity
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]
    kept = [{name: row[name] for name in row if KEPT.match(name)} for row in rows]
    return RealRun(kept, used, others, *_groups(groups))


def _groups(file: Path) -> tuple[dict[int, list[tuple[int, int, float]]], list[tuple[float, int]]]:
    found, rollouts = {}, []
    for line in file.read_text().splitlines():
        order, answers, used_s = json.loads(line)
        parts = zip(parting([tokens for tokens, _ in answers]), answers, strict=True)
        found[order] = [(length, own_from, reward) for (length, own_from), (_, reward) in parts]
        rollouts.append((used_s, sum(len(tokens) for tokens, _ in answers)))
    return found, rollouts


def _accounts(process: subprocess.Popen[bytes], metrics: Path, step: int) -> _Accounts:
    """Once `step` steps are trained; the first row is of step 0."""
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= step):
        time.sleep(0.05)  # a benchmark looks; it synchronises nothing
    seconds: Counter[str] = Counter()
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a process that ended meanwhile is none of the run's
            named = TITLE.search(" ".join(child.cmdline()))
            for thread in child.threads() if named else ():
                with suppress(OSError):  # the same of threads
                    accounts = Path(f"/proc/{child.pid}/task/{thread.id}/schedstat").read_text()
                    kind = f"{named[1]}{'+' * (thread.id != child.pid)}" if named else ""
                    seconds[kind] += 1e-9 * int(accounts.split()[0])  # type: ignore[assignment]
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return _Accounts(time.monotonic(), seconds, busy)


def as_json(real: RealRun) -> dict[str, Any]:
    """For a file."""
    return {
        "rows": real.rows,
        "cpu": real.cpu,
        "others": real.others,
        "groups": list(real.groups.items()),
        "rollouts": real.rollouts,
    }


def from_json(kept: dict[str, Any]) -> RealRun:
    """As `as_json` made it."""
    groups = {order: [(length, own, reward) for length, own, reward in group] for order, group in kept["groups"]}
    rollouts = [(used_s, tokens) for used_s, tokens in kept["rollouts"]]
    return RealRun(kept["rows"], kept["cpu"], kept["others"], groups, rollouts)
