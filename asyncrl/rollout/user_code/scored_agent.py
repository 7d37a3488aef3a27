"""An agent whose samples get the rewards of episodes and groups, once it has returned them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from asyncrl.api import (
    Agent,
    Environment,
    Episode,
    GenerationClient,
    GroupClient,
    Prompt,
    Sample,
    Tokenizer,
    answer_text,
)
from asyncrl.api.agent import play_with_retries
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.plugins.datasets.prompt_format import PromptFormat
from asyncrl.plugins.tools.toolbox import Toolbox
from asyncrl.rollout.episode import RetryLimits, run_group
from asyncrl.rollout.user_code.agents import agent_process, load_agent, plays_at_once
from asyncrl.rollout.user_code.conversations import Conversations
from asyncrl.rollout.user_code.environments import Environments
from asyncrl.rollout.user_code.greedy_baseline import Played
from asyncrl.rollout.user_code.rewards import Added, AnswerReward, Rewards, load_rewards
from asyncrl.rollout.user_code_pool.off_event_loop import adapted_agent
from asyncrl.rollout.user_code_pool.process_slots import ProcessSlots
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner


class ScoredAgent(Agent):
    """Wraps `agent` and adds the rewards of episodes and groups to its samples."""

    def __init__(self, agent: Agent, rewards: Rewards, tokenizer: Tokenizer) -> None:
        self._agent, self._rewards, self._tokenizer = agent, rewards, tokenizer

    async def roll_out(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        """Return the agent's samples with these rewards added; each conversation of an episode is scored separately.

        If an episode's rewards fail, the episode is scored again, and is lost after its last attempt. If a group's
        rewards fail, the group fails.
        """
        samples = await self._agent.roll_out(prompt, make_env, client)
        if not samples:
            return samples
        seen = [episode_of(prompt, sample, self._tokenizer) for sample in samples]
        by_episode: defaultdict[int, list[int]] = defaultdict(list)
        for number, sample in enumerate(samples):
            by_episode[sample.episode].append(number)

        async def score(member: int) -> Sequence[tuple[int, Added]]:
            numbers = by_episode[member]

            async def play(_: Prompt) -> Sequence[tuple[int, Added]]:
                added = await asyncio.gather(*(self._rewards.episode(seen[number]) for number in numbers))
                return list(zip(numbers, added, strict=True))

            return await play_with_retries(prompt.of_member(member), play, client, limited=False)

        async with asyncio.TaskGroup() as tasks:
            scoring = [tasks.create_task(score(member)) for member in by_episode]
        own = dict(scored for task in scoring for scored in task.result())
        kept = sorted(own)
        of_group = await self._rewards.group([seen[number] for number in kept]) if kept else []
        return [_with(_with(samples[number], own[number]), added) for number, added in zip(kept, of_group, strict=True)]


def _with(sample: Sample, added: Added) -> Sample:
    more, parts = added
    return replace(sample, reward=sample.reward + more, reward_parts={**sample.reward_parts, **parts})


def scored_agent(agent: Agent, rewards: Rewards, tokenizer: Tokenizer) -> Agent:
    """Wrap `agent` with the rewards of episodes and groups; without such rewards return `agent` itself."""
    if not rewards.after_the_rollout:
        return agent
    named: type[ScoredAgent] = type(type(agent).__name__, (ScoredAgent,), {})  # messages show the user's class
    return named(agent, rewards, tokenizer)


def episode_of(prompt: Prompt, sample: Sample, tokenizer: Tokenizer) -> Episode:
    """Convert `sample` to the form that rewards receive."""
    mask = sample.loss_mask.astype(bool).tolist()
    tokens = sample.tokens.tolist()
    first = mask.index(True) if any(mask) else len(mask)
    stretches = groupby(range(first, len(tokens)), key=mask.__getitem__)
    turns = [(places[0], places[-1] + 1) for generated, stretch in stretches if generated for places in [[*stretch]]]
    return Episode(
        data=prompt.data,
        prompt=tokenizer.decode(tokens[:first]),
        turns=tuple(answer_text(tokenizer, tokens[:begin], tokens[begin:end]) for begin, end in turns),
        response=tokenizer.decode(tokens[first:]),
        generated_tokens=sample.generated_length,
        truncated=sample.truncated,
        reward=float(sample.total_reward),
        episode=sample.episode,
        version=int(sample.versions.max()),
        metrics=sample.metrics,
        frames=sample.frames,
    )


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
