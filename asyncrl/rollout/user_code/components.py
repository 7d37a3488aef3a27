"""The user's parts of a run, built as the config names them: data, tokenizer, agent, environment, reward, tools."""

from __future__ import annotations

from functools import partial

from asyncrl.api import Agent, GenerationClient, Prompt
from asyncrl.api.columns import with_columns
from asyncrl.config.evaluation_sets import with_code_of
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.config.token_ids import token_ids
from asyncrl.models.model_config import read_model_config
from asyncrl.plugins.datasets.prompt_format import PromptFormat
from asyncrl.plugins.tools.toolbox import Toolbox
from asyncrl.rollout.episode import RetryLimits, run_group
from asyncrl.rollout.user_code.agents import adapted_agent, agent_process, load_agent, offers_tools, plays_at_once
from asyncrl.rollout.user_code.conversations import Conversations
from asyncrl.rollout.user_code.embeddings import Embedder
from asyncrl.rollout.user_code.environments import Environments, ProcessSlots
from asyncrl.rollout.user_code.greedy_baseline import Played, with_greedy_baseline
from asyncrl.rollout.user_code.prompts import Prompts, load_prompt_format
from asyncrl.rollout.user_code.rewards import Rewards, load_rewards
from asyncrl.rollout.user_code.teacher_columns import scored_by_teachers, with_source_number
from asyncrl.rollout.user_code.tools import RunTools, check_format
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

REMAX = "remax"
ONCE = RetryLimits()


class Cast:
    """An agent with its environments and rewards.

    Args:
        config: settings with `agent`, `env`, `reward` and `rewards`.
        places: process slots of the whole worker for environments.

    Attributes:
        environments: environments of episodes.
        agent: the agent.
        at_once: True if it plays a whole group at once.
        rewards: rewards that score it.

    Raises:
        ConfigError: code cannot be loaded or built; the message begins with the setting.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        form: PromptFormat,
        toolbox: Toolbox,
        runner: UserCodeRunner,
        conversations: Conversations,
        places: ProcessSlots,
    ) -> None:
        self._conversations = conversations
        self.rewards = Rewards(load_rewards(config.reward, config.rewards), runner)
        self._score = partial(self.rewards.score, form.tokenizer)
        agent = load_agent(config.agent, form, toolbox)
        self.at_once = plays_at_once(agent)
        self.environments = Environments(config.env, self.rewards, runner, self.at_once, places)
        try:
            process = agent_process(config, chat=form.chat is not None)
            self.agent = adapted_agent(agent, runner, process)
        except TypeError as error:
            raise ConfigError(f"agent.path={config.agent.path!r}: {error}") from error

    async def play(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits = ONCE) -> Played:
        """Play the group of `prompt`; see `run_group`."""
        envs, client = self.environments.of_group(prompt.group_size), self._conversations.client
        return await run_group(self.agent, envs, prompt, policy, client, tries, self._score)


class UserComponents:
    """Everything a RolloutWorker takes from the user.

    Args:
        training: True if the worker trains and needs the training set.

    Attributes:
        tokenizer: the model's tokenizer.
        vocab_size: the model's vocabulary, from its config; None if the config does not name it.
        prompts: training and evaluation prompts.
        conversations: makes the clients of episodes.
        runner: runs the user's code; enter it in the worker's event loop.
        tools: tools of agents; enter them in the worker's event loop, after the runner.

    Raises:
        ConfigError: a path names nothing, or an object of the wrong kind, a module fails while it is imported, or a
            constructor refuses its arguments. The message begins with the setting.
    """

    def __init__(self, config: ExperimentConfig, *, training: bool = True) -> None:
        assert config.model.path is not None, "the launcher resolves model.path before it starts a worker"
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
        self.conversations = Conversations(config, form, model_config)
        self.runner = UserCodeRunner(config.rollout.user_code, config.env, config.agent)
        check_format(config, form.chat)
        self.tools = RunTools(config.tools, config.mcp, self.runner)
        toolbox = self.tools.toolbox
        self.prompts = Prompts(
            config,
            form,
            lambda each: toolbox.schemas if offers_tools(with_code_of(config, each) if each else config) else (),
            training=training,
        )
        self._config = config
        places = ProcessSlots(config.env.processes)

        def cast(played: ExperimentConfig) -> Cast:
            return Cast(played, form, toolbox, self.runner, self.conversations, places)

        self._cast = cast(config)
        self.environments.check_places(config.agent.path, config.group_size)
        if training and self._plays_greedy_baseline and (why := _why_not_greedy(self._cast)):
            raise ConfigError(f"algorithm.advantage.name={REMAX}: {why}; use another advantage, rloo for one")
        self._casts_of_sets: dict[str, Cast] = {}
        for name, (each, _) in self.prompts.eval_sets.items():
            try:
                self._casts_of_sets[name] = cast(with_code_of(config, each)) if each.code else self._cast
            except ConfigError as error:
                raise ConfigError(f"{each.group}.{error}") from error

    @property
    def agent(self) -> Agent:
        """The agent of training."""
        return self._cast.agent

    @property
    def rewards(self) -> Rewards:
        """Rewards of training."""
        return self._cast.rewards

    @property
    def environments(self) -> Environments:
        """Environments of training episodes."""
        return self._cast.environments

    @property
    def _plays_greedy_baseline(self) -> bool:
        return self._config.algorithm.advantage.name == REMAX

    def embed_with(self, embedder: Embedder | None) -> None:
        """Embed the frames of training groups with `embedder` from now on."""
        self._cast.rewards.embedder = embedder

    async def play(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits = ONCE) -> Played:
        """Play the group of `prompt`; see `run_group`."""
        return await self._cast.play(prompt, policy, tries)

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
            samples, counted = await with_greedy_baseline(self.play, prompt, policy, tries)
        else:
            samples, counted = await self.play(prompt, policy, tries)
        samples = await scored_by_teachers(samples, prompt.data, algorithm, policy)
        if columns:
            samples = with_columns(samples, with_source_number(prompt.data, algorithm), columns)
        return samples, counted


def _why_not_greedy(cast: Cast) -> str | None:
    """Return the reason why a single greedy episode has no reward that the group's can be compared with."""
    if cast.at_once:
        return "its baseline is a single greedy episode, and the agent plays its group at once"
    if cast.rewards.of_groups:
        return "its baseline is the reward of a single greedy answer, and a reward compares the answers of a group"
    return None
