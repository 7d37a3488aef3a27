"""Reinforcement learning of a language model in one process, one file, one loop.

    python -m asyncrl.reference                    # the demo, its base model made on first use
    python -m asyncrl.reference --staleness 4      # what asynchrony does to the algorithm, made exact

This file computes the same as asyncrl, without the parts that make it fast: no processes, no sockets, no concurrency.
Read it to learn the algorithm. It is also the oracle of the distributed system, which with `max_head_offpolicyness: 0`
and the same seeds must report the same losses. A train step, from policy version v to v + 1:

1. *Generate.* The prompts at orders [v·B, (v+1)·B) of the data order, `group_size` answers each. Sample i of a prompt
   draws from its own random stream, derived from (run seed, order, i), so that nothing depends on batching.
2. *Score.* A reward for each answer.
3. *Advantage.* The answer's reward compared with its group: GRPO, (reward - mean) / std. A group whose rewards are all
   equal teaches nothing; its tokens carry no loss and are not counted in any mean. If an agent names comparison groups,
   samples of the same name are compared.
4. *Train.* The proximal log-probabilities are computed once, with the weights at the step's start. Then one optimizer
   step per minibatch on the decoupled PPO objective: ratio to the *proximal* policy, clipped; each token weighted by
   proximal / *behaviour* (the policy that generated it), and the weight is capped. If both are equal this is plain PPO.

With a `Critic` (PPO) the advantage compares an answer with the critic's values, and the critic is trained on the
returns of the same minibatches.

Several policies may be trained: each is an `Actor`, which learns from its own samples of the batch, and version v of
each is the policy after step v. They may share a critic, which values the samples of all before it learns from any.

Shape suffixes: T packed tokens of all sequences, S sequences (samples), G groups, B sequences of a padded batch, L its
longest sequence, V vocabulary. Tensors are aligned with tokens: `logprobs_T[t]` is log p(token t | those before).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.algorithms.arithmetic import Stats, merge_stats, segment_sum, stat_values
from asyncrl.algorithms.critic import ValueObjective, align_values
from asyncrl.algorithms.inputs import (
    AdvantageInputs,
    AdvantageOutput,
    LossTokens,
    PolicyLossInputs,
    SelectionInputs,
    SelectionOutput,
    ValueLossInputs,
)
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.registry import Choice, ObjectiveSpec
from asyncrl.api import (
    Agent,
    Completion,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    RewardFunction,
    Sample,
    SamplingParams,
)
from asyncrl.api.columns import TOKEN, column, with_columns
from asyncrl.api.trajectory import SampleColumns, compared_episodes, policy_of, role_of
from asyncrl.chat.episode_client import ChatPolicy, EpisodeClient
from asyncrl.config.load import load_supervised
from asyncrl.config.plugin_code.catalog import resolve
from asyncrl.data.datasets import Dataset
from asyncrl.data.prompt_format import PromptFormat, make_prompt
from asyncrl.data.prompt_queue import DataOrder
from asyncrl.data.tokenizers import load_tokenizer
from asyncrl.inference.embedded.engine import GenerationEngine
from asyncrl.inference.embedded.jobs import Job
from asyncrl.inference.engine_io import GenerationInput, GenerationOutput, SamplingSpec
from asyncrl.inference.random_streams import derive_seed
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.plugins.datasets.arithmetic import ArithmeticDataset
from asyncrl.plugins.envs.single_turn import SingleTurnEnv
from asyncrl.plugins.rewards.arithmetic import arithmetic_reward
from asyncrl.rollout.episode import run_group
from asyncrl.trainer.engines.optimizer import decay_groups
from asyncrl.trainer.model.value_models import Critic as CriticModel
from asyncrl.trainer.supervised.base_model import ensure_base_model
from asyncrl.weights.whole_folder import check_whole


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """The settings of the distributed system that affect the result; the defaults are the demo's."""

    seed: int = 1
    train_batch_size: int = 32
    group_size: int = 8
    ppo_minibatches: int = 4
    ppo_epochs: int = 1
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    staleness: int = 0
    """Generate with the weights of `staleness` versions ago (in the first steps, with the first version's)."""
    sampling: SamplingParams = SamplingParams(max_new_tokens=112)
    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)
    advantage: Choice = Choice("grpo")
    columns: tuple[str, ...] = ()
    """Names of the columns that the loss reads; see `asyncrl.api.columns`."""
    train_every: int = 1
    train_offset: int = 0
    """Only steps from versions v with v mod train_every = train_offset train the policy."""
    critic_lr: float = 1e-4


