"""Every setting of an RL experiment, composed from the packages that own them. `--help` prints these fields.

A group is a dataclass in the `settings` module of its package; an experiment is a YAML file in `experiments/` that
overrides defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.setting import MOST_SEED, setting
from asyncrl.data.settings import DatasetConfig
from asyncrl.inference.settings import GenerationConfig
from asyncrl.manager.settings import ManagerConfig, PolicyConfig, VersionPoolConfig
from asyncrl.master.settings import BufferConfig, OnStale
from asyncrl.observe.settings import LoggingConfig, ProfileConfig, SamplesConfig
from asyncrl.plugins.settings import (
    AgentConfig,
    EnvConfig,
    McpServerConfig,
    NamedRewardConfig,
    RewardConfig,
    ToolConfig,
)
from asyncrl.rollout.settings import ONLINE_AGENT, EvalConfig, RolloutConfig
from asyncrl.runtime.settings import Resume, SystemConfig
from asyncrl.trainer.settings import (
    SOURCE_NUMBER,
    AlgorithmConfig,
    CheckpointConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    TrainerConfig,
)


@dataclass
class ExperimentConfig:
    """An asynchronous RL experiment."""

    experiment_name: str = setting("async_ppo", "folder under fileroot")
    trial_name: str = setting("trial0", "folder under the experiment; a second run of the same trial resumes it")
    fileroot: str = setting("~/.cache/asyncrl", "folder of models, checkpoints, logs and metrics")
    seed: int = setting(1, "seed of data order, sampling and initialisation", minimum=0, maximum=MOST_SEED, fixed=True)
    total_train_steps: int = setting(60, "policy versions to train", unit="steps", minimum=1)
    total_epochs: float | None = setting(
        None,
        "the run's length in passes over the training set; it sets total_train_steps to the number of steps that train "
        "total_epochs times its rows, rounded down. No prompt beyond is begun: the last steps wait for the slowest "
        "rollouts, and if prompts are dropped for good, the run ends with the last whole batch. null: "
        "total_train_steps as set",
        unit="epochs",
        minimum=0.0,
    )
    train_batch_size: int = setting(32, "B: rollouts (groups) per train step", unit="rollouts", minimum=1)
    group_size: int = setting(
        8, "episodes per prompt; each gives one sample, or as many as its agent returns", unit="episodes", minimum=1
    )
    max_head_offpolicyness: int = setting(
        4, "η: largest age of a trained token in policy versions; 0 is synchronous", unit="versions", minimum=0
    )
    on_stale: OnStale = setting(
        OnStale.wait,
        "how samples beyond η are avoided or handled; wait: the trainer waits for them in time; drop: drop them; mask: "
        "mask their old tokens; drop and mask lose a fifth to a third of long-tailed answers' tokens at small η "
        "(docs/staleness.md)",
    )
    resume: Resume = setting(
        Resume.auto,
        "auto: continue the trial's newest checkpoint if there is one; never: refuse a used trial; restart: wipe it",
    )
    my: dict[str, Any] = setting(
        help="settings of your own code, checked by my_class; others use them as '${my.scale}'",
        factory=dict,
    )
    my_class: str | None = setting(
        None, "`package.module:Class` or `file.py:Class` of the dataclass that has the fields of `my`; null: none"
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rewards: list[NamedRewardConfig] = setting(
        help="several rewards instead of reward: their weighted sum; each with name, weight and the settings of reward",
        factory=list,
    )
    tools: list[ToolConfig] = setting(
        help="tools that the model may call, for agents that take tools; each with path, args, name and timeout_s",
        factory=list,
    )
    mcp: list[McpServerConfig] = setting(
        help="MCP servers whose tools the model may call; each with name and command or url", factory=list
    )
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    manager: ManagerConfig = field(default_factory=ManagerConfig)
    policies: list[PolicyConfig] = setting(
        help="policies that agents may use besides the run's own: older versions of it, other models, or further "
        "trained policies; each with name, path, url or versions, servers, and trained",
        factory=list,
    )
    buffer: BufferConfig = field(default_factory=BufferConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    system: SystemConfig = field(default_factory=SystemConfig)

    @property
    def is_online(self) -> bool:
        """True if programs outside the run open its sessions (`asyncrl.rollout.online`)."""
        return self.agent.path == ONLINE_AGENT

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of every sample: those of `rollout.columns`, and those of teachers."""
        scored = [teacher.logprobs for teacher in self.algorithm.teachers if teacher.path is None]
        implied = (SOURCE_NUMBER,) if self.algorithm.teacher_sources else ()
        return tuple(dict.fromkeys((*self.rollout.columns, *scored, *implied)))

    @property
    def version_pools(self) -> list[VersionPoolConfig]:
        """The pools of older versions of the run's own policy."""
        return [policy.versions for policy in self.policies if policy.is_pool]

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Names of the policies that are trained beside the run's own."""
        return tuple(policy.name for policy in self.policies if policy.trained)

    @property
    def critic_sharers(self) -> tuple[str, ...]:
        """Names of the trained policies whose critic is that of the run's own policy."""
        return tuple(policy.name for policy in self.policies if policy.trained and policy.shared_critic)

    def policies_out_of_phase(self, version: int) -> set[str]:
        """Return the trained policies, "" for the run's own, that the step from `version` does not train."""
        trainer = self.trainer
        idle = {policy.name for policy in self.policies if policy.trained and not policy.trains_at(version)}
        return idle if version % trainer.train_every == trainer.train_offset else idle | {""}

    @property
    def adopted_urls(self) -> list[str]:
        """Addresses of servers outside the run; they do not receive the run's token."""
        return [*self.generation.engine.urls, *(policy.url for policy in self.policies if policy.url is not None)]

    @property
    def policy_of_server(self) -> list[PolicyConfig]:
        """The policy of each process of the kind `policy_server`, by index."""
        return [policy for policy in self.policies for _ in range(policy.servers)]

    def learning_rate(self, version: int, share: float = 0.0, *, first: int = 0) -> float:
        """Return the policy's learning rate in the step from `version`, after `share` (0 to 1) of its minibatches.

        It depends on nothing but the settings: minibatches that were skipped count as planned.

        Args:
            first: first version whose step trains the policy: those before it train the critic alone.
        """
        return self._rate(self.optimizer, [self.trainer], first, version, share)

    def critic_learning_rate(self, version: int, share: float = 0.0) -> float:
        """Return the critic's learning rate, as `learning_rate`; all policies whose samples train it count."""
        sharing = [policy for policy in self.policies if policy.name in self.critic_sharers]
        return self._rate(self.algorithm.critic.optimizer, [self.trainer, *sharing], 0, version, share)

    def _rate(
        self,
        optimizer: OptimizerConfig,
        trained: Sequence[TrainerConfig | PolicyConfig],
        first: int,
        version: int,
        share: float,
    ) -> float:
        """Return the rate of `optimizer`, which steps when a policy of `trained` does, from version `first` on."""

        def planned(until: int) -> int:
            """Number of train steps before the version `until`, once for each policy that they train."""
            spans = [(each, end) for each in trained for end in (until, min(until, first))]
            steps = [len(range(each.train_offset, end, each.train_every)) for each, end in spans]
            return sum(steps[::2]) - sum(steps[1::2])

        total = max(1, planned(self.total_train_steps))
        done = planned(version)
        progress = (done + share * (planned(version + 1) - done)) / total
        return optimizer.rate(progress, total * self.trainer.ppo_minibatches * self.trainer.ppo_epochs)
