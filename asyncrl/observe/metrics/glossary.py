"""The table of all metrics: the name of each, its unit, its meaning, and its value in a healthy run.

`METRICS` are the names in the rows of `metrics.jsonl`. A name may have placeholders, such as `eval/<set>/accuracy`;
`find` returns the entry of a name as it is in a row. `docs/metrics.md`, the help texts for Prometheus and the
dashboard's tooltips are made from this table. Figures of processes have a table of their own (`observed_figures.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from asyncrl.master.settings import BatchOrder

SAMPLES_OWN = ("agent", "tool", "chat", "reward", "rollout")
"""Groups of metrics that an answer brings with it, so that an evaluation has them too."""


@dataclass(frozen=True, slots=True)
class Metric:
    """An entry of the table.

    Attributes:
        name: as in a row; `<...>` stands for a part that differs. In the last place it may contain slashes.
        unit: of the value; empty for a number without one.
        meaning: one or two sentences.
        healthy: the values of a run that is well, or what to look for.
        grows: the value is a total that only grows during a run.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
    grows: bool = False

    @property
    def group(self) -> str:
        """The prefix that the metric is listed under; empty for the metrics without a prefix."""
        return self.name.partition("/")[0] if "/" in self.name else ""


GROUPS = {
    "": "The step and its update",
    "reward": "Rewards",
    "rollout": "Rollouts",
    "eval": "Evaluations",
    "staleness": "Age of the trained tokens",
    "time": "Where the time goes",
    "throughput": "Speed",
    "tokens": "Counts of tokens",
    "samples": "Counts of samples",
    "buffer": "The sample buffer",
    "data": "The data",
    "checkpoint": "Checkpoints",
    "rank": "The training ranks",
    "ppo": "The policy's update",
    "loss": "Parts of the loss",
    "grad_norm": "The gradient",
    "optimizer": "The optimizer",
    "kl": "Distance to the reference model",
    "advantage": "Advantages",
    "masked": "Tokens left out by a correction",
    "critic": "The critic",
    "filter": "Filters",
    "<call>": "Filter calls of the graph",
    "policy": "Further trained policies",
    "opponent": "Other policies that agents play with",
    "agent": "Numbers of the agent",
    "tool": "Tools",
    "chat": "Conversations",
}
"""Titles of the groups, in the order of the page."""

_MEAN = "A mean over the rollouts of the batch that have it."
_PROBLEM = "0. Anything else names a defect: see the `rollout_worker` logs."
_OWN = "Depends on your task."

