"""Does generation overlap training? The demo with η = 0 and η = 4: same seed, steps and processes, in turns.

    python benchmarks/overlap.py [--modes interrupt retract in_place] [--steps 40] [--rounds 3] [--quick]
                                 [--cost | --observing | --reference] [--json PATH] [setting=value ...]

With η = 0 nothing overlaps: a step waits for its rollouts (generation alone), then trains and publishes (training
alone). So that run gives both times; those with η = 4, one for each `manager.update_mode` asked for, give the step.
Figures of a run are medians over the steps after a warm-up. Every round is these runs one right after the other and
gives its own ratios, so that a machine whose speed changes from minute to minute disturbs them little; the figures at
the end are medians over the rounds.

    overlap efficiency = max(generation alone, training alone) / step with η = 4

The CPU share of GserverManager and MasterWorker is their CPU time over wall-clock time while steps are trained. Below,
every process's CPU-seconds for a step: where the time goes that two cores have, whatever else overlaps.

With `--cost`: what it costs a step that any process may die. The demo with η = 4 as it is, in turns with a run that has
no ledger, keeps no last step in memory and whose manager writes no log (`peers/bare`), another first in each round:

    cost = step as it is / step without them - 1

With `--observing`: what it costs that each process writes into `observed/`. One run with η = 4, in which each process
counts the processor seconds of its observing (`peers/watched`):

    cost = seconds of observing / seconds of all that the processes do

With `--reference`: what it brings that a frozen reference scores rollouts while the trainer waits for the rest. The
demo with a KL term and η = 0, 1 and 4, each in turns with `trainer.score_ahead=false`, another first in each round.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from peers.after_import import python_path

from asyncrl.config.load import load_supervised
from asyncrl.config.run_dir import LEDGER_DIR
from asyncrl.observe.history.tail import read_rows
from asyncrl.trainer.supervised.base_model import ensure_base_model

WARM_UP_STEPS = 8
SETTINGS = ["eval.interval=0", "checkpoint.interval=0", "logging.tensorboard=false", "resume=restart"]
CONTROL = ("gserver_manager", "master_worker")
TITLE = re.compile(r"^asyncrl (\w+)/")
TARGETS = {"speed-up": 1.5, "efficiency": 0.9, "control": 0.10}
COST_TARGET = 0.02
OBSERVING_TARGET = 0.01
REFERENCE_ETAS = (0, 1, 4)


@dataclass(frozen=True)
class Measured:
    """Medians of one run, in seconds per step; `control` is the share of one core, `cpu` CPU-seconds a step by kind of
    process."""

    eta: int
    mode: str
    step: float
    wait_data: float
    train: float
    publish: float
    tokens_per_s: float
    control: float
    cpu: dict[str, float]
    scored_ahead: float = 0.0


BARE = Path(__file__).parent / "peers" / "bare"
"""On PYTHONPATH it leaves out what lets a run go on after deaths, as far as no setting does."""

WATCHED = BARE.with_name("watched")


def run(
    eta: int,
    mode: str,
    steps: int,
    root: Path,
    overrides: list[str],
    *,
    bare: bool = False,
    name: str = "",
    environment: Mapping[str, str] = os.environ,
) -> Measured:
    """One run of the demo, in a trial of its `name`; `bare`: without what lets it go on after deaths."""
    trial = f"eta{eta}-{mode}{'-bare' * bare}{name}"
    run_dir = root / "overlap" / trial
    settings = [f"max_head_offpolicyness={eta}", f"manager.update_mode={mode}", f"total_train_steps={steps}"]
    settings += ["experiment_name=overlap", f"trial_name={trial}", f"fileroot={root}", *SETTINGS, *overrides]
    if bare:
        settings.append("checkpoint.in_memory=false")
        environment = {**environment, "PYTHONPATH": python_path(BARE)}
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings]
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
    metrics = run_dir / "metrics.jsonl"
    begun, before = _cpu_seconds(process, metrics, WARM_UP_STEPS)
    ended, after = _cpu_seconds(process, metrics, steps - 2)
    if process.wait() != 0:
        raise SystemExit(f"the run with η = {eta} failed; logs in {run_dir / 'logs'}")
    if bare == (run_dir / LEDGER_DIR).is_dir():
        raise SystemExit(
            f"the run in {run_dir} {'has a' if bare else 'has no'} ledger: it is not what was to be measured"
        )
    rows = read_rows(metrics)[WARM_UP_STEPS:]
    median = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key.startswith("time/")}
    tokens = sum(row["tokens/batch"] for row in rows)
    return Measured(
        eta=eta,
        mode=mode,
        step=median["time/step_s"],
        wait_data=median["time/wait_for_batch_s"],
        train=median["time/train_s"],
        publish=median["time/publish_s"],
        tokens_per_s=tokens / sum(row["time/step_s"] for row in rows),
        control=sum(after[kind] - before[kind] for kind in CONTROL) / (ended - begun),
        cpu={kind: (after[kind] - before[kind]) / (steps - 2 - WARM_UP_STEPS) for kind in sorted(after)},
        scored_ahead=statistics.mean(row.get("rollout/scored_ahead", 0.0) for row in rows),
    )


def _cpu_seconds(process: subprocess.Popen[bytes], metrics: Path, step: int) -> tuple[float, Counter[str]]:
    """(clock, CPU seconds by kind of process) once `step` steps are trained."""
    while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < step):
        time.sleep(0.05)  # a benchmark looks; it synchronises nothing
    seconds: Counter[str] = Counter()
    for child in psutil.Process(process.pid).children(recursive=True):  # each is a child of its supervisor
        with suppress(psutil.NoSuchProcess):  # a process that ended meanwhile is none of these
            if named := TITLE.search(" ".join(child.cmdline())):
                times = child.cpu_times()
                seconds[named[1]] += times.user + times.system  # type: ignore[assignment]
    if process.poll() is None and (missing := set(CONTROL) - set(seconds)):
        raise SystemExit(f"{', '.join(sorted(missing))} cannot be seen among the run's processes")
    return time.monotonic(), seconds


@dataclass(frozen=True)
class Round:
    """One run without overlap, and one with it for every mode."""

    sync: Measured
    overlapped: tuple[Measured, ...]


def table(rounds: list[Round]) -> str:
    """The figures for a person: every round, then the medians of every mode."""
    eta = rounds[0].overlapped[0].eta
    lines = [
        f"{'round':>5}{'update mode':>13}{'generation':>12}{'training':>10}{'step, η = 0':>13}{f'step, η = {eta}':>13}"
        f"{'tokens/s':>18}{'speed-up':>10}{'efficiency':>12}{'control':>9}"
    ]
    for number, each in enumerate(rounds, 1):
        sync = each.sync
        for overlapped in each.overlapped:
            found = figures(sync, overlapped)
            lines.append(
                f"{number:>5}{overlapped.mode:>13}{sync.wait_data:>10.3f} s{sync.train + sync.publish:>8.3f} s"
                f"{sync.step:>11.3f} s{overlapped.step:>11.3f} s"
                f"{f'{sync.tokens_per_s:,.0f} / {overlapped.tokens_per_s:,.0f}':>18}"
                f"{found['speed-up']:>10.2f}{found['efficiency']:>12.2f}{found['control']:>9.3f}"
            )
    for mode, found in medians(rounds).items():
        lines += ["", mode]
        for name, value in found.items():
            ok = value <= TARGETS[name] if name == "control" else value >= TARGETS[name]
            bound = "at most" if name == "control" else "at least"
            lines.append(f"  {name:12}{value:>7.3f}   target {bound} {TARGETS[name]:.2f}   {'met' if ok else 'MISSED'}")
    runs = {"η = 0": [each.sync for each in rounds]}
    for each in rounds:
        for overlapped in each.overlapped:
            runs.setdefault(f"η = {eta}, {overlapped.mode}", []).append(overlapped)
    kinds = list(rounds[0].sync.cpu)
    lines += ["", "CPU-seconds a step", " " * 20 + "".join(f"{kind:>20}" for kind in kinds) + f"{'together':>12}"]
    for name, measured in runs.items():
        used = [statistics.median(run.cpu[kind] for run in measured) for kind in kinds]
        lines.append(f"{name:20}" + "".join(f"{seconds:>20.3f}" for seconds in used) + f"{sum(used):>12.3f}")
    return "\n".join(lines)


def figures(sync: Measured, overlapped: Measured) -> dict[str, float]:
    """Return the figures of the targets, of one run with overlap against the one without."""
    return {
        "speed-up": sync.step / overlapped.step,
        "efficiency": max(sync.wait_data, sync.train + sync.publish) / overlapped.step,
        "control": overlapped.control,
    }


def medians(rounds: list[Round]) -> dict[str, dict[str, float]]:
    """By update mode, each figure's median over the rounds."""
    found: dict[str, list[dict[str, float]]] = {}
    for each in rounds:
        for overlapped in each.overlapped:
            found.setdefault(overlapped.mode, []).append(figures(each.sync, overlapped))
    return {
        mode: {name: statistics.median(each[name] for each in runs) for name in TARGETS} for mode, runs in found.items()
    }


