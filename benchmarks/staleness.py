"""Cost of staleness: the demo with η from 0 to 8, by objective, by pacing, and made training-bound.

The ways `exact, LOSS` compare losses on samples that are exactly η versions old, in `asyncrl.reference`, one process;
`training-bound, LOSS` do so in a run, where a loss that is cheaper to compute has younger samples:

    python benchmarks/staleness.py --etas 16 --seeds 1 2 3 --ways "exact, decoupled" "exact, vanilla" ... \
        -- optimizer.schedule=constant train_batch_size=16

    python benchmarks/staleness.py [--out DIR] [--steps 40] [--seeds 1 2] [--ways NAME ...] [--etas 0 1 2 4 8] [--quick]
                                   [setting=value ...]

Accuracy over time is that of policies kept every few steps and asked after the run (`kept_policies`). Finished cells
are files in DIR/cells, so a run that was cut off goes on where it stopped, and several calls with fewer cells each may
run at the same time on the same DIR (the times then mean nothing). A cell of another base model, number of steps or
setting is another cell. At the end the table and the plot are written to DIR, as `staleness.md` and `staleness.png`
(docs/results.md has those of several calls). The figures of --quick mean nothing: it shows that the benchmark runs. A
cell takes about 75 s on two quiet cores, the whole, 56 cells with two seeds, a good hour.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import kept_policies
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment, load_supervised
from asyncrl.observe.history.tail import read_rows
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.datasets.prompt_format import PromptFormat
from asyncrl.plugins.datasets.tokenizers import load_tokenizer
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import ReferenceConfig, ReferenceTrainer
from asyncrl.trainer.functions.model_functions import objective_spec
from asyncrl.trainer.supervised.base_model import ensure_base_model

VANILLA = ("algorithm.policy_loss.name=ppo_clip", "algorithm.correction.name=none", "algorithm.prox=behave")
MASK = ("algorithm.correction.name=icepop",)
EAGER, DEADLINE = "rollout.pacing=eager", "rollout.pacing=deadline"
TRAINING_BOUND = "trainer.tokens_per_micro_batch=128"
LOSSES = {
    "vanilla": VANILLA,
    "icepop": MASK,
    "opsm": ("algorithm.correction.name=opsm",),
    "cispo": ("algorithm.policy_loss.name=cispo", *VANILLA[1:]),
    "topr": ("algorithm.policy_loss.name=topr", *VANILLA[1:]),
    "vespo": ("algorithm.policy_loss.name=vespo", *VANILLA[1:]),
    "m2po": (
        "algorithm.policy_loss.name=cispo",
        "algorithm.policy_loss.params={clip_high: 1000.0}",
        "algorithm.correction.name=none",
        "algorithm.selection.name=m2po",
    ),
}
"""Losses for old samples, by what they are called in docs/algorithms.md."""
WAYS = {
    "vanilla": (*VANILLA, EAGER),
    "decoupled": (EAGER,),
    "decoupled + mask": (*MASK, EAGER),
    "deadline": (DEADLINE,),
    "training-bound": (TRAINING_BOUND, EAGER),
    "training-bound, deadline": (TRAINING_BOUND, DEADLINE),
    **{f"training-bound, {loss}": (*chosen, TRAINING_BOUND, EAGER) for loss, chosen in LOSSES.items()},
    **{f"exact, {loss}": chosen for loss, chosen in {"decoupled": (), **LOSSES}.items()},
}
EXACT = tuple(way for way in WAYS if way.startswith("exact, "))
"""Those of the reference loop. Their cells have no times."""
EXACT_SETTINGS = ("algorithm.", "train_batch_size=", "optimizer.lr=", "optimizer.schedule=constant")
"""What may be set for them."""
PLAIN_WAYS = [way for way in WAYS if way == "vanilla" or (way.rpartition(", ")[2] not in LOSSES and way not in EXACT)]
"""Those of the default loss, and `vanilla`."""
PACED_LIKE = {"deadline": "decoupled", "training-bound, deadline": "training-bound"}
"""What these are at η = 0, where there is nothing to pace."""
ETAS, SEEDS, STEPS, KEPT_EVERY = (0, 1, 2, 4, 8), (1, 2), 40, 4
QUICK_WAYS, QUICK_ETAS, QUICK_SEEDS, QUICK_STEPS = ("decoupled", "deadline"), (0, 4), (1,), 12
ABOUT = """
- *vanilla*: the ratio to the behaviour policy, clipped (`ppo_clip`, no correction)
- *decoupled*: the ratio to the proximal policy, clipped, weighted by proximal/behaviour, that weight truncated (the
  default)
