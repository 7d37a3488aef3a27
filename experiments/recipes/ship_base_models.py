"""Make the base models of the built-in recipes anew, and write them to `base_models`, from which a first start copies.

    python experiments/recipes/ship_base_models.py

`arithmetic_base` and `tool_calculator_base` are trained by their recipes, in some two minutes of CPU time each. A
useful `arithmetic_base` answers 0.3 to 0.5 of held-out problems. After a change to a recipe run this again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from asyncrl.config.load import load_supervised
from asyncrl.config.run_dir import METRICS_FILE
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.data.tokenizers import load_tokenizer, model_files
from asyncrl.observe.tail import read_rows
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import ReferenceConfig, ReferenceTrainer
from asyncrl.trainer.supervised.base_model import SHIPPED_FILE, shipped_dir
from asyncrl.trainer.supervised.supervised_loop import make_base_model

SHIPPED = ("arithmetic_base", "tool_calculator_base")
FIRST_STEPS = 10
"""Steps whose losses are recorded beside the model; a test takes them again."""
TRAINING_FILES = ("training.json", METRICS_FILE, "sft.yaml")
"""Files beside a trained model that say where and how long it was trained; the package does not have them."""
PROBLEMS = 512


def greedy_accuracy(path: Path, problems: int = PROBLEMS) -> float:
    """Greedy accuracy of the model in `path` on held-out problems of the demo."""
    dataset = ArithmeticDataset(split="held_out", num_rows=problems)
    model, prompts = AutoModelForCausalLM.from_pretrained(path), PromptFormat(load_tokenizer(path), None)
    return ReferenceTrainer(ReferenceConfig(), model, prompts, dataset, arithmetic_reward).greedy_accuracy(dataset)


def copy_shipped(made: Path, folder: Path, record: Mapping[str, Any]) -> None:
    """Copy the model in `made` to `folder` of the package, with `record` and the SHA-256 of its files beside it."""
    left_out = (*TRAINING_FILES, SHIPPED_FILE)
    files = {name: file for name, file in model_files(made).items() if name not in left_out}
    digests = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, file in files.items():
        shutil.copyfile(file, folder / name)
    (folder / SHIPPED_FILE).write_text(json.dumps({**record, "sha256": digests}, indent=2) + "\n", encoding="utf-8")


def ship(experiment: str) -> Path:
    """Train the base model of a built-in experiment and write it to the package; return its folder there."""
    config = load_supervised(experiment)
    shipped = shipped_dir(config)
    with tempfile.TemporaryDirectory() as folder:
        made = make_base_model(config, Path(folder) / "model")
        losses = [row["loss"] for row in read_rows(made / METRICS_FILE)]
        record = {
            "experiment": experiment,
            "made_with": {"torch": torch.__version__, "transformers": transformers.__version__},
            "first_losses": [round(loss, 4) for loss in losses[:FIRST_STEPS]],
            "final_loss": round(losses[-1], 4),
            "greedy_accuracy": round(greedy_accuracy(made), 4) if experiment == "arithmetic_base" else None,
        }
        for former in shipped.parent.glob(f"{config.experiment_name}-*"):
            shutil.rmtree(former)
        copy_shipped(made, shipped, record)
    return shipped


if __name__ == "__main__":
    for name in SHIPPED:
        print(ship(name), flush=True)
