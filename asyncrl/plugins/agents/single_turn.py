"""The default agent: one question, `group_size` answers, each scored by its own environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncrl.api import (
    Agent,
    Completion,
    Environment,
    GenerationClient,
    GenerationRequest,
    GroupClient,
    Prompt,
    Sample,
    Tokenizer,
    answer_text,
)
from asyncrl.api.agent import play_with_retries
from asyncrl.api.reward import reward_parts
from asyncrl.plugins.agents.sample_builder import SampleBuilder


class SingleTurnAgent(Agent):
    """One generation request for the whole group; one sample per answer. The answers are scored at the same time."""

    def __init__(self, *, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run_group(
        self, prompt: Prompt, make_env: Callable[[], Environment], client: GroupClient
    ) -> Sequence[Sample]:
        """Return the group's samples, in the order of the completions.

        An answer that cannot be scored is retried alone.
        """
        request = GenerationRequest(
            prompt.prompt_id, prompt.input_ids, prompt.group_size, prompt.sampling, prompt.pictures
        )
        result = await client.generate(request)

        async def scored(member: int, completion: Completion) -> Sequence[Sample]:
            first = prompt.of_member(member)

            async def play(own: Prompt) -> Sequence[Sample]:
                env = make_env()
                try:
                    again = None if own is first else (await self._answer(own, client))
                    sample = await self._scored(prompt, env, again or completion)
                finally:
                    await env.close()
                return [replace(sample, episode=member)]

            return await play_with_retries(first, play, client)

        async with asyncio.TaskGroup() as tasks:
            scoring = [tasks.create_task(scored(*each)) for each in enumerate(result.completions)]
        return [sample for task in scoring for sample in task.result()]

    async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Sample:
        """Generate and score a single answer, for subclasses that do more with it."""
        return await self._scored(prompt, env, await self._answer(prompt, client))

    async def _answer(self, prompt: Prompt, client: GenerationClient) -> Completion:
        name = f"{prompt.prompt_id}/{prompt.member}"
        request = GenerationRequest(name, prompt.input_ids, 1, prompt.sampling, prompt.pictures)
        (completion,) = (await client.generate(request)).completions
        return completion

    async def _scored(self, prompt: Prompt, env: Environment, completion: Completion) -> Sample:
        with reward_parts() as parts:
            await env.reset(options={"data": prompt.data})
            _, reward, _, truncated, _ = await env.step(
                answer_text(self._tokenizer, prompt.input_ids, completion.token_ids)
            )
        builder = SampleBuilder(prompt.input_ids, prompt.pictures)
        builder.generate(completion)
        sample = builder.build(reward, truncated=truncated or completion.finish_reason == "length")
        return replace(sample, reward_parts=parts.means())
