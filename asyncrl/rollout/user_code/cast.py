"""The agent, the environments and the rewards of training or of an evaluation set."""

from __future__ import annotations

from asyncrl.api import Agent, GenerationClient, Prompt
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.plugins.datasets.prompts import PromptFormat
from asyncrl.plugins.tools.toolbox import Toolbox
from asyncrl.rollout.episode import RetryLimits, run_group
from asyncrl.rollout.scoring import AnswerReward, Rewards, load_rewards
from asyncrl.rollout.user_code.agents import agent_process, load_agent, plays_at_once
from asyncrl.rollout.user_code.conversations import Conversations
from asyncrl.rollout.user_code.environments import Environments
from asyncrl.rollout.user_code.greedy_baseline import Played
from asyncrl.rollout.user_code.scored_agent import scored_agent
from asyncrl.rollout.user_code_pool.adapters import adapted_agent
from asyncrl.rollout.user_code_pool.process_slots import ProcessSlots
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

ONCE = RetryLimits()


class Cast:
    """An agent with its environments and rewards.

    Args:
        config: settings with `agent`, `env`, `reward` and `rewards`.
        places: process slots of the whole worker for environments.

    Attributes:
        environments: environments of episodes.
        agent: the agent, with rewards.
        at_once: True if it plays a whole group at once.
        rewards: rewards that score it.

    Raises:
        ConfigError: as of `UserComponents`.
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
        agent = load_agent(config.agent, form, toolbox)
        self.at_once = plays_at_once(agent)
        self.environments = Environments(config.env, AnswerReward(self.rewards), runner, self.at_once, places)
        try:
            process = agent_process(config, chat=form.chat is not None)
            self.agent: Agent = scored_agent(adapted_agent(agent, runner, process), self.rewards, form.tokenizer)
        except TypeError as error:
            raise ConfigError(f"agent.path={config.agent.path!r}: {error}") from error

    async def play(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits = ONCE) -> Played:
        """Play the group of `prompt`; see `run_group`."""
        envs, client = self.environments.of_group(prompt.group_size), self._conversations.client
        return await run_group(self.agent, envs, prompt, policy, client, tries)
