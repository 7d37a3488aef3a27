"""Settings of the ModelWorkers: models, optimizers, the objective, checkpoints; and their checks."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from asyncrl.algorithms.registry import KINDS
from asyncrl.algorithms.spec import KLPlace, ProximalMode, ValueNormalisation
from asyncrl.config import catalog
from asyncrl.config.setting import ChoiceConfig, ConfigError, Device, Dtype, setting
from asyncrl.runtime.hardware import count_gpus
from asyncrl.trainer.worker_grid import WorkerGrid

if TYPE_CHECKING:
    from asyncrl.config.experiment import ExperimentConfig

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


_PARALLEL = re.compile(r"d([1-9][0-9]*)")
_WEIGHT_FILES = ("*.safetensors", "*.bin")
NEEDS_VALUES = frozenset({"gae", "gae_turn"})
"""Advantages that are estimated from a critic's values; a test compares it with what each refuses."""


class AttentionImplementation(StrEnum):
    """Attention of the training ranks, by transformers' names."""

    sdpa = auto()
    eager = auto()
    flash_attention_2 = auto()


class LearningRateSchedule(StrEnum):
    """How the learning rate goes on after its warm-up."""

    constant = auto()
    linear = auto()
    cosine = auto()


class ReferenceMode(StrEnum):
    """What the reference model does while the actor learns."""

    frozen = auto()
    """It stays the model it was loaded from."""
    ema = auto()
    """It follows the actor as an exponential moving average."""


@dataclass
class ModelConfig:
    """The policy."""

    path: Optional[str] = setting(
        None, "Hugging Face model folder; null: the base made by `model.base_experiment`, cached", fixed=True
    )
    base_experiment: str = setting("sft", "experiment that makes the base model where `model.path` is null")
    dtype: Dtype = setting(Dtype.float32, "parameter type of the training ranks")
    attn_implementation: AttentionImplementation = setting(
        AttentionImplementation.sdpa,
        "attention of the training ranks; sdpa and flash_attention_2 train packed where that is proven right for the "
        "model when it is loaded, else on padded rows; eager: padded rows",
    )


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = setting(1e-4, "peak learning rate", minimum=0.0)
    beta1: float = setting(0.9, "AdamW beta 1", minimum=0.0, maximum=1.0)
    beta2: float = setting(0.99, "AdamW beta 2", minimum=0.0, maximum=1.0)
    eps: float = setting(1e-8, "AdamW epsilon", minimum=0.0)
    weight_decay: float = setting(0.0, "decoupled weight decay", minimum=0.0)
    max_grad_norm: float = setting(1.0, "gradient clipping by global norm; 0: none", minimum=0.0)
    schedule: LearningRateSchedule = setting(LearningRateSchedule.constant, "learning-rate schedule after warm-up")
    warmup_steps: int = setting(0, "linear warm-up", unit="optimizer steps", minimum=0)


@dataclass
class TrainerConfig:
    """ModelWorkers."""

    parallel: str = setting("d1", "parallel layout: d<N> is N data-parallel ranks")
    device: Device = setting(Device.auto, "cpu, cuda, or auto: cuda where there is one")
    threads: int = setting(1, "CPU threads per rank", minimum=1)
    tokens_per_micro_batch: int = setting(
        16384, "token budget of one forward and backward pass", unit="tokens", minimum=1
    )
    ppo_minibatches: int = setting(4, "optimizer steps per train step; divides train_batch_size", minimum=1)
    buffer_capacity: int = setting(
        4096, "rollouts a rank holds before it stops taking more", unit="rollouts", minimum=1
    )
    collective_timeout_s: float = setting(120.0, "limit of one collective operation", unit="s", minimum=1.0)


@dataclass
class CriticConfig:
    """The value model, where the graph has one."""

    path: Optional[str] = setting(
        None, "Hugging Face folder of the critic's trunk; null: the actor's model.path", fixed=True
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    value_loss: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="clipped"))
    value_norm: ValueNormalisation = setting(ValueNormalisation.none, "normalisation of the returns")
    warmup_steps: int = setting(0, "train steps in which only the critic moves", unit="steps", minimum=0)


