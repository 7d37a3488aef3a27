"""A reward model learns from answers of the demo's base, then RL learns from its scores: what becomes of true accuracy.

    python benchmarks/reward_model.py --make
    python benchmarks/reward_model.py [--out DIR] [--steps 32] [--seeds 1] [--every 4] [--plot docs/reward_model.png]

`--make` makes the reward model of the experiment `reward_model` in `experiments/base_models`: the base answers training
problems eight times each, right answers are paired with wrong ones of the same problem, and `sft` trains a reward model
on the pairs (`loss.name=bradley_terry`). It takes a minute and a half of CPU time.

Without it the experiment runs. The policies that it kept are asked after the run, and the table of docs/results.md
and its figure are made: the mean score of the reward model beside the true accuracy, held-out and of the same answers.
Points are kept in DIR/points: seeds that are there are not run again, and calls with one seed each may run at the same
time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import islice, product
from pathlib import Path

import kept_policies
from base_model import copy_shipped
from transformers import AutoModelForCausalLM

from asyncrl.api.generation import GenerationRequest, SamplingParams
from asyncrl.config.load import experiments_dir, load_supervised
from asyncrl.config.run_dir import METRICS_FILE
from asyncrl.observe.history.tail import read_rows
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.datasets.tokenizers import load_tokenizer
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import complete
from asyncrl.trainer.supervised.base_model import ensure_base_model

EXPERIMENT = "reward_model"
FOLDER = experiments_dir() / "base_models" / EXPERIMENT
PROBLEMS, ANSWERS, AT_ONCE, PAIRS_OF_PROBLEM = 768, 8, 64, 4
SEED = 5
TRAINING = ("optimizer=adamw", "adamw_lr=5e-4", "batch_size=32", "phases=[{steps: 200}]", "eval.interval=50")
Point = tuple[int, float | None, float | None, float]
"""Step, mean score of the reward model and share of right answers in the steps since the last point, held-out accuracy.
Step 0 is the base, whose answers were not scored.
"""


def pairs(base: Path) -> list[dict[str, str]]:
    """Right answers of the base beside wrong ones to the same problem."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), load_tokenizer(base)
    rows = [ArithmeticDataset(seed=SEED, num_rows=PROBLEMS).row(index) for index in range(PROBLEMS)]
    found = []
    for start in range(0, PROBLEMS, AT_ONCE):
        some = rows[start : start + AT_ONCE]
        requests = [
            GenerationRequest(
                str(row["index"]),
                tuple(tokenizer.encode(row["prompt"])),
                ANSWERS,
                SamplingParams(112, stop_token_ids=(tokenizer.eos_token_id,), seed=SEED + row["index"]),
            )
            for row in some
        ]
        for row, result in zip(some, complete(model, requests, 0), strict=True):
            ended = [each for each in result.completions if each.finish_reason == "stop"]
            texts = dict.fromkeys(tokenizer.decode(each.token_ids) for each in ended)
            by_reward: dict[bool, list[str]] = {True: [], False: []}
            for text in texts:
                by_reward[arithmetic_reward(row, text) > 0].append(text)
            both = product(by_reward[True], by_reward[False])
            found += [
                {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}
                for chosen, rejected in islice(both, PAIRS_OF_PROBLEM)
            ]
    return found


def make(out: Path) -> None:
    """Train the reward model and write it to the package, with a record of it; the pairs are kept in `out`.

    Raises:
        SystemExit: training failed.
    """
    base = ensure_base_model(load_supervised("arithmetic_base"))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "pairs.jsonl"
        rows = kept_policies.recorded(out / "pairs.json", lambda: pairs(base))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings = [f"model.path={base}", f"dataset.path={file}", "dataset.args={held_out_share: 0.1}"]
        settings += ["loss.name=bradley_terry", "loss.params={centring: 0.01}", f"fileroot={scratch}", *TRAINING]
        command = [sys.executable, "-m", "asyncrl.launch", "sft", *settings]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout)
        if done.returncode:
            raise SystemExit(done.returncode)
        made = Path(
            next(line for line in done.stdout.splitlines() if line.startswith("model: ")).removeprefix("model: ")
        )
        measured = [row for row in read_rows(made / METRICS_FILE) if row.get("held_out_accuracy") is not None][-1]
        record = {"pairs": len(rows), "held_out_accuracy": round(measured["held_out_accuracy"], 4)}
        copy_shipped(made, FOLDER, record)
    print(record)


