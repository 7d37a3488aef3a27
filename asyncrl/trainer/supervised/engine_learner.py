"""Learning with AdamW by the engines that RL training uses: packed where that is proven right, adapters, layouts.

A rank takes every N-th demonstration of a batch, of N data-parallel ranks. The loss is divided by the answer tokens of
the whole batch, so that gradients and losses add up over ranks and micro-batches.

A run's folder has its checkpoints, and in `weights/` the model that it began with and the one that it ended with, so
that `asyncrl export` finds what it finds of an RL run. A run that was cut off goes on from its newest checkpoint
exactly as it would have: the data order depends on the step alone, and a checkpoint has all that the optimizer knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from asyncrl.algorithms.arithmetic.sums import Stats
from asyncrl.comm.names import ACTOR
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.run_dir import CHECKPOINTS_DIR, WEIGHTS_DIR
from asyncrl.config.setting import Dtype
from asyncrl.models.picture_rules import placeholder_in
from asyncrl.plugins.datasets.demonstrations import Demonstration
from asyncrl.trainer.batches.micro_batch import MicroBatch
from asyncrl.trainer.batches.step_batch import StepBatch
from asyncrl.trainer.engines.base import PolicyOutputs, engine_loader
from asyncrl.trainer.model.lora import adapter_config
from asyncrl.trainer.model.lora_checks import publishes_adapters
from asyncrl.trainer.parallel.rank_position import World
from asyncrl.trainer.placement import engine_of
from asyncrl.trainer.settings import LearningRateSchedule, LoraPublish, OptimizerConfig
from asyncrl.trainer.supervised.settings import SFTConfig
from asyncrl.weights import atomic_dir
from asyncrl.weights.checkpoints import store as checkpoints
from asyncrl.weights.checkpoints.store import CheckpointWriter
from asyncrl.weights.model_files.adapters import CONFIG_FILE as ADAPTERS_FILE
from asyncrl.weights.model_files.stored import MergedModel, StoredModel, from_folder
from asyncrl.weights.versions.manifest import FileEntry, verify
from asyncrl.weights.versions.publishing import publish, tokenizer_assets, write_model
from asyncrl.weights.versions.shared_files import SharedFiles


class EngineLearner:
    """See the module's docstring. All ranks call its methods together.

    Args:
        model: Hugging Face folder to begin with.
        run_dir: the run's folder.
        total: number of steps.

    Attributes:
        steps_done: those of the checkpoint that it goes on from; 0: there was none.

    Raises:
        ValueError: the model cannot be trained right, or the newest checkpoint is of another one.
    """

    def __init__(
        self, model: Path, run_dir: Path, config: SFTConfig, total: int, world: World, device: torch.device
    ) -> None:
        self._run_dir, self._checkpoint, self._device, self._world = run_dir, config.checkpoint, device, world
        self._model, settings = model, engine_settings(config, model, total)
        self._lora = config.model.lora if publishes_adapters(settings) else None
        self._place = world.place(ACTOR)
        make = engine_loader(engine_of(settings))
        self._engine = make(settings, self._place, device).policy(str(model), Dtype.float32, settings.optimizer)
        engines = {ACTOR: self._engine}
        state = checkpoints.load(engines, run_dir / CHECKPOINTS_DIR, world.everyone)
        self.steps_done = 0 if state is None else int(state["version"])
        self._writer = CheckpointWriter(engines, (ACTOR,), world.everyone)
        if config.checkpoint.interval and not self.steps_done:
            self._publish(0)

    def learn(self, batch: Sequence[Demonstration]) -> float:
        """One step on `batch`, the same on all ranks; returns its mean loss in nats per answer token, before the step.

        Raises:
            FloatingPointError: the gradient is not finite.
        """
        answer_tokens = sum(item.answer_length for item in batch)

        def share(micro_batch: MicroBatch, outputs: PolicyOutputs) -> tuple[Tensor, Stats]:
            return -outputs.logprobs_N.sum() / answer_tokens, {}

        mine = self._mine(batch)
        loss, _ = self._engine.compute_gradients(mine, mine["loss_mask"], range(mine.num_seqs), share)
        mean = self._place.data.all_reduce_sum(loss.double()).item()
        outcome = self._engine.step()
        if not outcome.applied:
            raise FloatingPointError(f"the gradient's norm is {outcome.grad_norm}; lower adamw_lr")
        return mean

    def mean_loss(self, batch: Sequence[Demonstration]) -> float:
        """Mean loss of `batch` in nats per answer token."""
        mine = self._mine(batch)
        total = -self._engine.logprobs(mine, mine["loss_mask"]).double().sum()
        return self._place.data.all_reduce_sum(total).item() / sum(item.answer_length for item in batch)

    def complete(self, step: int) -> None:
        """Step `step`, from 1, is complete and told: write a checkpoint where one is due."""
        if not self._checkpoint.interval or step % self._checkpoint.interval:
            return
        path = self._run_dir / CHECKPOINTS_DIR / f"v{step}"
        self._writer.begin(path, version=step, state={})
        mine = msgspec.json.encode(self._writer.share(path).result())
        files: dict[str, FileEntry] = {}
        for written in self._world.everyone.all_gather_bytes(mine):
            files |= msgspec.json.decode(written, type=dict[str, FileEntry])

        def commit() -> None:
            if self._world.everyone.leads:
                self._writer.commit(path, files, keep=self._checkpoint.keep, protected=())

        self._world.everyone.together(commit, f"completing {path}")

    def finish(self, step: int, out_dir: Path, beside: dict[str, bytes]) -> None:
        """Publish the model after `step` steps, and write it, adapters merged, as the Hugging Face folder `out_dir`,
        with the files `beside` by name.
        """
        self._writer.close()
        published = self._publish(step)

        def write() -> None:
            if not self._world.everyone.leads:
                return
            stored = StoredModel(verify(published), from_folder(published))
            model = stored if self._lora is None else MergedModel(stored, (published / ADAPTERS_FILE).read_bytes())
            own = model.beside() if isinstance(model, MergedModel) else _small_files(published)
            if out_dir.exists():
                atomic_dir.remove(out_dir)
            write_model(model, out_dir, {**own, **beside}, self._world.everyone)

        self._world.everyone.together(write, f"writing {out_dir}")

    def _publish(self, version: int) -> Path:
        root = self._run_dir / WEIGHTS_DIR
        shared = SharedFiles(self._engine.model_config, tokenizer_assets(self._model))
        if self._lora is not None:
            specs, model_config = self._engine.published_specs(), self._engine.model_config
            shared = SharedFiles(adapter_config(self._lora, str(self._model), specs, model_config))
        ranks = self._world.everyone
        return publish(self._engine, root, role=ACTOR, version=version, ranks=ranks, shared=shared)

    def _mine(self, batch: Sequence[Demonstration]) -> StepBatch:
        """This rank's part of `batch`."""
        data = self._place.data
        own = batch[data.rank :: data.world]
        columns = {
            "tokens": torch.tensor([token for item in own for token in item.token_ids], dtype=torch.int64),
            "loss_mask": torch.tensor([learnt for item in own for learnt in item.loss_mask], dtype=torch.bool),
            "lengths": torch.tensor([len(item.token_ids) for item in own], dtype=torch.int64),
            "rollouts": torch.arange(len(own)),
            "minibatches": torch.zeros(len(own), 1, dtype=torch.int64),
        }
        columns = {name: column.to(self._device) for name, column in columns.items()}
        pictures = [item.pictures for item in own] if any(item.pictures for item in own) else ()
        names = [str(n) for n in range(len(own))]
        return StepBatch(columns, version=0, num_minibatches=1, rollout_ids=names, pictures=pictures)


