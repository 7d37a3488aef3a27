"""Every setting of an RL experiment. `python -m asyncrl.launch <experiment> --help` prints this file's fields.

A group is a dataclass; an experiment is a YAML file in `experiments/` that overrides defaults. Cross-field rules are in
`asyncrl.config.checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from asyncrl.config.setting import setting

# OmegaConf resolves annotations at run time and knows Optional[X], not X | None.
# ruff: noqa: UP045


@dataclass
class ChoiceConfig:
    """A registered algorithm, or an import path to one's own, with its parameters."""

    name: str = setting("", "registered name, or import path `package.module:function`")
    params: dict[str, Any] = setting(help="keyword arguments of the function", factory=dict)


@dataclass
class PluginConfig:
    """A user's class or function, named by import path."""

    path: str = setting("", "import path `package.module:Name`, or a file `path/to/file.py:Name`")
    args: dict[str, Any] = setting(
        help="keyword arguments of the constructor (of the call, for a function)", factory=dict
    )


@dataclass
class ModelConfig:
    """The policy."""

    path: Optional[str] = setting(
        None, "Hugging Face model folder; null: the base made by `model.base_experiment`, cached"
    )
    base_experiment: str = setting("sft", "experiment that makes the base model where `model.path` is null")
    dtype: str = setting("float32", "parameter type of the training ranks", choices=("float32", "bfloat16"))
    attn_implementation: str = setting(
        "sdpa", "attention of the training ranks", choices=("sdpa", "eager", "flash_attention_2")
    )


@dataclass
class DatasetConfig:
    """The prompts."""

    path: str = setting(
        "asyncrl.datasets.arithmetic:ArithmeticDataset", "dataset class by import path, or a JSONL file"
    )
    args: dict[str, Any] = setting(help="keyword arguments of the dataset's constructor", factory=dict)
    max_prompt_tokens: int = setting(512, "longer prompts are refused at the start", unit="tokens", minimum=1)


@dataclass
class SamplingConfig:
    """How answers are sampled during training."""

    max_new_tokens: int = setting(112, "longest answer", unit="tokens", minimum=1)
    temperature: float = setting(1.0, "0 is greedy and gives groups without variance", minimum=0.0)
    top_p: float = setting(1.0, "nucleus mass kept", minimum=1e-6, maximum=1.0)
    top_k: int = setting(-1, "most likely tokens kept; -1: all", minimum=-1)
    min_p: float = setting(0.0, "least probability kept, relative to the most likely token", minimum=0.0, maximum=1.0)


@dataclass
class RolloutConfig:
    """RolloutWorkers: agents, environments, rewards."""

    workers: int = setting(1, "number of RolloutWorkers; each takes a shard of the prompts", minimum=1)
    max_concurrent: int = setting(128, "rollouts one worker runs at the same time", unit="rollouts", minimum=1)
    new_tokens_per_chunk: int = setting(
        0, "ask for so many tokens at a time; 0: the whole answer", unit="tokens", minimum=0
    )
    request_timeout_s: float = setting(120.0, "limit of one generation request", unit="s", minimum=1.0)
    rollout_timeout_s: float = setting(
        600.0, "limit of one rollout; beyond it the rollout is dropped", unit="s", minimum=1.0
    )
    filters: list[ChoiceConfig] = setting(
        help="group filters, in order; a rejected group is counted by reason", factory=list
    )
    shaping: list[ChoiceConfig] = setting(help="reward shaping functions, in order", factory=list)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass
class SGLangConfig:
    """SGLang servers."""

    python: str = setting("", "interpreter with sglang installed; empty: this one")
    urls: list[str] = setting(help="servers that already run; they are adopted, none is started", factory=list)
    args: dict[str, Any] = setting(help="flags of sglang.launch_server, e.g. {mem_fraction_static: 0.8}", factory=dict)
    env: dict[str, str] = setting(help="environment variables of the server", factory=dict)
    tensor_parallel: int = setting(1, "GPUs per server", minimum=1)


