"""Settings of the ModelWorkers: models, optimizers, the objective, checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Optional

from asyncrl.algorithms.registry import KLIn, ProximalMode, ValueNormalisation
from asyncrl.config.setting import ChoiceConfig, Device, Dtype, setting
from asyncrl.trainer.engines import AUTO, ENGINES

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


class AttentionImplementation(StrEnum):
    """Attention of the training ranks, by transformers' names."""

    sdpa = auto()
    eager = auto()
    flash_attention_2 = auto()


class RoleRanks(StrEnum):
    """Workers that a role is placed on."""

    shared = auto()
    """The actor's workers, from the first on."""
    own = auto()
    """Separate workers."""


class OptimizerName(StrEnum):
    """torch's optimizers."""

    adamw = auto()
    """AdamW for all."""
    muon = auto()
    """Muon for the matrices of the layers, AdamW for the rest."""


class LearningRateSchedule(StrEnum):
    """Course of the learning rate after its warm-up."""

    constant = auto()
    linear = auto()
    cosine = auto()


class KeptOn(StrEnum):
    """Memory for tensors of which the device needs only a part at a time."""

    device = auto()
    """The device's own."""
    host = auto()
    """The host's; the needed part is copied to the device."""


class BestDirection(StrEnum):
    """Direction in which a metric is better."""

    highest = auto()
    lowest = auto()


class ReferenceMode(StrEnum):
    """Behaviour of the reference model while the actor learns."""

    frozen = auto()
    """The reference does not change."""
    ema = auto()
    """The reference follows the actor as an exponential moving average."""


MOST_BETA = 0.999999
"""A beta of 1 never forgets: AdamW divides by 1 - beta."""
ALL_LINEAR = "all-linear"
"""In `model.lora.targets`: every linear layer but the output embedding, as in peft."""


class LoraPublish(StrEnum):
    """Content of a version of a policy with adapters."""

    auto = "auto"
    """Adapters if all servers can load them, else merged weights."""
    adapter = "adapter"
    """The adapters alone."""
    merged = "merged"
    """The whole weights, with the adapters merged."""


@dataclass
class LoraConfig:
    """Low-rank adapters of the policy, which are trained instead of its weights."""

    rank: int = setting(
        0, "rank of the adapters, by the extra `lora`; 0: none, all weights are trained", minimum=0, fixed=True
    )
    alpha: float = setting(32.0, "adapters are scaled by alpha / rank", minimum=0.0, fixed=True)
    targets: list[str] = setting(
        help="names of the layers that get one, for example q_proj; all-linear: every linear layer but embeddings",
        factory=lambda: [ALL_LINEAR],
        fixed=True,
    )
    publish: LoraPublish = setting(
        LoraPublish.auto,
        "content of each version: adapter, the adapters alone, which the embedded engine loads from a shared disk; "
        "merged, the whole weights with the adapters merged, which every back end and transport takes; auto: adapter "
        "where possible",
    )


class VisionMode(StrEnum):
    """Treatment of a vision-language model's vision tower and projector."""

    train = auto()
    """They are trained with the rest."""
    freeze = auto()
    """They are frozen; the text model is trained."""
    none = auto()
    """They are not used: the run has no pictures. Their weights do not change."""


