"""Does generation overlap training? The demo with η = 0 and η = 4: same seed, steps and processes, in turns.

    python benchmarks/overlap.py [--modes interrupt retract in_place] [--steps 40] [--rounds 3]
                                 [--cost | --observing | --reference] [setting=value ...]

With η = 0 nothing overlaps: a step waits for its rollouts (generation alone), then trains and publishes (training
alone). So that run gives both times; those with η = 4, one for each `manager.update_mode` asked for, give the step.
Figures of a run are medians over the steps after a warm-up, the last lines medians over the rounds' ratios.

    efficiency = max(generation alone, training alone) / step with η = 4

The CPU share of GserverManager and MasterWorker is their CPU time over wall-clock time while steps are trained. Below,
every process's CPU-seconds for a step: where the time goes that two cores have, whatever else overlaps.

With `--cost`: what it costs a step that any process may die. The demo with η = 4 as it is, in turns with a run that has
no ledger, keeps no last step in memory and whose manager writes no log (`peers/bare`):

    cost = step as it is / step without them - 1

With `--observing`: what it costs that each process writes into `observed/`. One run with η = 4, in which each process
counts the processor seconds of its observing (`peers/watched`):

    cost = seconds of observing / seconds of all that the processes do

With `--reference`: what it brings that a frozen reference scores rollouts while the trainer waits for the rest. The
demo with a KL term and η = 0, 1 and 4, each in turns with `trainer.score_ahead=false`.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from common import MEASURED_RUN, Table, cpu_seconds, demo_model, in_turns, parser, start_run, verdict, wait_for_step
from peers.after_import import python_path

from asyncrl.config.run_dir import LEDGER_DIR
from asyncrl.observe.tail import read_rows

WARM_UP_STEPS = 8
CONTROL = ("gserver_manager", "master_worker")
TARGETS = {"speed-up": 1.5, "efficiency": 0.9, "control": 0.10}
COST_TARGET, OBSERVING_TARGET = 0.02, 0.01
REFERENCE_ETAS = (0, 1, 4)
BARE = Path(__file__).parent / "peers" / "bare"
"""On PYTHONPATH it leaves out what lets a run continue after deaths, as far as no setting does."""
WATCHED = BARE.with_name("watched")


@dataclass(frozen=True)
class Measured:
    """Medians of one run, in seconds per step; `control` is the share of one core, `cpu` CPU-seconds a step by kind of
    process, `scored_ahead` the share of rollouts that the reference scored while training waited."""

    step: float
    wait_data: float
    train: float
    publish: float
    control: float
    cpu: dict[str, float]
    scored_ahead: float

    @property
    def used(self) -> float:
        """CPU-seconds a step of all processes."""
        return sum(self.cpu.values())


@dataclass(frozen=True)
class Demo:
    """Runs of the demo, all with `settings`."""

    root: Path
    steps: int
    settings: Sequence[str]

    def run(
        self, eta: int, mode: str, name: str = "", *more: str, bare: bool = False, path: Mapping[str, str] | None = None
    ) -> Measured:
        """One run in a trial of its `name`, with `more` settings; `bare`: without what lets it continue after deaths.

        Raises:
            SystemExit: the run failed, or is not the one that was to be measured.
        """
        trial = f"eta{eta}-{mode}{name}"
        run_dir = self.root / "overlap" / trial
        settings = [f"max_head_offpolicyness={eta}", f"manager.update_mode={mode}", f"total_train_steps={self.steps}"]
        settings += ["experiment_name=overlap", f"trial_name={trial}", f"fileroot={self.root}", *MEASURED_RUN]
        if bare:
            settings.append("checkpoint.in_memory=false")
            path = {"PYTHONPATH": python_path(BARE)}
        process = start_run("async_ppo", [*settings, *self.settings, *more], {**os.environ, **(path or {})})
        metrics = run_dir / "metrics.jsonl"
        marks: list[tuple[float, Counter[str]]] = []
        for step in (WARM_UP_STEPS, self.steps - 2):
            wait_for_step(process, metrics, step)
            marks.append((time.monotonic(), cpu_seconds(process)))
        if process.wait() != 0:
            raise SystemExit(f"the run with η = {eta} failed; logs in {run_dir / 'logs'}")
        if bare == (run_dir / LEDGER_DIR).is_dir():
            raise SystemExit(
                f"the run in {run_dir} {'has a' if bare else 'has no'} ledger: not what was to be measured"
            )
        (begun, before), (ended, after) = marks
        rows = read_rows(metrics)[WARM_UP_STEPS:]
        step, wait, train, publish = (
            statistics.median(row[f"time/{name}_s"] for row in rows)
            for name in ("step", "wait_for_batch", "train", "publish")
        )
        counted = self.steps - 2 - WARM_UP_STEPS
        return Measured(
            step=step,
            wait_data=wait,
            train=train,
            publish=publish,
            control=sum(after[kind] - before[kind] for kind in CONTROL) / (ended - begun),
            cpu={kind: (after[kind] - before[kind]) / counted for kind in sorted(after)},
            scored_ahead=statistics.mean(row.get("rollout/scored_ahead", 0.0) for row in rows),
        )


def overlap(demo: Demo, modes: Sequence[str], rounds: int, eta: int) -> None:
    """Print every round, the medians of every mode, and CPU-seconds by process."""
    table = Table("update mode", "generation", "training", "step, η = 0", f"step, η = {eta}", *TARGETS)
    runs: dict[str, list[Measured]] = {}
    found: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in modes}
    for number in range(rounds):
        alone = demo.run(0, modes[0], f"-{number}")
        runs.setdefault("η = 0", []).append(alone)
        first = number % len(modes)  # another one is first in each round
        for mode in [*modes[first:], *modes[:first]]:
            own = demo.run(eta, mode, f"-{number}")
            runs.setdefault(f"η = {eta}, {mode}", []).append(own)
            training = alone.train + alone.publish
            ratios = (alone.step / own.step, max(alone.wait_data, training) / own.step, own.control)
            found[mode].append(ratios)
            times = (alone.wait_data, training, alone.step, own.step)
            table.row(mode, *(f"{each:.3f} s" for each in times), *(f"{each:.3f}" for each in ratios))
    for mode, of_mode in found.items():
        for (name, target), values in zip(TARGETS.items(), zip(*of_mode, strict=True), strict=True):
            value = statistics.median(values)
            met = verdict(value, target, at_least=name != "control")
            print(f"{mode}: {name} {value:.3f}, target {target:.2f}: {met}")
    kinds = list(runs["η = 0"][0].cpu)
    table = Table("CPU-seconds a step", *kinds, "together")
    for name, measured in runs.items():
        used = [statistics.median(run.cpu[kind] for run in measured) for kind in kinds]
        table.row(name, *(f"{each:.3f}" for each in used), f"{sum(used):.3f}")


def cost(demo: Demo, mode: str, rounds: int, eta: int) -> None:
    """Print every round, and the medians of the ratios of steps and of CPU-seconds, which other work disturbs less."""
    table = Table("round", "step", "without", "CPU-seconds", "without")
    pairs: dict[int, dict[bool, Measured]] = {}
    for number, bare in in_turns((False, True), rounds):
        pairs.setdefault(number, {})[bare] = demo.run(eta, mode, f"-{number}{'-bare' * bare}", bare=bare)
        if len(pairs[number]) == 2:
            whole, without = pairs[number][False], pairs[number][True]
            figures = (whole.step, without.step, whole.used, without.used)
            table.row(number + 1, *(f"{each:.3f} s" for each in figures))
    steps, cpus = (
        statistics.median(getattr(each[False], what) / getattr(each[True], what) - 1 for each in pairs.values())
        for what in ("step", "used")
    )
    print(f"cost {steps:+.2%}, target {COST_TARGET:.0%}: {verdict(steps, COST_TARGET)}; of CPU time {cpus:+.2%}")


def observing(demo: Demo, mode: str, eta: int) -> None:
    """Print the processor seconds of a run's processes, and those of their observing."""
    told = demo.root / "told"
    told.mkdir()
    demo.run(eta, mode, path={"PYTHONPATH": python_path(WATCHED), "OBSERVING_FOLDER": str(told)})
    counts = {each["process"]: each for each in (json.loads(file.read_text()) for file in told.iterdir())}
    files = next(demo.root.glob("overlap/*/observed")).glob("*.jsonl")
    used = {file.stem: max(line.get("cpu_s", 0.0) for line in read_rows(file)) for file in files}
    if used.keys() != counts.keys():
        raise SystemExit(f"observed/ has {sorted(used)}, and {sorted(counts)} counted their observing")
    table, together = Table("process", "CPU-seconds", "observing", "of it inline", "cost"), 0.0
    for name, total in sorted(used.items()):
        thread, inline = (counts[name].get(kind, 0.0) for kind in ("thread", "inline"))
        together += thread + inline
        own = thread + inline
        table.row(name, f"{total:.2f}", f"{own:.3f}", f"{inline:.3f}", f"{own / total:.2%}")
    share = together / sum(used.values())
    print(f"together {share:.2%}, target below {OBSERVING_TARGET:.0%}: {verdict(share, OBSERVING_TARGET)}")


