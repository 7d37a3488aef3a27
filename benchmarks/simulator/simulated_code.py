"""Rollouts of a simulation, in place of a user's data set, agent and environment.

The agent of single answers is asyncrl's own. Tokens have no meaning. A prompt's first token is the prompt's number,
which determines the lengths of its answers. An answer repeats a single token that encodes its seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from asyncrl.api import Environment, GenerationClient, Prompt
from asyncrl.api.agent import StepResult
from asyncrl.api.generation import SamplingParams, seed_from
from asyncrl.data.prompt_queue import PromptRef, prompt_seed
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.rollout.episode import RetryLimits, run_group
from simulator.setup import Setup


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


class _Client:
    """An episode's client without counters."""

    metrics: Mapping[str, float] = {}

    def __init__(self, policy: GenerationClient, prompt: Prompt) -> None:
        self.generate = policy.generate

    def close(self) -> None:
        pass


class SimulatedCode:
    """The part of `UserComponents` that `RolloutLoop` uses."""

    def __init__(self, setup: Setup) -> None:
        tokenizer: Any = _NoWords()
        self.agent = SingleTurnAgent(tokenizer=tokenizer)
        self.prompts: Any = SimpleNamespace(train=self._train_prompt)
        self._setup = setup

    async def play_to_train(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> Any:
        """See `UserComponents`."""
        make_client: Any = _Client  # without chat
        return await run_group(self.agent, _Scored, prompt, policy, make_client, tries)

    def _train_prompt(self, ref: PromptRef, version: int) -> Prompt:
        setup = self._setup
        number = seed_from("prompt number", setup.seed, ref.row)
        tokens = (number, *[1] * (setup.prompt_units - 1))
        seed = prompt_seed(setup.seed, ref.order, ref.attempt)
        sampling = SamplingParams(max_new_tokens=setup.most_units, seed=seed)
        return Prompt(ref.prompt_id, ref.order, {}, tokens, setup.group, sampling)
