"""Settings of a supervised experiment, which makes a base model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import Any, Optional

from asyncrl.config.setting import ConfigError, Device, setting
from asyncrl.plugins.datasets.chat import AUTO
from asyncrl.plugins.datasets.demonstrations import TrainOn
from asyncrl.plugins.datasets.readers import is_data_path
from asyncrl.rollout.settings import dataset
from asyncrl.trainer.checks import hugging_face_folder
from asyncrl.trainer.lora_checks import lora_problems
from asyncrl.trainer.settings import LoraConfig, LoraPublish, layout_of
from asyncrl.trainer.worker_grid import WorkerGrid

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


DEFAULT_FILEROOT = "~/.cache/asyncrl"
DEMO_MODEL: Mapping[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 288,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
"""The demo's architecture: 242k parameters with the arithmetic alphabet."""


class SupervisedOptimizer(StrEnum):
    """Which optimizer learns what."""

    muon = auto()
    """Muon for matrices, AdamW for the rest."""
    adamw = auto()
    """AdamW for all."""


@dataclass
class SFTPhaseConfig:
    """Some steps on one version of the dataset."""

    steps: int = setting(100, "optimizer steps", unit="steps", minimum=1)
    args: dict[str, Any] = setting(
        help="keyword arguments of the dataset in this phase, on top of dataset.args", factory=dict
    )