def recorded(seed: int, steps: int, every: int, out: Path) -> list[Point]:
    """Return the points in `out/points`, after a run if they are not there."""
    file = out / "points" / f"seed{seed}-{steps}-{every}.json"
    found = kept_policies.recorded(file, lambda: measure(seed, steps, every, out))
    return [(step, score, sampled, held_out) for step, score, sampled, held_out in found]


def measure(seed: int, steps: int, every: int, out: Path) -> list[Point]:
    """Run the experiment; return what its kept policies and the steps before them gave.

    Raises:
        SystemExit: the run failed.
    """
    base, trial = ensure_base_model(load_supervised("arithmetic_base")), f"seed{seed}"
    settings = [f"fileroot={out}", f"trial_name={trial}", "resume=restart", f"seed={seed}", f"model.path={base}"]
    settings += [f"total_train_steps={steps}", "samples.every=4", *kept_policies.settings(every, steps)]
    done = subprocess.run([sys.executable, "-m", "asyncrl.launch", EXPERIMENT, *settings], check=False)
    run = out / EXPERIMENT / trial
    if done.returncode:
        raise SystemExit(f"{EXPERIMENT}: exit code {done.returncode}; see {run / 'logs'}")
    rows = {int(row["step"]): row for row in read_rows(run / METRICS_FILE) if row["step"]}
    curve = kept_policies.curve(run, base, every)
    points: list[Point] = [(0, None, None, kept_policies.accuracy(base, base))]
    for step, _, accuracy in curve:
        since = [rows[each] for each in range(step - every + 1, step + 1)]  # one step's problems may be easy
        score, right = (statistics.fmean(row[name] for row in since) for name in ("reward/scores", "reward/mean"))
        points.append((step, score, right, accuracy))
    return points


def plot(points: list[Point], target: Path) -> None:
    """Draw the score and both accuracies over steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot([at for at, *_ in points], [held_out for *_, held_out in points], color="C0", label="accuracy, held out")
    steps, scores, sampled, _ = zip(*points[1:], strict=True)
    axes.plot(steps, sampled, color="C0", linestyle=":", label="accuracy of the answers that were scored")
    axes.set(xlabel="train step", ylabel="true accuracy", ylim=(0, 1))
    right = axes.twinx()
    right.plot(steps, scores, color="C1", label="the reward model's mean score")
    right.set_ylabel("score")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(target, dpi=110)


def main() -> None:
    """Make the reward model, or measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", action="store_true", help="make the package's reward model")
    parser.add_argument(
        "--out", type=Path, default=Path("~/.cache/asyncrl/reward_model_runs"), help="folder of the runs"
    )
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--every", type=int, default=4, help="steps between the policies that are asked")
    parser.add_argument("--plot", type=Path, help="the PNG to write, of the first seed")
    args = parser.parse_args()
    out = args.out.expanduser().resolve()
    if args.make:
        make(out)
        return
    print("| seed | step | the reward model's score | right among the scored answers | held-out accuracy |")
    print("|--:|--:|--:|--:|--:|")
    for seed in args.seeds:
        points = recorded(seed, args.steps, args.every, out)
        for step, score, sampled, held_out in points:
            scored = "- | -" if score is None else f"{score:.2f} | {sampled:.3f}"
            print(f"| {seed} | {step} | {scored} | {held_out:.3f} |", flush=True)
        if args.plot and seed == args.seeds[0]:
            plot(points, args.plot)


if __name__ == "__main__":
    main()