@dataclass
class GenerationConfig:
    """GenerationServers."""

    backend: str = setting("embedded", "engine behind the HTTP contract", choices=("embedded", "sglang"))
    servers: int = setting(1, "number of GenerationServers", minimum=1)
    device: str = setting("auto", "cpu, cuda, or auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    dtype: str = setting("float32", "type of weights and KV cache", choices=("float32", "bfloat16"))
    max_running_requests: int = setting(256, "sequences decoded together (embedded engine)", minimum=1)
    max_total_tokens: int = setting(65536, "KV cache (embedded engine)", unit="tokens", minimum=16)
    context_length: int = setting(
        0, "longest prompt + answer; 0: max_prompt_tokens + max_new_tokens", unit="tokens", minimum=0
    )
    start_timeout_s: float = setting(300.0, "limit for a server to become ready", unit="s", minimum=1.0)
    threads: int = setting(1, "CPU threads per server", minimum=1)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)


@dataclass
class ManagerConfig:
    """GserverManager: router, staleness gate, weight updates."""

    routing: str = setting(
        "least_requests",
        "how a request finds its server",
        choices=("round_robin", "least_requests", "least_tokens", "prefix_affine"),
    )
    update_mode: str = setting(
        "interrupt",
        "a weight update aborts running requests, which clients send again with what they have (interrupt), puts them "
        "back into the server's queue, to go on under the new weights (retract: tens of milliseconds where SGLang "
        "takes a second to abort; SGLang 0.5.20 or newer), lets them go on at once with the keys and values that the "
        "old weights left in the cache (in_place: cheapest, nothing is computed again; log-probabilities are those of "
        "this mixture), or waits for their end (finish)",
        choices=("interrupt", "retract", "in_place", "finish"),
    )
    weight_transport: str = setting(
        "disk",
        "how servers get a version: from its folder (disk), or from the trainer's memory, which keeps a copy of each "
        "version that is in use and writes folders only with checkpoints and at the end; tensor: shared memory, one "
        "machine; distributed: a process group of trainer and server, NCCL between GPUs, else gloo. Other than disk "
        "needs generation.backend=sglang",
        choices=("disk", "tensor", "distributed"),
    )
    update_timeout_s: float = setting(60.0, "a server later than this is quarantined", unit="s", minimum=0.1)
    health_interval_s: float = setting(1.0, "time between two health checks of a server", unit="s", minimum=0.05)
    rollout_lease_s: float = setting(30.0, "rollouts of a worker silent for so long are dropped", unit="s", minimum=1.0)
    canary_tolerance: Optional[float] = setting(
        None,
        "after an update a server must score a fixed prompt as the trainer does, each token to within this, or it is "
        "quarantined and updated again; null: 1e-3 where both compute in float32, else 0.5; 0: not checked",
        unit="nats",
        minimum=0.0,
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
    schedule: str = setting(
        "constant", "learning-rate schedule after warm-up", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = setting(0, "linear warm-up", unit="optimizer steps", minimum=0)


@dataclass
class TrainerConfig:
    """ModelWorkers."""

    parallel: str = setting("d1", "parallel layout: d<N> is N data-parallel ranks")
    device: str = setting("auto", "cpu, cuda, or auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
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

    path: Optional[str] = setting(None, "Hugging Face folder of the critic's trunk; null: the actor's model.path")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    value_loss: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="clipped"))
    value_norm: str = setting("none", "normalisation of the returns", choices=("none", "running", "ema"))
    warmup_steps: int = setting(0, "train steps in which only the critic moves", unit="steps", minimum=0)


@dataclass
class ReferenceConfig:
    """The reference model, where a KL term asks for one."""

    mode: str = setting("frozen", "frozen, or an exponential moving average of the actor", choices=("frozen", "ema"))
    ema_decay: float = setting(0.99, "decay per train step of the moving average", minimum=0.0, maximum=1.0)
    path: Optional[str] = setting(None, "Hugging Face folder; null: the actor's model.path")


@dataclass
class AlgorithmConfig:
    """What is optimised, by which graph of calls."""

    graph: str = setting(
        "grpo", "built-in graph (grpo, ppo, dapo, reinforce) or import path of a function that builds one"
    )
    graph_args: dict[str, Any] = setting(help="keyword arguments of the graph's function", factory=dict)
    plugins: list[str] = setting(
        help="your modules or packages whose registered losses, advantages, filters, ... are known by name",
        factory=list,
    )
    policy_loss: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="decoupled_ppo"))
    correction: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="token_truncate"))
    prox: str = setting(
        "recompute",
        "proximal log-probabilities: recomputed at the step's start, approximated, or the behaviour's",
        choices=("recompute", "approximate", "behave"),
    )
    advantage: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="grpo"))
    aggregation: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="token_mean"))
    kl: ChoiceConfig = field(default_factory=lambda: ChoiceConfig(name="k3"))
    kl_coef: float = setting(0.0, "weight of the KL term to the reference; 0: no reference model", minimum=0.0)
    kl_in: str = setting("loss", "where the KL term enters", choices=("loss", "reward"))
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
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)


