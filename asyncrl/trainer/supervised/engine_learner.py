"""Learning by the engines of RL training: packed if that is proven correct, with adapters and layouts.

`engine_objective` makes the loss with its engine, `versions` writes the model; this module has steps and checkpoints.

A run's folder holds its checkpoints and, in `weights/`, the models at its start and at its end, so `asyncrl export`
works as on an RL run. An interrupted run resumes from its newest checkpoint with the same result as without the
interruption: the data order depends only on the step, and a checkpoint has the optimizer's whole state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from asyncrl.comm.names import ACTOR
from asyncrl.comm.typed import decode_json
from asyncrl.config.run_dir import CHECKPOINTS_DIR, WEIGHTS_DIR
from asyncrl.models.weights.checkpoints.restore import restore_newest
from asyncrl.models.weights.checkpoints.writer import CheckpointWriter
from asyncrl.models.weights.versions.manifest import FileEntry
from asyncrl.plugins.datasets.supervised.demonstrations import Demonstration
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.settings import OptimizerName
from asyncrl.trainer.supervised.engine_objective import engine_settings, make_objective
from asyncrl.trainer.supervised.model_versions import ModelVersions
from asyncrl.trainer.supervised.objectives import Measures
from asyncrl.trainer.supervised.settings import SFTConfig


class EngineLearner:
    """Trains a model by the engines of RL training. All ranks call its methods together.

    Args:
        model: Hugging Face folder to begin with.
        run_dir: the run's folder.
        total: number of steps.

    Attributes:
        steps_done: steps of the checkpoint that this run resumed from; 0 without one.

    Raises:
        ValueError: the model cannot be trained correctly, or the newest checkpoint is of another model.
    """

    def __init__(
        self, model: Path, run_dir: Path, config: SFTConfig, total: int, world: World, device: torch.device
    ) -> None:
        self._run_dir, self._checkpoint, self._world = run_dir, config.checkpoint, world
        settings = self._settings = engine_settings(config, model, total)
        self._objective = make_objective(config, settings, world.place(ACTOR), device)
        self._engine = self._objective.engine
        engines = {ACTOR: self._engine}
        state = restore_newest(engines, run_dir / CHECKPOINTS_DIR, world.everyone)
        self.steps_done = 0 if state is None else int(state["version"])
        self._steps = self.steps_done
        self._writer = CheckpointWriter(engines, (ACTOR,), world.everyone)
        lora = config.model.lora if publishes_adapters(settings) else None
        self._versions = ModelVersions(self._engine, model, run_dir / WEIGHTS_DIR, lora, world.everyone)
        if config.checkpoint.interval and not self.steps_done:
            self._versions.publish(0)

    def learn(self, batch: Sequence[Demonstration]) -> Measures:
        """Take a step on `batch`, which is the same on all ranks. Return the figures of `batch` before the step.

        Raises:
            FloatingPointError: the gradient is not finite.
        """
        measures = self._objective.compute_gradients(batch)
        outcome = self._engine.step(self._settings.learning_rate(self._steps))
        self._steps += 1
        if not outcome.applied:
            rates = "lr and adamw_lr" if self._settings.optimizer.name == OptimizerName.muon else "adamw_lr"
            raise FloatingPointError(f"the gradient's norm is {outcome.grad_norm}; lower {rates}")
        return measures

    def measure(self, batch: Sequence[Demonstration]) -> Measures:
        """Return the figures of `batch`, without a step."""
        return self._objective.measure(batch)

    def complete(self, step: int) -> None:
        """Write a checkpoint if one is due after `step` (from 1), which is complete and reported."""
        if not self._checkpoint.interval or step % self._checkpoint.interval:
            return
        path = self._run_dir / CHECKPOINTS_DIR / f"v{step}"
        self._writer.begin(path, version=step, state={})
        mine = msgspec.json.encode(self._writer.share(path).result())
        files: dict[str, FileEntry] = {}
        for written in self._world.everyone.all_gather_bytes(mine):
            files |= decode_json(written, dict[str, FileEntry])

        def commit() -> None:
            if self._world.everyone.leads:
                self._writer.commit(path, files, keep=self._checkpoint.keep, protected=())

        self._world.everyone.together(commit, f"completing {path}")

    def finish(self, step: int, out_dir: Path, beside: dict[str, bytes]) -> None:
        """Publish the model after `step` steps, and write it, adapters merged, as the Hugging Face folder `out_dir`,
        with the files `beside` by name.
        """
        self._writer.close()
        self._versions.export(self._versions.publish(step), out_dir, beside)