def engine_settings(config: SFTConfig, model: Path, total: int) -> ExperimentConfig:
    """Translate `config` into the settings of an RL experiment, which are the ones that the engines read."""
    told = ExperimentConfig(seed=config.seed, total_train_steps=total)
    publish = LoraPublish.adapter if placeholder_in(model) is None else LoraPublish.merged
    told.model.path, told.model.lora = str(model), replace(config.model.lora, publish=publish)
    told.model.vision = config.model.vision
    told.trainer.parallel, told.trainer.device = config.trainer.parallel, config.device
    told.trainer.gradient_checkpointing = config.trainer.gradient_checkpointing
    told.trainer.tokens_per_micro_batch = config.tokens_per_micro_batch
    told.trainer.share_prefixes, told.trainer.ppo_minibatches, told.trainer.ppo_epochs = False, 1, 1
    told.trainer.threads = config.threads
    told.generation.context_length = config.dataset.max_tokens
    told.optimizer = OptimizerConfig(
        lr=config.adamw_lr,
        max_grad_norm=config.max_grad_norm,
        schedule=LearningRateSchedule.cosine,
        min_lr_share=config.min_lr_share,
        warmup_steps=config.warmup_steps,
    )
    return told


def _small_files(published: Path) -> dict[str, bytes]:
    """Configuration and tokenizer in the folder of a version."""
    files = {"config.json": published / "config.json", **tokenizer_assets(published)}
    return {name: file.read_bytes() for name, file in files.items()}