@dataclass
class SFTModelConfig:
    """What is trained."""

    path: Optional[str] = setting(
        None, "Hugging Face folder to start from; null: a random start of `model.architecture`"
    )
    architecture: dict[str, Any] = setting(
        help="transformers configuration of a model from scratch, with its model_type; empty: the demo's", factory=dict
    )
    tokenizer: Optional[str] = setting(
        None,
        "folder with the tokenizer of a model from scratch, its chat template included; needs "
        "model.architecture.vocab_size; null: the characters of the arithmetic demo",
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class SFTDatasetConfig:
    """The demonstrations."""

    path: str = setting(
        "asyncrl.plugins.datasets.arithmetic:ArithmeticDataset",
        "class with a `demonstration` method by import path, a JSONL or Parquet file, a folder of them, a folder saved "
        "by `datasets`, or a name on the Hugging Face hub; docs/sft.md",
    )
    args: dict[str, Any] = setting(help="keyword arguments of the dataset's constructor", factory=dict)
    fields: dict[str, str] = setting(
        help="columns of a file under another name, `{messages: conversations, completion: output}`", factory=dict
    )
    chat_template: str = setting(
        AUTO, "auto: the tokenizer's, where it has one; off: prompts and answers are plain text; or a Jinja file"
    )
    chat_template_args: dict[str, Any] = setting(
        help="further variables of the chat template, as `{enable_thinking: false}`", factory=dict
    )
    system_prompt: str = setting("", "system message put before conversations that have none; empty: no such message")
    train_on: TrainOn = setting(TrainOn.all, "assistant's turns that are imitated: all, or the last alone")
    max_tokens: int = setting(4096, "longer rows of a file are left out, and counted", unit="tokens", minimum=2)


@dataclass
class SFTEvalConfig:
    """The loss on demonstrations that are not trained on."""

    interval: int = setting(
        0, "steps between measurements of the held-out loss, at the end another; 0: never", unit="steps", minimum=0
    )
    path: Optional[str] = setting(None, "as dataset.path; null: the rows that dataset holds out")
    args: dict[str, Any] = setting(help="as dataset.args, of eval.path", factory=dict)
    fields: Optional[dict[str, str]] = setting(None, "as dataset.fields, of eval.path; null: those of dataset")
    size: int = setting(256, "rows measured, from the top", unit="rows", minimum=1)


@dataclass
class SFTTrainerConfig:
    """The ranks, with optimizer=adamw."""

    parallel: str = setting(
        "d1", "parallel layout as of an RL run's trainer.parallel, for example d2t2p2; more than one rank on CPUs only"
    )
    gradient_checkpointing: bool = setting(
        False, "recompute each layer's activations in the backward pass: less memory, a third more work"
    )


@dataclass
class SFTCheckpointConfig:
    """What a run that was cut off goes on from, with optimizer=adamw."""

    interval: int = setting(
        0, "steps between checkpoints; 0: none, a run that was cut off starts over", unit="steps", minimum=0
    )
    keep: int = setting(2, "newest checkpoints kept", minimum=1)


@dataclass
class SFTConfig:
    """Supervised training on demonstrations."""

    experiment_name: str = setting("sft", "name of the model's folder under <fileroot>/models")
    fileroot: str = setting(DEFAULT_FILEROOT, "where models, checkpoints, logs and metrics go")
    seed: int = setting(1, "seed of data order and initialisation", minimum=0)
    device: Device = setting(Device.cpu, "cpu, cuda, or auto: cuda where there is one")
    threads: int = setting(1, "CPU threads; two are faster on an idle machine only", minimum=1)
    batch_size: int = setting(64, "demonstrations per step", unit="demonstrations", minimum=1)
    optimizer: SupervisedOptimizer = setting(
        SupervisedOptimizer.muon,
        "muon: matrices by Muon, the rest by AdamW, whole and padded, in one process; adamw: all, by the engines of RL "
        "training: packed, in layouts, with adapters and checkpoints",
    )
    lr: float = setting(7e-3, "peak learning rate of Muon", minimum=0.0)
    adamw_lr: float = setting(2e-2, "peak learning rate of AdamW", minimum=0.0)
    min_lr_share: float = setting(0.1, "end of the cosine schedule, as a share of the peak", minimum=0.0, maximum=1.0)
    warmup_steps: int = setting(50, "linear warm-up", unit="steps", minimum=0)
    max_grad_norm: float = setting(1.0, "gradient clipping by global norm", minimum=0.0)
    tokens_per_micro_batch: int = setting(
        2048, "token budget of one forward and backward pass", unit="tokens", minimum=1
    )
    phases: list[SFTPhaseConfig] = setting(help="what to imitate, in order", factory=lambda: [SFTPhaseConfig()])
    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    dataset: SFTDatasetConfig = field(default_factory=SFTDatasetConfig)
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    checkpoint: SFTCheckpointConfig = field(default_factory=SFTCheckpointConfig)


def check(config: SFTConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    data = config.dataset
    args = [{**data.args, **phase.args} for phase in config.phases] or [data.args]
    yield from dict.fromkeys(problem for each in args for problem in dataset("dataset", data.path, each))
    if is_data_path(data.path):
        yield from (
            f"dataset.args.{name}: it is set by asyncrl for supervised training; leave it out"
            for name in ("demonstrations", "fields")
            if name in data.args
        )
    yield from _held_out(config)
    yield from _engine(config)
    if not config.phases:
        yield "phases=[]: there is nothing to imitate; give at least one, for example phases=[{steps: 1000}]"
    if config.model.path is not None:
        yield from hugging_face_folder("model.path", config.model.path)
        if config.model.architecture:
            yield "model.architecture: a pretrained model has its own; set model.path or model.architecture, not both"
        if config.model.tokenizer is not None:
            yield "model.tokenizer: a pretrained model has its own; set model.path or model.tokenizer, not both"
    elif config.model.tokenizer is not None:
        if not (Path(config.model.tokenizer).expanduser() / "tokenizer_config.json").is_file():
            yield (
                f"model.tokenizer={config.model.tokenizer!r}: no folder with a tokenizer_config.json; give one "
                "that has the tokenizer's files"
            )
        if "vocab_size" not in config.model.architecture:
            yield "model.architecture.vocab_size: missing; a model with model.tokenizer needs the tokenizer's size"


def _held_out(config: SFTConfig) -> Iterator[str]:
    """What is wrong with the rows that the held-out loss is measured on."""
    data, held_out = config.dataset, config.eval
    if not held_out.interval:
        return
    if held_out.path is not None:
        yield from dataset("eval", held_out.path, held_out.args)
    elif is_data_path(data.path) and not data.args.get("held_out_share"):
        yield (
            f"eval.path=null: the held-out loss would be measured on the training file {data.path!r} itself; give it a "
            "file of its own (eval.path=...), hold out a share of this one (dataset.args.held_out_share=0.05), or "
            "switch it off (eval.interval=0)"
        )


def _engine(config: SFTConfig) -> Iterator[str]:
    """What is wrong with how the ranks train."""
    lora, parallel = config.model.lora, config.trainer.parallel
    if config.optimizer == SupervisedOptimizer.muon:
        given: dict[str, Any] = {
            "model.lora.rank": lora.rank,
            "trainer.gradient_checkpointing": config.trainer.gradient_checkpointing,
            "checkpoint.interval": config.checkpoint.interval,
        }
        given |= {} if parallel == "d1" else {"trainer.parallel": parallel}
        for name, value in given.items():
            if value:
                yield f"{name}={value}: optimizer=muon trains whole weights in one process; use optimizer=adamw"
    try:
        ranks = WorkerGrid.of(layout_of("trainer.parallel", parallel)).workers
    except ConfigError as error:
        yield str(error)
        return
    if ranks > 1 and config.device != Device.cpu:
        yield f"trainer.parallel={parallel!r}: {ranks} ranks train on CPUs only, device=cpu; on a GPU use d1"
    if lora.publish != LoraPublish.auto:
        yield f"model.lora.publish={str(lora.publish)!r}: no servers load the result, which is merged; leave it out"
    yield from lora_problems(lora, config.model.path)
