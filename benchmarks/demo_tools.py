"""A tiny model learns to call the calculator: greedy accuracy on held-out problems before and after, and the minutes.

    python benchmarks/demo_tools.py [--seeds 1 2] [--json PATH] [setting=value ...]

Each seed is one `tool_calculator`, as `make demo-tools` runs it; its base model is made first where there is none. Exit
code 1 where a run does not go from below 0.3 to above 0.8 within ten minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.observe.history.tail import read_rows

BEFORE, AFTER, LIMIT_S = 0.3, 0.8, 600.0


def learn(seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One run; its accuracy at version 0, the best later one with its step, and seconds from the command to its end."""
    settings = [f"fileroot={folder}", f"seed={seed}", f"trial_name=seed{seed}", *overrides]
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "asyncrl.launch", "tool_calculator", *settings], check=True)
    seconds = time.monotonic() - began
    found: dict[int, float] = {}
    for row in read_rows(folder / "tool_calculator" / f"seed{seed}" / "metrics.jsonl"):
        accuracies = [value for name, value in row.items() if name.startswith("eval/") and name.endswith("/accuracy")]
        found |= {row["step"]: max(accuracies)} if accuracies else {}
    step = max((step for step in found if step), key=lambda step: found[step])
    return {"seed": seed, "before": found[0], "after": found[step], "step": step, "seconds": seconds}


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="setting=value")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [learn(seed, Path(folder), args.overrides) for seed in args.seeds]
    print(f"{'seed':>4} {'before':>7} {'after':>7} {'at step':>8} {'minutes':>8}")
    for row in rows:
        print(
            f"{row['seed']:>4} {row['before']:>7.3f} {row['after']:>7.3f} {row['step']:>8} {row['seconds'] / 60:>8.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    learned = all(row["before"] < BEFORE and row["after"] > AFTER and row["seconds"] < LIMIT_S for row in rows)
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
