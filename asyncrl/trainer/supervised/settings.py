"""Settings of a supervised experiment, which makes a base model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import Any, Optional

from asyncrl.config.setting import setting
from asyncrl.rollout.settings import dataset
from asyncrl.trainer.checks import hugging_face_folder

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


@dataclass
class SFTDatasetConfig:
    """The demonstrations."""

    path: str = setting(
        "asyncrl.datasets.arithmetic:ArithmeticDataset",
        "class with a `demonstration` method by import path, or a JSONL file",
    )
    args: dict[str, Any] = setting(help="keyword arguments of the dataset's constructor", factory=dict)


@dataclass
class SFTConfig:
    """Supervised training on demonstrations."""

    experiment_name: str = setting("sft", "name of the model's folder under <fileroot>/models")
    fileroot: str = setting(DEFAULT_FILEROOT, "where models, checkpoints, logs and metrics go")
    seed: int = setting(1, "seed of data order and initialisation", minimum=0)
    threads: int = setting(1, "CPU threads; two are faster on an idle machine only", minimum=1)
    batch_size: int = setting(64, "demonstrations per step", unit="demonstrations", minimum=1)
    optimizer: SupervisedOptimizer = setting(
        SupervisedOptimizer.muon, "muon: matrices by Muon, the rest by AdamW; adamw: all"
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


def check(config: SFTConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    data = config.dataset
    args = [{**data.args, **phase.args} for phase in config.phases] or [data.args]
    yield from dict.fromkeys(problem for each in args for problem in dataset("dataset", data.path, each))
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