- *decoupled + mask*: the same, but tokens whose weight is too small or too large carry no loss (`icepop`, two-sided)
- *deadline*: *decoupled* with `rollout.pacing=deadline` ([staleness.md](staleness.md)); all others are `eager`
- *training-bound*: *decoupled* with micro-batches of 128 tokens, which makes training the bottleneck
- *training-bound, LOSS*: the same with another loss, correction or selection, by its name in
  [algorithms.md](algorithms.md)
- *exact, LOSS*: `asyncrl.reference`, in which every sample is η versions old, or of the first version

Every other cell is a run of `python -m asyncrl.launch async_ppo`, one after the other, all with the same number of
steps. Accuracy is greedy, on 1024 held-out problems that are the same for all, of policies that were kept every four
steps and asked after the run; a cell's is the mean of its last three. Wall-clock is from the start of the first step to
the end of the last one, and *to 0.90* until the first kept policy with that accuracy (mean of the seeds; - where one
did not get there). The mean age of the trained tokens is in versions, after the first eight steps; it stays well below
η where generation is not fast enough to run that far ahead of training. *Waited* is the share of the steps' time in
which the trainer waited for rollouts, after the first eight.
"""
EVALUATIONS = 3
"""Kept policies whose mean is a cell's accuracy."""
UNTIL = 0.9
WARM_UP = 8
CELL_LIMIT_S = 1800.0
"""A cell takes a minute and a half on two cores; one that takes so long hangs."""


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a cell's run; `model` is the name of the base model's folder."""

    model: str
    way: str
    eta: int
    seed: int
    steps: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one run.

    Attributes:
        curve: (step, seconds, accuracy) of the kept policies.
        seconds: duration of the run.
        waited: share of the steps' time in which the trainer waited for data.
        age: mean age of trained tokens, in versions.
        dropped: rollouts dropped as stale.
    """

    curve: list[tuple[int, float, float]]
    seconds: float
    waited: float
    age: float
    dropped: float

    @property
    def accuracy(self) -> float:
        """Mean of the last kept policies."""
        return statistics.fmean(found for _, _, found in self.curve[-EVALUATIONS:])

    @property
    def to_accuracy_s(self) -> float | None:
        """Seconds until the first kept policy that is good enough; None: there is none."""
        return next((seconds for _, seconds, found in self.curve if found >= UNTIL), None)


def trial_of(key: Key) -> str:
    """Return the name of a cell's run."""
    return f"{key.way}-eta{key.eta}-seed{key.seed}".replace(" + ", "-").replace(", ", "-")


def measure_exact(key: Key, model: Path) -> Cell:
    """Run one cell in the reference loop, and ask the policies of the last `EVALUATIONS` times `KEPT_EVERY` steps."""
    torch.set_num_threads(1)
    config = load_experiment("async_ppo", [*WAYS[key.way], *key.overrides])
    assert isinstance(config, ExperimentConfig)
    own = ReferenceConfig(
        seed=key.seed,
        train_batch_size=config.train_batch_size,
        staleness=key.eta,
        lr=config.optimizer.lr,
        objective=objective_spec(config.algorithm),
    )
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), load_tokenizer(model)
    loop = ReferenceTrainer(
        own, policy, PromptFormat(tokenizer, None), ArithmeticDataset(seed=key.seed), arithmetic_reward
    )
    held_out = ArithmeticDataset(split="held_out", num_rows=kept_policies.HELD_OUT)
    curve = []
    for step in range(1, key.steps + 1):
        loop.train_step()
        if step % KEPT_EVERY == 0 and step > key.steps - EVALUATIONS * KEPT_EVERY:
            curve.append((step, 0.0, loop.greedy_accuracy(held_out)))
    ages = [min(version, key.eta) for version in range(WARM_UP, key.steps)]
    return Cell(curve, seconds=0.0, waited=0.0, age=statistics.fmean(ages), dropped=0.0)


