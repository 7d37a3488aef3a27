"""The user's parts of a run, built as the config names them: data, tokenizer, agent, environment, reward, tools."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from asyncrl.api import GenerationClient, Prompt, RunIn, ToolSchema
from asyncrl.api.columns import with_columns
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
from asyncrl.rollout.user_code.rewards import Rewards, RewardScope, load_rewards
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

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
        parts = load_rewards(config.reward, config.rewards)
        self.rewards = Rewards(parts, runner)
        if any(part.sees != RewardScope.answer for part in parts):
            if config.is_online:
                raise ConfigError(
                    "reward: of an episode or a group, it would be added to what clients of online sessions report; "
                    "leave it out, or give it to the evaluation (eval.reward)"
                )
            from asyncrl.rollout.user_code.rewards_of_groups import RewardsOfGroups

            self.rewards = RewardsOfGroups(parts, runner, form.tokenizer)
        agent = load_agent(config.agent, form, toolbox)
        self._at_once = plays_at_once(agent)
        self.environments = Environments(config.env, self.rewards, runner, self._at_once)
        if self.environments.run_in == RunIn.process:
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
        agent_setup: those who play to train; `agent`, `rewards` and `environments` are its parts.
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

        def setup_of(played: ExperimentConfig) -> AgentSetup:
            return AgentSetup(played, form, toolbox, self.runner, self.client)

        self.agent_setup = setup = setup_of(config)
        self.agent, self.rewards, self.environments = setup.agent, setup.rewards, setup.environments
        self.environments.check_group(config.agent.path, config.group_size)
        if training and self._plays_greedy_baseline and (why := self.agent_setup.why_not_greedy()):
            raise ConfigError(f"algorithm.advantage.name={REMAX}: {why}; use another advantage, rloo for one")
        self._setups_of_sets: dict[str, AgentSetup] = {}
        for name, (each, _) in self.prompts.eval_sets.items():
            try:
                self._setups_of_sets[name] = setup_of(with_code_of(config, each)) if each.code else self.agent_setup
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
        return await self._setups_of_sets[name].play(prompt, policy, tries)

    async def play_to_train(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> Played:
        """Play the group of `prompt`, and the greedy baseline if the advantage needs it.

        Raises:
            ColumnError: a sample lacks a column of `rollout.columns`, or its row the source that names its teacher.
            Exception: a teacher's server cannot score.
        """
        algorithm, columns = self._config.algorithm, self._config.columns
        data = prompt.data
        if self._plays_greedy_baseline:
            from asyncrl.rollout.user_code.beside_groups import play_with_greedy_baseline

            samples, counted = await play_with_greedy_baseline(self.agent_setup.play, prompt, policy, tries)
        else:
            samples, counted = await self.agent_setup.play(prompt, policy, tries)
        if algorithm.teachers:
            from asyncrl.rollout.user_code.beside_groups import scored_by_teachers, with_source_number

            samples = await scored_by_teachers(samples, data, algorithm, policy)
            data = with_source_number(data, algorithm) if columns else data
        return (with_columns(samples, data, columns) if columns else samples), counted
