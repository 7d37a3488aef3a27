"""Gain of lending the trainer's devices to guests: real runs of the demo with paced devices, one after the other.

    python benchmarks/lending.py [--steps 8] [--servers 1 2] [--json PATH]

For S servers on devices of their own, a run without guests and one with a guest on the training rank's device. Servers
and ranks are paced as for `plan.py`: a decode step and a trained token take a fixed time, most of which their process
sleeps, so that two cores stand for several devices. All else is real: turns, weight updates, checks, the rule that
lends (`asyncrl/colocated/master.py`). A server decodes 16 samples at a time, so that a second one halves the
time of a batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from plan import WARM_UP_STEPS, run

from asyncrl.observe.history.tail import read_rows

SETTINGS = ("train_batch_size=16", "group_size=4", "generation.max_running_requests=16", "trainer.ppo_minibatches=2")
HEADER = "| servers | guests | step | waits for data | switch, a step | gain |\n|--:|--:|--:|--:|--:|--:|"


def measured(folder: Path) -> dict[str, float]:
    """Medians over the steps after the warm-up, in seconds."""
    rows = read_rows(folder / "metrics.jsonl")[WARM_UP_STEPS:]
    names = ("time/step_s", "time/wait_for_batch_s", "time/switch_s")
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2], help="servers on devices of their own")
    parser.add_argument("--steps", type=int, default=8, help=f"steps measured, after {WARM_UP_STEPS} others")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory(prefix="asyncrl-lending-") as folder:
        for servers in args.servers:
            alone = 0.0
            for guests in (0, 1):
                settings = [*SETTINGS, f"generation.servers={servers + guests}"]
                settings += [f"generation.guests={guests}"] if guests else []
                told = measured(run(Path(folder), f"s{servers}g{guests}", args.steps + WARM_UP_STEPS, settings))
                step, waits, switch = told.values()
                alone = alone or step
                gain = f"{alone / step:.2f} x" if guests else ""
                found.append({"servers": servers, "guests": guests, **told})
                print(f"| {servers} | {guests} | {step:.2f} s | {waits:.2f} s | {switch:.2f} s | {gain} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