METRICS: tuple[Metric, ...] = (
    Metric("step", "", "Number of the train step; 0 is the model before training.", "Grows by one from row to row."),
    Metric("policy_version", "", "Version of the policy that the step made, the same number as `step`.", "As `step`."),
    Metric(
        "loss", "", "Loss of a minibatch: the mean over the minibatches of the step.", "Finite. Its size says little."
    ),
    Metric(
        "entropy",
        "nats",
        "Mean uncertainty of the policy over the tokens that carry loss: its entropy where the objective computes it, "
        "else the mean negative log-probability of the sampled tokens.",
        "Falls slowly. A collapse towards 0 while the reward is flat means that the policy has stopped exploring.",
    ),
    Metric(
        "grad_norm",
        "",
        "Norm of the gradient before clipping, the mean over the optimizer steps.",
        "Steady. 0 means that no sample carried a signal.",
    ),
    Metric("lr", "", "Learning rate of the step's last optimizer step.", "Follows your schedule."),
    Metric(
        "restarts",
        "",
        "Restarts of processes since the run began, over all launches.",
        "0, or steady between two faults.",
        grows=True,
    ),
    Metric("reward/mean", "", "Mean reward of the batch's episodes, after shaping.", "Rises."),
    Metric("reward/std", "", "Standard deviation of the rewards of the batch's episodes.", "Above 0."),
    Metric("reward/min", "", "Smallest reward of an episode of the batch.", _OWN),
    Metric("reward/max", "", "Largest reward of an episode of the batch.", _OWN),
    Metric(
        "reward/frac_zero_std",
        "share",
        "Share of the rollouts whose samples all have the same reward. Advantages relative to the group are 0 there.",
        "Well below 1. At 1 a step teaches nothing: make the prompts easier or harder, or set `rollout.filters`.",
    ),
    Metric(
        "reward/role/<role>",
        "",
        "Mean reward of the samples of this role, where an agent names comparison groups: a group's name up to its "
        "first `/`. A mean over the rollouts of the batch that have it.",
        "Depends on your task. Roles that play against each other move against each other.",
    ),
    Metric(
        "reward/<name>",
        "",
        "Mean of the reward, or part of a reward, of this name. Where a call of the graph asks a reward model, its "
        "mean score under the key that the call writes.",
        "Rises, if it is the goal. Parts that move against each other show what the policy trades.",
    ),
    Metric(
        "rollout/generate_s",
        "s",
        "Wall time of a rollout in which at least one of its requests to a server was open, with queueing and prefill. "
        + _MEAN,
        "The largest of the `rollout/..._s`.",
    ),
    Metric(
        "rollout/reward_s",
        "s",
        "Wall time of a rollout in which at least one of its rewards was computed. " + _MEAN,
        "Small next to `rollout/generate_s`; else the reward is slow.",
    ),
    Metric(
        "rollout/env_s",
        "s",
        "Wall time of a rollout in which at least one of its environments ran. Rewards that an environment computes "
        "count here too. " + _MEAN,
        "Small next to `rollout/generate_s`; else the environment is slow.",
    ),
    Metric(
        "rollout/tool_s",
        "s",
        "Wall time of a rollout in which at least one of its tool calls ran. " + _MEAN,
        "Small next to `rollout/generate_s`; else a tool is slow.",
    ),
    Metric(
        "rollout/env_wait_s",
        "s",
        "Wall time of a rollout in which at least one of its episodes waited for a process or a place for its "
        "environment. " + _MEAN,
        "Near 0; else raise the number of environment processes.",
    ),
    Metric(
        "rollout/agent_wait_s",
        "s",
        "Wall time of a rollout in which at least one of its episodes waited for a process for its agent. " + _MEAN,
        "Near 0; else raise the number of agent processes.",
    ),
    Metric(
        "rollout/process_wait_s",
        "s",
        "Wall time of a rollout in which at least one of its rewards or tools waited for a free process of "
        "`rollout.user_code.processes`. " + _MEAN,
        "Near 0; else raise `rollout.user_code.processes`.",
    ),
    Metric(
        "rollout/thread_wait_s",
        "s",
        "Wall time of a rollout in which at least one of its plain functions waited for a free thread of "
        "`rollout.user_code.threads`. " + _MEAN,
        "Near 0; else raise `rollout.user_code.threads`.",
    ),
    Metric(
        "rollout/failed_rewards",
        "",
        "Rewards of a rollout that failed, so that `failure_reward` was used: the mean over the rollouts that had any.",
        _PROBLEM,
    ),
    Metric(
        "rollout/samples_per_episode", "samples", "Samples of an episode, on average.", "1, unless the agent branches."
    ),
    Metric("rollout/len_mean", "tokens", "Mean number of generated tokens of a sample.", "Steady, or grows slowly."),
    Metric("rollout/len_min", "tokens", "Generated tokens of the shortest sample.", "Above 0."),
    Metric("rollout/len_max", "tokens", "Generated tokens of the longest sample.", "Below the limit of new tokens."),
    Metric(
        "rollout/context_len_mean",
        "tokens",
        "Mean number of the other tokens of a sample: prompt, environment and tools.",
        _OWN,
    ),
    Metric("rollout/context_len_max", "tokens", "The same of the sample with the most of them.", _OWN),
    Metric(
        "rollout/truncated",
        "share",
        "Share of the samples that a length limit cut off.",
        "Small. A growing share means that answers need more tokens than you allow.",
    ),
    Metric(
        "rollout/received_len_mean",
        "tokens",
        "Mean generated tokens of the samples that arrived at the trainer since the step before, trained or not.",
        "Near `rollout/len_mean`. Far above it, long rollouts arrive too late to be trained.",
    ),
    Metric(
        "rollout/order_failed",
        "steps",
        f"Steps since the MasterWorker began that took {BatchOrder.words}, as the function of `buffer.order.path` "
        "failed or was too slow.",
        "0.",
        grows=True,
    ),
    Metric(
        "rollout/scored_ahead",
        "share",
        "Share of the batch that frozen reference and reward models scored before its step (`trainer.score_ahead`).",
        "Near 1 where the trainer waits for data; near 0 where it does not, and then it costs nothing.",
    ),
    Metric(
        "rollout/lost_episodes: <failure>",
        "episodes",
        "Episodes that failed in this way and were dropped while the rest of their groups went on.",
        _PROBLEM,
    ),
    Metric(
        "rollout/dropped_stale",
        "rollouts",
        "Rollouts dropped since the step before, as their oldest token is older than `max_head_offpolicyness` allows.",
        "0 or few. Each is generation thrown away.",
    ),
    Metric(
        "rollout/dropped_agent_rejected",
        "rollouts",
        "Rollouts of the step whose agent returned no samples.",
        "0, unless your agent rejects prompts.",
    ),
    Metric(
        "rollout/dropped_overlong_prompt",
        "rollouts",
        "Rollouts of the step whose prompt is longer than `dataset.max_prompt_tokens`.",
        "Few. They were counted at the start of the run.",
    ),
    Metric(
        "rollout/dropped_curriculum",
        "rollouts",
        "Prompts that were left out since the step before, as they were too easy or too hard in the epoch before.",
        "Set by `dataset.curriculum`.",
    ),
    Metric(
        "rollout/dropped_worker_died",
        "rollouts",
        "Rollouts of the step that were lost with their RolloutWorker.",
        "0. Their prompts are tried again.",
    ),
    Metric("rollout/dropped_failed", "rollouts", "Rollouts of the step that failed at an unknown place.", _PROBLEM),
    Metric(
        "rollout/dropped_failed: <code>",
        "rollouts",
        "Rollouts of the step that failed in this part of your code.",
        _PROBLEM,
    ),
    Metric("rollout/dropped_invalid_prompt", "rollouts", "Rollouts of the step whose row makes no prompt.", "0."),
    Metric(
        "rollout/dropped_timeout",
        "rollouts",
        "Rollouts of the step that took longer than `rollout.rollout_timeout_s`.",
        "0.",
    ),
    Metric(
        "rollout/dropped_crashed_worker",
        "rollouts",
        "Rollouts of the step whose prompts ended their RolloutWorker more than once.",
        "0.",
    ),
    Metric(
        "rollout/dropped_filter: <reason>",
        "rollouts",
        "Groups that a filter of `rollout.filters` dropped since the step before for this reason: `zero_variance`, "
        "`too_hard`, `too_easy` or a reason of your own filter. `_exhausted` follows where the filter would have "
        "returned the prompt once too often.",
        "Well below the rollouts that are trained.",
    ),
    Metric(
        "rollout/transport_s",
        "s",
        "Time from the end of a rollout until the trainer received it. Between hosts, a difference of their clocks "
        "counts too. " + _MEAN,
        "Near 0. More means that the trainer takes nothing, as its buffer is full, or a slow network.",
    ),
    Metric(
        "rollout/buffered_s",
        "s",
        "Time from the receipt of a rollout until the step that trains it began, a mean over the batch.",
        "Below `time/step_s`. More means that the trainer is the limit and tokens grow old in the buffer.",
    ),
    Metric("staleness/mean", "versions", "Mean age of the trained tokens in policy versions.", "At most η."),
    Metric("staleness/max", "versions", "Age of the oldest trained token in policy versions.", "At most η."),
    Metric(
        "time/step_s",
        "s",
        "Time from the row before to this row: the length of the step.",
        "Steady.",
    ),
    Metric("time/elapsed_s", "s", "Time since this launch began to train.", "Grows.", grows=True),
    Metric(
        "time/wait_for_batch_s",
        "s",
        "Time in which the trainer waited for enough rollouts.",
        "A small part of `time/step_s` when the trainer is busy; a large part when generation is the limit.",
    ),
    Metric(
        "time/switch_s",
        "s",
        "Time that servers on the trainer's devices took to give their memory back; with `generation.guests` only.",
        "Small next to `time/step_s`; 0 where a step follows in the same turn.",
    ),
    Metric(
        "time/score_ahead_s",
        "s",
        "Part of `time/wait_for_batch_s` in which frozen models scored what had come (`trainer.score_ahead`).",
        "What the step is shorter by.",
    ),
    Metric(
        "time/train_s",
        "s",
        "Time in which the ranks computed the step, all calls of the graph together.",
        "The largest part of `time/step_s` when the trainer is busy.",
    ),
    Metric(
        "time/actor_inf_s", "s", "Time of the call that computes proximal log-probabilities.", "Below `time/train_s`."
    ),
    Metric(
        "time/ref_inf_s",
        "s",
        "Time of the call that computes the reference's log-probabilities.",
        "Below `time/train_s`.",
    ),
    Metric("time/critic_inf_s", "s", "Time of the call that computes values.", "Below `time/train_s`."),
    Metric("time/filter_s", "s", "Time of the call that filters groups.", "Near 0."),
    Metric("time/advantage_s", "s", "Time of the call that computes advantages.", "Near 0."),
    Metric("time/actor_train_s", "s", "Time of the call that trains the actor.", "Most of `time/train_s`."),
    Metric("time/critic_train_s", "s", "Time of the call that trains the critic.", "Below `time/train_s`."),
    Metric(
        "time/<call>_s", "s", "Time of this call of your graph, from sending it until every rank has answered.", _OWN
    ),
    Metric(
        "time/publish_s",
        "s",
        "Time in which the ranks copied the step's state, where steps are kept, and published the new weights.",
        "Small next to `time/step_s`.",
    ),
    Metric(
        "time/memory_checkpoint_s",
        "s",
        "Time after that in which the master waited until the step's state was safely kept.",
        "Near 0; else the disk is slow.",
    ),
    Metric(
        "time/wait_eval_s",
        "s",
        "Time in which the new version waited to be announced to the servers, as an earlier version was evaluated.",
        "Near 0; else evaluate less often or on fewer prompts.",
    ),
    Metric(
        "time/generation_idle_s",
        "s",
        "Time since the step before in which no rollout ran, as the gate let none begin.",
        "Near 0; else raise `max_head_offpolicyness`.",
    ),
    Metric(
        "time/restarts_s",
        "s",
        "Time from the death of processes until they were ready again, over all restarts and launches.",
        "0, or steady between two faults.",
        grows=True,
    ),
    Metric(
        "throughput/gen_tokens_per_s",
        "tokens/s",
        "Generated tokens that arrived at the trainer since the step before, each second.",
        "Steady.",
    ),
    Metric(
        "throughput/train_tokens_per_s",
        "tokens/s",
        "`tokens/computed`, each second of `time/train_s`; without that metric `tokens/batch`.",
        "Steady.",
    ),
    Metric(
        "tokens/computed",
        "tokens",
        "Tokens of the samples that the actor's training computed, in all passes, prompts included. Samples without a "
        "learning signal are not computed.",
        "Near `tokens/batch` times `trainer.ppo_epochs`; 0 if no group has a signal.",
    ),
    Metric("tokens/batch", "tokens", "Tokens of the batch, prompts included.", "Steady, or grows with the answers."),
    Metric(
        "tokens/trained",
        "tokens",
        "Generated tokens of the batch that are young enough to carry loss.",
        "Below `tokens/batch`.",
    ),
    Metric(
        "tokens/loss",
        "tokens",
        "Tokens that the loss was computed on, summed over the passes. Samples without a signal are left out.",
        "Above 0.",
    ),
    Metric(
        "tokens/computed_ratio",
        "ratio",
        "Tokens that the model computed for each token of the samples.",
        "About 1. Shared prefixes bring it below 1, padding above it.",
    ),
    Metric("samples/total", "samples", "Samples of the batch.", "Steady: batch size times group size."),
    Metric(
        "buffer/size",
        "rollouts",
        "Rollouts that wait in the buffer after the step.",
        "Above 0 when the trainer is busy.",
    ),
    Metric("data/epoch", "", "Latest epoch of the data that the batch has a prompt of, from 0 on.", "Grows slowly."),
    Metric(
        "loss/policy",
        "",
        "Mean of the policy's loss over the tokens that carry loss, with the weights of the correction.",
        "Finite. Its size says little.",
    ),
    Metric(
        "rank/memory_bytes",
        "bytes",
        "Most memory that a training rank has used since it began, the largest of all ranks: memory of its GPU, or "
        "resident memory of its process where it has no GPU.",
        "Steady after the first steps, and below what the device has.",
    ),
    Metric(
        "rank/mfu",
        "share",
        "Model FLOPs utilisation: `rank/tflops_per_s` as a share of the device's peak. That is the maker's figure for "
        "bfloat16 where the GPU is known, else what torch's matrix product reached at the start. Not counted: "
        "attention between the patches of a picture, the states of recurrent layers. Mean of the ranks; `mfu` of each "
        "is in `observed/`.",
        "Steady. 0.3 to 0.5 is good on GPUs with long micro-batches; small models and short ones reach less.",
    ),
    Metric(
        "rank/tflops_per_s",
        "TFLOP/s",
        "Floating point operations a second of a training rank in the calls of the step, mean of the ranks. It counts "
        "the matrix products that its tokens need: not padding, and nothing that is computed a second time. Not "
        "counted are attention between the patches of a picture, and the states of recurrent layers (Mamba, linear "
        "attention).",
        "Steady.",
    ),
    Metric(
        "checkpoint/seconds",
        "s",
        "Time from the begin of a checkpoint until it was whole on the disk, beside training. It is in the first row "
        "written after that.",
        "Below the time between two checkpoints.",
    ),
    Metric("checkpoint/bytes", "bytes", "Size of that checkpoint's files.", "Steady."),
    Metric("loss/value", "", "Mean of the critic's loss over its tokens.", "Falls, then steady."),
    Metric("ppo/loss_per_minibatch", "", "List of the losses of the step's minibatches, in order.", "Finite."),
    Metric(
        "ppo/minibatches_skipped",
        "",
        "Minibatches that were not stepped on, as `stop_kl` or `stop_weight_variance` was passed.",
        "0, unless you set such a bound.",
    ),
    Metric(
        "ppo/clip_fraction",
        "share",
        "Share of the tokens that carry loss whose ratio the loss clips or masks.",
        "Above 0 and below 0.3. 0 is normal with a single minibatch of fresh tokens.",
    ),
    Metric("ppo/dual_clip_fraction", "share", "Share of the tokens that the dual clip bounds.", "Near 0."),
    Metric("ppo/drift", "nats", "Mean of CPGD's policy drift term over the tokens.", "Near 0."),
    Metric(
        "ppo/tv",
        "",
        "Mean absolute difference between a token's probability now and under the old policy, of DPPO.",
        "Below the trust region's bound.",
    ),
    Metric(
        "ppo/approx_kl",
        "nats",
        "KL divergence of a token, estimated by k3, from the policy at the step's start to the current policy. Without "
        "a proximal policy it is from the policy that generated.",
        "Below 0.1. A jump announces an update that is too large.",
    ),
    Metric(
        "ppo/behave_kl",
        "nats",
        "KL divergence of a token, estimated by k3, from the policy that generated it to the one at the step's start.",
        "Near 0 at η = 0; grows with the age of the tokens.",
    ),
    Metric(
        "ppo/behave_imp_weight_mean",
        "ratio",
        "Mean weight that the correction gives to tokens for having been generated by an older policy.",
        "About 1.",
    ),
    Metric(
        "ppo/behave_imp_weight_max", "ratio", "Largest weight that the correction gives to a token.", "At most the cap."
    ),
    Metric(
        "ppo/engine_gap",
        "nats",
        "Mean distance between the log-probability of the generating engine and that of the trainer, of tokens of the "
        "current version.",
        "Below 0.01 in float32, 0.05 in bfloat16; model.float32_head=true lowers the latter. More means that engine "
        "and trainer compute different models.",
    ),
    Metric("ppo/engine_gap_max", "nats", "Largest such distance.", "Below about 1."),
    Metric(
        "ppo/behave_ratio_mean",
        "ratio",
        "Mean of the probability of a token now, divided by that when it was generated.",
        "About 1.",
    ),
    Metric(
        "ppo/behave_ratio_square_mean",
        "",
        "Mean of the square of that ratio. `behave_ratio_mean` squared, divided by this, is the effective share of the "
        "tokens.",
        "Near 1. Far above it, few tokens decide the update.",
    ),
    Metric(
        "ppo/effective_share",
        "share",
        "Effective share of the tokens (Kish): the square of the mean ratio of the policy to the one that sampled the "
        "token, divided by the mean of its square.",
        "Near 1. A fall announces a collapse: few tokens decide the update. Lower η, or use a correction with a cap.",
    ),
    Metric(
        "ppo/log_ratio_square",
        "nats²",
        "Mean squared log-ratio to the policy that the loss's ratio refers to; only with `algorithm.log_ratio_coef`.",
        "Small.",
    ),
    Metric(
        "ppo/binary_kl", "nats", "Mean binary divergence from the old policy, where the loss is `dppo_kl`.", "Small."
    ),
    Metric(
        "ppo/taper",
        "",
        "Mean weight of the negative sequences, where the loss is `topr`.",
        "Falls below 1 as the policy leaves its mistakes.",
    ),
    Metric("ppo/sequence_weight", "", "Mean weight of the sequences, where the loss is `vespo`.", "Near 1."),
    Metric("grad_norm/max", "", "Largest norm of the gradient before clipping among the optimizer steps.", "Steady."),
    Metric(
        "optimizer/steps", "steps", "Optimizer steps that were taken.", "One for each minibatch; 0 without a signal."
    ),
    Metric(
        "optimizer/not_finite",
        "steps",
        "Optimizer steps that were left out, as the gradient was not finite.",
        "0.",
    ),
    Metric("kl/reference", "nats", "Mean KL divergence of a token from the reference model.", "Grows slowly."),
    Metric(
        "kl/teacher/<name>",
        "nats",
        "Mean log-ratio of the policy to this one of `algorithm.teachers` at a sampled token: the reverse KL "
        "divergence from it.",
        "Falls towards 0.",
    ),
    Metric(
        "kl/coef", "", "Coefficient of the KL term, which `kl_target` adapts.", "Steady once the target is reached."
    ),
    Metric(
        "advantage/abs_mean", "", "Mean absolute advantage of the tokens.", "Above 0; at 0 the step teaches nothing."
    ),
    Metric(
        "masked/<reason>",
        "tokens",
        "Tokens that the correction left out for this reason.",
        "A small part of `tokens/loss`.",
    ),
    Metric("critic/loss", "", "Loss of a minibatch of the critic: the mean over the step's.", "Falls, then steady."),
    Metric("critic/grad_norm", "", "Norm of the critic's gradient before clipping, mean over its steps.", "Steady."),
    Metric("critic/lr", "", "Learning rate of the critic's last optimizer step.", "Follows your schedule."),
    Metric(
        "critic/explained_variance",
        "share",
        "Share of the returns' variance that the values at the step's start explain.",
        "Rises towards 1. Below 0 the critic is worse than a constant.",
    ),
    Metric("critic/value_mean", "", "Mean value that the critic gives while it trains.", "Near the mean return."),
    Metric("critic/error", "", "Mean of half the squared difference between value and return.", "Falls, then steady."),
    Metric(
        "critic/clip_fraction", "share", "Share of the tokens where the clipped loss is the larger one.", "Below 0.3."
    ),
    Metric("critic/returns_mean", "", "Mean return of the tokens, in the critic's units.", "Rises with the reward."),
    Metric("critic/returns_square_mean", "", "Mean squared return; with the mean it gives the variance.", _OWN),
    Metric("critic/error_mean", "", "Mean of the return minus the value at the step's start.", "About 0."),
    Metric("critic/error_square_mean", "", "Mean square of that difference.", "Falls, then steady."),
    Metric(
        "filter/dropped_groups",
        "groups",
        "Groups that filters dropped since the step before: those of `rollout.filters` and those of the graph.",
        "Above 0 when filters work. When nearly all groups are dropped, the prompts are too easy or too hard.",
    ),
    Metric(
        "<call>/dropped_groups",
        "groups",
        "Groups of the batch that this filter call of your graph dropped.",
        "As above.",
    ),
    Metric(
        "agent/greedy_reward",
        "",
        "Reward of the greedy answer, the baseline of ReMax. " + _MEAN,
        "Rises.",
    ),
    Metric(
        "policy/<name>/<number>",
        "",
        "The metric of this name, such as `loss` or `ppo/clip_fraction`, of the trained one of `policies`; absent in "
        "steps that do not train it.",
        "As of the run's own policy.",
    ),
    Metric(
        "opponent/<name>/version",
        "versions",
        f"Version of the one of `policies` that answered, a mean over the tokens of its answers. {_MEAN}",
        "Follows the policy's own version at a distance; 0 for a model that stays, and before a pool has a member.",
    ),
    Metric(
        "opponent/<name>/oldest_version",
        "versions",
        f"The oldest version of this policy that answered in a rollout. {_MEAN}",
        "As `opponent/<name>/version`.",
    ),
    Metric(
        "opponent/<name>/newest_version",
        "versions",
        f"The newest version of this policy that answered in a rollout. {_MEAN}",
        "As `opponent/<name>/version`.",
    ),
    Metric(
        "rollout/generated/<policy>",
        "tokens",
        "With several trained policies: tokens that this one, `actor` for the run's own, generated in a rollout. "
        f"{_MEAN}",
        "Above 0.",
    ),
    Metric("agent/<name>", "", "Mean of a number that the agent gave its samples under this name.", _OWN),
    Metric("tool/<name>/calls", "calls", "Calls of this tool, a mean over the samples that used any tool.", _OWN),
    Metric("tool/<name>/errors", "calls", "Calls of this tool that failed, likewise.", "Near 0."),
    Metric(
        "tool/<name>/seconds",
        "s",
        "Seconds of the calls of this tool, likewise; a sample's calls are added up.",
        "Small.",
    ),
    Metric("tool/<name>/<number>", "", "A number that the tool itself counted, likewise.", _OWN),
    Metric("chat/calls", "calls", "Requests for an answer, summed over the episodes of a rollout. " + _MEAN, _OWN),
    Metric(
        "chat/extended",
        "calls",
        "Those of the requests that continued a conversation.",
        "Most of `chat/calls` over many turns.",
    ),
    Metric(
        "chat/branches",
        "calls",
        "Those of the requests that began a conversation.",
        "One for each episode, unless the agent holds several conversations.",
    ),
    Metric("chat/malformed_calls", "calls", "Tool calls in answers that could not be parsed.", "Near 0."),
    Metric(
        "chat/tool_s",
        "s",
        "Seconds between an answer that calls tools and the request that follows it, summed.",
        "Small.",
    ),
    Metric("chat/limit_<setting>", "conversations", "Conversations that this setting ended.", "Near 0."),
    Metric(
        "chat/drift_checks", "checks", "Checks that the chat template renders a conversation again as it was.", _OWN
    ),
    Metric("chat/drift_text", "checks", "Those of the checks where the text differed.", "0."),
    Metric("chat/drift_tokens", "checks", "Those of the checks where the tokens alone differed.", "0."),
    Metric("chat/drift_refused", "checks", "Those of the checks where the template refused the conversation.", "0."),
    Metric(
        "eval/<set>/accuracy",
        "share",
        "Share of the answers to the set that are right, where a reward is a verdict.",
        "Rises with `reward/mean`. If the reward rises and this does not, the reward is exploited.",
    ),
    Metric(
        "eval/<set>/pass@<k>",
        "share",
        "Estimated probability that at least one of k answers to a prompt is right.",
        "Above the accuracy.",
    ),
    Metric("eval/<set>/reward_mean", "", "Mean reward of the answers to the set.", "Rises."),
    Metric(
        "eval/<set>/len_mean", "tokens", "Mean number of generated tokens of an answer.", "Steady, or grows slowly."
    ),
    Metric("eval/<set>/truncated", "share", "Share of the answers that a length limit cut off.", "Small."),
    Metric(
        "eval/<set>/seconds", "s", "Time that the evaluation on the set took.", "Small next to the time between two."
    ),
    Metric("eval/<set>/prompts", "prompts", "Prompts of the set that were answered.", "All prompts of the set."),
    Metric("eval/<set>/failed", "", "1 where the evaluation of this version failed.", "Absent."),
    Metric(
        "eval/<set>/cut_short",
        "",
        "1 where the run was stopped before the evaluation of this version had ended.",
        "Absent; 1 in the last row of a stopped run.",
    ),
    Metric(
        "eval/<set>/<metric>",
        "",
        "Mean of a metric of groups "
        + ", ".join(f"`{group}`" for group in SAMPLES_OWN)
        + " over the answers that have it.",
        "As in training.",
    ),
)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    return tuple((_pattern(metric.name), metric) for metric in METRICS if "<" in metric.name)


def _pattern(name: str) -> re.Pattern[str]:
    """Placeholders stand for anything without a slash; the last one, if the name ends with it, for anything."""
    *parts, end = re.split(r"<(\w+)>", name)
    pattern = ""
    for part, placeholder in zip(parts[::2], parts[1::2], strict=True):
        ends = not end and placeholder == parts[-1]
        own = rf"(?:{'|'.join(SAMPLES_OWN)})/.+" if placeholder == "metric" else ".+" if ends else "[^/]+"
        pattern += f"{re.escape(part)}(?P<{placeholder}>{own})"
    return re.compile(pattern + re.escape(end))


_BY_NAME = {metric.name: metric for metric in METRICS}


def find(name: str) -> Metric | None:
    """Return the entry of the metric `name` of a row; None if the table does not have it."""
    found = match(name)
    return None if found is None else found[0]


def match(name: str) -> tuple[Metric, dict[str, str]] | None:
    """Return the entry of the metric `name` of a row, and the text of each placeholder of the entry's name."""
    if (exact := _BY_NAME.get(name)) is not None:
        return exact, {}
    for pattern, metric in _patterns():
        if found := pattern.fullmatch(name):
            return metric, found.groupdict()
    return None