@dataclass(frozen=True, slots=True)
class StepReport:
    """One train step of a policy: losses of its minibatches in order, pass by pass (0 where no group carried signal),
    and the step's means.

    `others`: the reports of further policies that the step trained, by name. `critic_losses`: of the minibatches on
    which a critic was trained.
    """

    version: int
    reward_mean: float
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    stats: dict[str, float]
    others: dict[str, StepReport] = field(default_factory=dict)
    critic_losses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A sample with its inputs of the losses; all tensors are `[T]` of this sample. `rollout` numbers its group."""

    rollout: int
    sample: Sample
    advantages_T: Tensor
    prox_logprobs_T: Tensor


@dataclass(frozen=True, slots=True)
class ValuedSample:
    """As `TrainSample`, of the critic's loss."""

    rollout: int
    sample: Sample
    old_values_T: Tensor
    returns_T: Tensor
    mask_T: Tensor


Item = TypeVar("Item", TrainSample, ValuedSample)


class Critic:
    """The value model of every prefix of a sample, and its optimizer; for one actor or several.

    Args:
        model: a trunk as `AutoModel.from_pretrained` loads it, with a head that starts at 0.
    """

    def __init__(self, config: ReferenceConfig, model: CriticModel) -> None:
        self.config, self.model = config, model
        self.optimizer = adamw(config, model, config.critic_lr)

    def outputs(self, samples: Sequence[Sample]) -> Tensor:
        """Return the value of the prefix that ends with each token, packed [T]."""
        tokens_BL, real_BL = padded(samples)
        hidden_BLH = self.model.trunk(input_ids=tokens_BL, use_cache=False).last_hidden_state
        return self.model.values(hidden_BLH[real_BL])

    def optimizer_step(self, minibatch: Sequence[ValuedSample], objective: ValueObjective) -> float:
        """Take one step on the minibatch's mean loss; return the loss."""
        samples = [item.sample for item in minibatch]
        mask_T = torch.cat([item.mask_T for item in minibatch])
        tokens = loss_tokens(minibatch, mask_T)
        inputs = ValueLossInputs(
            align_values(self.outputs(samples), tokens.seq_ids_T, len(samples))[0],
            torch.cat([item.old_values_T for item in minibatch]),
            torch.cat([item.returns_T for item in minibatch]),
            mask_T,
        )
        loss, _ = objective(inputs, tokens, objective.normaliser(tokens))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Actor:
    """A policy that is trained: its model and optimizer, its critic if it has one, and the last versions of its
    weights.
    """

    def __init__(self, config: ReferenceConfig, model: PreTrainedModel, critic: Critic | None = None) -> None:
        self.config, self.model, self.critic = config, model, critic
        self.baselines: dict[str, float] = {}
        """Baselines of the advantage estimator by role, if it has any."""
        self.objective = Objective(config.objective, resolve)
        self.value_objective = ValueObjective(Choice("clipped"), config.objective.aggregation, resolve)
        self.optimizer = adamw(config, model, config.lr)
        # The engine disables gradients and training mode of its model, so it needs a separate one.
        self.behaviour = copy.deepcopy(model)
        self.snapshots: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=config.staleness + 1)

    def behaviour_policy(self, version: int) -> BatchingPolicy:
        """Return the policy that generates the batch of `version`: the weights of `staleness` versions ago."""
        self.snapshots.append((version, copy.deepcopy(self.model.state_dict())))
        behaviour_version, weights = self.snapshots[0]
        self.behaviour.load_state_dict(weights)
        return BatchingPolicy(self.behaviour, behaviour_version)

    def newest_policy(self, version: int) -> BatchingPolicy:
        """Return the policy with the current weights, of policy `version`."""
        self.behaviour.load_state_dict(self.model.state_dict())
        return BatchingPolicy(self.behaviour, version)

    def outputs(self, groups: Sequence[Sequence[Sample]]) -> Tensor | None:
        """Return the critic's outputs [T] for the policy's samples of the batch; None without a critic or a sample."""
        samples = [sample for group in groups for sample in group]
        if self.critic is None or not samples:
            return None
        with torch.no_grad():
            return self.critic.outputs(samples)

    def train(self, groups: Sequence[Sequence[Sample]], version: int, critic_T: Tensor | None = None) -> StepReport:
        """Train from version v to v + 1, on the policy's own samples of the batch; a group may have none.

        Args:
            critic_T: result of `outputs` at the step's start.
        """
        samples = [sample for group in groups for sample in group]
        if not samples:
            return StepReport(version + 1, 0.0, (), (), {})
        estimated = self.advantages(groups, critic_T)
        critic_losses = () if critic_T is None else tuple(self.train_critic(groups, version, critic_T, estimated))
        with torch.no_grad():
            prox_logprobs_T, _ = packed_logprobs(self.model, samples, self.config.sampling.temperature)
        by_group = grouped(TrainSample, groups, estimated.advantages_T, prox_logprobs_T)
        steps = [self.optimizer_step(minibatch, version) for minibatch in self.minibatches(by_group, version)]
        losses, grad_norms, stats = zip(*steps, strict=True)
        reward_mean = float(np.mean([sample.reward for sample in samples]))
        merged = stat_values(merge_stats(stats))
        return StepReport(version + 1, reward_mean, losses, grad_norms, merged, critic_losses=critic_losses)

    def train_critic(
        self, groups: Sequence[Sequence[Sample]], version: int, critic_T: Tensor, estimated: AdvantageOutput
    ) -> Iterator[float]:
        """Take one step of the critic on each minibatch that has tokens for it; yield the losses."""
        assert self.critic is not None
        assert estimated.returns_T is not None
        samples = [sample for group in groups for sample in group]
        mask_T, seq_ids_T = mask_and_ids(samples)
        old_T, _ = align_values(critic_T, seq_ids_T, len(samples))
        trained_T = mask_T if estimated.value_mask_T is None else estimated.value_mask_T
        for minibatch in self.minibatches(
            grouped(ValuedSample, groups, old_T, estimated.returns_T, trained_T), version
        ):
            if any(bool(item.mask_T.any()) for item in minibatch):
                yield self.critic.optimizer_step(minibatch, self.value_objective)

    def advantages(self, groups: Sequence[Sequence[Sample]], critic_T: Tensor | None = None) -> AdvantageOutput:
        """Return the advantages of all samples, packed; without a critic, 0 in comparison groups of equal rewards."""
        samples = [sample for group in groups for sample in group]
        compared = [(number, sample.group) for number, group in enumerate(groups) for sample in group]
        number_of = {name: number for number, name in enumerate(dict.fromkeys(compared))}
        roles = sorted({role_of(sample.group) for sample in samples})
        episodes = (compared_episodes([each.episode for each in g], [each.group for each in g]) for g in groups)
        mask_T, seq_ids_T = mask_and_ids(samples)
        expected: tuple[Tensor | None, Tensor | None] = (None, None)
        if critic_T is not None:
            expected = align_values(critic_T, seq_ids_T, len(samples))
        estimate = resolve("advantage", self.config.advantage.name, self.config.advantage.params)
        output: AdvantageOutput = estimate(
            AdvantageInputs(
                rewards_S=torch.tensor([sample.total_reward for sample in samples]),
                values_T=expected[0],
                bootstrap_values_S=expected[1],
                truncated_S=torch.tensor([sample.truncated for sample in samples]),
                group_ids_S=torch.tensor([number_of[name] for name in compared]),
                mask_T=mask_T,
                seq_ids_T=seq_ids_T,
                num_seqs=len(samples),
                episodes_S=torch.tensor([*chain.from_iterable(episodes)]),
                roles_S=torch.tensor([roles.index(role_of(sample.group)) for sample in samples]),
                roles=roles,
                baselines=self.baselines,
            )
        )
        self.baselines = dict(output.baselines or {})
        return output

    def minibatches(self, groups: Sequence[Sequence[Item]], version: int) -> Iterator[list[Item]]:
        """Yield the minibatches of all passes over the batch, made of whole groups with any number of samples.

        Groups are permuted by (run seed, version), in later passes by (run seed, version, pass). Groups whose
        rewards differ are dealt first, in turn, so that all minibatches of a pass have equally many groups with a
        signal.
        """
        for epoch in range(self.config.ppo_epochs):
            key = [self.config.seed, version, epoch] if epoch else [self.config.seed, version]
            permuted = np.random.default_rng(key).permutation(len(groups))
            alike = {g: not has_signal([item.sample for item in groups[g]]) for g in permuted.tolist()}
            order_G = sorted(alike, key=lambda g: alike[g])
            for number in range(self.config.ppo_minibatches):
                yield [item for g in order_G[number :: self.config.ppo_minibatches] for item in groups[g]]

    def optimizer_step(self, minibatch: Sequence[TrainSample], version: int) -> tuple[float, float, Stats]:
        """Take one step on the minibatch's mean loss per token; return loss, gradient norm and statistics.

        Samples without advantage (their group's rewards are all equal) are left out; if no sample remains, the
        optimizer does nothing.
        """
        minibatch = [item for item in minibatch if bool(item.advantages_T.any())]
        if not minibatch:
            return 0.0, 0.0, {}
        samples = [item.sample for item in minibatch]
        logprobs_T, entropy_T = packed_logprobs(self.model, samples, self.config.sampling.temperature)
        inputs = policy_loss_inputs(minibatch, logprobs_T, entropy_T, version, self.config.columns)
        if self.objective.selects:
            inputs = replace(inputs, selection=self.select(inputs))
        loss, stats = self.objective(inputs, None, self.objective.normaliser(inputs.loss_tokens))
        torch.autograd.backward(loss)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), grad_norm.item(), stats

    def select(self, inputs: PolicyLossInputs) -> SelectionOutput:
        """Return the objective's selection among the loss tokens of a minibatch, over all of its tokens."""
        mask_T = inputs.mask_T
        chosen = self.objective.selection(
            SelectionInputs(
                start_logprobs_T=inputs.required_prox_T[mask_T],
                behave_logprobs_T=inputs.behave_logprobs_T[mask_T],
                advantages_T=inputs.advantages_T[mask_T],
            )
        )
        keep_T, penalty_T = torch.ones_like(mask_T), torch.zeros_like(inputs.advantages_T)
        keep_T[mask_T] = chosen.keep_T
        if chosen.penalty_T is None:
            return SelectionOutput(keep_T)
        penalty_T[mask_T] = chosen.penalty_T
        return SelectionOutput(keep_T, penalty_T)


