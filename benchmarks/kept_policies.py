"""Held-out accuracy of the policies that a run kept, asked after it has ended, so that it is on nobody's clock.

An evaluation within a run generates as many answers as a step of the demo does, and holds back newer weights meanwhile;
a checkpoint, from which a policy is read here, costs the run a copy of the weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncrl.api import RewardFunction, SamplingParams
from asyncrl.launch.commands.export.policy import export
from asyncrl.observe.history.tail import read_rows
from asyncrl.plugins.datasets import Dataset
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.datasets.prompt_format import PromptFormat, load_chat_template
from asyncrl.plugins.datasets.settings import DatasetConfig
from asyncrl.plugins.datasets.tokenizers import load_tokenizer
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import ReferenceConfig, ReferenceTrainer

HELD_OUT = 1024
"""Problems, the same for every run whatever its seed: an accuracy of 0.9 has a standard error of 0.009."""


def settings(every: int, steps: int) -> list[str]:
    """Overrides for a run of `steps` steps that keeps the policy of every `every`th, and evaluates none."""
    return ["eval.interval=0", f"checkpoint.interval={every}", f"checkpoint.keep={steps}"]


@dataclass(frozen=True)
class HeldOut:
    """Problems that policies are asked, how an answer is judged, and how long it may be."""

    dataset: Dataset
    reward: RewardFunction
    max_new_tokens: int


DEMO = HeldOut(ArithmeticDataset(split="held_out", num_rows=HELD_OUT), arithmetic_reward, 112)


def accuracy(policy: Path, base: Path, held_out: HeldOut = DEMO) -> float:
    """Greedy, of the policy in the folder `policy`, with the tokenizer and the chat template of `base`."""
    torch.set_num_threads(1)  # several wait for each other where cores are busy
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), load_tokenizer(base)
    config = ReferenceConfig(sampling=SamplingParams(max_new_tokens=held_out.max_new_tokens))
    prompts = PromptFormat(tokenizer, load_chat_template(base, DatasetConfig()))
    asked = ReferenceTrainer(config, model, prompts, held_out.dataset, held_out.reward)
    return asked.greedy_accuracy(held_out.dataset)


def curve(run: Path, base: Path, every: int, held_out: HeldOut = DEMO) -> list[tuple[int, float, float]]:
    """(step, seconds since the first step began, accuracy) of every policy that the run in the folder `run` kept."""
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"]]  # without the initial model's
    seconds = {int(row["step"]): float(row["time/elapsed_s"]) for row in rows}
    found = []
    for step in range(every, max(seconds) + 1, every):
        with tempfile.TemporaryDirectory() as folder:
            export(run, step, Path(folder) / "policy")
            found.append((step, seconds[step], accuracy(Path(folder) / "policy", base, held_out)))
    return found


def recorded(file: Path, measure: Callable[[], Any]) -> Any:
    """Return the JSON in `file`; if there is no such file, measure and write it.

    So a benchmark that is cut off continues, and its runs may be spread over processes or machines: the last call finds
    the files of all.
    """
    if not file.is_file():
        found = measure()
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".new")
        aside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, file)
    return json.loads(file.read_text(encoding="utf-8"))
