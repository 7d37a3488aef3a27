"""The user's parts of a run, built as the config names them: data, tokenizer, agent, environment, reward, tools.

Training may need more of a group than its samples:

- ReMax's baseline is the reward of a greedy answer to the group's prompt, generated beside the group (Li et al. 2024,
  "ReMax", arXiv:2310.10505, algorithm 1). The greedy episode is one more episode of the same agent, with its own
  environment and client, and always samples greedily. It is not trained, and filters and shaping do not see it: its
  reward is the plain result of the reward functions.
- Columns for `algorithm.teachers` are the source of the samples' row, and the log-probabilities of teachers on servers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.api import (
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    RunIn,
    Sample,
    SamplingParams,
    ToolSchema,
)
from asyncrl.api.columns import ColumnError, with_columns
from asyncrl.api.trajectory import GREEDY_REWARD
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError, token_ids
from asyncrl.config.variants import EvaluationSet, evaluation_sets, with_code_of
from asyncrl.data.prompt_format import PromptFormat
from asyncrl.models.model_config import read_model_config
from asyncrl.rollout.checks import code_problems
from asyncrl.rollout.episode import MakeClient, Played, RetryLimits, run_group
from asyncrl.rollout.user_code.episode_code import (
    Environments,
    adapted_agent,
    load_agent,
    offers_tools,
    place_of_agent,
    plays_at_once,
    takes_tools,
)
from asyncrl.rollout.user_code.prompts import Prompts, load_prompt_format
from asyncrl.rollout.user_code.rewards import SOURCE, Rewards, load_rewards
from asyncrl.rollout.user_code_pool.call_records import metered
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner
from asyncrl.trainer.settings import SOURCE_NUMBER, AlgorithmConfig, TeacherConfig

if TYPE_CHECKING:
    from asyncrl.chat.episode_client import EpisodeClient
    from asyncrl.plugins.tools.toolbox import Toolbox
    from asyncrl.rollout.user_code.conversations import Conversations
    from asyncrl.rollout.user_code.tools import RunTools

REMAX = "remax"
ONCE = RetryLimits()


class AgentSetup:
    """An agent with its environments and rewards.

    Args:
        config: settings with `agent`, `env`, `reward` and `rewards`.

    Attributes:
        environments: environments of episodes.
        agent: the agent.
        rewards: rewards that score it.

    Raises:
        ConfigError: code cannot be loaded or built; the message begins with the setting.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        form: PromptFormat,
        toolbox: Toolbox | None,
        runner: UserCodeRunner,
        make_client: MakeClient,
    ) -> None:
        self._make_client = make_client
        self.rewards = Rewards(load_rewards(config.reward, config.rewards), runner, form.tokenizer)
        agent = load_agent(config.agent, form, toolbox)
        self._at_once = plays_at_once(agent)
        self.environments = Environments(config.env, self.rewards, runner, self._at_once)
        if self.environments.place == RunIn.process:
            from asyncrl.rollout.user_code.in_processes import ProcessEnvironments

            self.environments = ProcessEnvironments(config.env, self.rewards, runner, self._at_once)
        try:
            in_process = None
            if place_of_agent(config.agent) == RunIn.process:
                from asyncrl.rollout.user_code.in_processes import play_in_process

                in_process = play_in_process(config, runner, chat=form.chat is not None)
            self.agent = adapted_agent(agent, runner, in_process)
        except TypeError as error:
            raise ConfigError(f"agent.path={config.agent.path!r}: {error}") from error

    async def play(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits = ONCE) -> Played:
        """Play the group of `prompt`; see `run_group`."""
        envs = self.environments.of_group(prompt.group_size)
        return await run_group(self.agent, envs, prompt, policy, self._make_client, tries, self.rewards)

    async def play_with_greedy_baseline(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> Played:
        """Play the group of `prompt` and a greedy episode at the same time.

        Returns:
            The group, and the counts of its episodes with `GREEDY_REWARD`. No samples if the agent rejects the prompt.

        Raises:
            Exception: an error of `play`, for the group or for the greedy episode.
        """
        greedy = asyncio.create_task(self._greedy_reward(prompt, policy, tries))
        try:
            samples, counted = await self.play(prompt, policy, tries)
            if not samples:
                return (), counted
            reward = await greedy
        finally:
            greedy.cancel()
            await asyncio.gather(greedy, return_exceptions=True)
        return ((), counted) if reward is None else (samples, counted | {GREEDY_REWARD: reward})

    async def _greedy_reward(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> float | None:
        """Return the mean reward of the greedy episode's samples; None if the agent rejects the prompt."""
        alone = replace(prompt, group_size=1, sampling=_greedy(prompt.sampling))
        with metered():  # its time and reward parts are not the group's
            samples, _ = await self.play(alone, _GreedyPolicy(policy), replace(tries, least=1))
        return float(np.mean([sample.total_reward for sample in samples])) if samples else None

    def why_not_greedy(self) -> str | None:
        """Return the reason why a single greedy episode has no reward that the group's can be compared with."""
        if self._at_once:
            return "its baseline is a single greedy episode, and the agent plays its group at once"
        if self.rewards.of_groups:
            return "its baseline is the reward of a single greedy answer, and a reward compares the answers of a group"
        return None


class UserComponents:
    """Everything a RolloutWorker takes from the user.

    Args:
        training: True if the worker trains and needs the training set.

    Attributes:
        tokenizer: the model's tokenizer.
        vocab_size: the model's vocabulary, from its config; None if the config does not name it.
        prompts: training and evaluation prompts.
        cast: those who play to train; `agent`, `rewards` and `environments` are its parts.
        runner: runs the user's code; enter it in the worker's event loop.
        tools: tools of agents; None if there are none and no agent takes them.

    Raises:
        ConfigError: a path names nothing, or an object of the wrong kind, a module fails while it is imported, or a
            constructor refuses its arguments. The message begins with the setting.
    """

    def __init__(self, config: ExperimentConfig, *, training: bool = True) -> None:
        assert config.model.path is not None, "the launcher resolves model.path before it starts a worker"
        if problems := list(code_problems(config)):
            raise ConfigError("\n".join(problems))
        form = load_prompt_format(config)
        model_config = read_model_config(config.model.path)
        self.tokenizer = form.tokenizer
        self.vocab_size: int | None = model_config.get("vocab_size")
        allowed = config.rollout.sampling.allowed_token_ids
        if self.vocab_size is not None and max(token_ids(allowed), default=0) >= self.vocab_size:
            raise ConfigError(
                f"rollout.sampling.allowed_token_ids={allowed!r}: the vocabulary of {config.model.path} has "
                f"{self.vocab_size} tokens; name ids below that"
            )
        self.runner = UserCodeRunner(config.rollout.user_code, config.env, config.agent)
        self._config, self._form, self._model_config = config, form, model_config
        self._conversations: Conversations | None = None
        self._making = threading.Lock()
        if form.chat is not None:
            from asyncrl.rollout.user_code.conversations import check_thoughts

            check_thoughts(config, form.chat)
        self.tools = self._tools()
        toolbox = None if self.tools is None else self.tools.toolbox

        def offered(each: EvaluationSet | None) -> tuple[ToolSchema, ...]:
            offers = toolbox is not None and offers_tools(with_code_of(config, each) if each else config)
            return toolbox.schemas if toolbox is not None and offers else ()

        self.prompts = Prompts(config, form, offered, training=training)

        def cast(played: ExperimentConfig) -> AgentSetup:
            return AgentSetup(played, form, toolbox, self.runner, self.client)

        self.cast = cast(config)
        self.agent, self.rewards, self.environments = self.cast.agent, self.cast.rewards, self.cast.environments
        self.environments.check_group(config.agent.path, config.group_size)
        if training and self._plays_greedy_baseline and (why := self.cast.why_not_greedy()):
            raise ConfigError(f"algorithm.advantage.name={REMAX}: {why}; use another advantage, rloo for one")
        self._casts_of_sets: dict[str, AgentSetup] = {}
        for name, (each, _) in self.prompts.eval_sets.items():
            try:
                self._casts_of_sets[name] = cast(with_code_of(config, each)) if each.code else self.cast
            except ConfigError as error:
                raise ConfigError(f"{each.group}.{error}") from error

    def _tools(self) -> RunTools | None:
        config = self._config
        played = [config, *(with_code_of(config, each) for each in evaluation_sets(config) if each.interval)]
        if not (config.tools or config.mcp or any(takes_tools(each.agent) for each in played)):
            return None
        from asyncrl.rollout.user_code.tools import RunTools, check_format

        check_format(config, self._form.chat)
        return RunTools(config.tools, config.mcp, self.runner)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Within this block users' code runs. For the worker's event loop."""
        async with self.runner, self.tools or nullcontext():
            try:
                yield
            finally:
                if self._conversations is not None:
                    await self._conversations.close()

    @property
    def conversations(self) -> Conversations:
        """The conversations of agents with the policy, made for the first client, which any thread may ask for."""
        with self._making:
            if self._conversations is None:
                from asyncrl.rollout.user_code.conversations import Conversations

                self._conversations = Conversations(self._config, self._form, self._model_config)
            return self._conversations

    def chat_notes(self) -> list[str]:
        """Describe what the chat template does in conversations of several turns; nothing if there is none."""
        chat = None if self._form.chat is None else self.conversations.format
        return [] if chat is None else chat.findings.lines()

    def client(self, policy: GenerationClient, prompt: Prompt) -> EpisodeClient:
        """Return a new client for the episode of `prompt`, which is one member's."""
        return self.conversations.client(policy, prompt)

    @property
    def _plays_greedy_baseline(self) -> bool:
        return self._config.algorithm.advantage.name == REMAX

    async def play_to_evaluate(self, name: str, prompt: Prompt, policy: GenerationClient) -> Played:
        """Play the episode of `prompt`, which is of the evaluation set `name`."""
        tries = RetryLimits(limit_s=self._config.rollout.rollout_timeout_s)
        return await self._casts_of_sets[name].play(prompt, policy, tries)

    async def play_to_train(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> Played:
        """Play the group of `prompt`, and the greedy baseline if the advantage needs it.

        Raises:
            ColumnError: a sample lacks a column of `rollout.columns`, or its row the source that names its teacher.
            Exception: a teacher's server cannot score.
        """
        algorithm, columns = self._config.algorithm, self._config.columns
        if self._plays_greedy_baseline:
            samples, counted = await self.cast.play_with_greedy_baseline(prompt, policy, tries)
        else:
            samples, counted = await self.cast.play(prompt, policy, tries)
        samples = await scored_by_teachers(samples, prompt.data, algorithm, policy)
        if columns:
            samples = with_columns(samples, with_source_number(prompt.data, algorithm), columns)
        return samples, counted


@dataclass(frozen=True, slots=True)
class _GreedyPolicy:
    """The policy with greedy sampling, also for agents that set their own sampling parameters."""

    policy: GenerationClient

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if request.policy:  # an opponent keeps its sampling
            return await self.policy.generate(request)
        return await self.policy.generate(replace(request, sampling=_greedy(request.sampling)))


def _greedy(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)


def with_source_number(data: Mapping[str, Any], algorithm: AlgorithmConfig) -> Mapping[str, Any]:
    """Return the row with the number of its source, if teachers are named for sources.

    Raises:
        ColumnError: the row has no source, or its source has no teacher although the run learns from teachers only.
    """
    sources = algorithm.teacher_sources
    if not sources:
        return data
    source = data.get(SOURCE)
    if not isinstance(source, str):
        raise ColumnError(
            f"algorithm.teachers are for rows of {SOURCE} {', '.join(map(repr, sources))}, and this row has "
            f"{SOURCE} {source!r}; give rows that field, or leave the teachers' sources empty, which is for all"
        )
    alone = algorithm.advantage.name == "zero" and all(teacher.sources for teacher in algorithm.teachers)
    if alone and source not in sources:
        raise ColumnError(
            f"algorithm.teachers has none for rows of {SOURCE} {source!r}, and algorithm.advantage=zero learns from "
            "teachers alone; name it in the sources of one"
        )
    return {**data, SOURCE_NUMBER.partition("/")[2]: sources.index(source) if source in sources else -1}


async def scored_by_teachers(
    samples: Sequence[Sample], data: Mapping[str, Any], algorithm: AlgorithmConfig, policy: GenerationClient
) -> Sequence[Sample]:
    """Return the samples, each with a column of log-probabilities for every teacher that runs on servers.

    The column is 0 if the teacher is not for the row's source.

    Raises:
        Exception: a server cannot score.
    """
    for teacher in algorithm.teachers:
        if teacher.policy is not None:
            wanted = not teacher.sources or data.get(SOURCE) in teacher.sources
            samples = await asyncio.gather(*(_scored(sample, teacher, policy, wanted=wanted) for sample in samples))
    return samples


async def _scored(sample: Sample, teacher: TeacherConfig, policy: GenerationClient, *, wanted: bool) -> Sample:
    column_T = np.zeros(len(sample.tokens), np.float32)
    if wanted and sample.loss_mask.any():
        first = int(sample.loss_mask.argmax())
        request = GenerationRequest(
            teacher.role,
            tuple(sample.tokens.tolist()),
            1,
            SamplingParams(),
            sample.pictures,
            policy=teacher.policy or "",
            score_from=first,
        )
        column_T[first:] = (await policy.generate(request)).scores
        column_T *= sample.loss_mask
    name = teacher.logprobs.partition("/")[2]
    return replace(sample, token_columns={**sample.token_columns, name: column_T})