def costs(steps: int, count: int, eta: int, mode: str, overrides: list[str]) -> list[tuple[Measured, Measured]]:
    """Rounds of a run as it is and a bare one."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, count + 1):
            root = Path(folder) / f"round{number}"
            order = (False, True) if number % 2 else (True, False)
            runs = {bare: run(eta, mode, steps, root, overrides, bare=bare) for bare in order}
            rounds.append((runs[False], runs[True]))
            print(f"round {number} of {count}: {runs[False].step / runs[True].step:.4f}", file=sys.stderr)
    return rounds


def observing(steps: int, eta: int, mode: str, overrides: list[str]) -> str:
    """Processor seconds of a run's processes, and those of their observing."""
    with tempfile.TemporaryDirectory() as folder:
        root, told = Path(folder), Path(folder) / "told"
        told.mkdir()
        watched = {**os.environ, "PYTHONPATH": python_path(WATCHED), "OBSERVING_FOLDER": str(told)}
        run(eta, mode, steps, root, overrides, environment=watched)
        observed = next(root.glob("overlap/*/observed"))
        counts = {each["process"]: each for each in (json.loads(file.read_text()) for file in told.iterdir())}
        used = {}
        for file in observed.glob("*.jsonl"):
            used[file.stem] = max(line.get("cpu_s", 0.0) for line in read_rows(file))
    if used.keys() != counts.keys():
        raise SystemExit(f"observed/ has {sorted(used)}, and {sorted(counts)} counted their observing")
    lines = [f"{'process':24}{'CPU-seconds':>14}{'observing':>12}{'of it inline':>14}{'cost':>9}"]
    for name, total in sorted(used.items()):
        thread, inline = (counts[name].get(kind, 0.0) for kind in ("thread", "inline"))
        cost = (thread + inline) / total
        lines.append(f"{name:24}{total:>14.2f}{thread + inline:>12.3f}{inline:>14.3f}{cost:>9.2%}")
    together = sum(each.get(kind, 0.0) for each in counts.values() for kind in ("thread", "inline"))
    cost = together / sum(used.values())
    met = "met" if cost < OBSERVING_TARGET else "MISSED"
    lines.append(f"together {cost:.2%} of {sum(used.values()):.1f} s, target below {OBSERVING_TARGET:.0%}   {met}")
    return "\n".join(lines)