class ReferenceTrainer:
    """The loop's state: the policies, the prompts, and the version that all policies are at.

    Args:
        prompt_format: renders prompts, with the model's tokenizer and its chat template.
        policies: further trained policies, by the name that agents use, with their own training settings; settings of
            prompts and batches are those of `config`.
        critic: critic of the run's own policy, and of further policies that share it.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        model: PreTrainedModel,
        prompt_format: PromptFormat,
        dataset: Dataset,
        reward: RewardFunction,
        agent: Agent | None = None,
        policies: Mapping[str, Actor] | None = None,
        critic: Critic | None = None,
    ) -> None:
        if config.sampling.allowed_token_ids:
            raise ValueError("sampling.allowed_token_ids: this loop draws from all tokens; leave it empty")
        self.config, self.prompt_format, self.dataset, self.reward = config, prompt_format, dataset, reward
        self.agent = agent or SingleTurnAgent(tokenizer=prompt_format.tokenizer)
        self.version = 0
        self.actor = Actor(config, model, critic)
        self.others = dict(policies or {})
        self.order = DataOrder(len(dataset), config.seed)

    def train_step(self) -> StepReport:
        """Train from version v to v + 1."""
        groups = self.generate()
        trained = {
            name: actor
            for name, actor in {"": self.actor, **self.others}.items()
            if self.version % actor.config.train_every == actor.config.train_offset
        }
        own_samples = {name: [self.samples_of(name, group) for group in groups] for name in trained}
        critic = {name: actor.outputs(own_samples[name]) for name, actor in trained.items()}  # before any is trained
        reports = {name: actor.train(own_samples[name], self.version, critic[name]) for name, actor in trained.items()}
        self.version += 1
        own = reports.pop("", StepReport(self.version, 0.0, (), (), {}))
        return replace(own, others=reports)

    def samples_of(self, policy: str, group: Sequence[Sample]) -> list[Sample]:
        """Return the samples of a group that a policy made; "": the run's own."""
        return [sample for sample in group if policy_of(sample.group, self.others) == policy]

    def generate(self) -> list[Sequence[Sample]]:
        """Return the scored groups of this version's batch, in the data order."""
        config = self.config
        first = self.version * config.train_batch_size
        prompts = [
            make_prompt(ref, self.dataset, self.prompt_format, config.group_size, config.sampling, config.seed)
            for ref in map(self.order.ref, range(first, first + config.train_batch_size))
        ]
        others = {name: actor.behaviour_policy(self.version) for name, actor in self.others.items()}
        return self.answer(prompts, Policies(self.actor.behaviour_policy(self.version), others))

    def greedy_accuracy(self, dataset: Dataset) -> float:
        """Return the mean reward of one greedy answer to each row, under the current weights."""
        greedy, order = replace(self.config.sampling, temperature=0.0), DataOrder(len(dataset), seed=0)
        prompts = [make_prompt(order.ref(i), dataset, self.prompt_format, 1, greedy, 0) for i in range(len(dataset))]
        others = {name: actor.newest_policy(self.version) for name, actor in self.others.items()}
        answered = self.answer(prompts, Policies(self.actor.newest_policy(self.version), others))
        return float(np.mean([group[0].reward for group in answered]))

    def answer(self, prompts: Sequence[Prompt], policies: Policies) -> list[Sequence[Sample]]:
        """Return the scored group of each prompt's answers by `policies`."""

        async def run_groups() -> list[Sequence[Sample]]:
            make_env = partial(SingleTurnEnv, reward=self.reward)
            groups = await asyncio.gather(
                *(run_group(self.agent, make_env, prompt, policies, self._client) for prompt in prompts)
            )
            return [
                with_columns(samples, prompt.data, self.config.columns)
                for (samples, _), prompt in zip(groups, prompts, strict=True)
            ]

        return asyncio.run(run_groups())

    def _client(self, policy: GenerationClient, prompt: Prompt) -> EpisodeClient:
        named = tuple(self.others)
        return EpisodeClient(policy, prompt, None, ChatPolicy(policies=named, trained=named))