@dataclass
class EvalConfig:
    """Held-out evaluation on the running servers, greedy, outside the staleness count."""

    interval: int = setting(5, "train steps between evaluations; 0: never", unit="steps", minimum=0)
    name: str = setting("held_out", "name of the set in metrics: eval/<name>/accuracy")
    path: Optional[str] = setting(None, "dataset; null: dataset.path with split=held_out")
    args: dict[str, Any] = setting(
        help="keyword arguments of the dataset; added to dataset.args where eval.path is null", factory=dict
    )
    size: int = setting(256, "prompts evaluated, from the set's start", unit="prompts", minimum=1)
    timeout_s: float = setting(300.0, "limit of one evaluation", unit="s", minimum=1.0)


@dataclass
class CheckpointConfig:
    """What a run needs to continue, and the policy it leaves behind."""

    interval: int = setting(
        10, "train steps between checkpoints; one is always written at exit; 0: only at exit", unit="steps", minimum=0
    )
    keep: int = setting(2, "checkpoints kept", minimum=1)


@dataclass
class LoggingConfig:
    """Where numbers go besides metrics.jsonl."""

    tensorboard: bool = setting(True, "write TensorBoard event files under the trial's folder")
    wandb_project: str = setting("", "Weights & Biases project; empty: off (needs the `tracking` extra)")
    display: str = setting("auto", "live display, or plain lines", choices=("auto", "live", "plain", "none"))


@dataclass
class SystemConfig:
    """Processes and how they find each other."""

    launcher: str = setting("local", "how processes are started", choices=("local",))
    name_resolve: str = setting("file", "name resolution back end", choices=("file", "etcd3"))
    name_resolve_root: str = setting(
        "", "file: a folder, which trials may share (empty: a private one); etcd3: host:port"
    )
    encrypt: bool = setting(True, "CURVE on every ZMQ socket and a bearer token on every HTTP request")
    host: str = setting("127.0.0.1", "address the processes bind to and are reached at")
    start_timeout_s: float = setting(120.0, "limit for all processes to become ready", unit="s", minimum=1.0)
    heartbeat_s: float = setting(
        10.0, "lease of a worker's entry; it is renewed three times per lease", unit="s", minimum=0.5
    )
    stall_timeout_s: float = setting(
        120.0, "no train step for so long: say which stage waits for what, and stop", unit="s", minimum=5.0
    )


@dataclass
class ExperimentConfig:
    """An asynchronous RL experiment."""

    experiment_name: str = setting("async_ppo", "folder under fileroot")
    trial_name: str = setting("trial0", "folder under the experiment; a second run of the same trial resumes it")
    fileroot: str = setting("~/.cache/asyncrl", "where models, checkpoints, logs and metrics go")
    seed: int = setting(1, "seed of data order, sampling and initialisation", minimum=0)
    total_train_steps: int = setting(60, "policy versions to train", unit="steps", minimum=1)
    train_batch_size: int = setting(32, "B: rollouts (groups) per train step", unit="rollouts", minimum=1)
    group_size: int = setting(8, "samples per prompt", unit="samples", minimum=1)
    max_head_offpolicyness: int = setting(
        4, "η: no trained token is older than so many versions; 0 is synchronous", unit="versions", minimum=0
    )
    on_stale: str = setting(
        "drop",
        "what happens to a sample beyond η: dropped, masked, or the trainer waits for it in time",
        choices=("drop", "mask", "wait"),
    )
    resume: str = setting(
        "auto",
        "auto: continue the trial's newest checkpoint if there is one; never: refuse a used trial; restart: wipe it",
        choices=("auto", "never", "restart"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    agent: PluginConfig = field(default_factory=lambda: PluginConfig(path="asyncrl.agents.single_turn:SingleTurnAgent"))
    env: PluginConfig = field(default_factory=lambda: PluginConfig(path="asyncrl.envs.single_turn:SingleTurnEnv"))
    reward: PluginConfig = field(
        default_factory=lambda: PluginConfig(path="asyncrl.rewards.arithmetic:arithmetic_reward")
    )
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
