"""The demo in one layout after the other: held-out accuracy before training and after a few steps.

    python benchmarks/layouts.py [--steps 8] [--only "d2" ...] [setting=value ...]

Each row is a run of `python -m asyncrl.launch async_ppo`. Target: every layout learns as `d1` does; which rollouts are
trained differs from run to run, so the accuracies differ by chance (one of 256 problems: about 0.03).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from asyncrl.config.load import load_supervised
from asyncrl.observe.history.tail import read_rows
from asyncrl.trainer.supervised.base_model import ensure_base_model

CRITIC = ("algorithm.graph=ppo", "algorithm.advantage.name=gae")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "d1": (),
    "d2": ("trainer.parallel=d2",),
    "t2": ("trainer.parallel=t2",),
    "p2": ("trainer.parallel=p2",),
    "d2, a critic in t2": ("trainer.parallel=d2", "algorithm.critic.parallel=t2", *CRITIC),
    "d1, a critic in p2 of its own": ("algorithm.critic.parallel=p2", "algorithm.critic.ranks=own", *CRITIC),
    "d2, idle roles and moments on the host": (
        "trainer.parallel=d2",
        "trainer.offload=true",
        "optimizer.moments_on=host",
        "algorithm.kl_coef=0.01",
    ),
}
ACCURACY = "eval/held_out/accuracy"
LIMIT_S = 1800.0


def accuracies(settings: tuple[str, ...], steps: int, root: Path, model: Path) -> list[float]:
    """Return the accuracies of one run's evaluations, in order of the versions that they evaluated."""
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", f"fileroot={root}", f"model.path={model}"]
    command += [f"total_train_steps={steps}", f"eval.interval={steps}", "trial_name=layout", *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    (metrics,) = root.glob("*/layout/**/metrics.jsonl")
    return [float(row[ACCURACY]) for row in read_rows(metrics) if ACCURACY in row]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("settings", nargs="*", metavar="setting=value")
    args = parser.parse_intermixed_args()
    model = ensure_base_model(load_supervised("arithmetic_base"))
    print(f"{'layout':<40} {'before':>7} {'after':>7}")
    for name in args.only:
        with tempfile.TemporaryDirectory() as root:
            found = accuracies((*LAYOUTS[name], *args.settings), args.steps, Path(root), Path(model))
        print(f"{name:<40} {found[0]:>7.3f} {found[-1]:>7.3f}", flush=True)


if __name__ == "__main__":
    main()