@dataclass(frozen=True)
class Policies:
    """The policies that agents use: the run's own, and others by name."""

    own: BatchingPolicy
    others: Mapping[str, BatchingPolicy]

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return the answer to `request` by the policy that it names."""
        return await (self.others[request.policy] if request.policy else self.own).generate(request)


class BatchingPolicy:
    """`model`, of policy version `version`, for agents: all requests made at the same time are one batch."""

    def __init__(self, model: PreTrainedModel, version: int) -> None:
        self.model, self.version = model, version
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return the answer to `request`."""
        if not self.requests:  # the task begins after every agent that is ready has made its request
            self.answers = asyncio.create_task(self.answer_all())
        self.requests.append(request)
        position = len(self.requests) - 1
        return (await self.answers)[position]

    async def answer_all(self) -> list[GenerationResult]:
        """Return the answers to the requests made so far, in the same order."""
        requests, self.requests = self.requests, []
        return complete(self.model, requests, self.version)


def complete(model: PreTrainedModel, requests: Sequence[GenerationRequest], version: int) -> list[GenerationResult]:
    """Return the answers to `requests` by `model`, whose policy version is `version`."""
    inputs = []
    for request in requests:
        for i in range(request.n):
            sampling = asdict(replace(request.sampling, seed=derive_seed(request.sampling.seed or 0, i)))
            del sampling["stop"]  # stop strings are handled outside of the engine, and there are none here
            spec = SamplingSpec(**sampling)
            inputs.append(GenerationInput(f"{request.request_id}/{i}", request.input_ids, spec))
    engine = GenerationEngine(model, max_running_requests=len(inputs))
    outputs = engine.submit(Job(tuple(inputs)))
    while engine.step():
        pass
    completions = (completion_of(output, version) for output in outputs.result(timeout=0))
    return [GenerationResult(request.request_id, tuple(islice(completions, request.n))) for request in requests]


