"""The agent: how a prompt becomes trajectories."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from asyncrl.api.environment import Environment
from asyncrl.api.generation import GenerationRequest, GenerationResult
from asyncrl.api.prompt import Prompt
from asyncrl.api.trajectory import Sample


class Agent(ABC):
    """Subclass, implement `collect_trajectory`, and name the class in `agent.path`. `agent.args` go to the constructor.

    The RolloutWorker passes the run's tokenizer as the keyword argument `tokenizer`. One instance serves all prompts of
    its worker, many at the same time: keep the state of an episode in local variables.
    """

    @abstractmethod
    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[GenerationRequest],
        act_queue: asyncio.Queue[GenerationResult],
    ) -> Sequence[Sample]:
        """Roll out one prompt's group.

        Put a `GenerationRequest` on `obs_queue`; its `GenerationResult` arrives on `act_queue`. Several requests may be
        outstanding; their results arrive as they finish and carry the request's id. Aborted generations are
        continued by the RolloutWorker, so the agent always sees whole answers, whose tokens may be of several versions.

        Returns:
            The group's samples, `prompt.group_size` of them; an empty sequence rejects the prompt.
        """
