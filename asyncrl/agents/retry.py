"""An example of several turns: who answers wrongly reads the environment's feedback and tries again.

All members of the group play at the same time, one generation request each and turn. The feedback's tokens carry no
loss, all tries share the last one's reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncrl.agents.sample_builder import SampleBuilder
from asyncrl.api import Agent, Environment, GenerationRequest, GenerationResult, Prompt, Sample, Tokenizer
from asyncrl.datasets.order import seed_from


@dataclass(slots=True)
class _Episode:
    """One member of the group."""

    builder: SampleBuilder
    reward: float = 0.0
    done: bool = False
    truncated: bool = False


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

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[GenerationRequest],
        act_queue: asyncio.Queue[GenerationResult],
    ) -> Sequence[Sample]:
        """The group's samples, one conversation each."""
        await env.reset(options={"data": prompt.data})
        episodes = [_Episode(SampleBuilder(prompt.input_ids)) for _ in range(prompt.group_size)]
        for turn in range(self._max_turns):
            asked = {
                f"{prompt.prompt_id}/{turn}/{i}": (i, episode) for i, episode in enumerate(episodes) if not episode.done
            }
            for request_id, (i, episode) in asked.items():
                sampling = replace(prompt.sampling, seed=seed_from("turn", prompt.sampling.seed or 0, turn, i))
                await obs_queue.put(GenerationRequest(request_id, episode.builder.tokens, 1, sampling))
            for _ in range(len(asked)):
                result = await act_queue.get()
                await self._play(asked[result.request_id][1], result, env, turn)
        return [episode.builder.build(episode.reward, truncated=episode.truncated) for episode in episodes]

    async def _play(self, episode: _Episode, result: GenerationResult, env: Environment, turn: int) -> None:
        (completion,) = result.completions
        episode.builder.generate(completion)
        feedback, reward, solved, _, _ = await env.step(self._tokenizer.decode(completion.token_ids))
        episode.reward = reward * self._turn_discount**turn
        episode.truncated = completion.finish_reason == "length"
        episode.done = solved or episode.truncated
        if not episode.done and turn + 1 < self._max_turns:
            episode.builder.observe(self._tokenizer.encode(feedback))