@dataclass
class ModelConfig:
    """The policy."""

    path: Optional[str] = setting(
        None, "Hugging Face model folder; null: the base made by `model.base_experiment`, cached", fixed=True
    )
    base_experiment: str = setting("arithmetic_base", "experiment that makes the base model where `model.path` is null")
    dtype: Dtype = setting(
        Dtype.auto,
        "type in which the training ranks compute; auto: bfloat16 on GPUs, float32 on CPUs; what is trained has "
        "float32 masters, gradients and moments in either case",
    )
    publish_dtype: Dtype = setting(
        Dtype.auto,
        "type in which versions are published to the servers; auto: model.dtype. bfloat16 from float32 training halves "
        "what is written and sent, and lets hosts fetch differences; servers then have weights that training does not "
        "round",
        fixed=True,
    )
    float32_head: bool = setting(
        False,
        "training ranks and servers compute logits in float32, from the output embedding's weights as they are; in "
        "bfloat16 the logits' own rounding is a part of what the two differ by (ppo/engine_gap)",
    )
    attn_implementation: AttentionImplementation = setting(
        AttentionImplementation.sdpa,
        "attention of the training ranks; sdpa and flash_attention_2 train packed where that is proven right for the "
        "model when it is loaded, else on padded rows; eager: padded rows",
    )
    vision: VisionMode = setting(
        VisionMode.train,
        "vision tower and projector of a model that takes pictures: train them, freeze them, or none: use the "
        "model for text alone; no effect on other models",
        fixed=True,
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class OptimizerConfig:
    """The optimizer and its schedule."""

    name: OptimizerName = setting(
        OptimizerName.adamw,
        "adamw; or muon: the matrices of the layers by torch's Muon, the rest by AdamW; with trainer.engine=flat, "
        "without adapters",
        fixed=True,
    )
    lr: float = setting(1e-4, "peak learning rate", minimum=0.0)
    muon_lr: Optional[float] = setting(
        None, "peak learning rate of Muon's matrices, on the schedule of lr; null: lr", minimum=0.0
    )
    beta1: float = setting(0.9, "AdamW beta 1, decay of the mean gradient", minimum=0.0, maximum=MOST_BETA)
    beta2: float = setting(0.99, "AdamW beta 2, decay of the mean squared gradient", minimum=0.0, maximum=MOST_BETA)
    eps: float = setting(1e-8, "AdamW epsilon", minimum=1e-20)
    weight_decay: float = setting(0.0, "decoupled weight decay of matrices; norms and biases have none", minimum=0.0)
    decay_embeddings: bool = setting(True, "apply weight decay to embeddings too")
    max_grad_norm: float = setting(1.0, "limit of the gradient's global norm, by clipping; 0: none", minimum=0.0)
    schedule: LearningRateSchedule = setting(
        LearningRateSchedule.constant,
        "learning-rate schedule after warm-up, over the planned optimizer steps: its place is the share of "
        "total_train_steps that is over",
    )
    min_lr_share: float = setting(0.0, "end of the cosine schedule, as a share of the peak", minimum=0.0, maximum=1.0)
    warmup_steps: int = setting(0, "linear warm-up", unit="optimizer steps", minimum=0)
    warmup_ratio: float = setting(
        0.0,
        "linear warm-up as a share of the run's optimizer steps; not together with warmup_steps",
        minimum=0.0,
        maximum=1.0,
    )
    moments_on: KeptOn = setting(
        KeptOn.device,
        "where the moments are kept: with the weights (device), or in host memory (host), from which every step takes "
        "16 bytes per parameter to the device and back; values are the same",
    )

    @property
    def is_scheduled(self) -> bool:
        """True if the learning rate changes in the run."""
        warmup = bool(self.warmup_steps or self.warmup_ratio)
        return self.schedule != LearningRateSchedule.constant or warmup

    def rate(self, progress: float, steps: int) -> float:
        """Return the learning rate at `progress`, the share of the run that is over (0 to 1), of `steps` optimizer
        steps.

        The rate is computed, not counted: a run that resumes with other settings has their rate at its place.
        """
        progress = min(max(progress, 0.0), 1.0)
        warmup = self.warmup_steps / steps if self.warmup_steps else self.warmup_ratio
        if progress < warmup:
            return self.lr * progress / warmup
        if self.schedule == LearningRateSchedule.constant:
            return self.lr
        left = (1.0 - progress) / (1.0 - warmup) if warmup < 1.0 else 0.0
        if self.schedule == LearningRateSchedule.linear:
            return self.lr * left
        return self.lr * (self.min_lr_share + (1.0 - self.min_lr_share) * 0.5 * (1.0 - math.cos(math.pi * left)))


@dataclass
class TrainerConfig:
    """ModelWorkers."""

    parallel: str = setting(
        "d1",
        "parallel layout of the actor: d<N> data-parallel ranks, t<N> tensor slices, p<N> pipeline stages, c<N> parts "
        "of each micro-batch's tokens, r<N> replicas of d, in any order, for example d2t2p2",
    )
    engine: str = setting(
        AUTO,
        "whole weights on every rank (flat), or weights, gradients and moments in shards (sharded); auto: flat where "
        "one rank trains alone, else sharded",
        choices=(AUTO, *ENGINES),
    )
    device: Device = setting(Device.auto, "cpu, cuda, or auto: cuda if there is a GPU")
    threads: int = setting(1, "CPU threads of each rank", unit="threads", minimum=1)
    tokens_per_micro_batch: int = setting(
        16384,
        "token budget of one forward and backward pass; with c<N> in trainer.parallel, of its N ranks together",
        unit="tokens",
        minimum=1,
    )
    share_prefixes: bool = setting(
        True,
        "compute a prefix that several samples begin with (a group's prompt, earlier turns, equal answers) once, where "
        "that saves and the model is proven right so; the results are the same up to rounding",
    )
    gradient_checkpointing: bool = setting(
        False, "recompute each layer's activations in the backward pass: less memory, a third more work"
    )
    activations_on: KeptOn = setting(
        KeptOn.device,
        "where the inputs of recomputed layers wait for the backward pass: on the device, or in host memory (host), "
        "for long contexts; needs trainer.gradient_checkpointing; values are the same",
    )
    compile: bool = setting(
        False,
        "compile the norms and the feed-forward of each layer with torch.compile, which takes some minutes at the "
        "start: of use on GPUs; trainer.engine=flat only",
    )
    offload: bool = setting(
        False,
        "keep each role (weights, moments) in host memory while another one works on the ranks that they share; of use "
        "on GPUs only",
    )
    score_ahead: bool = setting(
        False,
        "frozen reference and reward models score rollouts while the trainer waits for the rest of a batch, with the "
        "same results up to rounding; of use where the ranks have devices of their own and wait much",
    )
    ppo_minibatches: int = setting(
        4, "parts of a step's batch, an optimizer step each; divides train_batch_size", minimum=1
    )
    ppo_epochs: int = setting(
        1,
        "passes over a step's batch; minibatches are shuffled again in each, ratios refer to the policy before the "
        "first (end them early by algorithm.stop_kl)",
        minimum=1,
    )
    train_every: int = setting(
        1,
        "with further trained `policies`: only steps from versions v with v mod train_every = train_offset train "
        "the run's own, so that policies can be trained in turns",
        minimum=1,
    )
    train_offset: int = setting(0, "remainder of the versions that train_every selects; less than it", minimum=0)
    buffer_capacity: int = setting(
        4096,
        "most rollouts that a rank holds; it takes no more until some are trained or discarded",
        unit="rollouts",
        minimum=1,
    )
    buffer_memory: float = setting(
        8.0,
        "memory for the tokens of the rollouts that a rank holds; what comes beyond it waits in files under the run's "
        "folder until it is trained (a rollout of 16 samples of 32k tokens takes 7 MiB)",
        unit="GiB",
        minimum=0.0,
    )
    collective_timeout_s: float = setting(
        1800.0,
        "longest wait of a rank for another one in a collective operation, which the other may compute for; a rank "
        "that waits longer fails. A rank that is gone or frozen is noticed earlier (system.stall_timeout_s)",
        unit="s",
        minimum=1.0,
    )


@dataclass
class MoeConfig:
    """Mixtures of experts."""

    replay_routing: bool = setting(
        False,
        "train through the experts that the engine chose while it generated, so that rounding and stale weights do not "
        "change which they are: they travel with the answers, a number for each token, layer and expert",
    )


@dataclass
class RolePlacementConfig:
    """Placement of a role other than the actor."""

    parallel: Optional[str] = setting(None, "parallel layout of this role; null: the actor's, trainer.parallel")
    ranks: RoleRanks = setting(
        RoleRanks.shared,
        "shared: on the actor's ranks, of which it may take fewer; own: on separate ranks, which compute at the same "
        "time as the actor's",
    )


@dataclass
class CriticConfig(RolePlacementConfig):
    """The value model, if the graph has one."""

    path: Optional[str] = setting(
        None,
        "Hugging Face folder of the critic's trunk, and of its head if it is a classifier with one label; null: the "
        "actor's model.path",
        fixed=True,
    )
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    value_loss: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="clipped"))
    value_norm: ValueNormalisation = setting(
        ValueNormalisation.none,
        "normalisation of the critic's targets: none, by all returns (running), or by their moving averages (ema)",
        fixed=True,
    )
    warmup_steps: int = setting(0, "first train steps, in which only the critic is trained", unit="steps", minimum=0)


