"""asyncrl against TRL on one job: seconds a step, and seconds to an accuracy.

    python benchmarks/vs_trl.py [--seeds 1 2 3] [--slow-reward] [--own-steps 40] [--only NAME] [--out DIR] [--json FILE]
                                [--quick] [setting=value ...]

The job is the demo: the same base model, rows, reward, batch of 32 prompts with 8 answers each in four minibatches, the
same learning rate and its schedule, on the same two cores. TRL runs `peers/trl_job.py` in an environment of its own, in
DIR, made at the first run with the versions named below. The two take turns, seed by seed; figures are medians.

Evaluation is on nobody's clock: the policy of every second step is kept, by TRL's job while its clock stands still, by
asyncrl as a checkpoint while its clock goes on, and after the run all are asked the same held-out problems, greedily,
by the same code. An evaluation within asyncrl's run would generate as many answers as a step does, and hold back newer
weights meanwhile. Clocks start when the model is loaded: TRL's as it begins to train, asyncrl's as its server takes the
first request, a few seconds after its train loop begins. `--slow-reward`: every verdict takes 0.1 to 3 s (log-normal,
median 0.3 s), all verdicts of a batch at the same time in both. `--own-steps`: asyncrl's steps, and so its schedule's,
where they are not TRL's: its steps are shorter, and their samples older.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import kept_policies

from asyncrl.config.load import load_supervised
from asyncrl.observe.history import History
from asyncrl.observe.history.tail import read_rows
from asyncrl.observe.observer import SERVES
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.trainer.supervised.base_model import ensure_base_model

TORCH, TRL = "torch==2.13.0", "trl==1.16.0"
STEPS, EVALUATE_EVERY, UNTIL = 40, 2, 0.9
SLOW = (0.1, 3.0, 0.3)
"""Least, most and median seconds of a verdict."""
LIMIT_S = 3600.0
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Outcome:
    """One run: median seconds a step after the first five, seconds and steps until the accuracy (None: not reached),
    and the curve: steps, seconds and accuracy of every policy that was kept."""

    step_s: float
    to_accuracy_s: float | None
    to_accuracy_steps: int | None
    curve: list[tuple[int, float, float]]

    @property
    def accuracy(self) -> float:
        """Accuracy of the last policy."""
        return self.curve[-1][2]


def trl_python(out: Path) -> Path:
    """The interpreter with TRL; installed where it is not yet."""
    python = out / "trl-env" / "bin" / "python"
    if not (out / "trl-env" / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(out / "trl-env")], check=True)
        for package in (TORCH, TRL):  # torch first: what depends on it then keeps the build that is there
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", package], check=True)
        (out / "trl-env" / "complete").touch()
    return python


def write_rows(file: Path, count: int, seed: int) -> Path:
    """`count` rows of the demo's dataset as JSON lines."""
    dataset = ArithmeticDataset(seed=seed, num_rows=count)
    file.write_text("".join(json.dumps(dataset.row(index)) + "\n" for index in range(count)))
    return file


def run_trl(python: Path, model: Path, seed: int, steps: int, slow: bool, out: Path) -> Outcome:
    """One run of TRL."""
    scratch = out / f"trl-seed{seed}{'-slow' if slow else ''}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    job = {
        "model": str(model),
        "rows": str(write_rows(scratch / "rows.jsonl", 16384, seed)),
        "log": str(scratch / "log.jsonl"),
        "scratch": str(scratch),
        "seed": seed,
        "steps": steps,
        "threads": 2,
        "prompts": 32,
        "group_size": 8,
        "minibatches": 4,
        "lr": 1e-4,
        "max_new_tokens": 112,
        "keep_every": EVALUATE_EVERY,
        "slow_reward": SLOW if slow else None,
    }
    (scratch / "job.json").write_text(json.dumps(job, indent=1))
    with open(scratch / "output.txt", "w") as output:
        command = [str(python), str(HERE / "peers" / "trl_job.py"), str(scratch / "job.json")]
        done = subprocess.run(command, stdout=output, stderr=output, timeout=LIMIT_S, check=False)
    events = [json.loads(line) for line in (scratch / "log.jsonl").read_text().splitlines()]
    if done.returncode != 0 or len(events) < steps:
        raise SystemExit(f"TRL ended with {done.returncode} after {len(events)} steps; see {scratch / 'output.txt'}")
    seconds = [event["seconds"] for event in events]
    kept = range(EVALUATE_EVERY, steps + 1, EVALUATE_EVERY)
    curve = [(step, seconds[step - 1], kept_policies.accuracy(scratch / f"v{step}", model)) for step in kept]
    return outcome(seconds, curve)


