"""Groups whose environments are all open at once do not wait for each other's processes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from asyncrl.api import Completion, GenerationRequest, GenerationResult, Prompt, RunIn, SamplingParams
from asyncrl.config.experiment import ExperimentConfig
from asyncrl.config.setting import ConfigError
from asyncrl.rollout.episode import run_group
from asyncrl.rollout.user_code.components import UserComponents
from asyncrl.rollout.user_code_pool.process_pool import GroupSlots, ProcessSlots

LIMIT_S = 300.0
MINE = """
import asyncio

from asyncrl.plugins.agents.sample_builder import SampleBuilder
from asyncrl.plugins.agents.single_turn import SingleTurnAgent
from asyncrl.api import Agent, Environment, GenerationRequest


class World(Environment):
    def __init__(self, *, reward): ...

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        return "", 1.0, True, False, {}


class AtOnce(Agent):
    def __init__(self, *, tokenizer, more=0):
        self._more = more

    async def run_group(self, prompt, make_env, client):
        worlds = [make_env() for _ in range(prompt.group_size + self._more)]
        for world in worlds:  # one after the other, so that groups get in between each other
            await world.reset()
        request = GenerationRequest(prompt.prompt_id, prompt.input_ids, prompt.group_size, prompt.sampling)
        answers = (await client.generate(request)).completions
        rewards = [(await world.step(""))[1] for world in worlds]
        samples = []
        for answer, reward in zip(answers, rewards):
            builder = SampleBuilder(prompt.input_ids)
            builder.generate(answer)
            samples.append(builder.build(reward, truncated=False))
        return samples


class Single(SingleTurnAgent): ...
"""


class Policy:
    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return GenerationResult(request.request_id, (Completion([7], [-0.5], [0], "stop"),) * request.n)


def components_of(folder: Path, model: Path, agent: str, processes: int, **args: int) -> UserComponents:
    file = folder / "mine.py"
    file.write_text(MINE)
    config = ExperimentConfig()
    config.model.path, config.group_size = str(model), 2
    config.agent.path, config.agent.args = f"{file}:{agent}", args
    config.env.path, config.env.run_in, config.env.processes = f"{file}:World", RunIn.process, processes
    return UserComponents(config)


async def test_groups_that_open_all_their_environments_at_once_do_not_hold_each_other_up(
    tmp_path: Path, tiny_model: Path
) -> None:
    components = components_of(tmp_path, tiny_model, "AtOnce", 3)

    async def play(number: int) -> int:
        prompt = Prompt(f"p{number}", number, {}, (1, 2), 2, SamplingParams(seed=1))
        samples, _ = await run_group(
            components.agent, components.environments.of_group(2), prompt, Policy(), components.conversations.client
        )
        return len(samples)

    async with components.runner, asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*map(play, range(4))) == [2] * 4


async def test_a_group_has_no_more_environments_open_than_episodes(tmp_path: Path, tiny_model: Path) -> None:
    components = components_of(tmp_path, tiny_model, "AtOnce", 8, more=1)
    prompt = Prompt("p", 0, {}, (1, 2), 2, SamplingParams(seed=1))
    async with components.runner:
        with pytest.raises(RuntimeError, match="2 environments open, one for each of its episodes; close one"):
            await run_group(
                components.agent, components.environments.of_group(2), prompt, Policy(), components.conversations.client
            )


def test_fewer_processes_than_a_group_may_open_are_refused_at_the_start(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.processes=1: .*AtOnce' plays its group at once .* group_size=2"):
        components_of(tmp_path, tiny_model, "AtOnce", 1)
    components_of(tmp_path, tiny_model, "Single", 1)  # which has one open at a time for each that plays


async def test_places_are_given_in_the_order_of_asking_and_none_are_lost() -> None:
    places = ProcessSlots(3)
    await places.take(2)
    many, one = asyncio.create_task(places.take(3)), asyncio.create_task(places.take(1))
    await asyncio.sleep(0)
    places.give(1)
    await asyncio.sleep(0)
    assert not many.done(), "two are free"
    assert not one.done(), "who asks for many is not overtaken"
    many.cancel()
    await asyncio.wait({many, one})
    assert one.done()
    assert not one.cancelled()
    places.give(2)
    await asyncio.wait_for(places.take(3), LIMIT_S)


async def test_who_gives_up_at_the_moment_of_its_turn_is_cancelled_and_takes_nothing() -> None:
    places = ProcessSlots(1)
    await places.take(1)
    waiting = asyncio.create_task(places.take(1))
    await asyncio.sleep(0)
    waiting.cancel()
    places.give(1)
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    await asyncio.wait_for(places.take(1), LIMIT_S)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_is_given_up_meanwhile_every_group_gets_its_places(seed: int) -> None:
    chance, places, held = random.Random(seed), ProcessSlots(4), 0

    async def group(size: int) -> None:
        nonlocal held
        own = GroupSlots(places, size)

        async def environment() -> None:
            nonlocal held
            await own.enter()
            held += 1
            assert held <= 4
            try:
                await asyncio.sleep(chance.random() / 1000)
            finally:
                held -= 1
                own.leave()

        await asyncio.gather(*(environment() for _ in range(size)))

    running = [asyncio.create_task(group(chance.randint(1, 4))) for _ in range(20)]
    for each in chance.sample(running, 8):
        await asyncio.sleep(chance.random() / 1000)
        each.cancel()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*running, return_exceptions=True)
        await places.take(4)
