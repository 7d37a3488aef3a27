"""Settings of a supervised experiment, which makes a base model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from asyncrl.config.setting import MOST_SEED, ChoiceConfig, Device, setting
from asyncrl.data.settings import AUTO, TrainOn
from asyncrl.trainer.settings import LoraConfig, OptimizerName, VisionMode

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


CHILD = "asyncrl.trainer.supervised.child"
"""The process that makes a base model, by which Python's `-m` runs it."""
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


CROSS_ENTROPY = "cross_entropy"
"""The loss on demonstrations; other losses are on judged answers, of a kind of `asyncrl.algorithms.registry`."""


MUON_LR = 7e-3
"""Default of `lr`: a check tells it from a rate that was meant for AdamW."""


@dataclass
class SFTPhaseConfig:
    """Some steps on one version of the dataset."""

    steps: int = setting(100, "optimizer steps", unit="steps", minimum=1)
    args: dict[str, Any] = setting(
        help="keyword arguments of the dataset in this phase, on top of dataset.args", factory=dict
    )


@dataclass
class SFTModelConfig:
    """The model."""

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
    vision: VisionMode = setting(
        VisionMode.train,
        "vision tower and projector of a model that takes pictures: train them, freeze them, or none: use the model "
        "for text alone",
    )


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
    """The ranks."""

    parallel: str = setting(
        "d1",
        "parallel layout as of an RL run's trainer.parallel, for example d2t2p2; all ranks are on this machine, on a "
        "GPU each or on its CPUs",
    )
    gradient_checkpointing: bool = setting(
        False, "recompute each layer's activations in the backward pass: less memory, a third more work"
    )


@dataclass
class SFTCheckpointConfig:
    """Checkpoints, from which an interrupted run resumes."""

    interval: int = setting(
        0, "steps between checkpoints; 0: none, a run that was cut off starts over", unit="steps", minimum=0
    )
    keep: int = setting(2, "newest checkpoints kept", minimum=1)


@dataclass
class SFTConfig:
    """Supervised training on demonstrations, or on judged answers."""

    experiment_name: str = setting("sft", "name of the model's folder under <fileroot>/models")
    fileroot: str = setting(DEFAULT_FILEROOT, "folder of models, checkpoints, logs and metrics")
    seed: int = setting(1, "seed of data order and initialisation", minimum=0, maximum=MOST_SEED)
    device: Device = setting(Device.auto, "cpu, cuda, or auto: cuda if there is a GPU")
    threads: int = setting(1, "CPU threads; two are faster on an idle machine only", minimum=1)
    batch_size: int = setting(64, "rows per step: demonstrations, pairs or labelled answers", unit="rows", minimum=1)
    loss: ChoiceConfig = setting(
        help="cross_entropy: imitate demonstrations; bradley_terry: a reward model from pairs of answers; dpo, ipo, "
        "kto: a policy from pairs, or with kto from labelled answers; docs/sft.md",
        factory=lambda: ChoiceConfig(CROSS_ENTROPY),
    )
    optimizer: OptimizerName = setting(
        OptimizerName.adamw,
        "adamw: all weights, in layouts, with adapters; muon: the matrices of the layers by Muon, the rest by AdamW, "
        "in one process, for small models from scratch",
    )
    lr: float = setting(MUON_LR, "peak learning rate of Muon, with optimizer=muon", minimum=0.0)
    adamw_lr: float = setting(
        1e-5,
        "peak learning rate of AdamW; the default suits a pretrained model whose weights are all trained; adapters "
        "take about ten times as much, a model from scratch about a thousand times",
        minimum=0.0,
    )
    min_lr_share: float = setting(0.1, "end of the cosine schedule, as a share of the peak", minimum=0.0, maximum=1.0)
    warmup_steps: int = setting(10, "linear warm-up", unit="steps", minimum=0)
    max_grad_norm: float = setting(1.0, "limit of the gradient's global norm, by clipping; 0: none", minimum=0.0)
    tokens_per_micro_batch: int = setting(
        2048, "token budget of one forward and backward pass", unit="tokens", minimum=1
    )
    phases: list[SFTPhaseConfig] = setting(
        help="parts of the training, in order, each with its steps and dataset arguments",
        factory=lambda: [SFTPhaseConfig()],
    )
    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    dataset: SFTDatasetConfig = field(default_factory=SFTDatasetConfig)
    eval: SFTEvalConfig = field(default_factory=SFTEvalConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    checkpoint: SFTCheckpointConfig = field(default_factory=SFTCheckpointConfig)


def run_dir_of(out_dir: Path) -> Path:
    """Return the folder of the run that makes `out_dir`."""
    return out_dir.with_name(f"{out_dir.name}.run")
