"""Make the teacher of the experiment `async_distill`: the demo's base, careful all the time and trained twice as long.

    python experiments/recipes/async_distill_teacher.py

It is written to `base_models/distill_teacher`, after some five minutes of CPU time, and answers 0.99 of held-out
problems.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from ship_base_models import copy_shipped, greedy_accuracy

from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.load import load_experiment, load_supervised
from asyncrl.trainer.supervised.supervised_loop import make_base_model, phases_of

STEPS, PROBLEMS = 1500, 1024


def main() -> None:
    """Train the teacher and write it to the package, with a record of it."""
    config, experiment = load_supervised("arithmetic_base"), load_experiment("async_distill", [])
    assert isinstance(experiment, ExperimentConfig)
    careful = replace(phases_of(config)[0], steps=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        made = make_base_model(config, Path(folder) / "model", phases=[careful])
        record = {"steps": STEPS, "held_out_accuracy": round(greedy_accuracy(made, PROBLEMS), 4)}
        copy_shipped(made, Path(experiment.algorithm.teachers[0].path or ""), record)
    print(record)


if __name__ == "__main__":
    main()
