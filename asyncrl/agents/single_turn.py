"""The default agent: one question, `group_size` answers, each scored by the environment."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.agents.sample_builder import SampleBuilder
from asyncrl.api import Agent, Environment, GenerationClient, GenerationRequest, Prompt, Sample, Tokenizer


class SingleTurnAgent(Agent):
    """One generation request for the whole group; one sample per answer."""

    def __init__(self, *, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Sequence[Sample]:
        """The group's samples, in the order of the completions."""
        request = GenerationRequest(prompt.prompt_id, prompt.input_ids, prompt.group_size, prompt.sampling)
        result = await client.generate(request)
        samples = []
        for completion in result.completions:
            await env.reset(options={"data": prompt.data})
            answer = self._tokenizer.decode(completion.token_ids)
            _, reward, _, truncated, _ = await env.step(answer)
            builder = SampleBuilder(prompt.input_ids)
            builder.generate(completion)
            samples.append(builder.build(reward, truncated=truncated or completion.finish_reason == "length"))
        return samples