def measure(key: Key, model: Path, out: Path) -> Cell:
    """Run one cell.

    Raises:
        SystemExit: the run failed, or trained less than asked.
        subprocess.TimeoutExpired: it hangs.
    """
    if key.way in EXACT:
        return measure_exact(key, model)
    trial = trial_of(key)
    run_dir = out / "runs" / "staleness" / trial
    settings = [f"fileroot={out / 'runs'}", "experiment_name=staleness", f"trial_name={trial}", "resume=restart"]
    settings += [f"model.path={model}", f"max_head_offpolicyness={key.eta}", f"seed={key.seed}"]
    settings += [f"total_train_steps={key.steps}", "logging.tensorboard=false"]
    settings += kept_policies.settings(KEPT_EVERY, key.steps)
    command = [sys.executable, "-m", "asyncrl.launch", "async_ppo", *settings, *WAYS[key.way], *key.overrides]
    done = subprocess.run(command, stdout=sys.stderr, timeout=CELL_LIMIT_S, check=False)
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]
    if done.returncode != 0 or len(rows) != key.steps:
        raise SystemExit(
            f"{trial}: exit code {done.returncode}, {len(rows)} of {key.steps} steps; see {run_dir / 'logs'}, then run "
            "the same command again to go on"
        )
    later = rows[WARM_UP:]
    cell = Cell(
        curve=kept_policies.curve(run_dir, model, KEPT_EVERY),
        seconds=rows[-1]["time/elapsed_s"],
        waited=sum(row["time/wait_for_batch_s"] for row in later) / sum(row["time/step_s"] for row in later),
        age=statistics.fmean(row["staleness/mean"] for row in later),
        dropped=sum(row["rollout/dropped_stale"] for row in rows),
    )
    shutil.rmtree(run_dir / "checkpoints")
    return cell


def file_of(key: Key, out: Path) -> Path:
    """Return where a cell is recorded."""
    digest = hashlib.blake2b(json.dumps(asdict(key)).encode(), digest_size=4).hexdigest()
    return out / "cells" / f"{trial_of(key)}-{digest}.json"


def recorded(key: Key, model: Path, out: Path) -> Cell:
    """Return the cell in `out/cells`, after a run if it is not there."""
    found = kept_policies.recorded(file_of(key, out), lambda: asdict(measure(key, model, out)))
    return Cell(**found | {"curve": [tuple(point) for point in found["curve"]]})


def mean(values: Iterable[float | None]) -> float | None:
    """Over the seeds of a cell; None where one has none."""
    known = list(values)
    numbers = [value for value in known if value is not None]
    return statistics.fmean(numbers) if numbers and len(numbers) == len(known) else None


Grid = dict[tuple[str, int], list[Cell]]
"""The cells of every (way, η), one per seed."""


def has_times(grid: Grid) -> bool:
    """True if the cells are of runs."""
    return not any(way in EXACT for way, _ in grid)


def table(grid: Grid) -> str:
    """In Markdown."""
    times = has_times(grid)
    headings = ["", "η", "accuracy", "of each seed", "mean age"]
    headings += ["dropped as stale", "wall-clock", f"to {UNTIL:.2f}", "waited"] if times else []
    lines = [f"| {' | '.join(headings)} |", f"|---|--:|--:|---{'|--:' * (len(headings) - 4)}|"]
    for (way, eta), cells in grid.items():
        seeds = ", ".join(f"{cell.accuracy:.3f}" for cell in cells)
        figures = [way, str(eta), f"{mean(cell.accuracy for cell in cells):.3f}", seeds]
        figures.append(f"{mean(cell.age for cell in cells):.2f}")
        if times:
            until = mean(cell.to_accuracy_s for cell in cells)
            figures.append(f"{mean(cell.dropped for cell in cells):.0f}")
            figures += [f"{mean(cell.seconds for cell in cells):.0f} s", "-" if until is None else f"{until:.0f} s"]
            figures.append(f"{mean(cell.waited for cell in cells):.2f}")
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines)


def findings(grid: Grid) -> str:
    """Return the findings, and the size of chance."""
    lines = []
    for way in dict.fromkeys(way for way, _ in grid):
        etas = [eta for name, eta in grid if name == way and eta]
        sync = grid.get((PACED_LIKE.get(way, way), 0))
        if sync is None or not etas:
            continue
        accuracies = {eta: statistics.fmean(cell.accuracy for cell in grid[way, eta]) for eta in etas}
        seconds = [statistics.fmean(cell.seconds for cell in grid[way, eta]) for eta in etas]
        worst = min(etas, key=accuracies.__getitem__)
        lost = accuracies[worst] - statistics.fmean(cell.accuracy for cell in sync)
        line = f"- {way}: at worst (η = {worst}) accuracy is {lost:+.3f} against η = 0"
        if has_times(grid):
            share = min(seconds) / statistics.fmean(cell.seconds for cell in sync)
            line += f"; at best η > 0 takes {share:.2f} of the time of η = 0"
        lines.append(f"{line}.")
    spreads = [max(c.accuracy for c in cells) - min(c.accuracy for c in cells) for cells in grid.values()]
    if all(len(cells) > 1 for cells in grid.values()):
        lines.append(f"- Seeds of one cell differ by up to {max(spreads):.3f}; differences of that size are chance.")
    return "\n".join(lines)


