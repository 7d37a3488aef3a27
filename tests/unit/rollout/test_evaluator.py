"""An evaluation asks for every row of the worker's share, of the version that is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from asyncrl.agents.single_turn import SingleTurnAgent
from asyncrl.api import (
    Agent,
    Completion,
    Environment,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    SamplingParams,
)
from asyncrl.chat.client import EpisodeClient
from asyncrl.datasets.tokenizers import CharTokenizer
from asyncrl.envs.single_turn import SingleTurnEnv
from asyncrl.rollout.evaluator import Evaluator
from asyncrl.rollout.generation_client import RolloutClient
from asyncrl.rollout.user_code import Plugins


@dataclass
class FakeClient:
    asked: list[tuple[str, int | None]] = field(default_factory=list)

    async def generate(
        self, request: GenerationRequest, rollout_id: str | None = None, *, min_version: int | None = None
    ) -> GenerationResult:
        assert rollout_id is None, "no staleness count sees an evaluation"
        self.asked.append((request.request_id, min_version))
        return GenerationResult(request.request_id, (Completion([3], [-0.5], [min_version or 0], "stop"),))


@dataclass
class FakePlugins:
    agent: Agent
    eval_set: range = range(5)

    def make_envs(self, size: int) -> Callable[[], Environment]:
        return lambda: SingleTurnEnv(reward=lambda data, completion: 1.0)

    def episode_client(self, policy: GenerationClient, prompt: Prompt) -> Any:
        return EpisodeClient(policy, prompt, prompt.member, None)

    def eval_prompt(self, row: int) -> Prompt:
        return Prompt(f"eval-{row}", row, {"prompt": ""}, (1,), 1, SamplingParams())


def evaluator(client: FakeClient, agent: Agent, **share: int) -> Evaluator:
    return Evaluator(cast(Plugins, FakePlugins(agent)), cast(RolloutClient, client), **share)


@pytest.mark.parametrize(("index", "size", "rows"), [(0, 9, [0, 2, 4]), (1, 9, [1, 3]), (1, 2, [1])])
async def test_each_worker_answers_its_share_under_that_version(index: int, size: int, rows: list[int]) -> None:
    client = FakeClient()
    agent = SingleTurnAgent(tokenizer=CharTokenizer())
    await evaluator(client, agent, index=index, workers=2, size=size).evaluate(7)
    assert client.asked == [(f"eval-{row}", 7) for row in rows]


async def test_what_the_agent_raises_ends_the_evaluation() -> None:
    class Broken(Agent):
        async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Any:
            raise KeyError("no such field")

    with pytest.raises(KeyError, match="no such field"):
        await evaluator(FakeClient(), Broken(), index=0, workers=1, size=2).evaluate(7)
