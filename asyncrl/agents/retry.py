"""An example of several turns: who answers wrongly reads the environment's feedback and tries again.

All members of the group play at the same time, one generation request each and turn. The feedback's tokens carry no
loss; all tries share the last one's reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.agents.sample_builder import SampleBuilder
from asyncrl.api import Agent, Environment, GenerationClient, GenerationRequest, Prompt, Sample, Tokenizer
from asyncrl.datasets.order import seed_from


class RetryAgent(Agent):
    """Up to `max_turns` tries per answer.

    Args:
        tokenizer: the run's tokenizer.
        max_turns: tries, at least 1.
        turn_discount: factor on the reward for each turn beyond the first, so that a first right try is worth most.
    """

    def __init__(self, *, tokenizer: Tokenizer, max_turns: int = 2, turn_discount: float = 0.5) -> None:
        if max_turns < 1:
            raise ValueError(f"agent max_turns is {max_turns}: give at least 1")
        self._tokenizer, self._max_turns, self._turn_discount = tokenizer, max_turns, turn_discount

    async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Sequence[Sample]:
        """The group's samples, one conversation each."""
        await env.reset(options={"data": prompt.data})
        async with asyncio.TaskGroup() as tasks:
            members = [
                tasks.create_task(self._converse(prompt, env, client, member)) for member in range(prompt.group_size)
            ]
        return [member.result() for member in members]

    async def _converse(self, prompt: Prompt, env: Environment, client: GenerationClient, member: int) -> Sample:
        """Up to `max_turns` tries; a try that is cut off is the last."""
        builder = SampleBuilder(prompt.input_ids)
        for turn in range(self._max_turns):
            sampling = replace(prompt.sampling, seed=seed_from("turn", prompt.sampling.seed or 0, turn, member))
            request = GenerationRequest(f"{prompt.prompt_id}/{turn}/{member}", builder.tokens, 1, sampling)
            (completion,) = (await client.generate(request)).completions
            builder.generate(completion)
            feedback, reward, solved, _, _ = await env.step(self._tokenizer.decode(completion.token_ids))
            truncated = completion.finish_reason == "length"
            if solved or truncated or turn + 1 == self._max_turns:
                break
            builder.observe(self._tokenizer.encode(feedback))
        return builder.build(reward * self._turn_discount**turn, truncated=truncated)
