"""The user's parts of a run, built as the config names them: data, tokenizer, agent, environment, reward, tools."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.api import Agent, GenerationClient, Prompt
from asyncrl.api.columns import with_columns
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.rollout.episode import Tries, run_group
from asyncrl.rollout.greedy_baseline import Played, with_greedy_baseline
from asyncrl.rollout.offload.adapters import adapted_agent
from asyncrl.rollout.offload.offloader import EpisodeProcesses, Offloader
from asyncrl.rollout.scoring import AnswerReward, Rewards, load_rewards, scored_agent
from asyncrl.rollout.tools import RunTools, check_format
from asyncrl.rollout.user_code.agents import agent_process, load_agent, offers_tools, plays_at_once
from asyncrl.rollout.user_code.conversations import Conversations
from asyncrl.rollout.user_code.environments import Environments
from asyncrl.rollout.user_code.prompts import Prompts, load_prompt_format

REMAX = "remax"
ONCE = Tries()


class Plugins:
    """Everything a RolloutWorker takes from the user.

    Args:
        training: whether it trains, and needs the training set.

    Attributes:
        tokenizer: the model's.
        vocab_size: the model's, from its config; None if that does not name it.
        prompts: training and evaluation prompts.
        conversations: clients of episodes.
        offloader: runs the user's code; to be entered in the worker's event loop.
        tools: of agents; entered in the worker's event loop, after the offloader.
        environments: of episodes.
        agent: the agent, with rewards.

    Raises:
        ConfigError: a path names nothing or something of another kind, a module fails while it is imported, or a
            constructor refuses its arguments. The message begins with the setting.
    """

    def __init__(self, config: ExperimentConfig, *, training: bool = True) -> None:
        assert config.model.path is not None, "the launcher resolves model.path before it starts a worker"
        form = load_prompt_format(config)
        model_config = json.loads((Path(config.model.path) / "config.json").read_text())
        self.tokenizer = form.tokenizer
        self.vocab_size: int | None = model_config.get("vocab_size")
        self.conversations = Conversations(config, form, model_config)
        self.offloader = Offloader(
            config.rollout.user_code,
            *(EpisodeProcesses(each.processes, each.process_max_episodes) for each in (config.env, config.agent)),
        )
        check_format(config, form.chat.source_with_tools if form.chat else None)
        self.tools = RunTools(config.tools, config.mcp, self.offloader)
        toolbox = self.tools.toolbox
        self.prompts = Prompts(config, form, lambda: toolbox.schemas if offers_tools(config) else (), training=training)
        rewards = Rewards(load_rewards(config.reward, config.rewards), self.offloader)
        agent = load_agent(config.agent, form, toolbox)
        self._columns = tuple(config.rollout.columns)
        self._greedy_baseline = training and config.algorithm.advantage.name == REMAX
        if self._greedy_baseline and (why := _why_not_greedy(agent, rewards)):
            raise ConfigError(f"algorithm.advantage.name={REMAX}: {why}; use another advantage, rloo for one")
        self.environments = Environments(config.env, AnswerReward(rewards), self.offloader, plays_at_once(agent))
        self.environments.check_places(config.agent.path, config.group_size)
        try:
            process = agent_process(config, chat=form.chat is not None)
            self.agent: Agent = scored_agent(adapted_agent(agent, self.offloader, process), rewards, self.tokenizer)
        except TypeError as error:
            raise ConfigError(f"agent.path={config.agent.path!r}: {error}") from error

    async def play(self, prompt: Prompt, policy: GenerationClient, tries: Tries = ONCE) -> Played:
        """Play the group of `prompt`; see `run_group`."""
        envs, client = self.environments.of_group(prompt.group_size), self.conversations.client
        return await run_group(self.agent, envs, prompt, policy, client, tries)

    async def play_to_train(self, prompt: Prompt, policy: GenerationClient, tries: Tries) -> Played:
        """Play the group of `prompt` and what the advantage needs beside it.

        Raises:
            ColumnError: a sample lacks a column of `rollout.columns`.
        """
        if self._greedy_baseline:
            samples, counted = await with_greedy_baseline(self.play, prompt, policy, tries)
        else:
            samples, counted = await self.play(prompt, policy, tries)
        return with_columns(samples, prompt.data, self._columns) if self._columns else samples, counted


def _why_not_greedy(agent: Agent, rewards: Rewards) -> str | None:
    """Return the reason why a single greedy episode has no reward that the group's can be compared with."""
    if plays_at_once(agent):
        return "its baseline is a single greedy episode, and the agent plays its group at once"
    if rewards.of_groups:
        return "its baseline is the reward of a single greedy answer, and a reward compares the answers of a group"
    return None