def reference(demo: Demo, mode: str, rounds: int) -> None:
    """Print by η the steps and the training in them with and without scoring ahead, and the medians of the gain."""
    table = Table("η, round", "scored ahead", "training", "in the step", "step", "in the step", "CPU time by")
    gains: dict[int, list[float]] = {eta: [] for eta in REFERENCE_ETAS}
    for number, eta in product(range(rounds), REFERENCE_ETAS):
        runs = {}
        for ahead in (False, True) if number % 2 else (True, False):
            settings = ("algorithm.kl_coef=0.01", f"trainer.score_ahead={str(ahead).lower()}")
            runs[ahead] = demo.run(eta, mode, f"-{number}{'-ahead' * ahead}", *settings)
        early, within = runs[True], runs[False]
        gains[eta].append(early.step / within.step - 1)
        times = (early.train, within.train, early.step, within.step)
        cells = [f"{early.scored_ahead:.0%}", *(f"{each:.3f} s" for each in times)]
        table.row(f"{eta}, {number + 1}", *cells, f"{early.used / within.used - 1:+.2%}")
    for eta, of_eta in gains.items():
        print(f"step at η = {eta}: {statistics.median(of_eta):+.2%}")


def main() -> None:
    """Run the rounds, print the tables."""
    command = parser(__doc__)
    command.add_argument("--modes", nargs="+", default=["interrupt", "retract", "in_place"])
    command.add_argument("--steps", type=int, default=40)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--eta", type=int, default=4)
    for what in ("cost", "observing", "reference"):
        command.add_argument(f"--{what}", action="store_true", help="see above")
    command.add_argument("overrides", nargs="*", metavar="setting=value")
    args = command.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(Path(folder), args.steps, [f"model.path={demo_model()}", *args.overrides])
        if args.observing:
            observing(demo, args.modes[0], args.eta)
        elif args.cost:
            cost(demo, args.modes[0], args.rounds, args.eta)
        elif args.reference:
            reference(demo, args.modes[0], args.rounds)
        else:
            overlap(demo, args.modes, args.rounds, args.eta)


if __name__ == "__main__":
    main()