@dataclass
class ReferenceModelConfig(RolePlacementConfig):
    """The reference model, if a KL term needs one."""

    mode: ReferenceMode = setting(
        ReferenceMode.frozen, "frozen, or an exponential moving average of the actor", fixed=True
    )
    ema_decay: float = setting(0.99, "decay per train step of the moving average", minimum=0.0, maximum=1.0)
    path: Optional[str] = setting(None, "Hugging Face folder; null: the actor's model.path")


@dataclass
class TeacherConfig(RolePlacementConfig):
    """A model that the policy is distilled from."""

    name: str = setting("", "the name of its metric, kl/teacher/<name>, and of its role in the trainer, teacher_<name>")
    path: Optional[str] = setting(
        None, "Hugging Face folder with the policy's tokenizer; the training ranks score with it, as with the reference"
    )
    policy: Optional[str] = setting(
        None, "in place of path: one of `policies` that stays as it is, whose GenerationServers score finished samples"
    )
    column: Optional[str] = setting(
        None,
        "in place of path: token/<name>, a column in which the agent gives the teacher's log-probabilities, such as "
        "those after a prompt with a hint",
    )
    coef: float = setting(1.0, "factor of its log-ratio in the advantage of a token", minimum=0.0)
    sources: list[str] = setting(
        help="sources (column `source` of a row) whose samples it teaches; empty: all", factory=list
    )

    @property
    def role(self) -> str:
        """The teacher's role in the trainer."""
        return f"teacher_{self.name}"

    @property
    def logprobs(self) -> str:
        """Key of the teacher's log-probabilities, [T], in a step's batch: a column of samples unless the ranks
        score.
        """
        if self.path is not None:
            return f"{self.role}_logprobs"
        return self.column or f"token/{self.role}"