def cost_table(rounds: list[tuple[Measured, Measured]]) -> str:
    """Every round, and the medians of their ratios: of a step's time, and of all processes' CPU-seconds for it, which
    other work on the machine changes less."""
    lines = [f"{'round':>5}{'step':>12}{'without':>12}{'cost':>9}{'CPU-seconds':>14}{'without':>10}{'cost':>9}"]
    steps, cpus = [], []
    for number, (whole, bare) in enumerate(rounds, 1):
        used, used_bare = sum(whole.cpu.values()), sum(bare.cpu.values())
        steps.append(whole.step / bare.step - 1.0)
        cpus.append(used / used_bare - 1.0)
        lines.append(
            f"{number:>5}{whole.step:>10.3f} s{bare.step:>10.3f} s{steps[-1]:>+9.2%}"
            f"{used:>14.3f}{used_bare:>10.3f}{cpus[-1]:>+9.2%}"
        )
    cost = statistics.median(steps)
    lines.append(
        f"median {cost:+.2%}, target below {COST_TARGET:.0%}   {'met' if cost < COST_TARGET else 'MISSED'}; "
        f"of CPU time {statistics.median(cpus):+.2%}"
    )
    return "\n".join(lines)


def references(steps: int, count: int, mode: str, overrides: list[str]) -> list[tuple[Measured, Measured]]:
    """By round and η, a run whose reference scores ahead and one whose does not."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, count + 1):
            root = Path(folder) / f"round{number}"
            for eta in REFERENCE_ETAS:
                runs = {}
                for ahead in (False, True) if number % 2 else (True, False):
                    settings = ["algorithm.kl_coef=0.01", f"trainer.score_ahead={str(ahead).lower()}", *overrides]
                    runs[ahead] = run(eta, mode, steps, root, settings, name="-ahead" * ahead)
                pairs.append((runs[True], runs[False]))
                print(f"round {number} of {count}, η = {eta}: {_gain(pairs[-1]):+.2%}", file=sys.stderr)
    return pairs


def _gain(pair: tuple[Measured, Measured]) -> float:
    return pair[0].step / pair[1].step - 1.0


def reference_table(pairs: list[tuple[Measured, Measured]]) -> str:
    """Every pair, and the medians by η."""
    lines = [
        f"{'η':>3}{'scored ahead':>14}{'training':>12}{'in the step':>13}{'step':>10}{'in the step':>13}{'step by':>10}"
        f"{'CPU time by':>13}"
    ]
    for ahead, within in sorted(pairs, key=lambda pair: pair[0].eta):
        cpu = sum(ahead.cpu.values()) / sum(within.cpu.values()) - 1.0
        lines.append(
            f"{ahead.eta:>3}{ahead.scored_ahead:>14.0%}{ahead.train:>10.3f} s{within.train:>11.3f} s"
            f"{ahead.step:>8.3f} s{within.step:>11.3f} s{_gain((ahead, within)):>+10.2%}{cpu:>+13.2%}"
        )
    for eta in REFERENCE_ETAS:
        gains = [_gain(pair) for pair in pairs if pair[0].eta == eta]
        lines.append(f"median at η = {eta}: {statistics.median(gains):+.2%}")
    return "\n".join(lines)


def main() -> None:
    """Run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--modes", nargs="+", default=["interrupt", "retract", "in_place"], help="values of manager.update_mode"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 20 steps")
    parser.add_argument("--eta", type=int, default=4)
    parser.add_argument("--cost", action="store_true", help="measure what it costs that any process may die")
    parser.add_argument("--observing", action="store_true", help="measure what observing costs")
    parser.add_argument("--reference", action="store_true", help="measure what a reference brings that scores ahead")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    steps, count = (20, 1) if args.quick else (args.steps, args.rounds)
    overrides = [f"model.path={ensure_base_model(load_supervised('arithmetic_base'))}", *args.overrides]
    if args.observing:
        print(observing(steps, args.eta, args.modes[0], overrides))
        return
    if args.cost:
        pairs = costs(steps, count, args.eta, args.modes[0], overrides)
        print(cost_table(pairs))
        if args.json:
            args.json.write_text(json.dumps([{"whole": asdict(each[0]), "bare": asdict(each[1])} for each in pairs]))
        return
    if args.reference:
        pairs = references(steps, count, args.modes[0], overrides)
        print(reference_table(pairs))
        if args.json:
            args.json.write_text(json.dumps([{"ahead": asdict(each[0]), "within": asdict(each[1])} for each in pairs]))
        return
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, count + 1):
            root = Path(folder) / f"round{number}"
            sync = run(0, args.modes[0], steps, root, overrides)
            first = number % len(args.modes)
            modes = args.modes[first:] + args.modes[:first]  # another one is first in each round
            rounds.append(Round(sync, tuple(run(args.eta, mode, steps, root, overrides) for mode in modes)))
            for overlapped in rounds[-1].overlapped:
                shown = {name: round(value, 3) for name, value in figures(sync, overlapped).items()}
                print(f"round {number} of {count}, {overlapped.mode}: {shown}", file=sys.stderr)
    print(table(rounds))
    if args.json:
        content = {"rounds": [asdict(each) for each in rounds], "medians": medians(rounds)}
        args.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
