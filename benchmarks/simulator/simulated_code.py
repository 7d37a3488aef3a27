"""Rollouts of a simulation, in place of a user's data set, agent and environment.

The agent of single answers is asyncrl's own. Tokens have no meaning. A prompt's first token is the prompt's number,
which determines the lengths of its answers. An answer repeats a single token that encodes its seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from asyncrl.api import Agent, Environment, GenerationClient, GenerationRequest, Prompt, Sample
from asyncrl.api.agent import StepResult
from asyncrl.api.generation import SamplingParams, seed_from
from asyncrl.data.prompt_queue import PromptRef, prompt_seed
from asyncrl.plugins.agents.sample_builder import SampleBuilder
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.rollout.episode import RetryLimits, run_group
from simulator.setup import Turns


class _NoWords:
    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class _Scored(Environment):
    """An environment that gives every answer the reward 0."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        return None, {}

    async def step(self, action: Any) -> StepResult:
        return None, 0.0, True, False, {}


class TurnsAgent(Agent):
    """An episode of several turns with a tool between them."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Sample:
        """See `Agent`."""
        builder = SampleBuilder(prompt.input_ids)
        seed = prompt.sampling.seed
        assert seed is not None
        number = self._turns.number(seed)
        for turn in range(number):
            own = seed_from("turn", seed, turn)
            sampling = replace(prompt.sampling, seed=own)
            (completion,) = (
                await client.generate(GenerationRequest(f"{prompt.prompt_id}/{turn}", builder.tokens, 1, sampling))
            ).completions
            builder.generate(completion)
            if turn < number - 1:
                await asyncio.sleep(self._turns.tool_s(own))
                builder.observe([2 + own % 1_000_003] * self._turns.tool_tokens)
        return builder.build(0.0, truncated=False)


class _Client:
    """An episode's client without counters."""

    metrics: Mapping[str, float] = {}

    def __init__(self, policy: GenerationClient, prompt: Prompt) -> None:
        self.generate = policy.generate

    def close(self) -> None:
        pass


class SimulatedCode:
    """The part of `UserComponents` that `RolloutLoop` uses.

    Args:
        turns: episodes of several turns; None: single answers.
        prompt_tokens: tokens of a prompt; all tokens are in the run's units.
    """

    def __init__(
        self,
        turns: Turns | None,
        *,
        run_seed: int,
        group_size: int,
        prompt_tokens: int,
        max_new_tokens: int,
    ) -> None:
        tokenizer: Any = _NoWords()
        self.agent = SingleTurnAgent(tokenizer=tokenizer) if turns is None else TurnsAgent(turns)
        self.prompts: Any = SimpleNamespace(train=self._train_prompt)
        self._seed, self._group, self._prompt = run_seed, group_size, prompt_tokens
        self._sampling = SamplingParams(max_new_tokens=max_new_tokens)

    async def play_to_train(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> Any:
        """See `UserComponents`."""
        make_client: Any = _Client  # without chat
        return await run_group(self.agent, _Scored, prompt, policy, make_client, tries)

    def _train_prompt(self, ref: PromptRef, version: int) -> Prompt:
        seed = prompt_seed(self._seed, ref.order, ref.attempt)
        number = seed_from("prompt number", self._seed, ref.row)
        tokens = (number, *[1] * (self._prompt - 1))
        sampling = replace(self._sampling, seed=seed)
        return Prompt(ref.prompt_id, ref.order, {}, tokens, self._group, sampling)