def completion_of(output: GenerationOutput, version: int) -> Completion:
    """Convert the engine's output to a `Completion`."""
    assert output.finish is not None
    return Completion(output.output_ids, output.logprobs, [version] * len(output.output_ids), output.finish.reason)


def has_signal(group: Sequence[Sample]) -> bool:
    """True if samples that are compared have different rewards."""
    return len({(sample.group, sample.total_reward) for sample in group}) > len({sample.group for sample in group})


def policy_loss_inputs(
    items: Sequence[TrainSample], logprobs_T: Tensor, entropy_T: Tensor, version: int, columns: Sequence[str] = ()
) -> PolicyLossInputs:
    """Return the packed micro-batch as input of the objective."""
    samples = [item.sample for item in items]
    tokens = loss_tokens(items, mask_and_ids(samples)[0])
    return PolicyLossInputs(
        logprobs_T=logprobs_T,
        prox_logprobs_T=torch.cat([item.prox_logprobs_T for item in items]),
        behave_logprobs_T=torch.from_numpy(np.concatenate([sample.behave_logprobs for sample in samples])),
        advantages_T=torch.cat([item.advantages_T for item in items]),
        mask_T=tokens.mask_T,
        seq_ids_T=tokens.seq_ids_T,
        num_seqs=tokens.num_seqs,
        versions_T=torch.from_numpy(np.concatenate([sample.versions for sample in samples]).astype(np.int64)),
        current_version=version,
        entropy_T=entropy_T,
        columns={name: column_by_token(samples, name) for name in columns},
        episode_tokens_T=tokens.episode_tokens_T,
    )


