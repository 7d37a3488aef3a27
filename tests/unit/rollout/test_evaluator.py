"""An evaluation asks for every row of the worker's share of a set, of the version that is evaluated."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from simulator.simulated_code import FakeComponents

from asyncrl.api import (
    Agent,
    ChatClient,
    Completion,
    Environment,
    GenerationClient,
    GenerationRequest,
    GenerationResult,
    Prompt,
    Sample,
    SamplingParams,
)
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.variants import evaluation_sets
from asyncrl.data.prompt_format import InvalidPrompt
from asyncrl.data.tokenizers import CharTokenizer
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.plugins.envs.single_turn import SingleTurnEnv
from asyncrl.rollout.episode import Answer
from asyncrl.rollout.evaluation import Evaluator
from asyncrl.rollout.kept_answers import KeptAnswers
from asyncrl.rollout.messages import EvaluatedAnswer
from asyncrl.rollout.rollout_client import RolloutClient
from asyncrl.rollout.settings import EvalConfig, EvalSetConfig
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.call_records import Activity, current_meter

SETS = evaluation_sets(ExperimentConfig(eval=EvalConfig(sets=[EvalSetConfig("all"), EvalSetConfig("two", size=2)])))


@dataclass
class FakeClient:
    asked: list[tuple[str, int | None]] = field(default_factory=list)
    hold: asyncio.Event | None = None

    async def generate(
        self, request: GenerationRequest, rollout_id: str | None = None, *, min_version: int | None = None
    ) -> GenerationResult:
        assert rollout_id is None, "no staleness count sees an evaluation"
        self.asked.append((request.request_id, min_version))
        if self.hold is not None:
            await self.hold.wait()
        token = 3 + request.input_ids[0] % 2
        return GenerationResult(request.request_id, (Completion([token], [-0.5], [min_version or 0], "length"),))


async def score(data: Mapping[str, Any], completion: str) -> float:
    """Return 1 if the answer is the digit 1, and report that to the meter, as a verdict does."""
    current_meter().verdicts[""] = completion == "1"
    return 0.5 * (completion == "1")


def eval_prompt(name: str, row: int, member: int) -> Prompt:
    if row == 3:
        raise InvalidPrompt("too long")
    return Prompt(f"{name}-{row}-{member}", row, {"prompt": ""}, (row + member,), 1, SamplingParams())


def components_of(agent: Agent, n_samples: int) -> UserComponents:
    made = FakeComponents(
        agent,
        make_env=lambda: SingleTurnEnv(reward=score),
        make_client=lambda policy, prompt: EpisodeClient(policy, prompt, None),
        eval_prompt=eval_prompt,
        eval_sets={each.name: (replace(each, n_samples=n_samples), range(5)) for each in SETS},
    )
    return cast(UserComponents, made)


SINGLE_TURN = SingleTurnAgent(tokenizer=CharTokenizer())


def evaluator(client: FakeClient, agent: Agent = SINGLE_TURN, n_samples: int = 1, **share: int) -> Evaluator:
    components = components_of(agent, n_samples)
    return Evaluator(components, cast(RolloutClient, client), **{"index": 0, "workers": 1, "max_concurrent": 2} | share)


@pytest.mark.parametrize(
    ("name", "index", "rows", "left_out"), [("all", 0, [0, 2, 4], 0), ("all", 1, [1], 1), ("two", 1, [1], 0)]
)
async def test_each_worker_answers_its_share_of_a_set_under_that_version(
    name: str, index: int, rows: list[int], left_out: int
) -> None:
    client = FakeClient()
    result = await evaluator(client, index=index, workers=2).evaluate(name, 7)
    assert client.asked == [(f"{name}-{row}-0", 7) for row in rows]
    assert result.answers == tuple(EvaluatedAnswer(row, 0.5 * (row % 2), row % 2 == 1, 1, True) for row in rows)
    assert (result.left_out, result.min_version, result.max_version) == (left_out, 7, 7)


async def test_the_answers_are_kept_by_row_and_member_with_their_verdicts() -> None:
    seen: list[tuple[str, int, dict[int, list[bool | None]]]] = []

    class Keeps(KeptAnswers):
        def __init__(self) -> None: ...

        async def keep(self, name: str, version: int, answers: Mapping[int, Sequence[Answer]]) -> None:
            seen.append((name, version, {row: [each.right for each in group] for row, group in answers.items()}))

    components = components_of(SINGLE_TURN, 2)
    keeping = Evaluator(
        components, cast(RolloutClient, FakeClient()), index=1, workers=2, max_concurrent=2, keep=Keeps()
    )
    await keeping.evaluate("all", 7)
    assert seen == [("all", 7, {1: [True, False]})], "row 3 makes no prompt"


async def test_of_several_answers_to_a_prompt_each_has_its_own_verdict() -> None:
    client = FakeClient()
    result = await evaluator(client, n_samples=3).evaluate("two", 7)
    assert [(answer.row, answer.right) for answer in result.answers] == [
        *((0, right) for right in (False, True, False)),
        *((1, right) for right in (True, False, True)),
    ]


async def test_no_more_episodes_run_at_a_time_than_allowed() -> None:
    client = FakeClient(hold=asyncio.Event())
    evaluation = asyncio.create_task(evaluator(client, n_samples=4).evaluate("two", 7))
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(client.asked) == 2
    assert client.hold is not None
    client.hold.set()
    assert len((await evaluation).answers) == 8


class Failing(Agent):
    def __init__(self, *fails: int) -> None:
        self.tries: Counter[str] = Counter()
        self.fails = dict(enumerate(fails))

    async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Any:
        self.tries[prompt.prompt_id] += 1
        if self.tries[prompt.prompt_id] <= self.fails[prompt.order]:
            raise KeyError("no such field")
        return await SINGLE_TURN.run(prompt, env, client)


async def test_an_episode_that_fails_is_tried_again_and_ends_the_evaluation_when_it_always_does() -> None:
    agent = Failing(2, 0)
    assert len((await evaluator(FakeClient(), agent).evaluate("two", 7)).answers) == 2
    assert agent.tries == {"two-0-0": 3, "two-1-0": 1}
    with pytest.raises(KeyError, match="no such field"):
        await evaluator(FakeClient(), Failing(3, 0)).evaluate("two", 7)


async def test_a_prompt_that_the_agent_rejects_is_left_out_and_counted() -> None:
    class Picky(Agent):
        async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Any:
            return [] if prompt.order == 0 else await SINGLE_TURN.run(prompt, env, client)

    result = await evaluator(FakeClient(), Picky()).evaluate("two", 7)
    assert ([answer.row for answer in result.answers], result.left_out) == ([1], 1)


async def test_an_episodes_outcome_is_its_own_conversations_not_that_of_a_side_conversation() -> None:
    class Judged(Agent):
        async def run(self, prompt: Prompt, env: Environment, client: ChatClient) -> list[Sample]:
            for each in (client, client.conversation("judge")):
                await each.generate(GenerationRequest("one", prompt.input_ids, 1, prompt.sampling))
            return [replace(each, reward=0.0, truncated=False) if each.group else each for each in client.samples(0.5)]

    result = await evaluator(FakeClient(), Judged()).evaluate("two", 7)
    assert [(answer.reward, answer.truncated, answer.tokens) for answer in result.answers] == [(0.5, True, 2)] * 2


async def test_a_new_evaluation_ends_the_one_that_nobody_waits_for_any_more() -> None:
    client = FakeClient(hold=asyncio.Event())
    evaluating = evaluator(client)
    first = asyncio.create_task(evaluating.evaluate("all", 7))
    while not client.asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    second = asyncio.create_task(evaluating.evaluate("two", 8))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert client.hold is not None
    client.hold.set()
    assert {answer.row for answer in (await second).answers} == {0, 1}


async def test_a_worker_that_stops_ends_its_evaluation() -> None:
    client = FakeClient(hold=asyncio.Event())
    evaluating = evaluator(client)
    evaluating.cancel()  # none runs
    asked = asyncio.create_task(evaluating.evaluate("all", 7))
    while not client.asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    evaluating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_answer_tells_what_its_agent_its_tools_and_its_rewards_counted() -> None:
    class Counts(Agent):
        async def run(self, prompt: Prompt, env: Environment, client: GenerationClient) -> Any:
            sample = await SINGLE_TURN.run(prompt, env, client)
            assert isinstance(sample, Sample)
            current_meter().tools.append({"tool/search/calls": 2.0})
            current_meter().intervals[Activity.tool].append((0.0, 3.0))
            return [replace(sample, metrics={"turns": 4.0}, reward_parts={"own": sample.reward})]

    result = await evaluator(FakeClient(), Counts()).evaluate("two", 7)
    reported = {"agent/turns": 4.0, "tool/search/calls": 2.0}
    assert [answer.metrics for answer in result.answers] == [
        reported | {"reward/own": 0.0},
        reported | {"reward/own": 0.5},
    ]