@dataclass
class ReferenceModelConfig:
    """The reference model, where a KL term asks for one."""

    mode: ReferenceMode = setting(
        ReferenceMode.frozen, "frozen, or an exponential moving average of the actor", fixed=True
    )
    ema_decay: float = setting(0.99, "decay per train step of the moving average", minimum=0.0, maximum=1.0)
    path: Optional[str] = setting(None, "Hugging Face folder; null: the actor's model.path")


@dataclass
class AlgorithmConfig:
    """What is optimised, by which graph of calls."""

    graph: str = setting(
        "grpo", "built-in graph (grpo, ppo, dapo, reinforce) or import path of a function that builds one", fixed=True
    )
    graph_args: dict[str, Any] = setting(help="keyword arguments of the graph's function", factory=dict)
    plugins: list[str] = setting(
        help="your modules or packages whose registered losses, advantages, filters, ... are known by name",
        factory=list,
    )
    policy_loss: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="decoupled_ppo"))
    correction: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="token_truncate"))
    prox: ProximalMode = setting(
        ProximalMode.recompute,
        "proximal log-probabilities: recomputed at the step's start, approximated, or the behaviour's",
    )
    advantage: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="grpo"))
    aggregation: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="token_mean"))
    kl: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="k3"))
    kl_coef: float = setting(0.0, "weight of the KL term to the reference; 0: no reference model", minimum=0.0)
    kl_in: KLPlace = setting(KLPlace.loss, "where the KL term enters")
    kl_target: float = setting(0.0, "adapt kl_coef towards this KL; 0: fixed", unit="nats/token", minimum=0.0)
    kl_horizon: int = setting(10000, "samples over which kl_coef adapts", unit="samples", minimum=1)
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", minimum=0.0)
    stop_kl: float = setting(
        0.0, "end a step's minibatch loop once the KL to the proximal policy exceeds this; 0: never", minimum=0.0
    )
    stop_weight_variance: float = setting(
        0.0,
        "end a step's minibatch loop once the variance of the importance weights exceeds this; 0: never",
        minimum=0.0,
    )
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceModelConfig = field(default_factory=ReferenceModelConfig)


@dataclass
class CheckpointConfig:
    """What a run needs to continue, and the policy it leaves behind."""

    interval: int = setting(
        10, "train steps between checkpoints; one is always written at exit; 0: only at exit", unit="steps", minimum=0
    )
    keep: int = setting(2, "checkpoints kept", minimum=1)


def worker_grid(config: ExperimentConfig) -> WorkerGrid:
    """How the ModelWorkers of `config` are laid out.

    Raises:
        ConfigError: `trainer.parallel` is not a layout.
    """
    parallel = config.trainer.parallel
    match = _PARALLEL.fullmatch(parallel)
    if match is None:
        raise ConfigError(
            f"trainer.parallel={parallel!r}: not a layout; write d<N> for N data-parallel ranks, for example d2"
        )
    return WorkerGrid(data=int(match[1]))


def check(config: ExperimentConfig) -> Iterator[str]:
    """What is wrong with these settings, each as `setting=value: what is wrong; what to do`."""
    for name, path in (
        ("model.path", config.model.path),
        ("algorithm.critic.path", config.algorithm.critic.path),
        ("algorithm.reference.path", config.algorithm.reference.path),
    ):
        if path is not None:
            yield from hugging_face_folder(name, path)
    yield from _devices(config)
    unknown = list(_algorithms(config))
    yield from unknown
    if not unknown:
        yield from _critic(config)


