"""Is `doctor RUN --plan` right? Real runs of the demo on the splits that the plan of one of them predicts.

    python benchmarks/plan.py [--devices 3 4] [--steps 16] [--json PATH]

The first run has one training rank and one server. Its plan for `--devices` predicts a step for each split; then each
of those splits is run. Two cores cannot show that three devices are faster than two, so servers and ranks are paced
(`peers/paced`): a decode step and a trained token take a fixed time, most of which their process sleeps. All else is
real: processes, weight updates, trajectories, checkpoints. The machine must have cores to spare; the share of time in
which threads of a server waited for one is in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.after_import import python_path

from asyncrl.observe.history.tail import read_rows

PACED = Path(__file__).parent / "peers" / "paced"
SETTINGS = ("eval.interval=0", "checkpoint.interval=0", "logging.tensorboard=false", "logging.display=plain")
WARM_UP_STEPS = 5
HEADER = "| train | generate | η | predicted | measured | ratio | waits: predicted | measured | no core |"


def run(root: Path, trial: str, steps: int, settings: list[str]) -> Path:
    """Run the demo with paced devices; returns its folder."""
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *SETTINGS, f"total_train_steps={steps}"]
    command += [f"fileroot={root}", f"trial_name={trial}", *settings]
    environment = os.environ | {"PYTHONPATH": python_path(PACED), "OMP_NUM_THREADS": "1"}
    log = root / f"{trial}.log"
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"the run {trial} failed:\n{log.read_text()[-2000:]}")
    return root / "async_ppo" / trial


def doctor(folder: Path, *options: str) -> dict[str, Any]:
    """What `doctor` says of a run."""
    command = [sys.executable, "-m", "asyncrl.launch", "doctor", str(folder), "--json", *options]
    told: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    return told


def measured(folder: Path) -> tuple[float, float, float]:
    """Seconds of a step after the warm-up, the share of them in which training waits, and the share of time in which
    threads of the server that lacks cores most were ready without one.
    """
    rows = read_rows(folder / "metrics.jsonl")[WARM_UP_STEPS:]
    step_s = statistics.fmean(row["time/step_s"] for row in rows)
    wait_s = statistics.fmean(row["time/wait_for_batch_s"] for row in rows)
    servers = (doctor(folder)["measured"] or {}).get("servers", [])
    return step_s, wait_s / step_s, max((each["no_core"] or 0.0 for each in servers), default=0.0)


def row(candidate: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Print and return a line: what was predicted for a split, and what its run took."""
    step_s, wait, no_core = measured(folder)
    ratio = candidate["step_s"] / step_s
    split = f"| {candidate['training']} | {candidate['generation']} | {candidate['eta']} "
    steps = f"| {candidate['step_s']:.2f} s | {step_s:.2f} s | {ratio:.2f} "
    print(f"{split}{steps}| {candidate['wait']:.0%} | {wait:.0%} | {no_core:.0%} |", flush=True)
    return {"candidate": candidate, "step_s": step_s, "ratio": ratio, "wait": wait, "no_core": no_core}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, default=[3, 4])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-plan-") as folder:
        root = Path(folder)
        own = run(root, "own", args.steps + WARM_UP_STEPS, [])
        plans = [doctor(own, "--plan", str(devices)) for devices in args.devices]
        print(f"{HEADER}\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
        found.append(row(plans[0]["own"], own))
        for told in plans:
            for each in told["candidates"]:
                if each["eta"] != told["own"]["eta"]:
                    continue
                trial = f"train{each['training']}_generate{each['generation']}"
                settings = [f"trainer.parallel={each['layout']}", f"generation.servers={each['servers']}"]
                settings += [f"rollout.max_concurrent={each['places']}"]
                found.append(row(each, run(root, trial, args.steps + WARM_UP_STEPS, settings)))
        print("\nassumed: " + "; ".join(plans[0]["assumed"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
