"""Cost of the ledger in a train step: writing and syncing its lines, beside the step of the demo with η = 4.

    python benchmarks/ledger.py [--steps 200] [--step-s S] [--folder DIR]

The lines are those of the demo (32 rollouts a step: admitted, finished, trained; the step's counters; a seal), written
by the ledger as the GserverManager does before it answers the step's report, one step after the other; a thread syncs
them to the disk of `--folder` meanwhile. The step beside which that stands is the median of a run of the demo, as
`overlap.py` measures it; `--step-s` gives one that is known. The target is below 2 %.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from common import demo_model, parser, verdict
from overlap import Demo

from asyncrl.comm.ended_rollouts import Admitted, Finished, RolloutCounts, RolloutLine, RunSettings
from asyncrl.manager.messages import GateCheckpoint, TrainedRollout
from asyncrl.manager.rollouts.ledger import Ledger

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
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=200)
    command.add_argument("--step-s", type=float, help="the demo's step, where it is known")
    command.add_argument("--folder", type=Path, help="on the disk that runs are written to; default: a temporary one")
    args = command.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as root:
        costs = asyncio.run(step_costs(Path(root), args.steps))
        step_s = args.step_s or Demo(Path(root), 30, [f"model.path={demo_model()}"]).run(4, "interrupt").step
    cost, p95 = statistics.median(costs), statistics.quantiles(costs, n=20)[-1]
    print(
        f"the ledger takes {1e3 * cost:.2f} ms of a step of {step_s:.2f} s (95 % of steps: at most {1e3 * p95:.2f} ms)"
    )
    print(f"{cost / step_s:.2%} of the step, target below {TARGET:.0%}: {verdict(cost / step_s, TARGET)}")


if __name__ == "__main__":
    main()
