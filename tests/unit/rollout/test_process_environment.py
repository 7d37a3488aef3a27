"""Environments in processes of their own: what they may do, and that what they do wrong costs their episode alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.api import (
    ChatClient,
    Completion,
    Environment,
    GenerationRequest,
    GenerationResult,
    Prompt,
    RewardFunction,
    SamplingParams,
)
from asyncrl.api.agent import agent_of
from asyncrl.chat.episode_client import EpisodeClient
from asyncrl.comm.ended_rollouts import lost_episodes
from asyncrl.plugins.settings import EnvConfig
from asyncrl.rollout.episode import RetryLimits, run_group
from asyncrl.rollout.settings import UserCodeConfig
from asyncrl.rollout.user_code.in_processes import ProcessEnvironment
from asyncrl.rollout.user_code_pool.call_records import UserCodeError, metered
from asyncrl.rollout.user_code_pool.child import CodeTarget
from asyncrl.rollout.user_code_pool.runner import UserCodeRunner

LIMIT_S = 300.0
MINE = """
import asyncio
import os
import sys
import time

from asyncrl.api import Environment


class Counting(Environment):
    def __init__(self, *, reward, start=0):
        self._reward, self._steps = reward, start

    def reset(self, *, seed=None, options=None):
        self._data = options["data"]
        return [os.getpid(), seed], {"seen": self._data}

    def step(self, action):
        self._steps += 1
        return action * self._steps, self._reward(self._data, action), self._steps == 3, False, {"pid": os.getpid()}


class Async(Counting):
    async def reset(self, *, seed=None, options=None):
        self._lock = asyncio.Lock()
        self._waiting = asyncio.create_task(asyncio.sleep(1000))
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        async with self._lock:
            self._steps += 1
            assert not self._waiting.done(), "the loop of the first call is that of the next"
            return action, await self._reward(self._data, action), False, False, {}


class Hostile(Environment):
    def __init__(self, *, reward):
        self._reward = reward

    def reset(self, *, seed=None, options=None):
        self._what = options["what"]
        return "", {}

    def step(self, action):
        getattr(self, self._what)()
        return self._what, 1.0, True, False, {}

    def fine(self):
        pass

    def raises(self):
        raise ValueError("no such move")

    def hangs(self):
        time.sleep(1000)

    def loops(self):
        while True:
            pass

    def exits(self):
        os._exit(3)

    def forks(self):
        for _ in range(100):
            if os.fork() == 0:
                time.sleep(1000)
        time.sleep(1000)

    def wants_10_gb(self):
        bytearray(10 << 30)

    def prints_100_mb(self):
        sys.stdout.write("x" * 100_000_000)
        sys.stdout.flush()

    def breaks_unicode(self):
        self._what = "\\ud800"

    def rewards_wrongly(self):
        self._reward({}, "wrong")
"""


async def length(data: Any, completion: str) -> float:
    if completion == "wrong":
        raise UserCodeError("reward my.py:score", "raised KeyError: 'x'", how="raised KeyError")
    return float(len(completion))


Make = Callable[..., ProcessEnvironment]


@pytest.fixture
async def runner() -> AsyncIterator[UserCodeRunner]:
    settings = UserCodeConfig(process_memory_mb=1024, process_children=8)
    async with UserCodeRunner(settings, EnvConfig(processes=2, process_max_episodes=2)) as made:
        yield made


@pytest.fixture
def make(runner: UserCodeRunner, tmp_path: Path) -> Make:
    """`make(name, **args)`: an environment of that class above."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)

    def environment(name: str, **args: Any) -> ProcessEnvironment:
        reward: RewardFunction = length
        return ProcessEnvironment(CodeTarget(f"{file}:{name}", args), reward, f"env mine.py:{name}", LIMIT_S, runner)

    return environment


async def pid_of(env: Environment) -> int:
    (pid, _), _ = await env.reset(options={"data": {}})
    return int(pid)


async def test_it_keeps_its_state_between_calls_and_its_reward_is_called_where_the_worker_is(make: Make) -> None:
    env = make("Counting", start=1)
    with metered() as meter:
        (pid, seed), info = await env.reset(seed=7, options={"data": {"answer": "x"}})
        assert (seed, info) == (7, {"seen": {"answer": "x"}})
        assert pid != os.getpid()
        assert await env.step("ab") == ("abab", 2.0, False, False, {"pid": pid})
        assert (await env.step("abc"))[:3] == ("abc" * 3, 3.0, True)
        await env.close()
    assert {"rollout/env_s", "rollout/env_wait_s"} <= meter.metrics().keys()
    await env.close()
    with pytest.raises(RuntimeError, match="reset is called after it was closed"):
        await env.reset()
    with pytest.raises(AttributeError, match=r"only reset, step and close are called, not 'render'; set env.run_in"):
        env.render()