def run_asyncrl(model: Path, seed: int, steps: int, slow: bool, out: Path, overrides: Sequence[str]) -> Outcome:
    """One run of asyncrl."""
    trial = f"asyncrl-seed{seed}{'-slow' if slow else ''}"
    settings = [f"fileroot={out}", "experiment_name=vs_trl", f"trial_name={trial}", "resume=restart", f"seed={seed}"]
    settings += [f"model.path={model}", f"total_train_steps={steps}", "logging.tensorboard=false"]
    settings += kept_policies.settings(EVALUATE_EVERY, steps)
    if slow:
        # As many at a time as the gate lets in: they wait for verdicts, not for the engine.
        settings += [f"reward.path={HERE / 'peers' / 'slow_reward.py'}:slow_reward", "rollout.max_concurrent=160"]
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings, *overrides]
    run_dir = out / "vs_trl" / trial
    shutil.rmtree(run_dir, ignore_errors=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        code = process.wait(LIMIT_S)
    finally:
        process.terminate()
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]
    if code != 0 or len(rows) != steps:
        raise SystemExit(f"asyncrl ended with {code} after {len(rows)} steps; see {run_dir / 'logs'}")
    before_s = rows[0]["time/elapsed_s"] - _seconds_of_first_step(run_dir)
    curve = [(step, at - before_s, found) for step, at, found in kept_policies.curve(run_dir, model, EVALUATE_EVERY)]
    return outcome([row["time/elapsed_s"] - before_s for row in rows], curve)


def _seconds_of_first_step(run_dir: Path) -> float:
    """From when the generation server takes requests until the end of the first step."""
    history = History(run_dir)
    lines = history.processes["generation_server/0"].lines
    return history.steps[1].at - min(float(line["since"]) for line in lines if line["stage"] == SERVES)


def outcome(seconds: Sequence[float], curve: list[tuple[int, float, float]]) -> Outcome:
    """Summarise a run from the end times of its steps, in seconds, and its kept policies."""
    steps = [after - before for before, after in itertools.pairwise(seconds[5:])]
    at_s, at_step = next(((at, step) for step, at, found in curve if found >= UNTIL), (None, None))
    return Outcome(statistics.median(steps), at_s, at_step, curve)


def median(values: Sequence[float | None]) -> float | None:
    """The median; None where a run did not get there."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def ratio(peer: float | None, ours: float | None) -> str:
    """Return the peer's time as a multiple of ours."""
    return "-" if peer is None or ours is None else f"{peer / ours:.2f} x"


def main() -> None:
    """Run both, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--slow-reward", action="store_true")
    parser.add_argument("--out", type=Path, default=Path.home() / ".cache" / "asyncrl" / "vs_trl")
    parser.add_argument("--json", type=Path, help="where to write the runs")
    parser.add_argument("--own-steps", type=int, default=STEPS, help="of asyncrl, where they are not TRL's")
    parser.add_argument("--only", choices=("asyncrl", "TRL"), help="one of the two")
    parser.add_argument("--quick", action="store_true", help="8 steps of one seed: shows that it runs")
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="of asyncrl")
    options = parser.parse_args()
    steps, own_steps, seeds = (8, 8, options.seeds[:1]) if options.quick else (STEPS, options.own_steps, options.seeds)
    options.out.mkdir(parents=True, exist_ok=True)
    python, model = trl_python(options.out), ensure_base_model(load_supervised("arithmetic_base"))
    slow, out = options.slow_reward, options.out
    runs: dict[str, list[Outcome]] = {name: [] for name in ("asyncrl", "TRL") if options.only in (None, name)}
    for seed in seeds:
        for name, made in runs.items():
            if name == "TRL":
                made.append(run_trl(python, model, seed, steps, slow, out))
            else:
                made.append(run_asyncrl(model, seed, own_steps, slow, out, options.overrides))
            print(f"seed {seed}: {name} {made[-1]}", file=sys.stderr, flush=True)
    print(f"| | seconds a step | seconds to {UNTIL:.2f} | steps to it | accuracy in the end |")
    print("|---|--:|--:|--:|--:|")
    figures = {}
    for name, made in runs.items():
        step, to = median([run.step_s for run in made]), median([run.to_accuracy_s for run in made])
        figures[name] = step, to
        by_step = median([run.to_accuracy_steps for run in made])
        reached = "not reached | " if to is None or by_step is None else f"{to:.1f} | {by_step:.0f}"
        print(f"| {name} | {step:.2f} | {reached} | {statistics.median(run.accuracy for run in made):.3f} |")
    if options.only is None:
        ratios = [ratio(theirs, ours) for theirs, ours in zip(figures["TRL"], figures["asyncrl"], strict=True)]
        print(f"| ratio | {ratios[0]} | {ratios[1]} | | |")
    if options.json:
        options.json.write_text(json.dumps({name: [asdict(run) for run in made] for name, made in runs.items()}) + "\n")


if __name__ == "__main__":
    main()
