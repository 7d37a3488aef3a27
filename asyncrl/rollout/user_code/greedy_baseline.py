"""ReMax's baseline: the reward of a greedy answer to the group's prompt, generated beside the group.

Li et al. 2024, "ReMax" (arXiv:2310.10505), algorithm 1. The greedy episode is one more episode of the same agent, with
its own environment and client, and always samples greedily. It is not trained, and filters and shaping do not see it:
its reward is the plain result of the reward functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from asyncrl.api import GenerationClient, GenerationRequest, GenerationResult, Prompt, Sample, SamplingParams
from asyncrl.rollout.episode import RetryLimits
from asyncrl.rollout.user_code_pool.timing import metered

GREEDY_REWARD = "agent/greedy_reward"
"""The metric of a trajectory that advantages read (`AdvantageInputs.greedy_rewards_S`)."""

Played: TypeAlias = tuple[Sequence[Sample], dict[str, float]]
Play: TypeAlias = Callable[[Prompt, GenerationClient, RetryLimits], Awaitable[Played]]
"""Plays a prompt's group; returns its samples and the counts of its episodes."""


async def with_greedy_baseline(play: Play, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> Played:
    """Play the group of `prompt` and a greedy episode at the same time.

    Returns:
        The group, and the counts of its episodes with `GREEDY_REWARD`. No samples if the agent rejects the prompt.

    Raises:
        Exception: an error of `play`, for the group or for the greedy episode.
    """
    greedy = asyncio.create_task(_greedy_reward(play, prompt, policy, tries))
    try:
        samples, counted = await play(prompt, policy, tries)
        if not samples:
            return (), counted
        reward = await greedy
    finally:
        greedy.cancel()
        await asyncio.gather(greedy, return_exceptions=True)
    return ((), counted) if reward is None else (samples, counted | {GREEDY_REWARD: reward})


async def _greedy_reward(play: Play, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> float | None:
    """Return the mean reward of the greedy episode's samples; None if the agent rejects the prompt."""
    alone = replace(prompt, group_size=1, sampling=_greedy(prompt.sampling))
    with metered():  # its time and reward parts are not the group's
        samples, _ = await play(alone, _GreedyPolicy(policy), replace(tries, least=1))
    return float(np.mean([sample.total_reward for sample in samples])) if samples else None


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
