"""Optional: what training needs of a group beside its samples (`algorithm.advantage.name=remax`, `algorithm.teachers`).

- ReMax's baseline is the reward of a greedy answer to the group's prompt, generated beside the group (Li et al. 2024,
  "ReMax", arXiv:2310.10505, algorithm 1). The greedy episode is one more episode of the same agent, with its own
  environment and client, and always samples greedily. It is not trained, and filters and shaping do not see it: its
  reward is the plain result of the reward functions.
- Columns for teachers are the source of the samples' row, and the log-probabilities of teachers on servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.api import GenerationClient, GenerationRequest, GenerationResult, Prompt, Sample, SamplingParams
from asyncrl.api.columns import ColumnError
from asyncrl.api.trajectory import GREEDY_REWARD
from asyncrl.rollout.episode import Played, RetryLimits
from asyncrl.rollout.user_code.rewards import SOURCE
from asyncrl.rollout.user_code_pool.call_records import metered
from asyncrl.trainer.settings import SOURCE_NUMBER, AlgorithmConfig, TeacherConfig

Play = Callable[[Prompt, GenerationClient, RetryLimits], Awaitable[Played]]
"""Plays the group of a prompt."""


async def play_with_greedy_baseline(play: Play, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> Played:
    """Play the group of `prompt` and a greedy episode at the same time.

    Returns:
        The group, and the counts of its episodes with `GREEDY_REWARD`. No samples if the agent rejects the prompt.

    Raises:
        Exception: an error of `play`, for the group or for the greedy episode.
    """

    async def greedy_reward() -> float | None:
        """Return the mean reward of the greedy episode's samples; None if the agent rejects the prompt."""
        alone = replace(prompt, group_size=1, sampling=_greedy(prompt.sampling))
        with metered():  # its time and reward parts are not the group's
            samples, _ = await play(alone, _GreedyPolicy(policy), replace(tries, least=1))
        return float(np.mean([sample.total_reward for sample in samples])) if samples else None

    greedy = asyncio.create_task(greedy_reward())
    try:
        samples, counted = await play(prompt, policy, tries)
        if not samples:
            return (), counted
        reward = await greedy
    finally:
        greedy.cancel()
        await asyncio.gather(greedy, return_exceptions=True)
    return ((), counted) if reward is None else (samples, counted | {GREEDY_REWARD: reward})


@dataclass(frozen=True, slots=True)
class _GreedyPolicy:
    """The policy with greedy sampling, also for agents that set their own sampling parameters."""

    policy: GenerationClient

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if request.policy:  # a policy server keeps its sampling
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