SOURCE_NUMBER = "row/source_number"
"""Column of samples if teachers have sources: position of the row's source in `teacher_sources`; -1 if not there."""


_COMPARING = ("grpo", "dr_grpo", "opo", "gpg", "max_rl", "gdpo")
"""Advantages that compare the episodes of a group, so that a group of one episode would have no advantage."""


@dataclass
class AlgorithmConfig:
    """Objective, and the graph of calls that computes it."""

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
    selection: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="none"))
    prox: ProximalMode = setting(
        ProximalMode.recompute,
        "source of proximal log-probabilities. recompute: a forward pass at the step's start; approximate, behave: no "
        "pass, but an estimate or the behaviour's own (equal up to rounding at max_head_offpolicyness=0)",
    )
    advantage: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="grpo"))
    aggregation: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="token_mean"))
    kl: ChoiceConfig = setting(
        help="estimator of the KL term; auto: k3 in the loss, k1, which is unbiased there, in reward and advantage",
        factory=lambda: ChoiceConfig(name=AUTO),
    )
    kl_coef: float = setting(0.0, "weight of the KL term to the reference; 0: no reference model", minimum=0.0)
    kl_in: KLIn = setting(
        KLIn.loss,
        "place of the KL term: loss, reward, or advantage: subtracted from each token's advantage after the "
        "estimator, which distils the reference into the policy (on-policy distillation)",
    )
    kl_target: float = setting(
        0.0, "KL towards which kl_coef is adapted; 0: kl_coef is fixed", unit="nats/token", minimum=0.0
    )
    kl_horizon: int = setting(10000, "samples over which kl_coef adapts", unit="samples", minimum=1)
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", minimum=0.0)
    log_ratio_coef: float = setting(
        0.0,
        "weight of half the squared log-ratio to the policy that the loss's ratio refers to, which keeps the policy "
        "near it (DRO, Kimi k1.5, prime-rl); 0: none",
        minimum=0.0,
    )
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
    teachers: list[TeacherConfig] = setting(
        help="models to distil from, each for its sources: coef (log pi - log pi_teacher) is taken from the advantage "
        "of each token, after the estimator; each with name, path, policy or column, coef, sources, parallel and ranks",
        factory=list,
    )
    reward_models: dict[str, RolePlacementConfig] = setting(
        help="by role: parallel layout and ranks of the reward models that the graph names, as those of "
        "algorithm.critic, for example {judge: {parallel: t2, ranks: own}}",
        factory=dict,
    )

    @property
    def kl_estimator(self) -> ChoiceConfig:
        """The estimator of the KL term: `kl`, or for `auto` the default of the term's place."""
        if self.kl.name != AUTO:
            return self.kl
        return ChoiceConfig("k3" if self.kl_in == KLIn.loss else "k1", self.kl.params)

    @property
    def teacher_sources(self) -> list[str]:
        """The sources that teachers list, sorted; empty if each teacher is for all sources."""
        return sorted({source for teacher in self.teachers for source in teacher.sources})

    def teacher_of(self, role: str) -> TeacherConfig | None:
        """Return the teacher whose role in the trainer is `role`; None if there is none."""
        return next((teacher for teacher in self.teachers if teacher.role == role), None)

    @property
    def least_episodes(self) -> int:
        """Number of episodes that a group needs for its advantages."""
        return 2 if self.advantage.name in _COMPARING else 1


@dataclass
class CheckpointConfig:
    """Checkpoints, from which a run continues and policies are exported."""

    interval: int = setting(
        10, "train steps between checkpoints; one is always written at exit; 0: only at exit", unit="steps", minimum=0
    )
    interval_minutes: float = setting(
        0.0,
        "a checkpoint is also written after the first step that ends so long after the one before began; 0: by "
        "`checkpoint.interval` alone",
        unit="minutes",
        minimum=0.0,
    )
    keep: int = setting(2, "newest checkpoints kept", minimum=1)
    keep_every: int = setting(0, "also keep the checkpoint of every N-th step; 0: none", unit="steps", minimum=0)
    in_memory: bool = setting(
        True,
        "keep an in-memory checkpoint of every step, and the queued trajectories, in /dev/shm: a crash of the trainer "
        "then costs at most the current step; false: the steps since the newest checkpoint",
    )
    keep_best: Optional[str] = setting(
        None, "metric of an evaluation, like eval/<set>/accuracy, whose best checkpoint is kept too; null: none"
    )
    keep_best_direction: BestDirection = setting(
        BestDirection.highest, "better values of `checkpoint.keep_best`: the highest or the lowest"
    )