def hugging_face_folder(name: str, path: str) -> Iterator[str]:
    """What is wrong with the model folder `path`, which the setting `name` has."""
    folder, fix = Path(path).expanduser(), "give the folder of a downloaded model"
    if not folder.is_dir():
        yield f"{name}={path!r}: no such folder, so there is no config.json to read; {fix}"
        return
    file = folder / "config.json"
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"{name}={path!r}: no Hugging Face model there (no config.json); {fix}"
        return
    except (OSError, ValueError) as error:
        yield f"{name}={path!r}: its config.json cannot be read ({error}); download the model anew, or {fix}"
        return
    if not isinstance(described, dict) or not described.get("model_type"):
        yield f"{name}={path!r}: its config.json names no model_type, so it is not of a transformers model; {fix}"
    if not any(True for pattern in _WEIGHT_FILES for _ in folder.glob(pattern)):
        yield f"{name}={path!r}: it holds no weights ({', '.join(_WEIGHT_FILES)}); download them too, or {fix}"


def _devices(config: ExperimentConfig) -> Iterator[str]:
    device, gpus, ranks = config.trainer.device, count_gpus(), worker_grid(config).workers
    attention = config.model.attn_implementation
    if device == Device.cuda and not gpus:
        yield "trainer.device='cuda': this machine shows no NVIDIA GPU; use cpu or auto, or start on one that has GPUs"
    if device != Device.cpu and 0 < gpus < ranks:
        yield (
            f"trainer.parallel={config.trainer.parallel!r}: {ranks} training ranks want a GPU each and there are "
            f"{gpus}; use d{gpus} or fewer, or trainer.device=cpu"
        )
    if attention != AttentionImplementation.flash_attention_2:
        return
    if importlib.util.find_spec("flash_attn") is None:
        yield (
            f"model.attn_implementation={str(attention)!r}: the package flash-attn is not installed; install it, or "
            "use sdpa"
        )
    if device == Device.cpu or (device == Device.auto and not gpus):
        yield (
            f"model.attn_implementation={str(attention)!r}: it computes on a GPU only and trainer.device="
            f"{str(device)!r} is a CPU here; use sdpa"
        )


def _critic(config: ExperimentConfig) -> Iterator[str]:
    """An advantage of values in a graph in which nobody gives it any."""
    from asyncrl.master.graph.builtin import load_graph
    from asyncrl.master.graph.types import GraphError

    choice = config.algorithm.advantage
    if choice.name not in NEEDS_VALUES:
        return
    try:
        calls = [call for call in load_graph(config).calls if call.function == "advantage"]
    except GraphError:
        return  # which the launcher says itself
    if calls and not any("values" in call.reads for call in calls):
        yield (
            f"algorithm.advantage={choice.name!r}: it needs a critic's values, and graph "
            f"{config.algorithm.graph!r} has no critic; use algorithm.graph=ppo, or an advantage without a critic, "
            "for example grpo or rloo"
        )


def _algorithms(config: ExperimentConfig) -> Iterator[str]:
    algorithm = config.algorithm
    choices: list[tuple[str, str, ChoiceConfig]] = [
        ("algorithm.policy_loss", "policy_loss", algorithm.policy_loss),
        ("algorithm.correction", "correction", algorithm.correction),
        ("algorithm.advantage", "advantage", algorithm.advantage),
        ("algorithm.aggregation", "aggregation", algorithm.aggregation),
        ("algorithm.kl", "kl", algorithm.kl),
        ("algorithm.critic.value_loss", "value_loss", algorithm.critic.value_loss),
        *((f"rollout.filters[{i}]", "filter", choice) for i, choice in enumerate(config.rollout.filters)),
        *((f"rollout.shaping[{i}]", "shaping", choice) for i, choice in enumerate(config.rollout.shaping)),
    ]
    try:
        for kind in KINDS:
            catalog.known(kind, algorithm.plugins)
    except ValueError as error:
        yield f"algorithm.plugins={algorithm.plugins}: {error}"
        return
    for name, kind, choice in choices:
        try:
            catalog.check(kind, choice.name, choice.params, algorithm.plugins)
        except ValueError as error:
            yield f"{name}={choice.name!r}: {error}"
