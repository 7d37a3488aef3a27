"""Cost of the ledger in a train step: writing and syncing its lines, beside the step of the demo with η = 4.

    python benchmarks/ledger.py [--steps 200] [--step-s S] [--folder DIR] [--json PATH]

The lines are those of the demo (32 rollouts a step: admitted, finished, trained; the step's counters; a seal), written
by the ledger as the GserverManager does before it answers the step's report, one step after the other; a thread syncs
them to the disk of `--folder` meanwhile. The step beside which that stands is the median of a run of the demo, as
`overlap.py` measures it; `--step-s` gives one that is known. The target is below 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import overlap

from asyncrl.comm.ended_rollouts import Admitted, Finished, RolloutCounts, RolloutLine, RunSettings
from asyncrl.config.load import load_supervised
from asyncrl.manager.messages import GateCheckpoint, TrainedRollout
from asyncrl.manager.rollouts.ledger import Ledger
from asyncrl.trainer.supervised.base_model import ensure_base_model

ROLLOUTS, SAMPLES = 32, 8
TARGET = 0.02
PAUSE_S = 0.02
"""Between two steps, so that each finds the disk as the end of a step does: idle."""


async def step_costs(folder: Path, steps: int) -> list[float]:
    """Seconds that a step's report waits for the ledger, in each of `steps` steps."""
    ledger = Ledger(folder / "ledger", RunSettings(ROLLOUTS, 4, "drop", 1, 1))
    ledger.begin(0, GateCheckpoint())
    costs = []
    for version in range(steps):
        lines, trained = _step(version)
        counts = RolloutCounts((version + 1) * ROLLOUTS, (version + 1) * ROLLOUTS)
        begun = time.perf_counter()
        for line in lines:
            ledger.add(line)
        ledger.step(version + 1, trained, counts)
        await ledger.written()
        costs.append(time.perf_counter() - begun)
        await asyncio.sleep(PAUSE_S)
    ledger.close()
    return costs


def _step(version: int) -> tuple[list[RolloutLine], list[TrainedRollout]]:
    """The lines of one step's rollouts, and what it trained."""
    lines: list[RolloutLine] = []
    trained = []
    for order in range(version * ROLLOUTS, (version + 1) * ROLLOUTS):
        rollout, prompt = uuid.uuid4().hex, f"e0-{order}"
        lines.append(Admitted(rollout, prompt, order, 0, "rollout_worker/0", version, time.time()))
        lines.append(Finished(rollout, SAMPLES * 100, time.time()))
        trained.append(TrainedRollout(rollout, prompt, order, {version: SAMPLES * 60}, SAMPLES, SAMPLES, 0.5))
    return lines, trained


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, help="the demo's step, where it is known")
    parser.add_argument("--folder", type=Path, help="on the disk that runs are written to; default: a temporary one")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        costs = asyncio.run(step_costs(Path(root), args.steps))
        step_s = args.step_s
        if step_s is None:
            model = ensure_base_model(load_supervised("arithmetic_base"))
            step_s = overlap.run(4, "interrupt", 30, Path(root), [f"model.path={model}"]).step
    cost = statistics.median(costs)
    p95 = statistics.quantiles(costs, n=20)[-1]
    print(f"{'ledger, ms per step':24} {'p95':>8} {'step, s':>8} {'share':>8} {'target':>8}")
    print(f"{1e3 * cost:24.2f} {1e3 * p95:8.2f} {step_s:8.2f} {cost / step_s:8.2%} {TARGET:8.0%}")
    if args.json:
        figures = {"ledger_s": cost, "ledger_p95_s": p95, "step_s": step_s, "share": cost / step_s, "target": TARGET}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