def loss_tokens(items: Sequence[Item], mask_T: Tensor) -> LossTokens:
    """Return the tokens of a minibatch; each with the number of tokens with loss in its episode."""
    seq_ids_T = mask_and_ids([item.sample for item in items])[1]
    names = [(item.rollout, item.sample.episode) for item in items]
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    episodes_T = torch.tensor([number_of[name] for name in names])[seq_ids_T]
    episode_tokens_T = segment_sum(mask_T.double(), episodes_T, len(number_of))[episodes_T]
    return LossTokens(mask_T, seq_ids_T, len(items), episode_tokens_T)


def column_by_token(samples: Sequence[Sample], name: str) -> Tensor:
    """Return the column `name` of `asyncrl.api.columns`, [T]; a column of samples is repeated for their tokens."""
    joined = SampleColumns.join(samples)
    values = column(joined, name).astype(np.float32)
    return torch.from_numpy(values if name.startswith(TOKEN) else np.repeat(values, joined.lengths))


def mask_and_ids(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return loss mask (bool) and sequence number of every packed token."""
    mask_T = torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples])).bool()
    lengths_S = torch.tensor([len(sample.tokens) for sample in samples])
    return mask_T, torch.repeat_interleave(torch.arange(len(samples)), lengths_S)


def grouped(kind: Callable[..., Item], groups: Sequence[Sequence[Sample]], *values_T: Tensor) -> list[list[Item]]:
    """Return each group's samples as items of `kind`, with the sample's parts of the packed tensors `values_T`."""
    samples = [sample for group in groups for sample in group]
    rollouts = (number for number, group in enumerate(groups) for _ in group)
    columns = (torch.split(each_T, [len(sample.tokens) for sample in samples]) for each_T in values_T)
    items = (kind(*part) for part in zip(rollouts, samples, *columns, strict=True))
    return [list(islice(items, len(group))) for group in groups]


def padded(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return the samples' tokens [B, L], padded on the right, and True for real tokens, bool [B, L]."""
    lengths = [len(sample.tokens) for sample in samples]
    tokens_BL = torch.zeros(len(samples), max(lengths), dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens_BL[row, : lengths[row]] = torch.from_numpy(sample.tokens)
    return tokens_BL, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def adamw(config: ReferenceConfig, model: torch.nn.Module, lr: float) -> torch.optim.AdamW:
    """Return the optimizer of all of a model's parameters."""
    groups = decay_groups(model.named_parameters()).with_decay(config.weight_decay)
    return torch.optim.AdamW(
        [{"params": [parameter for _, parameter in group], "weight_decay": decay} for group, decay in groups],
        lr=lr,
        betas=config.betas,
        eps=config.eps,
    )


def packed_logprobs(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of every token given those before it, and its entropy; packed, 0 at the first.

    The forward pass is padded on the right, where causal attention keeps padding out of every real position.
    """
    tokens_BL, real_BL = padded(samples)
    logits_BLV = model(input_ids=tokens_BL, use_cache=False).logits.float() / temperature
    log_probs_BLV = logits_BLV[:, :-1].log_softmax(-1)
    chosen_BL = log_probs_BLV.gather(-1, tokens_BL[:, 1:, None]).squeeze(-1)
    entropy_BL = -(log_probs_BLV.exp() * log_probs_BLV).sum(-1)
    return F.pad(chosen_BL, (1, 0))[real_BL], F.pad(entropy_BL, (1, 0))[real_BL]


def main() -> None:
    """Run the demo and print one line per step."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.reference", description="RL in one process, on the demo.")
    parser.add_argument("--model", type=Path, help="base model folder; default: that of the `sft` experiment")
    parser.add_argument("--steps", type=int, default=60, help="train steps")
    parser.add_argument("--seed", type=int, default=1, help="seed of data order and sampling")
    parser.add_argument("--staleness", type=int, default=0, help="generate with the weights of this many versions ago")
    args = parser.parse_args()
    folder = args.model or ensure_base_model(load_supervised("arithmetic_base"))
    check_whole(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    config = ReferenceConfig(seed=args.seed, staleness=args.staleness)
    prompts = PromptFormat(tokenizer, chat=None)
    trainer = ReferenceTrainer(config, model, prompts, ArithmeticDataset(seed=args.seed), arithmetic_reward)
    held_out = ArithmeticDataset(split="held_out", num_rows=256)
    print(f"greedy accuracy of the base model on held-out problems: {trainer.greedy_accuracy(held_out):.3f}")
    for _ in range(args.steps):
        report = trainer.train_step()
        line = f"step {report.version:3d}  reward {report.reward_mean:.3f}  loss {np.mean(report.losses):+.5f}"
        evaluated = report.version % 5 == 0
        print(f"{line}  held out {trainer.greedy_accuracy(held_out):.3f}" if evaluated else line, flush=True)


if __name__ == "__main__":
    main()
