"""Cost and quality of the demo's base model, and the savings of Muon over AdamW.

    python benchmarks/base_model.py [--quick] [--seeds 1 2] [--threads 2] [--json PATH]
    python benchmarks/base_model.py --ship

Both optimizers train on the same demonstrations for the same number of steps. Reported for each seed: seconds, final
loss in nats per answer token (of the careless phase), and greedy accuracy on held-out problems, which for a useful base
lies between 0.3 and 0.5. `--quick` takes a tenth of the steps: it shows that the benchmark runs; ignore its accuracy.

`--ship` trains the base models of the built-in experiments by their recipes and writes them to
`experiments/base_models`, from which a first start takes them. It needs some two minutes of CPU time for each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from asyncrl.config.load import load_supervised
from asyncrl.config.run_dir import METRICS_FILE
from asyncrl.observe.history.tail import read_rows
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.datasets.prompt_format import PromptFormat
from asyncrl.plugins.datasets.tokenizers import load_tokenizer, model_files
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import ReferenceConfig, ReferenceTrainer
from asyncrl.trainer.settings import OptimizerName
from asyncrl.trainer.supervised.base_model import SHIPPED_FILE, shipped_dir
from asyncrl.trainer.supervised.make_model import make_base_model
from asyncrl.trainer.supervised.settings import SFTConfig
from asyncrl.trainer.supervised.supervised_loop import SFTPhase, phases_of

MUON = load_supervised("arithmetic_base")
ADAMW = replace(MUON, optimizer=OptimizerName.adamw, adamw_lr=3e-3)
"""The best rate found for AdamW alone."""
SHIPPED = ("arithmetic_base", "tool_calculator_base")
"""Built-in experiments that make a base model."""
FIRST_STEPS = 10
"""Steps whose losses are kept beside a model that comes with the package; a test takes them again."""
TRAINING_FILES = ("training.json", METRICS_FILE, "sft.yaml")
"""Files beside a trained model that tell where and how long it was trained; the package does not have them."""
PROBLEMS = 512


@dataclass(frozen=True, slots=True)
class Result:
    """One base model."""

    optimizer: str
    seed: int
    steps: int
    seconds: float
    final_loss: float
    greedy_accuracy: float


def measure(settings: SFTConfig, seed: int, threads: int, shrink: int, folder: Path) -> Result:
    """Make one base model and evaluate it."""
    phases = [SFTPhase(phase.dataset, max(1, phase.steps // shrink)) for phase in phases_of(MUON)]
    losses: list[float] = []
    begin = time.perf_counter()
    path = make_base_model(
        replace(settings, seed=seed, threads=threads),
        folder / f"{settings.optimizer}-{seed}",
        phases=phases,
        progress=lambda progress: losses.append(progress.loss),
    )
    seconds = time.perf_counter() - begin
    accuracy = greedy_accuracy(path, 64 if shrink > 1 else PROBLEMS)
    return Result(settings.optimizer, seed, len(losses), seconds, losses[-1], accuracy)


def greedy_accuracy(path: Path, problems: int) -> float:
    """Greedy accuracy of the model in `path` on held-out problems."""
    dataset = ArithmeticDataset(split="held_out", num_rows=problems)
    model = AutoModelForCausalLM.from_pretrained(path)
    prompts = PromptFormat(load_tokenizer(path), None)
    trainer = ReferenceTrainer(ReferenceConfig(), model, prompts, dataset, arithmetic_reward)
    return trainer.greedy_accuracy(dataset)


def ship(experiment: str) -> Path:
    """Train the base model of a built-in experiment and write it to the package; returns its folder there."""
    config = load_supervised(experiment)
    with tempfile.TemporaryDirectory() as folder:
        return write_shipped(experiment, make_base_model(config, Path(folder) / "model"))


def write_shipped(experiment: str, made: Path) -> Path:
    """Copy the model in `made`, which is the experiment's, to the package with a record of it; returns its folder."""
    config = load_supervised(experiment)
    shipped = shipped_dir(config)
    losses = [row["loss"] for row in read_rows(made / METRICS_FILE)]
    record = {
        "experiment": experiment,
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
        "first_losses": [round(loss, 4) for loss in losses[:FIRST_STEPS]],
        "final_loss": round(losses[-1], 4),
        "greedy_accuracy": round(greedy_accuracy(made, PROBLEMS), 4) if experiment == "arithmetic_base" else None,
    }
    for former in shipped.parent.glob(f"{config.experiment_name}-*"):
        shutil.rmtree(former)
    copy_shipped(made, shipped, record)
    return shipped


def copy_shipped(made: Path, folder: Path, record: Mapping[str, Any]) -> None:
    """Copy the model in `made` to `folder` of the package, with `record` and the SHA-256 of its files beside it."""
    left_out = (*TRAINING_FILES, SHIPPED_FILE)
    files = {name: file for name, file in model_files(made).items() if name not in left_out}
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, file in files.items():
        shutil.copyfile(file, folder / name)
    told = {**record, "sha256": digests}
    (folder / SHIPPED_FILE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="seeds of the base model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--ship", action="store_true", help="train the package's base models and write them there")
    args = parser.parse_args()
    if args.ship:
        for experiment in SHIPPED:
            print(ship(experiment), flush=True)
        return
    torch.set_num_threads(args.threads)
    seeds, shrink = (args.seeds[:1], 10) if args.quick else (args.seeds, 1)
    print(f"{'optimizer':10}{'seed':>6}{'steps':>7}{'seconds':>9}{'loss':>9}{'greedy':>8}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for settings in (MUON, ADAMW):
                result = measure(settings, seed, args.threads, shrink, Path(folder))
                results.append(asdict(result))
                print(
                    f"{result.optimizer:10}{result.seed:6}{result.steps:7}{result.seconds:9.1f}"
                    f"{result.final_loss:9.4f}{result.greedy_accuracy:8.3f}",
                    flush=True,
                )
    if args.json is not None:
        args.json.write_text(
            json.dumps({"threads": args.threads, "results": results}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
