"""Rollouts of a simulation, in place of a user's data set, agent and environment.

The agent of single answers is asyncrl's own. Tokens have no meaning. A prompt's first token is the prompt's number,
which determines the lengths of its answers. An answer repeats a single token that encodes its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from asyncrl.api import Agent, Environment, GenerationClient, Prompt
from asyncrl.api.agent import StepResult
from asyncrl.api.generation import SamplingParams, seed_from
from asyncrl.data.prompt_queue import PromptRef, prompt_seed
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.rollout.episode import RetryLimits, run_group
from simulator.setup import Setup


class _NoWords:
    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class Scored(Environment):
    """An environment that gives every answer the reward 0."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        return None, {}

    async def step(self, action: Any) -> StepResult:
        return None, 0.0, True, False, {}


class PlainClient:
    """An episode's client without chat and counters."""

    metrics: Mapping[str, float] = {}

    def __init__(self, policy: GenerationClient, prompt: Prompt) -> None:
        self.generate = policy.generate

    def close(self) -> None:
        pass


def _no_prompt(*_: Any) -> Prompt:
    raise NotImplementedError("this prompt is not asked for here")


@dataclass
class FakeComponents:
    """The part of `UserComponents` that `RolloutLoop` and `Evaluator` use, made of what it is given. Tests use it too.

    Attributes:
        train_prompt: makes a prompt of its place in the data order and the version.
        eval_prompt: makes a prompt of a set, row and member.
        eval_sets: settings and rows of each evaluation set.
    """

    agent: Agent
    train_prompt: Callable[[PromptRef, int], Prompt] = _no_prompt
    make_env: Callable[[], Environment] = Scored
    make_client: Any = PlainClient
    eval_prompt: Callable[[str, int, int], Prompt] = _no_prompt
    eval_sets: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompts(self) -> Any:
        return SimpleNamespace(train=self.train_prompt, evaluation=self.eval_prompt, eval_sets=self.eval_sets)

    async def play_to_train(self, prompt: Prompt, policy: GenerationClient, tries: RetryLimits) -> Any:
        """See `UserComponents`."""
        return await run_group(self.agent, self.make_env, prompt, policy, self.make_client, tries)

    async def play_to_evaluate(self, name: str, prompt: Prompt, policy: GenerationClient) -> Any:
        """See `UserComponents`."""
        return await run_group(self.agent, self.make_env, prompt, policy, self.make_client)


def simulated_code(setup: Setup) -> FakeComponents:
    """Return the user's parts of a simulated run."""

    def train_prompt(ref: PromptRef, version: int) -> Prompt:
        number = seed_from("prompt number", setup.seed, ref.row)
        tokens = (number, *[1] * (setup.prompt_units - 1))
        seed = prompt_seed(setup.seed, ref.order, ref.attempt)
        sampling = SamplingParams(max_new_tokens=setup.most_units, seed=seed)
        return Prompt(ref.prompt_id, ref.order, {}, tokens, setup.group, sampling)

    tokenizer: Any = _NoWords()
    return FakeComponents(SingleTurnAgent(tokenizer=tokenizer), train_prompt)
