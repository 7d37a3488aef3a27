"""Make the reward model of the experiment `reward_model`, from answers of the demo's base.

    python experiments/recipes/reward_model_base.py

The base answers training problems eight times each, right answers are paired with wrong ones of the same problem, and
`sft` trains a reward model on the pairs (`loss.name=bradley_terry`). It is written to `base_models/reward_model`, after
a minute and a half of CPU time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import islice, product
from pathlib import Path

from ship_base_models import copy_shipped
from transformers import AutoModelForCausalLM

from asyncrl.api.generation import GenerationRequest, SamplingParams
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment, load_supervised
from asyncrl.config.run_dir import METRICS_FILE
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.observe.tail import read_rows
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.reference import complete
from asyncrl.trainer.supervised.base_model import ensure_base_model

PROBLEMS, ANSWERS, AT_ONCE, PAIRS_OF_PROBLEM = 768, 8, 64, 4
SEED = 5
TRAINING = ("optimizer=adamw", "adamw_lr=5e-4", "batch_size=32", "phases=[{steps: 200}]", "eval.interval=50")


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
            by_reward: dict[bool, list[str]] = {True: [], False: []}
            for text in dict.fromkeys(tokenizer.decode(each.token_ids) for each in ended):
                by_reward[arithmetic_reward(row, text) > 0].append(text)
            both = product(by_reward[True], by_reward[False])
            found += [
                {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}
                for chosen, rejected in islice(both, PAIRS_OF_PROBLEM)
            ]
    return found


def main() -> None:
    """Train the reward model and write it to the package, with a record of it.

    Raises:
        SystemExit: training failed.
    """
    base, experiment = ensure_base_model(load_supervised("arithmetic_base")), load_experiment("reward_model", [])
    assert isinstance(experiment, ExperimentConfig)
    with tempfile.TemporaryDirectory() as scratch:
        file, rows = Path(scratch) / "pairs.jsonl", pairs(base)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        settings = [f"model.path={base}", f"dataset.path={file}", "dataset.args={held_out_share: 0.1}"]
        settings += ["loss.name=bradley_terry", "loss.params={centring: 0.01}", f"fileroot={scratch}", *TRAINING]
        command = [sys.executable, "-m", "asyncrl.launch", "sft", *settings]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout)
        if done.returncode:
            raise SystemExit(done.returncode)
        model_line = next(line for line in done.stdout.splitlines() if line.startswith("model: "))
        made = Path(model_line.removeprefix("model: "))
        measured = [row for row in read_rows(made / METRICS_FILE) if row.get("held_out_accuracy") is not None][-1]
        record = {"pairs": len(rows), "held_out_accuracy": round(measured["held_out_accuracy"], 4)}
        copy_shipped(made, Path(experiment.algorithm.graph_args["path"]), record)
    print(record)


if __name__ == "__main__":
    main()