def plot(grid: Grid, file: Path) -> None:
    """Accuracy over time, a panel for each η; of every way the mean over its seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    etas = sorted({eta for _, eta in grid})
    figure, axes = plt.subplots(
        1, len(etas), figsize=(3.2 * len(etas), 3.6), layout="constrained", sharey=True, squeeze=False
    )
    colors = {way: f"C{number}" for number, way in enumerate(dict.fromkeys(way for way, _ in grid))}
    for axis, eta in zip(axes[0], etas, strict=True):
        for (way, at), cells in grid.items():
            if at != eta:
                continue
            points = zip(*(cell.curve for cell in cells), strict=True)
            means = [
                (statistics.fmean(s for _, s, _ in same), statistics.fmean(a for *_, a in same)) for same in points
            ]
            axis.plot(*zip(*means, strict=True), label=way, color=colors[way])
        axis.set(title=f"η = {eta}", xlabel="seconds")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out accuracy")
    axes[0][-1].legend(fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def write_page(grid: Grid, folder: Path, command: str) -> None:
    """`staleness.md` and `staleness.png`."""
    picture = ""
    if has_times(grid):
        plot(grid, folder / "staleness.png")
        picture = "![Accuracy over time, by η](staleness.png)\n\n"
    (folder / "staleness.md").write_text(
        f"# Staleness: what it costs on the demo\n\n    {command}\n{ABOUT}\nMeasured on {os.cpu_count()} CPU cores.\n\n"
        f"{table(grid)}\n\n{picture}{findings(grid)}\n"
    )


def main() -> None:
    """Run the cells that are missing, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("~/.cache/asyncrl/staleness"), help="cells and runs")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=PLAIN_WAYS, metavar="NAME", help=", ".join(WAYS))
    parser.add_argument("--etas", type=int, nargs="+", default=list(ETAS))
    parser.add_argument("--quick", action="store_true", help="two ways, one seed, two values of η, few steps")
    parser.add_argument("--recorded", action="store_true", help="only the cells that DIR has, without a run")
    parser.add_argument("--model", type=Path, help="base model; default: that of the `sft` experiment")
    parser.add_argument("--json", type=Path, help="also write the cells here")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    out = args.out.expanduser().resolve()
    out.mkdir(parents=True, exist_ok=True)
    ways, etas, seeds, steps = args.ways, args.etas, args.seeds, args.steps
    if args.quick:
        ways, etas, seeds, steps = QUICK_WAYS, QUICK_ETAS, QUICK_SEEDS, QUICK_STEPS
    if steps < max(WARM_UP + 1, EVALUATIONS * KEPT_EVERY):
        parser.error(f"--steps {steps}: give {max(WARM_UP + 1, EVALUATIONS * KEPT_EVERY)} or more")
    if any(way in EXACT for way in ways):
        if not all(way in EXACT for way in ways):
            parser.error("--ways: cells of the reference loop have no times; ask for these ways alone")
        if "optimizer.schedule=constant" not in args.overrides:
            parser.error("the reference loop has a constant learning rate: add -- optimizer.schedule=constant")
        if other := [setting for setting in args.overrides if not setting.startswith(EXACT_SETTINGS)]:
            parser.error(f"{other[0]}: the reference loop takes {', '.join(EXACT_SETTINGS)} only")
    model = args.model.expanduser().resolve() if args.model else ensure_base_model(load_supervised("arithmetic_base"))
    wanted = [
        Key(model.name, way, eta, seed, steps, tuple(args.overrides))
        for way, eta, seed in itertools.product(ways, etas, seeds)
        if eta or way not in PACED_LIKE
    ]
    if args.recorded:
        wanted = [key for key in wanted if file_of(key, out).is_file()]
        if not wanted:
            parser.error(f"--recorded: {out} has none of these cells")
    cells: dict[Key, Cell] = {}
    grid: Grid = {}
    for number, key in enumerate(wanted, 1):
        print(f"cell {number} of {len(wanted)}: {key.way}, η = {key.eta}, seed {key.seed}", flush=True)
        cells[key] = recorded(key, model, out)
        grid.setdefault((key.way, key.eta), []).append(cells[key])
    print(table(grid), findings(grid), sep="\n\n")
    again = ["--quick"] if args.quick else ["--steps", str(steps), "--seeds", *map(str, seeds)]
    if ways != PLAIN_WAYS and not args.quick:
        again += ["--ways", *ways]
    if etas != list(ETAS) and not args.quick:
        again += ["--etas", *map(str, etas)]
    again += ["--", *args.overrides] if args.overrides else []
    write_page(grid, out, shlex.join(["python", "benchmarks/staleness.py", *again]))
    if args.json:
        args.json.write_text(json.dumps([{**asdict(key), **asdict(cells[key])} for key in wanted], indent=1))


if __name__ == "__main__":
    main()
