"""One prompt through a user's agent and environment, and what the group is worth afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from asyncrl.algorithms.group_view import GroupView, Verdict
from asyncrl.api import Agent, Environment, GenerationClient, Prompt, Sample

Filter = Callable[[GroupView], Verdict]
Shaping = Callable[[GroupView], "np.ndarray[tuple[int], np.dtype[np.float64]]"]


class EpisodeError(RuntimeError):
    """The user's agent broke its contract; the message names the agent and what it did."""


async def run_episode(agent: Agent, env: Environment, prompt: Prompt, client: GenerationClient) -> Sequence[Sample]:
    """Run `agent` on `prompt` with `client` as its policy.

    Returns:
        The group, `prompt.group_size` samples; empty where the agent rejects the prompt.

    Raises:
        EpisodeError: the agent returned another number of samples, or something that it awaits was cancelled.
        Exception: whatever the agent, the environment or the policy raised; of a group the first.
    """
    try:
        try:
            samples = await agent.run(prompt, env, client)
        finally:
            await env.close()
    except ExceptionGroup as group:
        raise _first_cause(group) from group
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # it is this rollout that was cancelled
            raise
        raise EpisodeError(
            f"agent {type(agent).__name__} was cancelled from within, on prompt {prompt.prompt_id}: a task or "
            "connection that it or its environment awaits was cancelled; catch asyncio.CancelledError there"
        ) from error
    if samples and len(samples) != prompt.group_size:
        raise EpisodeError(
            f"agent {type(agent).__name__} returned {len(samples)} samples for prompt {prompt.prompt_id}; return "
            f"group_size={prompt.group_size} of them, or none to reject the prompt"
        )
    return samples


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
