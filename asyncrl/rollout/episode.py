"""One prompt through a user's agent and environment, and what the group is worth afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.algorithms.group_view import GroupView, Verdict
from asyncrl.api import Agent, Environment, GenerationRequest, GenerationResult, Prompt, Sample

Generate = Callable[[GenerationRequest], Awaitable[GenerationResult]]
Filter = Callable[[GroupView], Verdict]
Shaping = Callable[[GroupView], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


class EpisodeError(RuntimeError):
    """The user's agent broke its contract; the message names the agent and what it returned."""


async def run_episode(agent: Agent, env: Environment, prompt: Prompt, generate: Generate) -> Sequence[Sample]:
    """Run `agent` on `prompt`, answering what it puts on its observation queue with `generate`.

    Returns:
        The group, `prompt.group_size` samples; empty where the agent rejects the prompt.

    Raises:
        EpisodeError: the agent returned another number of samples.
        Exception: whatever the agent, the environment or `generate` raised.
    """
    obs_queue: asyncio.Queue[GenerationRequest] = asyncio.Queue()
    act_queue: asyncio.Queue[GenerationResult] = asyncio.Queue()
    try:
        async with asyncio.TaskGroup() as tasks:
            pump = tasks.create_task(_answer_requests(tasks, obs_queue, act_queue, generate))
            samples = await agent.collect_trajectory(prompt, env, obs_queue, act_queue)
            pump.cancel()
    except ExceptionGroup as group:
        raise _first_cause(group) from group
    finally:
        await env.close()
    if samples and len(samples) != prompt.group_size:
        raise EpisodeError(
            f"agent {type(agent).__name__} returned {len(samples)} samples for prompt {prompt.prompt_id}; return "
            f"group_size={prompt.group_size} of them, or none to reject the prompt"
        )
    return samples


async def _answer_requests(
    tasks: asyncio.TaskGroup,
    obs_queue: asyncio.Queue[GenerationRequest],
    act_queue: asyncio.Queue[GenerationResult],
    generate: Generate,
) -> None:
    async def answer(request: GenerationRequest) -> None:
        await act_queue.put(await generate(request))

    while True:
        tasks.create_task(answer(await obs_queue.get()))


def _first_cause(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, ExceptionGroup) else first


def view_of(samples: Sequence[Sample]) -> GroupView:
    """What filters and shaping see of a group."""
    return GroupView(
        rewards_S=np.array([sample.reward for sample in samples], dtype=np.float64),
        lengths_S=np.array([sample.generated_length for sample in samples], dtype=np.int64),
        truncated_S=np.array([sample.truncated for sample in samples], dtype=bool),
    )


def judge(samples: Sequence[Sample], filters: Sequence[Filter]) -> Verdict:
    """The first rejecting verdict of `filters`, or a keeping one."""
    view = view_of(samples)
    for accept in filters:
        verdict = accept(view)
        if not verdict.keep:
            return verdict
    return Verdict(True)


def shape(samples: Sequence[Sample], shapings: Sequence[Shaping]) -> tuple[Sample, ...]:
    """The samples with their rewards put through `shapings`, in order."""
    for reshape in shapings:
        rewards = reshape(view_of(samples))
        samples = [replace(sample, reward=float(reward)) for sample, reward in zip(samples, rewards, strict=True)]
    return tuple(samples)