async def test_asynchronous_methods_share_a_loop(make: Make) -> None:
    env = make("Async")
    await env.reset(options={"data": {}})
    assert [(await env.step(text))[1] for text in ("a", "bcd")] == [1.0, 3.0]
    await env.close()


async def test_an_episode_has_a_process_for_itself_and_it_is_renewed_after_so_many(make: Make) -> None:
    first, second, third = (make("Counting") for _ in range(3))
    pids = [await pid_of(first), await pid_of(second)]
    assert len(set(pids)) == 2
    waits = asyncio.create_task(pid_of(third))
    await asyncio.sleep(0)
    assert not waits.done(), "processes=2"
    await first.close()
    assert await waits == pids[0]
    await third.close()
    fourth = make("Counting")
    assert await pid_of(fourth) not in pids, "episodes=2"
    for env in (second, fourth):
        await env.close()


async def test_time_in_which_it_waits_for_a_reward_is_not_the_environments(make: Make) -> None:
    async def slow(data: Any, completion: str) -> float:
        await asyncio.sleep(3.0)
        return 2.0

    env = make("Counting")
    await env.reset(options={"data": {}})
    env._reward, env._timeout_s = slow, 1.5
    assert (await env.step("a"))[1] == 2.0
    await env.close()


async def test_what_is_given_up_in_a_call_ends_its_process_and_frees_its_place(make: Make) -> None:
    for _ in range(3):  # more than there are processes
        env = make("Hostile")
        await env.reset(options={"what": "hangs"})
        assert env._lease is not None
        process = psutil.Process(env._lease.process.pid)
        step = asyncio.create_task(env.step(""))
        await asyncio.sleep(0)
        closing = asyncio.create_task(env.close())
        step.cancel()
        await asyncio.gather(step, closing, return_exceptions=True)
        assert psutil.wait_procs([process], timeout=LIMIT_S)[1] == []


async def test_what_an_environment_does_wrong_costs_its_episode_is_counted_and_the_run_goes_on(make: Make) -> None:
    """A group of which each member does something else."""
    deeds = ["fine", "raises", "hangs", "loops", "exits", "forks", "wants_10_gb", "prints_100_mb", "breaks_unicode"]
    deeds += ["rewards_wrongly", "fine"]

    async def play(prompt: Prompt, env: Environment, client: ChatClient) -> float:
        await env.reset(options={"what": deeds[prompt.member]})
        await client.generate(GenerationRequest(f"{prompt.member}", prompt.input_ids, 1, prompt.sampling))
        if deeds[prompt.member] in ("hangs", "loops"):
            assert isinstance(env, ProcessEnvironment)
            env._timeout_s = 0.5  # of what comes now: until here it may have taken its time
        return float((await env.step(""))[1])

    class Policy:
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            return GenerationResult(request.request_id, (Completion([7], [-0.5], [0], "stop"),))

    prompt = Prompt("p", 0, {}, (1, 2), len(deeds), SamplingParams(seed=1))
    async with asyncio.timeout(300):
        samples, counted = await run_group(
            agent_of(play, {}),
            lambda: make("Hostile"),
            prompt,
            Policy(),
            lambda client, own: EpisodeClient(client, own, None),
            RetryLimits(),
        )
        assert [deeds[sample.episode] for sample in samples] == ["fine", "prints_100_mb", "fine"]
        step = "env mine.py:Hostile.step"
        assert lost_episodes(counted) == {
            f"{step} raised ValueError": 1,
            f"{step} did not return in time": 2,
            f"{step} lost its process": 1,
            f"{step} exceeded a limit of its process": 1,
            f"{step} raised MemoryError": 1,
            f"{step} returned what cannot travel": 1,
            "reward my.py:score raised KeyError": 1,
        }
        for _ in range(3):
            env = make("Hostile")
            await env.reset(options={"what": "fine"})
            assert (await env.step(""))[0] == "fine"
            await env.close()


async def test_what_is_no_environment_or_cannot_be_made_says_so(make: Make) -> None:
    with pytest.raises(UserCodeError, match=r"env mine.py:Environment.made raised TypeError"):
        await make("Environment").reset()
    with pytest.raises(UserCodeError, match=r"env mine.py:dict.made raised"):
        await make("dict").reset()
