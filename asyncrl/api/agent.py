"""The agent: how a prompt becomes trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from asyncrl.api.environment import Environment
from asyncrl.api.generation import GenerationClient, GenerationRequest, GenerationResult
from asyncrl.api.prompt import Prompt
from asyncrl.api.trajectory import Sample


class Agent:
    """Subclass, implement `run`, and name the class in `agent.path`. `agent.args` go to the constructor.

    `run` awaits the policy's answers where it needs them; choose it unless you have an agent in the form of
    `collect_trajectory`, which takes them from a queue: that form works too, and only one of the two is needed.

    `run` may be a plain `def`: it then runs in a thread, where `client.generate`, `env.reset` and `env.step` are called
    without `await`.

    The RolloutWorker passes the run's tokenizer as the keyword argument `tokenizer`. One instance serves all prompts of
    its worker, many at the same time: keep the state of an episode in local variables.

    Raises:
        TypeError: when an instance is made: its class implements neither form, or overrides `collect_trajectory` of a
            class that implements `run`, so that it would never be called.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        derived = [vars(base) for base in cls.__mro__[: cls.__mro__.index(Agent)]]
        form = next((name for own in derived for name in ("run", "collect_trajectory") if name in own), None)
        if form is None:
            raise TypeError(f"agent {cls.__name__} implements neither `run` nor `collect_trajectory`: implement `run`")
        if form == "collect_trajectory" and cls.run is not Agent.run:
            raise TypeError(
                f"agent {cls.__name__} overrides `collect_trajectory`, but its base class implements `run`, which is "
                "what is called: override `run`"
            )
        return super().__new__(cls)

    async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Sequence[Sample]:
        """Roll out one prompt's group.

        `await client.generate(request)` is the policy's answer; for several at the same time use an
        `asyncio.TaskGroup`, which ends them all when one fails. Generations that are interrupted are continued by the
        RolloutWorker, so the agent always sees whole answers, whose tokens may be of several versions.

        Returns:
            The group's samples, `prompt.group_size` of them; an empty sequence rejects the prompt.
        """
        obs_queue: asyncio.Queue[GenerationRequest] = asyncio.Queue()
        act_queue: asyncio.Queue[GenerationResult] = asyncio.Queue()

        async def answer(request: GenerationRequest) -> None:
            act_queue.put_nowait(await client.generate(request))

        async def answer_all() -> None:
            while True:
                tasks.create_task(answer(await obs_queue.get()))

        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(answer_all())
            samples = await self.collect_trajectory(prompt, env, obs_queue, act_queue)
            answering.cancel()
        return samples

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[GenerationRequest],
        act_queue: asyncio.Queue[GenerationResult],
    ) -> Sequence[Sample]:
        """The other form of `run`, with queues around the policy.

        Put a `GenerationRequest` on `obs_queue`; its `GenerationResult` arrives on `act_queue`. Several requests may be
        outstanding; their results arrive as they finish and carry the request's id.
        """
        raise NotImplementedError(f"agent {type(self).__name__} implements `run`")
