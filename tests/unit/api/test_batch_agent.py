"""Several prompts' groups in one call: when it is made, what becomes of each group, and of those given up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.api import BatchAgent, BatchGroup, Prompt, Sample, SamplingParams
from asyncrl.api.agent import EpisodeError
from asyncrl.rollout.user_code_pool.runner import is_built_in

LIMIT_S = 300.0


def sample(prompt: Prompt) -> Sample:
    return Sample(
        np.array([1, 2], np.int32),
        np.array([0, 1], np.uint8),
        np.array([0.0, -1.0], np.float32),
        np.array([-1, 0], np.int32),
        reward=float(prompt.prompt_id),
    )


def prompt(number: int) -> Prompt:
    return Prompt(str(number), number, {}, (1,), 1, SamplingParams(max_new_tokens=4))


class Client:
    def seconds_left(self) -> float | None:
        return None


class Counting(BatchAgent):
    """Notes each call's prompts; `act` says what a call does."""

    batch_size = 3
    batch_wait_s = 0.05

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.cancelled = 0

    async def run_batch(self, groups: Sequence[BatchGroup]) -> list[list[Sample]]:
        self.calls.append([group.prompt.prompt_id for group in groups])
        try:
            return await self.act(groups)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def act(self, groups: Sequence[BatchGroup]) -> list[list[Sample]]:
        return [[sample(group.prompt)] for group in groups]


def play(agent: BatchAgent, number: int) -> asyncio.Task[Sequence[Sample]]:
    work: Any = agent.roll_out(prompt(number), lambda: None, Client())  # type: ignore[arg-type,return-value]
    return asyncio.create_task(work)


async def outcomes(tasks: Sequence[asyncio.Task[Sequence[Sample]]]) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    return [each if isinstance(each, BaseException) else [one.reward for one in each] for each in found]


async def test_a_call_has_as_many_prompts_as_it_may_and_the_rest_after_a_while() -> None:
    agent = Counting()
    assert await outcomes([play(agent, number) for number in range(7)]) == [[float(number)] for number in range(7)]
    assert agent.calls == [["0", "1", "2"], ["3", "4", "5"], ["6"]]


def test_it_is_the_users_code_wherever_it_is_called_from() -> None:
    assert Counting.form() == "run_group"
    assert not is_built_in(Counting.run_group)
    assert is_built_in(BatchAgent.run_group)


async def test_from_a_generator_each_group_is_complete_by_itself() -> None:
    going = asyncio.Event()

    class Streams(BatchAgent):
        batch_size = 2

        async def run_batch(self, groups: Sequence[BatchGroup]) -> AsyncIterator[tuple[int, list[Sample]]]:
            yield 1, [sample(groups[1].prompt)]
            await going.wait()
            yield 0, [sample(groups[0].prompt)]

    slow, quick = (play(agent := Streams(), 0), play(agent, 1))
    assert await outcomes([quick]) == [[1.0]]
    assert not slow.done()
    going.set()
    assert await outcomes([slow]) == [[0.0]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (KeyError("no tool"), "no tool"),
        ([[]], r"agent Wrong: run_batch returned 1 results for 2 groups"),
        (SystemExit(3), r"agent Wrong: run_batch ended by SystemExit\(3\)"),
    ],
)
async def test_a_call_that_fails_fails_each_of_its_groups(result: Any, message: str) -> None:
    class Wrong(Counting):
        batch_size = 2

        async def act(self, groups: Sequence[BatchGroup]) -> list[list[Sample]]:
            if isinstance(result, BaseException):
                raise result
            return result

    for each in await outcomes([play(agent := Wrong(), 0), play(agent, 1)]):
        with pytest.raises((EpisodeError, KeyError), match=message):
            raise each


async def test_a_generator_that_leaves_a_group_out_fails_it_alone() -> None:
    class Forgets(BatchAgent):
        batch_size = 2

        async def run_batch(self, groups: Sequence[BatchGroup]) -> AsyncIterator[tuple[int, list[Sample]]]:
            yield 0, [sample(groups[0].prompt)]

    first, second = await outcomes([play(agent := Forgets(), 0), play(agent, 1)])
    assert first == [0.0]
    assert "run_batch returned no samples for prompt 1" in str(second)


async def test_a_group_that_is_given_up_leaves_the_others_and_the_last_one_ends_the_call() -> None:
    class Hangs(Counting):
        async def act(self, groups: Sequence[BatchGroup]) -> list[list[Sample]]:
            await asyncio.Event().wait()
            return []

    agent = Hangs()
    waiting = play(agent, 9)
    await asyncio.sleep(0)
    waiting.cancel()
    tasks = [play(agent, number) for number in range(3)]
    async with asyncio.timeout(LIMIT_S):
        while not agent.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert agent.calls == [["0", "1", "2"]], "one that was given up before the call is not in it"
        for number, task in enumerate(tasks):
            assert agent.cancelled == 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled(), number
        while not agent.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
