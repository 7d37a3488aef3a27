"""The default agent: one question, `group_size` answers, each scored by the environment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncrl.agents.sample_builder import SampleBuilder
from asyncrl.api import Agent, Environment, GenerationRequest, GenerationResult, Prompt, Sample, Tokenizer


class SingleTurnAgent(Agent):
    """One generation request for the whole group; one sample per answer."""

    def __init__(self, *, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[GenerationRequest],
        act_queue: asyncio.Queue[GenerationResult],
    ) -> Sequence[Sample]:
        """The group's samples, in the order of the completions."""
        request = GenerationRequest(prompt.prompt_id, prompt.input_ids, prompt.group_size, prompt.sampling)
        await obs_queue.put(request)
        result = await act_queue.get()
        samples = []
        for completion in result.completions:
            await env.reset(options={"data": prompt.data})
            answer = self._tokenizer.decode(completion.token_ids)
            _, reward, _, truncated, _ = await env.step(answer)
            builder = SampleBuilder(prompt.input_ids)
            builder.generate(completion)
            samples.append(builder.build(reward, truncated=truncated or completion.finish_reason == "length"))
        return samples
